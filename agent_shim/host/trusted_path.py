"""Opens paths in which a job may have created links. Only links that root created are followed.

``host.sandbox_exec`` imports this in a process that becomes a job, so it uses only the standard library.
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
"""Maximum number of links in one path, as in the kernel."""
_HELD: Final = "/proc/self/fd/"


def hold(path: str | os.PathLike[str], *, make: int | None = None) -> int:
    """Return an ``O_PATH`` descriptor of the file at ``path``, without opening the file. Raises ``OSError`` with the
    path.

    If ``make`` is given, missing directories are created, and the last component must not be a link. ``make`` is the
    mode of the last directory. Those above it get 0777 minus the umask. The path is opened one directory at a time, so
    a link that replaces a directory is either rejected or comes too late to have an effect.
    """
    top, rest = start(path)
    links = 0
    current = os.open(top, os.O_PATH | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.popleft()
            if make is not None:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o777 if rest else make, dir_fd=current)
            entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            try:
                if stat.S_ISLNK((status := os.fstat(entry)).st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    if make is not None and not rest:
                        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                    refuse_link(name, status, os.fstat(current))
                    target = os.readlink("", dir_fd=entry)
                    rest.extendleft(name for name in reversed(target.split("/")) if name not in ("", "."))
                    followed = os.open("/" if target.startswith("/") else ".", os.O_PATH | os.O_CLOEXEC, dir_fd=current)
                    os.close(entry)
                    entry = followed
            except BaseException:
                os.close(entry)
                raise
            os.close(current)
            current = entry
    except OSError as exc:
        os.close(current)
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
    except BaseException:
        os.close(current)
        raise
    return current


def start(path: str | os.PathLike[str]) -> tuple[str, deque[str]]:
    """Return the directory from which ``path`` is resolved, and the remaining components of the path.

    A path may start with ``/proc/self/fd/N``, which refers to the directory that is open as descriptor N. The target
    that ``readlink`` returns for it is not used, because another directory may now be at that path, for example one
    that was mounted over it.
    """
    text = os.fspath(path)
    top = "/" if text.startswith("/") else "."
    if text.startswith(_HELD):
        number, _, rest = text.removeprefix(_HELD).partition("/")
        if number.isdecimal():
            top, text = _HELD + number, rest
    # Do not collapse ``..`` in the text. After a link it means the parent of the link's target, so it has to be
    # resolved during the walk.
    return top, deque(name for name in text.split("/") if name not in ("", "."))


def refuse_link(name: str, link: os.stat_result, directory: os.stat_result) -> None:
    """Raise ``OSError`` for a link that a job may have created, or for one of root's links that a job may have moved
    here.

    A link in a directory that only root can change was created by root, even if a start program changed its owner with
    ``chown -R``.
    """
    trusted = trusted_users()
    is_writable_by_others = bool(directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if directory.st_uid in trusted and not is_writable_by_others:
        return
    if link.st_uid not in trusted:
        raise OSError(errno.ELOOP, f"the path contains a link, {name!a}, of user {link.st_uid}")
    # In a sticky directory of a trusted user, others can neither replace nor move root's links.
    is_sticky = is_writable_by_others and directory.st_mode & stat.S_ISVTX
    # An agent that is not root runs jobs as its own user, so this check would not protect it.
    if os.geteuid() == 0 and not (directory.st_uid in trusted and is_sticky):
        raise OSError(errno.ELOOP, f"the path contains a link, {name!a}, in a directory that others may write")


def trusted_users() -> set[int]:
    """Return the users whose links are followed: root, this user, and in a user namespace the overflow user, who
    appears as the owner of files that belong to the host's root.
    """
    return {0, os.geteuid()} | ({user_namespace.overflow_user()} if user_namespace.is_inside() else set())
