"""Files that are whole or old, and directories with the modes they should have.

All functions here block on the disk; the event loop calls them through ``asyncio.to_thread`` (:func:`save` does).
Failures are :class:`HostError` with ``errno`` and a text that names the path. Owners are given as ``user:group`` and
are left alone unless we are root, so that a scratch world of an ordinary user works; root of a container that may not
give files away (no CAP_CHOWN) keeps them, which is said once.
"""

from __future__ import annotations

import asyncio
import functools
import grp
import logging
import os
import pwd
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from agent_shim.core.errors import HostError
from agent_shim.host import capabilities, guarded
from agent_shim.host.mounts import is_mount_point

logger = logging.getLogger(__name__)

CHUNK: Final = 64 * 1024
"""Bytes moved at a time. From 128 KiB on the allocator asks the kernel for each buffer anew: three times slower."""

_MOST_LINKS: Final = 40
"""On the way to a directory, as for the kernel."""
_LEFTOVER: Final = re.compile(r"\..+\.tmp-[0-9a-f]{8}")


def failed(what: str, exc: OSError) -> HostError:
    """``exc`` told as ``cannot WHAT: why``, with its ``errno``."""
    error = HostError(f"cannot {what}: {exc.strerror or exc}")
    error.errno = exc.errno
    return error


# --- owners ---------------------------------------------------------------------------------------------------------


def owner_ids(owner: str | None) -> tuple[int, int]:
    """The numbers of ``user:group``, without a group those of the user alone.

    (-1, -1), which chown takes as "as it is", for None and unless we are root that may give files away.
    """
    if owner is None or os.geteuid() != 0 or not _may_give():
        return -1, -1
    user, colon, group = owner.partition(":")
    try:
        known = pwd.getpwnam(user)
    except KeyError:
        raise HostError(f"there is no user {user}") from None
    try:
        return known.pw_uid, grp.getgrnam(group).gr_gid if colon else known.pw_gid
    except KeyError:
        raise HostError(f"there is no group {group}") from None


def chown(path: Path | str, owner: str) -> None:
    """Give ``path``, itself if it is a link, to ``user:group`` or to ``user`` with their own group."""
    try:
        os.chown(path, *owner_ids(owner), follow_symlinks=False)
    except OSError as exc:
        raise failed(f"give {path} to {owner}", exc) from exc


def _settle(fd: int, mode: int, owner: str | None) -> None:
    """Set owner, then mode (a change of owner clears bits); what is right already is not touched."""
    uid, gid = owner_ids(owner)
    now = os.fstat(fd)
    if uid not in (-1, now.st_uid) or gid not in (-1, now.st_gid):
        os.fchown(fd, uid, gid)
        now = os.fstat(fd)
    if stat.S_IMODE(now.st_mode) != mode:
        try:
            os.fchmod(fd, mode)
        except PermissionError as exc:
            # A volume came with it. A new file is ours and has its mode from the start: no secret is shown by that.
            logger.warning("the mode of what somebody else owns stays %o: %s", stat.S_IMODE(now.st_mode), exc.strerror)


@functools.cache
def _may_give() -> bool:
    """Whether root may change owners; said once where a container does not let it."""
    if "CHOWN" in capabilities.privileges().effective:
        return True
    logger.warning("files stay with the user who makes them: this container lacks CAP_CHOWN")
    return False


# --- whole files ----------------------------------------------------------------------------------------------------


def sibling(path: Path) -> Path:
    """A new name beside ``path`` for something half made; :func:`is_leftover` knows it when it is found later."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def is_leftover(name: str) -> bool:
    """True for a name that :func:`sibling` has made."""
    return _LEFTOVER.fullmatch(name) is not None


def sweep(places: Iterable[Path]) -> None:
    """Remove what :func:`sibling` has named in these directories; only where nobody is at work."""
    for place in places:
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in place.iterdir():
                if is_leftover(path.name):
                    remove_tree(path)


def remove_leftovers(path: Path) -> None:
    """Remove what :func:`sibling` has named after ``path`` and nobody works at any more."""
    with suppress(FileNotFoundError):
        for found in path.parent.iterdir():
            if is_leftover(found.name) and found.name.startswith(f".{path.name}.tmp-"):
                remove_tree(found)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, owner: str | None = None) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends well, and is gone when it does not.

    It is on disk before it has the name; a crash leaves the old file or the new one. A link at ``path`` is replaced.
    """
    temp = sibling(path)
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            _settle(fd, mode, owner)
            os.fsync(fd)
        temp.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temp.unlink()
        raise
    sync_directory(path.parent)


