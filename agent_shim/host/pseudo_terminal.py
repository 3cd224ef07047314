"""Runs a program in a new pseudo-terminal, and copies bytes between it and the caller's terminal.

A job's program with access to an operator's terminal could push commands into it (TIOCSTI) that the operator's shell
would run as root, and could change the terminal's settings permanently. Except in ``in_terminal``, the program
therefore never gets a descriptor of that terminal: each standard stream that is a terminal is replaced by the
pseudo-terminal, and the other streams are inherited. Keys, window size and hang-up are passed on to the program, its
output is passed back, and the caller's terminal is restored at the end. All functions block, so only commands may call
them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import signal
import stat
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from agent_shim.host.descriptors import closing

Argv: TypeAlias = Callable[[int | None], tuple[list[str], int]]
"""See ``run``."""

CHUNK_BYTES: Final = 64 * 1024
POLL_MS: Final = 200
"""How often to check whether the program has exited or must be hung up. The terminal does not show that the program has
exited, because the program's children may keep the terminal open.
"""
HANG_UP_TIMEOUT_S: Final = 5.0
"""How long the program may run after a hang-up before it gets SIGKILL."""

# Constants from include/uapi/asm-generic/ioctls.h.
_LOCK_SLAVE: Final = 0x40045431
_OPEN_SLAVE: Final = 0x5441


def run(argv: Argv, pid: int) -> int:
    """Run a program until it exits and return its exit code, or 128+N if signal N killed it.

    ``argv`` is called with the descriptor that is the program's terminal (0, 1 or 2, or None without a terminal). It
    returns the program's argument list and a descriptor for the program to inherit. The pseudo-terminal is created in
    the mount namespace of the process ``pid``, so that its path exists there. Raises ``OSError``.
    """
    terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    if not terminals:
        command, inherited = argv(None)
        return _code(subprocess.Popen(command, pass_fds=[inherited], start_new_session=True).wait())
    master, slave = open_pair(f"/proc/{pid}/root")
    hang_ups: list[float] = []
    with _signals(terminals[0], master, hang_ups), _raw(0 if 0 in terminals else None):
        with closing(slave):
            if 0 not in terminals:  # the operator's terminal already translates line feeds
                modes = termios.tcgetattr(slave)
                modes[1] &= ~termios.OPOST
                termios.tcsetattr(slave, termios.TCSANOW, modes)
            command, inherited = argv(terminals[0])
            _copy_size(terminals[0], master)
            # The program itself creates the session and makes the pseudo-terminal its controlling terminal.
            stdin, stdout, stderr = (slave if number in terminals else None for number in (0, 1, 2))
            program = subprocess.Popen(command, pass_fds=[inherited], stdin=stdin, stdout=stdout, stderr=stderr)
        # The pseudo-terminal's output is shown on the first of stdout, stderr and stdin that is a terminal.
        _relay(master, program, hang_ups, keys=0 in terminals, out=1 if 1 in terminals else terminals[-1])
    os.close(master)  # this hangs up the pseudo-terminal
    try:
        return _code(program.wait(_time_left([*hang_ups, time.monotonic()])))  # the close counts as a hang-up too
    except subprocess.TimeoutExpired:
        program.kill()
        return _code(program.wait())


INTERRUPTED: Final = 128 + signal.SIGINT
"""Result of ``in_terminal`` if Ctrl-C has ended the program."""


def in_terminal(argv: list[str]) -> int:
    """Run a trusted program such as strace, never a job's, in the caller's own terminal. Return its exit code, or 128+N
    if signal N killed it. Raises ``OSError``.

    From then on, this process survives SIGINT, so that Ctrl-C interrupts only the program. If the program is still
    running ``HANG_UP_TIMEOUT_S`` seconds after Ctrl-C, it is killed. This is necessary because strace hangs, and keeps
    the traced process stopped, if that process is in a vfork.
    """
    is_killed = False

    def kill(_signal: int, _frame: object) -> None:
        nonlocal is_killed
        is_killed = True
        os.kill(child, signal.SIGKILL)

    def start_timer(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C must not restart the timer
        signal.setitimer(signal.ITIMER_REAL, HANG_UP_TIMEOUT_S)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGINT])
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, start_timer)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # Stop the timer before the program is reaped, because its pid may be reused afterwards.
    signal.setitimer(signal.ITIMER_REAL, 0)
    status = os.waitpid(child, 0)[1]
    return INTERRUPTED if is_killed else _code(os.waitstatus_to_exitcode(status))


def open_pair(root: str) -> tuple[int, int]:
    """Open both ends of a pseudo-terminal in the devpts mounted at ``root``/dev/pts. Raises ``OSError``."""
    with closing(os.open(f"{root}/dev/pts/ptmx", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as path_fd:
        status = os.fstat(path_fd)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.makedev(5, 2):  # the device number of a ptmx is 5:2
            raise OSError(errno.ENODEV, "it makes no terminals", f"{root}/dev/pts/ptmx")
        master = os.open(f"/proc/self/fd/{path_fd}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(master, _LOCK_SLAVE, bytes(4))  # the number 0 unlocks it
        return master, fcntl.ioctl(master, _OPEN_SLAVE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise


def _code(code: int) -> int:
    """Convert an exit code from Python's form to the shell's, in which 128+N means signal N."""
    return code if code >= 0 else 128 - code


def _time_left(hang_ups: list[float]) -> float:
    """Return how many more seconds the program may run. Without a hang-up, this is infinity."""
    return max(0.0, hang_ups[0] + HANG_UP_TIMEOUT_S - time.monotonic()) if hang_ups else math.inf


def _relay(master: int, program: subprocess.Popen[bytes], hang_ups: list[float], *, keys: bool, out: int) -> None:
    """Copy output to the descriptor ``out`` and, if ``keys`` is set, keys from standard input, until the program has
    exited or the operator's terminal is gone.

    A signal handler adds the time of each hang-up to ``hang_ups``. After a hang-up, the program is sent SIGHUP, and
    copying stops ``HANG_UP_TIMEOUT_S`` seconds later.

    While the program does not read its input, no more keys are read, but its output is still copied.
    """
    os.set_blocking(master, False)
    poll, typed, forwarded_hang_ups = select.poll(), b"", 0
    while True:
        poll.register(master, select.POLLIN | (select.POLLOUT if typed else 0))
        if keys:
            poll.register(0, 0 if typed else select.POLLIN)  # poll reports a hang-up even with 0
        if len(hang_ups) > forwarded_hang_ups:
            forwarded_hang_ups = len(hang_ups)
            program.send_signal(signal.SIGHUP)
            program.send_signal(signal.SIGCONT)  # a stopped program could not react
        has_ended = program.poll() is not None
        ready = dict(poll.poll(0 if has_ended else POLL_MS))
        if has_ended and not ready.get(master, 0) & ~select.POLLOUT:  # no output is left
            return
        if not _time_left(hang_ups):
            return
        for descriptor in [number for number, events in ready.items() if events & ~select.POLLOUT]:
            try:
                chunk = os.read(descriptor, CHUNK_BYTES)
            except OSError:
                chunk = b""  # EIO: no process has the other end open
            if not chunk:
                return
            if descriptor == master:
                _write(out, chunk)
            else:
                typed += chunk
        try:
            typed = typed[os.write(master, typed) :] if typed else b""
        except BlockingIOError:
            continue
        except OSError:
            typed = b""


def _write(descriptor: int, chunk: bytes) -> None:
    """Write a whole chunk. Errors are ignored."""
    with contextlib.suppress(OSError):
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]


@contextlib.contextmanager
def _raw(terminal: int | None) -> Iterator[None]:
    """Put the terminal into raw mode for the duration of the block, so that every key reaches the program."""
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _signals(terminal: int, master: int, hang_ups: list[float]) -> Iterator[None]:
    """Within the block, forward window size changes. Instead of letting a signal terminate this process, add the time
    of the signal to ``hang_ups``.
    """

    def resize(*_: object) -> None:
        with contextlib.suppress(OSError):
            _copy_size(terminal, master)

    def end(*_: object) -> None:
        hang_ups.append(time.monotonic())

    handlers = {signal.SIGWINCH: resize, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy_size(terminal: int, master: int) -> None:
    """Give the pseudo-terminal the window size of the operator's terminal (struct winsize has 8 bytes)."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
