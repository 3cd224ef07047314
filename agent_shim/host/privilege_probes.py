"""Determines a container's privileges by trial. Each attempt is made in a child process that exits afterwards and
leaves nothing behind.

Trials are necessary because neither the uid nor the capabilities show the effect of seccomp, AppArmor, a user namespace
or a runtime like gVisor.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent_shim.host import mounts

if TYPE_CHECKING:
    import ctypes

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
_TIME_ERROR: Final = 5
"""Result of adjtimex(2) if the clock is not synchronized."""
_BROKEN: Final = 255
"""Exit code of a child whose probe failed without an ``errno``."""


def error_of(probe: Callable[..., object], *args: object) -> int:
    """Run ``probe`` in a forked child process. Return the ``errno`` with which it failed (EIO if there is none), or 0
    on success. Must not be called in a process with several threads.
    """
    child = os.fork()
    if child == 0:
        code = _BROKEN
        try:
            probe(*args)
            code = 0
        except OSError as exc:
            code = exc.errno or _BROKEN
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if 0 <= code < _BROKEN else errno.EIO


def bind_mount(scratch: Path) -> None:
    """Create a bind mount in a new mount namespace."""
    mounts.leave_mount_namespace()
    mounts.try_bind(scratch)


def tmpfs(scratch: Path) -> None:
    """Mount a tmpfs in a new mount namespace."""
    mounts.leave_mount_namespace()
    mounts.mount_tmpfs(scratch)


def user_namespace(scratch: Path) -> None:
    """Become root in a new user namespace, and create a bind mount there, as rootless runtimes do."""
    user, group = os.geteuid(), os.getegid()
    _checked(_libc().unshare(CLONE_NEWUSER | mounts.CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mounts.make_private()
    mounts.try_bind(scratch)


def process_namespace(_: Path) -> None:
    """Make the next child PID 1 of a new pid namespace."""
    _checked(_libc().unshare(CLONE_NEWPID))


def change_user(uid: int, gid: int) -> None:
    """Change to another user and group."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def change_owner(directory: Path, uid: int) -> None:
    """Change the owner of a temporary file in ``directory``, then remove the file."""
    path = directory / f"trial-{os.getpid()}"
    path.touch(mode=0o600)
    try:
        os.chown(path, uid, -1)
    finally:
        path.unlink()


def write(directory: Path) -> None:
    """Create and remove a file in ``directory``."""
    path = directory / f".trial-{os.getpid()}"
    path.touch(mode=0o600)
    path.unlink()


def open_for_writing(path: Path) -> None:
    """Open an existing file for writing, as the agent does to change a file in place."""
    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))


def listen(host: str, port: int) -> None:
    """Listen for TCP connections on the IP address ``host`` and ``port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()


def listen_low() -> None:
    """Bind to a free port below 1024, which requires a privilege."""
    for port in range(1023, 1000, -1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError as exc:
                if exc.errno == errno.EADDRINUSE:
                    continue
                raise
            return


def open_inotify() -> None:
    """Open an inotify instance and close it again."""
    os.close(_checked(_libc().inotify_init1(os.O_CLOEXEC)))


def open_pidfd() -> None:
    """Open a pidfd for this process and close it again."""
    os.close(os.pidfd_open(os.getpid()))


def is_clock_synchronized() -> bool | None:
    """Return True if the kernel's clock is synchronized with a time server, or None if that is unknown (adjtimex(2)).
    The clock is only read, so no child process is needed.
    """
    import ctypes

    state: int = _libc().adjtimex(ctypes.create_string_buffer(512))  # a struct of zeros changes nothing
    return None if state < 0 else state != _TIME_ERROR


def _checked(result: int) -> int:
    """Return a system call's result. Raises ``OSError`` if the call failed."""
    if result < 0:
        import ctypes

        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _libc() -> ctypes.CDLL:
    import ctypes  # imported late, because it uses half a megabyte and only the doctor needs it

    return ctypes.CDLL(None, use_errno=True)
