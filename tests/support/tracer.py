"""``python -m tests.support.tracer PID NUMBER WHO PATH…``: kill a process at its NUMBERth system call that changes
files, or make such calls fail.

The tracer follows a process, its threads and all descendants with ptrace, and counts their calls that change a file at
or below one of the PATHs. All of them share one counter. Files do not change between two counted calls, so killing at
each call in turn produces every state that a crash can leave. (strace counts per thread, so some calls would never be
reached.) The NUMBERth call itself is not executed. WHO selects the victims: ``all`` followed processes, only the
process PID (``root``), or only the process that makes the call (``caller``). With NUMBER 0 nothing is killed. If WHO is
an error (``ENOSPC``, ``EROFS``, ``EIO``), nothing is killed either. Instead, the NUMBERth call and all later ones fail
with that error, as on a disk that stays full or broken.

Once attached, the tracer prints ``following``. Then it prints lines of JSON with ``call``, ``path``, ``pid`` and
``killed``. With NUMBER 0 there is a line for each counted call, otherwise one line for the call at which a process was
killed, or for the first call that fails. The tracer exits after a kill, when the process exits, or on SIGTERM. If calls
are made to fail, let the traced process exit before the tracer, because a call that is failing when the tracer exits
returns ENOSYS instead of the requested error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

# The following values are from include/uapi/linux/ptrace.h.
SEIZE: Final = 0x4206
INTERRUPT: Final = 0x4207
LISTEN: Final = 0x4208
SYSCALL: Final = 24
POKEUSER: Final = 6
NUMBER_OF_CALL: Final = 15 * 8
RESULT: Final = 10 * 8
"""``NUMBER_OF_CALL`` and ``RESULT`` are the offsets of ``orig_rax`` and ``rax`` in ``struct user``."""
GET_SYSCALL_INFO: Final = 0x420E
OPTIONS: Final = 0x01 | 0x02 | 0x04 | 0x08 | 0x10
"""The ptrace options TRACESYSGOOD, TRACEFORK, TRACEVFORK, TRACECLONE and TRACEEXEC."""
EVENT_STOP: Final = 128
ENTRY: Final = 1
EXIT: Final = 2
ERRORS: Final = ("ENOSPC", "EROFS", "EIO")
INFO: Final = struct.Struct("<B3xIQQ7Q")
"""``struct ptrace_syscall_info`` at a syscall entry: kind of stop, architecture, two pointers, call number,
arguments.
"""
WALL: Final = 0x40000000
STOPPING: Final = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
CHANGING: Final = os.O_CREAT | os.O_TRUNC
HERE: Final = -100
"""The value of AT_FDCWD, a descriptor argument that refers to the working directory."""

BY_DESCRIPTOR: Final = {
    1: ("write", 0), 18: ("pwrite64", 0), 20: ("writev", 0), 296: ("pwritev", 0), 40: ("sendfile", 0),
    275: ("splice", 2), 326: ("copy_file_range", 2), 77: ("ftruncate", 0), 285: ("fallocate", 0), 74: ("fsync", 0),
    75: ("fdatasync", 0), 306: ("syncfs", 0), 91: ("fchmod", 0), 93: ("fchown", 0), 190: ("fsetxattr", 0),
}  # fmt: skip
"""Maps the number (on x86-64) of each system call that takes a file descriptor to the call's name and the position of
the descriptor among the arguments.
"""
BY_PATH: Final = {
    82: ("rename", 0), 83: ("mkdir", 0), 84: ("rmdir", 0), 85: ("creat", 0), 86: ("link", 1), 87: ("unlink", 0),
    88: ("symlink", 1), 90: ("chmod", 0), 92: ("chown", 0), 94: ("lchown", 0), 76: ("truncate", 0), 133: ("mknod", 0),
    188: ("setxattr", 0), 189: ("lsetxattr", 0), 2: ("open", 0),
}  # fmt: skip
"""Maps the number of each system call that takes a path to the call's name and the position of the path among the
arguments.
"""
BY_DIRECTORY: Final = {
    258: ("mkdirat", 0), 259: ("mknodat", 0), 260: ("fchownat", 0), 263: ("unlinkat", 0), 264: ("renameat", 0),
    265: ("linkat", 2), 266: ("symlinkat", 1), 268: ("fchmodat", 0), 280: ("utimensat", 0), 316: ("renameat2", 0),
    257: ("openat", 0), 437: ("openat2", 0), 452: ("fchmodat2", 0),
}  # fmt: skip
"""Maps the number of each system call that takes a directory descriptor followed by a path to the call's name and the
position of the descriptor among the arguments.
"""

NEEDS_NO_SPACE: Final = frozenset(
    (
        *("unlink", "unlinkat", "rmdir", "truncate", "ftruncate", "utimensat"),
        *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    )
)
"""Calls that need no free space, so they also succeed on a full disk."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    done = int(_libc.ptrace(request, tid, address, data))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


