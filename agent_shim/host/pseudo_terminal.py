"""A program in its own pseudo-terminal, with bytes copied from and to the caller's terminal.

A job's program with access to an operator's terminal can push input into it (TIOCSTI), which the operator's shell runs
as root, and can change its settings permanently. So it never gets a descriptor of that terminal: each standard stream
that is one becomes the pseudo-terminal, the others are inherited. Keys, window size and hang-up are passed in, output
is passed out, and the caller's terminal is restored. Blocks: for commands only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import struct
import subprocess
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Final

CHUNK_BYTES: Final = 64 * 1024
POLL_MS: Final = 200
"""Poll interval for the end of the program, whose children may keep the terminal open."""
HANG_UP_TIMEOUT_S: Final = 5.0
"""Between the hang-up and KILL."""

# include/uapi/asm-generic/ioctls.h
_LOCK_SLAVE: Final = 0x40045431
_OPEN_SLAVE: Final = 0x5441

Argv = Callable[[int | None], tuple[list[str], int]]
"""Returns the argument list of a program whose terminal is the given descriptor (0, 1, 2 or None), and a descriptor
that it inherits.
"""


def run(argv: Argv, pid: int) -> int:
    """Run a program to its end and return its exit code, 128+N after signal N.

    ``pid`` is a process in whose mount namespace the pseudo-terminal is created, so that its name exists there. Raises
    ``OSError``.
    """
    terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    if not terminals:
        command, inherited = argv(None)
        return _code(subprocess.Popen(command, pass_fds=[inherited], start_new_session=True))
    master, slave = open_pair(f"/proc/{pid}/root")
    try:
        command, inherited = argv(terminals[0])
        _copy_size(terminals[0], master)
        streams = {number: slave if number in terminals else None for number in (0, 1, 2)}
        # The program creates the session itself, then takes the terminal.
        running = subprocess.Popen(
            command, stdin=streams[0], stdout=streams[1], stderr=streams[2], pass_fds=[inherited]
        )
    finally:
        os.close(slave)
    with _raw(0 if 0 in terminals else None), _signals(terminals[0], master, running):
        _relay(master, running, keys=0 in terminals, out=1 if 1 in terminals else terminals[-1])
    os.close(master)  # hangs up
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(HANG_UP_TIMEOUT_S)
    if running.returncode is None:
        running.kill()
    return _code(running)


def open_pair(root: str) -> tuple[int, int]:
    """Open both ends of a pseudo-terminal of the devpts at ``root``/dev/pts. Raises ``OSError``."""
    held = os.open(f"{root}/dev/pts/ptmx", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.makedev(5, 2):
            raise OSError(errno.ENODEV, "it makes no terminals", f"{root}/dev/pts/ptmx")
        master = os.open(f"/proc/self/fd/{held}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(held)
    try:
        fcntl.ioctl(master, _LOCK_SLAVE, struct.pack("i", 0))
        return master, fcntl.ioctl(master, _OPEN_SLAVE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise


def _relay(master: int, running: subprocess.Popen[bytes], *, keys: bool, out: int) -> None:
    """Copy until the program has ended, or the operator's terminal is gone."""
    poll = select.poll()
    poll.register(master, select.POLLIN)
    if keys:
        poll.register(0, select.POLLIN)
    while True:
        has_ended = running.poll() is not None
        ready = [descriptor for descriptor, _ in poll.poll(0 if has_ended else POLL_MS)]
        if has_ended and master not in ready:
            return
        for descriptor in ready:
            try:
                chunk = os.read(descriptor, CHUNK_BYTES)
            except OSError:
                chunk = b""  # EIO of a master: no process has the other end open
            if not chunk:
                return
            _write(out if descriptor == master else master, chunk)


def _write(descriptor: int, chunk: bytes) -> None:
    with contextlib.suppress(OSError):
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]


@contextlib.contextmanager
def _raw(terminal: int | None) -> Iterator[None]:
    """Pass every key to the program unprocessed; restore the terminal in any case."""
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _signals(terminal: int, master: int, running: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward changes of the window size; signals that end us hang up the program and leave the block normally."""

    def resize(*_: object) -> None:
        with contextlib.suppress(OSError):
            _copy_size(terminal, master)

    def end(*_: object) -> None:
        running.send_signal(signal.SIGHUP)
        running.send_signal(signal.SIGCONT)

    handlers = {signal.SIGWINCH: resize, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy_size(terminal: int, master: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))


def _code(running: subprocess.Popen[bytes]) -> int:
    code = running.wait()
    return code if code >= 0 else 128 - code
