"""Runs a program in a new pseudo-terminal, and copies bytes between it and the caller's terminal.

A job's program with access to an operator's terminal could push input into it (TIOCSTI), which the operator's shell
would run as root, and could change its settings permanently. The program therefore never gets a descriptor of that
terminal: each standard stream that is a terminal is replaced by the pseudo-terminal, and the other streams are
inherited. Keys, window size and hang-up are passed on to the program, its output is passed back, and the caller's
terminal is restored at the end. All functions block, so only commands may call them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from agent_shim.host.descriptors import closing

Argv: TypeAlias = Callable[[int | None], tuple[list[str], int]]

CHUNK_BYTES: Final = 64 * 1024
POLL_MS: Final = 200
"""How often to check whether the program has ended. Its terminal does not show this, because the program's children may
keep it open.
"""
HANG_UP_TIMEOUT_S: Final = 5.0
"""How long the program may run after a hang-up before it gets SIGKILL."""
_HANDLED: Final = frozenset({signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})

# include/uapi/asm-generic/ioctls.h
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
        return _Child(command, {}, inherited, new_session=True).wait()
    master, slave = open_pair(f"/proc/{pid}/root")
    with closing(slave):
        if 0 not in terminals:  # the operator's terminal already translates line feeds
            modes = termios.tcgetattr(slave)
            modes[1] &= ~termios.OPOST
            termios.tcsetattr(slave, termios.TCSANOW, modes)
        command, inherited = argv(terminals[0])
        _copy_size(terminals[0], master)
        # Block signals until their handlers are set. An earlier signal would end this process and leave the terminal in
        # raw mode and the program running.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        # The program itself creates the session and makes the pseudo-terminal its controlling terminal.
        running = _Child(command, dict.fromkeys(terminals, slave), inherited, new_session=False)
    with _raw(0 if 0 in terminals else None), _signals(terminals[0], master, running):
        _relay(master, running, keys=0 in terminals, out=1 if 1 in terminals else terminals[-1])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(master)  # hangs up
    given_up_at = (running.hung_up_at or time.monotonic()) + HANG_UP_TIMEOUT_S
    while not running.has_ended():
        if time.monotonic() > given_up_at:
            running.send(signal.SIGKILL)
            break
        select.poll().poll(POLL_MS / 10)  # without descriptors, this only waits
    return running.wait()


class _Child:
    """A child process. ``streams`` maps its standard streams to descriptors. The other streams are inherited."""

    def __init__(self, argv: list[str], streams: Mapping[int, int], inherited: int, *, new_session: bool) -> None:
        self._status: int | None = None
        self.hung_up_at: float | None = None
        self._pid = os.fork()
        if self._pid == 0:
            try:
                if new_session:
                    os.setsid()
                for number, descriptor in streams.items():
                    os.dup2(descriptor, number)
                os.set_inheritable(inherited, True)
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by the interpreter
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
                os.execv(argv[0], argv)
            except OSError as exc:
                os.write(2, f"Error: cannot run {argv[0]}: {exc.strerror}\n".encode())
            finally:
                os._exit(127)

    def has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def wait(self) -> int:
        """Wait for the end of the child. Return its exit code, or 128+N if signal N killed it."""
        if self._status is None:
            self._status = os.waitpid(self._pid, 0)[1]
        return _code(self._status)

    def send(self, number: int) -> None:
        if not self.has_ended():
            os.kill(self._pid, number)


INTERRUPTED = 128 + signal.SIGINT


def in_terminal(argv: list[str]) -> int:
    """Run a program in the caller's terminal. Ctrl-C interrupts only the program, not this process. Return its exit
    code, or 128+N if signal N killed it. Raises ``OSError``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGINT])
    return _code(os.waitpid(child, 0)[1])


def open_pair(root: str) -> tuple[int, int]:
    """Open both ends of a pseudo-terminal in the devpts mounted at ``root``/dev/pts. Raises ``OSError``."""
    with closing(os.open(f"{root}/dev/pts/ptmx", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as held:
        status = os.fstat(held)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.makedev(5, 2):
            raise OSError(errno.ENODEV, "it makes no terminals", f"{root}/dev/pts/ptmx")
        master = os.open(f"/proc/self/fd/{held}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(master, _LOCK_SLAVE, bytes(4))
        return master, fcntl.ioctl(master, _OPEN_SLAVE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _relay(master: int, running: _Child, *, keys: bool, out: int) -> None:
    """Copy keys and output until the program has ended or the operator's terminal is gone. After a hang-up, stop after
    ``HANG_UP_TIMEOUT_S``.

    While the program does not read its input, no more keys are read, but its output is still copied.
    """
    os.set_blocking(master, False)
    poll, typed = select.poll(), b""
    while True:
        poll.register(master, select.POLLIN | (select.POLLOUT if typed else 0))
        if keys:
            poll.register(0, 0 if typed else select.POLLIN)  # poll always reports a hang-up
        has_ended = running.has_ended()
        ready = dict(poll.poll(0 if has_ended else POLL_MS))
        if has_ended and not ready.get(master, 0) & ~select.POLLOUT:
            return
        if running.hung_up_at is not None and time.monotonic() > running.hung_up_at + HANG_UP_TIMEOUT_S:
            return
        for descriptor in [each for each, events in ready.items() if events & ~select.POLLOUT]:
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
    with contextlib.suppress(OSError):
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]


@contextlib.contextmanager
def _raw(terminal: int | None) -> Iterator[None]:
    """Put the terminal into raw mode, so that every key reaches the program. Always restore it at the end."""
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
def _signals(terminal: int, master: int, running: _Child) -> Iterator[None]:
    """Within the block, forward changes of the window size, and hang up the program if a signal would otherwise end
    this process. The signals are unblocked only within the block, which is left normally.
    """

    def resize(*_: object) -> None:
        with contextlib.suppress(OSError):
            _copy_size(terminal, master)

    def end(*_: object) -> None:
        running.hung_up_at = running.hung_up_at or time.monotonic()
        running.send(signal.SIGHUP)
        running.send(signal.SIGCONT)

    handlers = {signal.SIGWINCH: resize, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy_size(terminal: int, master: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