class Tracer:
    """Traces a process and its descendants, and kills processes or makes calls fail as the command line says."""

    def __init__(self, root: int, number: int, who: str, places: list[str]) -> None:
        self._root = root
        self._number = number
        self._who = who
        self._places = tuple(places)
        self._count = 0
        self._threads: set[int] = set()
        self._failing: set[int] = set()
        """Threads whose current system call is being made to fail."""
        self._has_failed = False
        self._info = ctypes.create_string_buffer(INFO.size)

    def run(self) -> None:
        """Trace until a process has been killed or the traced process exits."""
        self._seize()
        while self._threads:
            tid, status = os.waitpid(-1, WALL)
            if not os.WIFSTOPPED(status):
                self._threads.discard(tid)
                if tid == self._root:
                    return
                continue
            self._threads.add(tid)
            with suppress(ProcessLookupError):
                if self._stopped(tid, os.WSTOPSIG(status), status >> 16):
                    return

    def _seize(self) -> None:
        """Attach to all threads, including any that the process creates in the meantime."""
        while missing := {int(task.name) for task in Path(f"/proc/{self._root}/task").iterdir()} - self._threads:
            for tid in missing:
                self._threads.add(tid)
                with suppress(ProcessLookupError):
                    _ptrace(SEIZE, tid, 0, OPTIONS)
                    _ptrace(INTERRUPT, tid)
        waiting = set(self._threads)
        while waiting:
            tid, status = os.waitpid(-1, WALL)
            waiting.discard(tid)
            self._threads.add(tid)
            if os.WIFSTOPPED(status):
                with suppress(ProcessLookupError):
                    self._stopped(tid, os.WSTOPSIG(status), status >> 16)
        sys.stdout.write("following\n")
        sys.stdout.flush()

    def _stopped(self, tid: int, reason: int, event: int) -> bool:
        """Handle a thread's stop and let the thread continue. Return True if a process was killed instead."""
        if reason == signal.SIGTRAP | 0x80:
            if self._at_last(tid):
                return True
            _ptrace(SYSCALL, tid)
        elif event == EVENT_STOP and reason in STOPPING:
            _ptrace(LISTEN, tid)
        else:
            _ptrace(SYSCALL, tid, 0, 0 if event else reason)
        return False

    def _at_last(self, tid: int) -> bool:
        _ptrace(GET_SYSCALL_INFO, tid, INFO.size, ctypes.addressof(self._info))
        kind, _, _, _, call, *arguments = INFO.unpack(self._info.raw)
        if kind == EXIT and tid in self._failing:
            self._failing.discard(tid)
            _ptrace(POKEUSER, tid, RESULT, -getattr(errno, self._who))
        if kind != ENTRY:
            return False
        try:
            name, path = self._named(tid, call, arguments)
        except OSError:
            return False
        if not path.startswith(self._places):
            return False
        self._count += 1
        if self._who in ERRORS:
            if self._count >= self._number and not (self._who == "ENOSPC" and name in NEEDS_NO_SPACE):
                self._fail(tid, name, path)
            return False
        is_last = self._count == self._number
        if is_last or not self._number:
            pid = _group(tid)
            self._tell(name, path, pid, self._kill(pid) if is_last else [])
        return is_last

    def _fail(self, tid: int, name: str, path: str) -> None:
        """Make the system call that a thread is entering fail, by replacing the call's number with an invalid one."""
        _ptrace(POKEUSER, tid, NUMBER_OF_CALL, -1)
        self._failing.add(tid)
        if not self._has_failed:
            self._has_failed = True
            self._tell(name, path, _group(tid), [])

    def _tell(self, name: str, path: str, pid: int, killed: list[int]) -> None:
        told = {"number": self._count, "call": name, "path": path, "pid": pid, "killed": killed}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()

    def _named(self, tid: int, call: int, arguments: list[int]) -> tuple[str, str]:
        """Return the name and path of a system call if it changes a file, otherwise "" for both."""
        if found := BY_DESCRIPTOR.get(call):
            return found[0], str(Path(f"/proc/{tid}/fd/{arguments[found[1]]}").readlink())
        if found := BY_PATH.get(call):
            if call == 2 and not arguments[1] & CHANGING:
                return "", ""
            return found[0], str(Path(f"/proc/{tid}/cwd").readlink() / _text(tid, arguments[found[1]]))
        if found := BY_DIRECTORY.get(call):
            name, position = found
            if name in ("openat", "openat2"):
                flags = struct.unpack("<Q", _memory(tid, arguments[2], 8))[0] if call == 437 else arguments[2]
                if not flags & CHANGING:
                    return "", ""
            descriptor = ctypes.c_int(arguments[position]).value
            above = Path(f"/proc/{tid}", "cwd" if descriptor == HERE else f"fd/{descriptor}").readlink()
            return name, str(above / _text(tid, arguments[position + 1]))
        return "", ""

    def _kill(self, caller: int) -> list[int]:
        """Kill the victims and return their pids.

        The calling thread is stopped at its call, which is therefore never executed.
        """
        if self._who == "all":
            others = {_group(tid) for tid in self._threads} - {caller, 0}
            pids = [caller, *sorted(others)]
        else:
            pids = [self._root if self._who == "root" else caller]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ignore SIGTERM from here on so that the kill is reported.
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


def _group(tid: int) -> int:
    """Return the pid of the process to which a thread belongs, or 0 if the thread has exited."""
    with suppress(OSError):
        for line in Path(f"/proc/{tid}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return 0


def _memory(tid: int, address: int, size: int) -> bytes:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, address)


def _text(tid: int, address: int) -> str:
    return os.fsdecode(_memory(tid, address, 4096).partition(b"\0")[0]) if address else ""


def main() -> int:
    """Run the tracer. Return 0, or 77 if tracing is not possible."""
    root, number, who, *places = sys.argv[1:]
    if platform.machine() != "x86_64":
        sys.stderr.write("the numbers of system calls are for x86-64\n")
        return 77

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    try:
        Tracer(int(root), int(number), who, places).run()
    except PermissionError as exc:
        sys.stderr.write(f"ptrace: {exc.strerror}\n")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