def behind(path: Path) -> Path:
    """What to write instead of ``path``, where that is a link which the agent has left: to a file in memory."""
    return path.parent / path.readlink() if path.is_symlink() else path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, owner: str | None = None) -> None:
    """Make ``data`` the content of ``path``, whole or not at all.

    A file that is itself a mount point (``/etc/hosts`` in a pod) cannot be replaced: it is written in place and keeps
    its mode and owner.
    """
    try:
        if is_mount_point(path):
            _write_in_place(path, data)
            return
        with replacing(path, mode=mode, owner=owner) as file:
            file.write(data)
    except OSError as exc:
        raise failed(f"write {path}", exc) from exc


async def save(path: Path, data: bytes, *, mode: int = 0o644, owner: str | None = None) -> None:
    """:func:`write_atomic` for the event loop."""
    await asyncio.to_thread(write_atomic, path, data, mode=mode, owner=owner)


def version(path: Path) -> tuple[int, int, int] | None:
    """Something that is another one after each change of a file; None while there is none.

    The time is that of the inode: a copy may bring the time of its original.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size


def _write_in_place(path: Path, data: bytes) -> None:
    # Cut after writing: a reader in between sees the new bytes with an old tail, never an empty file.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- directories and links ------------------------------------------------------------------------------------------


def make_dir(path: Path, mode: int, owner: str | None = None) -> None:
    """Make a directory, with parents (0755) if need be, and see that its mode and owner are these.

    A link at ``path`` itself is refused, and above it one that neither root nor this user has made: where vcap may
    write, it could lead anywhere.
    """
    try:
        fd = _make_way(path, mode & 0o700)
        try:
            _settle(fd, mode, owner)
        finally:
            os.close(fd)
    except OSError as exc:
        raise failed(f"make the directory {path}", exc) from exc


def _make_way(path: Path, mode: int) -> int:
    """Open a directory step by step, making what is not there."""
    top, rest = guarded.start(path)
    links = 0
    here = os.open(top, (os.O_PATH if rest else os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.popleft()
            try:
                below = _enter(here, name, None if rest else mode)
            except NotADirectoryError:
                links += 1
                target = _link_to_follow(here, name) if rest and links <= _MOST_LINKS else None
                if target is None:
                    raise
                rest.extendleft(reversed(target.relative_to(target.anchor).parts))
                below = os.open(target.anchor or ".", os.O_PATH | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def _enter(here: int, name: str, mode: int | None) -> int:
    """Open the directory ``name``, made if need be; the last one has a ``mode``, and its attributes can be set."""
    with suppress(FileExistsError):
        try:
            os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(name, 0o777 if mode is None else mode, dir_fd=here)
    kind = os.O_PATH if mode is None else os.O_RDONLY
    return os.open(name, kind | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)


def _link_to_follow(here: int, name: str) -> Path | None:
    """Where a link leads that may be followed; None for what is none."""
    status = os.stat(name, dir_fd=here, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        return None
    guarded.refuse_link(name, status, os.fstat(here))
    return Path(os.readlink(name, dir_fd=here))


def swap_link(target: Path, link: Path) -> None:
    """Make ``link`` point to ``target``; it is never absent in between, unless a real directory must go first."""
    temp = sibling(link)
    try:
        with suppress(FileExistsError):
            os.symlink(target, link)  # noqa: PTH211 - the usual case, thousands of times
            return
        temp.symlink_to(target)
        try:
            if link.is_dir() and not link.is_symlink():
                remove_tree(link)
            temp.replace(link)
        except BaseException:
            temp.unlink()
            raise
    except OSError as exc:
        raise failed(f"link {link} to {target}", exc) from exc


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a whole directory; no link is followed, and nothing there is nothing to do."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        try:
            shutil.rmtree(path)
        except PermissionError:
            if os.geteuid() == 0:
                raise
            _let_owner_write(path)
            shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise failed(f"remove {path}", exc) from exc


def _let_owner_write(tree: Path) -> None:
    tree.chmod(0o700)
    for here, names, _ in os.walk(tree):
        for path in (Path(here, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)


# --- bytes ----------------------------------------------------------------------------------------------------------


def copy_data(source: int, target: int) -> None:
    """Copy from the position of ``source`` to its end; the kernel does it (and shares blocks) where it can."""
    with suppress(OSError):  # other filesystems, old kernels: by hand, from where it stopped
        while os.copy_file_range(source, target, 1 << 30):
            pass
    buffer = memoryview(bytearray(CHUNK))
    while count := os.readv(source, [buffer]):
        view = buffer[:count]
        while view:
            view = view[os.write(target, view) :]


def sync_filesystem(path: Path) -> None:
    """Bring everything written to the filesystem of ``path`` to disk: one call where thousands of fsyncs would be."""
    import ctypes  # late: half a megabyte that most processes never need

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise failed(f"sync the filesystem of {path}", OSError(code, os.strerror(code)))
    finally:
        os.close(fd)
