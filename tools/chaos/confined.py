"""Runs a command as root, for example the tests of a mutant, without endangering this machine.

``confined.py SCRATCH COMMAND ...`` runs the command in new mount, PID, network, IPC and cgroup namespaces. It can write
only to SCRATCH, a new ``/tmp`` and its own cgroup. ``/dev`` contains only harmless devices, and the only network is the
loopback interface. When the command or the process that started this program exits, every process in the namespaces is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from agent_shim.host import mounts
from tests.support import namespaces
from tests.support.own_cgroups import joining, own_cgroups

ROOT: Final = Path(__file__).parents[2]
MAX_PROCESSES: Final = 2000
MAX_MEMORY: Final = 8 << 30
_INSIDE: Final = "SHIM_CONFINED_CGROUPS"
"""Environment variable that this program sets when it runs itself inside the namespaces. It lists the cgroup
directories and their mount points as ``FROM:TO``.
"""
_FRESH: Final = ("/tmp", "/var/tmp", "/run")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_CLOSED: Final = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_MOUNT_SETATTR: Final = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_RDONLY, _NODEV = 1, 4
_CLONE_NEWPID: Final = 0x20000000
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def command(scratch: Path, argv: Sequence[str]) -> list[str]:
    """Return the command that runs ``argv`` confined. Raises SystemExit unless this process is root, because creating
    the namespaces requires root.
    """
    if os.geteuid() != 0:
        raise SystemExit("cannot confine mutants: creating namespaces requires root")
    return [sys.executable, __file__, str(scratch), *argv]


def fresh_proc() -> None:
    """Mount ``/proc`` for the new PID namespace, with kernel settings read-only.

    This uses system calls instead of mount(8), because starting a program for each mutant would take longer than
    running the mutant's tests.
    """
    _checked(_LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
    for place in map(os.fsencode, filter(os.path.exists, _CLOSED)):
        _checked(_LIBC.mount(place, place, None, mounts.MS_BIND, None))
        _set(os.fsdecode(place), on=_RDONLY)


def fork() -> int:
    """Fork into new PID and mount namespaces.

    Returns 0 in the child. In the parent, returns the pid of the namespace's PID 1, which waits for the child and exits
    with the child's exit code. The kernel then kills all other processes in the namespace.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _checked(_LIBC.unshare(_CLONE_NEWPID))
    first = os.fork()
    if first != 0:
        _checked(_LIBC.setns(own, _CLONE_NEWPID))
        os.close(own)
        return first
    os.close(own)
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        mounts.leave_mount_namespace()
        fresh_proc()
        child = os.fork()
        if child == 0:
            os.setsid()
            return 0
        code = _reap(child)
    finally:
        if os.getpid() == 1:
            os._exit(code)
    raise AssertionError("unreachable")


def _reap(child: int) -> int:
    """Reap all children until ``child`` exits. Return its exit code, or 128 + N if signal N killed it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main(scratch: Path, argv: Sequence[str]) -> int:
    """Enter the namespaces, run the command and return its exit code."""
    if _INSIDE in os.environ:
        _enter(scratch)
        return namespaces.main("/run/signals", list(argv))
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _cgroups() as places:
        inside = {_INSIDE: " ".join(f"{ours}:{top}" for ours, top in places)}
        enter = ["unshare", "--mount", "--pid", "--net", "--ipc", "--cgroup", "--fork", "--mount-proc", "--kill-child"]
        again = [sys.executable, __file__, str(scratch), *argv]
        running = subprocess.Popen(
            joining(places, [*enter, "--", *again]),
            env={**os.environ, **inside},
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no threads here
        )
        try:
            return running.wait()
        finally:
            running.kill()
            running.wait()


@contextlib.contextmanager
def _cgroups() -> Iterator[list[tuple[Path, Path]]]:
    """Create cgroups that limit the number of processes and the memory.

    Yield the directory of each cgroup, together with the root of its hierarchy.
    """
    with own_cgroups("confined") as made:
        for ours, _ in made:
            for name, value in (
                ("pids.max", MAX_PROCESSES),
                ("memory.max", MAX_MEMORY),
                ("memory.limit_in_bytes", MAX_MEMORY),
            ):
                if (ours / name).exists():
                    (ours / name).write_text(str(value))
        yield made


def _enter(scratch: Path) -> None:
    """Set up the mounts in the new namespaces. This process is PID 1 in them."""
    _set("/", on=_RDONLY | _NODEV, recursive=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    aside = Path("/mnt")
    mounts.mount_tmpfs(aside)
    # A new tmpfs will hide some of these directories. Bind-mount those elsewhere first, so that they can be moved back.
    needed = (ROOT, Path(sys.prefix), Path(sys.base_prefix), Path.cwd())
    shown = [place for place in needed if any(map(place.is_relative_to, _FRESH))]
    for number, place in enumerate([scratch, *shown]):
        (aside / str(number)).mkdir()
        _mount("--rbind", str(place), str(aside / str(number)))
    _devices(aside / "dev")
    for fresh in _FRESH:
        mounts.mount_tmpfs(Path(fresh), "mode=1777")
        _set(fresh, on=_NODEV)
    for number, place in reversed(list(enumerate([scratch, *shown]))):
        place.mkdir(parents=True, exist_ok=True)
        _mount("--rbind", str(aside / str(number)), str(place))
    _set(str(scratch), off=_RDONLY)
    for pair in os.environ.pop(_INSIDE).split():
        ours, top = pair.split(":")
        _mount("--bind", ours, top)
        _set(top, off=_RDONLY)
    mounts.unmount(aside, lazy=True)
    os.chdir(Path.cwd())
    fresh_proc()


def _devices(at: Path) -> None:
    """Replace ``/dev`` with a read-only directory that has only harmless devices."""
    at.mkdir()
    mounts.mount_tmpfs(at)
    for name in _DEVICES:
        (at / name).touch()
        _mount("--bind", f"/dev/{name}", str(at / name))
        _set(str(at / name), off=_RDONLY | _NODEV)
    for name in ("pts", "shm"):
        (at / name).mkdir()
    for name, to in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (at / name).symlink_to(to)
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=666,mode=620", "devpts", str(at / "pts"))
    mounts.mount_tmpfs(at / "shm", "mode=1777")
    _mount("--rbind", str(at), "/dev")
    _set("/dev", on=_RDONLY)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _set(place: str, *, on: int = 0, off: int = 0, recursive: bool = False) -> None:
    """Set and clear attributes of the mount at ``place`` and, if ``recursive``, of all mounts below it."""
    values = ctypes.create_string_buffer(struct.pack("4Q", on, off, 0, 0))
    flags = _AT_RECURSIVE if recursive else 0
    _checked(_LIBC.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), flags, values, ctypes.c_size_t(32)))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
