"""The walk along a path on which a job may put links: links are followed if root made them where only root can.

``host.sandbox_exec`` imports this in a process that becomes a job: it needs the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from contextlib import suppress
from typing import Final

from agent_shim.host import user_namespace

_MAX_LINKS: Final = 40
"""Links in one path, as in the kernel."""
_HELD: Final = "/proc/self/fd/"


def hold(path: str | os.PathLike[str], *, make: int | None = None) -> int:
    """Hold the file at ``path`` without opening it (``O_PATH``). Raises ``OSError`` with the path.

    With ``make``, the mode of the last one, missing directories are made (0777 above it, less the umask), and the last
    name may not be a link. The walk goes step by step: a link that replaces a directory is either met and named in the
    error, or no longer on the path.
    """
    top, rest = start(path)
    links = 0
    here = os.open(top, os.O_PATH | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.popleft()
            if make is not None:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o777 if rest else make, dir_fd=here)
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            try:
                if stat.S_ISLNK((status := os.fstat(below)).st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    if make is not None and not rest:
                        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                    refuse_link(name, status, os.fstat(here))
                    target = os.readlink("", dir_fd=below)
                    rest.extendleft(name for name in reversed(target.split("/")) if name not in ("", "."))
                    after = os.open("/" if target.startswith("/") else ".", os.O_PATH | os.O_CLOEXEC, dir_fd=here)
                    os.close(below)
                    below = after
            except BaseException:
                os.close(below)
                raise
            os.close(here)
            here = below
    except OSError as exc:
        os.close(here)
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
    except BaseException:
        os.close(here)
        raise
    return here


def start(path: str | os.PathLike[str]) -> tuple[str, deque[str]]:
    """Return the start of ``path`` and the names below it.

    ``/proc/self/fd/N`` is a start of its own: the directory that descriptor N holds. The text of that link may name
    another directory by now, for example a directory mounted over it.
    """
    text = os.fspath(path)
    top = "/" if text.startswith("/") else "."
    if text.startswith(_HELD):
        number, _, rest = text.removeprefix(_HELD).partition("/")
        if number.isdecimal():
            top, text = _HELD + number, rest
    # A ``..`` stays, and goes up from where the walk is.
    return top, deque(name for name in text.split("/") if name not in ("", "."))


def refuse_link(name: str, link: os.stat_result, directory: os.stat_result) -> None:
    """Raise ``OSError`` for a link that a job may have made, or may have moved here from root's."""
    trusted = trusted_users()
    if link.st_uid not in trusted:
        raise OSError(errno.ELOOP, f"the path contains a link, {name!a}, of user {link.st_uid}")
    is_open = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX
    if os.geteuid() == 0 and (directory.st_uid not in trusted or is_open):
        raise OSError(errno.ELOOP, f"the path contains a link, {name!a}, in a directory that others may write")


def trusted_users() -> set[int]:
    """Return the users whose links are followed: root, this user, and the overflow user of a user namespace."""
    return {0, os.geteuid()} | ({user_namespace.overflow_user()} if user_namespace.is_inside() else set())
