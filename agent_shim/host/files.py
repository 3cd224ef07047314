"""Writes files atomically, and creates directories with a given mode and owner.

All functions block on the disk. The event loop calls them through ``asyncio.to_thread``. Failures raise ``OSError``, in
most functions as a :class:`HostError` with ``errno`` and a message that contains the path. Owners are given as
``user:group``. An agent that does not run as root ignores them, so that an ordinary user can use a scratch tree. In a
container without CAP_CHOWN, files keep root as their owner. This is logged once.
"""

from __future__ import annotations

import errno
import functools
import grp
import itertools
import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from agent_shim.core.errors import HostError
from agent_shim.host import capabilities, guarded, trusted_path
from agent_shim.host.descriptors import closing
from agent_shim.host.mounts import is_mount_point

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 * 1024
"""Copy buffer size. From 128 KiB on, the allocator maps and unmaps each buffer, which is three times slower."""
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of one document. The largest settings seen so far are half a megabyte."""
_ATTEMPTS: Final = 10
"""Number of attempts to create a directory at a path where another user keeps creating something else."""
_LEFTOVER: Final = re.compile(r"\..+\.tmp-[0-9a-f]{8}")


def read(path: Path, limit: int = MAX_FILE_BYTES, *, is_own: bool = False) -> bytes:
    """Return the content of a file from the CPI, the image or an operator. Links are followed, because files in the
    kubelet's volumes are links.

    Set ``is_own`` for a file that this agent or its predecessor wrote. In that case, no link is followed, except one to
    a file in memory (:func:`behind`). Raises ``OSError`` for a file with more than ``limit`` bytes, and for anything
    but a regular file, because a FIFO would block and a device has no end.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if is_own:
        path, flags = behind(path), flags | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # the path is a link or a socket
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from exc
        raise
    with closing(fd):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        # Read in chunks as large as the file, because a buffer as large as ``limit`` would have to be mapped for each
        # read. Kernel files report the size 0, so use ``CHUNK_BYTES`` for them.
        content, size = b"", max(status.st_size, CHUNK_BYTES)
        while max(status.st_size, len(content)) <= limit and (chunk := os.read(fd, size)):
            content += chunk
        if max(status.st_size, len(content)) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return read(path).decode(errors="replace")
    except OSError:
        return ""


def is_empty(directory: Path, *, spared: Collection[str] = ()) -> bool:
    """Return True if a directory is empty, apart from names in ``spared``."""
    with os.scandir(directory) as entries:
        return all(entry.name in spared for entry in entries)


def failed(what: str, exc: OSError) -> HostError:
    """Convert ``exc`` to ``HostError`` "cannot WHAT: why" with its ``errno``."""
    error = HostError(f"cannot {what}: {exc.strerror or exc}")
    error.errno = exc.errno
    return error


@contextmanager
def attempting(what: str) -> Iterator[None]:
    """Convert an ``OSError`` raised in the block to a ``HostError`` "cannot WHAT: why"."""
    try:
        yield
    except OSError as exc:
        raise failed(what, exc) from exc


# --- owners -----------------------------------------------------------------------------------------------------------


def owner_ids(owner: str | None) -> tuple[int, int]:
    """Return the uid and gid of ``user:group``. Without a group, the gid is the user's primary group.

    Return (-1, -1), which chown ignores, if ``owner`` is None, or if we are not root with CAP_CHOWN.
    """
    if owner is None or os.geteuid() != 0 or not can_chown():
        return -1, -1
    user, colon, group = owner.partition(":")
    try:
        account = pwd.getpwnam(user)
    except (KeyError, ValueError):  # ValueError: the name contains a NUL
        raise HostError(f"there is no user {user}") from None
    try:
        return account.pw_uid, grp.getgrnam(group).gr_gid if colon else account.pw_gid
    except (KeyError, ValueError):
        raise HostError(f"there is no group {group}") from None


def chown(path: Path | str, owner: str) -> None:
    """Change the owner of ``path`` to ``user:group``, or to ``user`` and its primary group. Links are not followed."""
    with attempting(f"give {path} to {owner}"):
        os.chown(path, *owner_ids(owner), follow_symlinks=False)


def _set_owner_and_mode(fd: int, mode: int, owner: str | None) -> None:
    """Set the owner and the mode of an open file or directory, unless they are already correct. The owner is set first,
    because chown clears setuid and setgid bits.
    """
    uid, gid = owner_ids(owner) if owner else (-1, -1)
    status = os.fstat(fd)
    if uid not in (-1, status.st_uid) or gid not in (-1, status.st_gid):
        os.fchown(fd, uid, gid)
        status = os.fstat(fd)
    if (current_mode := stat.S_IMODE(status.st_mode)) != mode:
        try:
            os.fchmod(fd, mode)
        except PermissionError as exc:
            # A warning is enough here. Only an existing directory on a volume can belong to another user, and files
            # with secrets have the right mode from the start, because we create them.
            logger.warning("cannot change the mode %o of a file of another user: %s", current_mode, exc.strerror)


@functools.cache
def can_chown() -> bool:
    """Return True if root is allowed to change the owners of files in this container. Otherwise, log this once."""
    if "CHOWN" in capabilities.privileges().effective:
        return True
    logger.warning("cannot change owners of files: this container lacks CAP_CHOWN")
    return False


# --- whole files ------------------------------------------------------------------------------------------------------


def sibling(path: Path) -> Path:
    """Return a unique temporary path in the directory of ``path``, which :func:`is_leftover` recognizes."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def is_leftover(name: str) -> bool:
    """Return True for a name created by :func:`sibling`."""
    return _LEFTOVER.fullmatch(name) is not None


def sweep(places: Iterable[Path]) -> None:
    """Remove the temporary files (:func:`sibling`) that interrupted writes have left in the directories ``places``.
    Call this only while no other process is writing there.

    If a file cannot be removed, the error is only logged, because an agent must be able to start even if a disk has
    become read-only.
    """
    for place in places:
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in place.iterdir():
                if is_leftover(path.name):
                    try:
                        remove_tree(path)
                    except HostError as exc:
                        logger.warning("a leftover of an interrupted write stays: %s", exc)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files left by interrupted writes of ``path``. Call this only while no process is writing
    ``path``.
    """
    with suppress(FileNotFoundError):
        for entry in path.parent.iterdir():
            if is_leftover(entry.name) and entry.name.startswith(f".{path.name}.tmp-"):
                remove_tree(entry)


def keep_unreadable(path: Path) -> None:
    """Rename a document that cannot be parsed, so that operators can examine it. If that fails, only log the error."""
    aside = path.with_name(f"{path.name}.unreadable")
    try:
        path.replace(aside)
        logger.error("%s is kept as %s", path, aside)
    except OSError as exc:
        logger.error("%s stays: %s", path, exc)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, owner: str | None = None, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` when the block succeeds and is removed when it fails.

    The file is synced before the rename, so that a crash leaves either the old file or the new one. If ``is_synced`` is
    False, a machine crash may leave an empty file, which is acceptable only if the file is rewritten after the crash
    anyway. A link at ``path`` is replaced.
    """
    temp = sibling(path)
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            _set_owner_and_mode(fd, mode, owner)
            if is_synced:
                os.fsync(fd)
        temp.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temp.unlink()
        raise
    if is_synced:
        sync_directory(path.parent)


def behind(path: Path) -> Path:
    """Return the path that is actually read or written. If ``path`` is one of the agent's links to files in memory,
    this is the link's target, otherwise ``path`` itself.

    The agent's links point to files below their own directory. Any other link was created by someone else.
    """
    target = path.readlink() if path.is_symlink() else None
    return path if target is None or target.is_absolute() or ".." in target.parts else path.parent / target


def write_atomic(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    owner: str | None = None,
    is_synced: bool = True,
    if_changed: bool = False,
) -> None:
    """Replace the content of ``path`` atomically and, by default, sync it to disk (:func:`replacing`).

    A file that is itself a mount point (``/etc/hosts`` in a pod) cannot be replaced, so it is written in place and
    keeps its mode and owner. A link to such a file is replaced like any other link. If ``if_changed`` is set, a file
    that this agent wrote and that already has this content is not written again.
    """
    if if_changed:
        with suppress(OSError):
            if read(path, is_own=True) == data:
                return
    try:
        if not path.is_symlink() and is_mount_point(path):
            _write_in_place(path, data)
            return
        with replacing(path, mode=mode, owner=owner, is_synced=is_synced) as file:
            file.write(data)
    except OSError as exc:
        raise failed(f"write {path}", exc) from exc


def version(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file changes, or None if there is no file.

    The value contains the inode's change time rather than the modification time, which copying may preserve.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size


def _write_in_place(path: Path, data: bytes) -> None:
    """Overwrite a file that cannot be replaced, and sync it."""
    # Truncate only after writing, so that a concurrent reader never sees an empty file. At worst, it sees the new
    # content followed by the end of the old content.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory so that files created or renamed in it survive a machine crash."""
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


# --- directories and links --------------------------------------------------------------------------------------------


def make_dir(path: Path, mode: int, owner: str | None = None) -> None:
    """Create a directory, and its parents (0755) if missing, and set its mode and owner.

    Links created by a job could lead anywhere. Therefore a link at ``path`` itself is rejected, and so is any link
    above it that neither root nor this user created.
    """
    with attempting(f"make the directory {path}"), closing(_open_made(path, mode & 0o700)) as fd:
        _set_owner_and_mode(fd, mode, owner)


def make_own_dir(path: Path, mode: int, owner: str | None = None) -> None:
    """Like :func:`make_dir`, but for a directory whose parent is writable by all users.

    If another user has created something at ``path``, it is renamed. It is not reused, because a directory created by a
    job could contain malicious files.
    """
    for _ in range(_ATTEMPTS):
        move_away(path)
        try:
            with closing(_open_made(path, mode & 0o700)) as fd:
                if os.fstat(fd).st_uid in trusted_path.trusted_users():
                    _set_owner_and_mode(fd, mode, owner)
                    return
        except NotADirectoryError:  # someone has created a file there in the meantime
            continue
        except OSError as exc:
            raise failed(f"make the directory {path}", exc) from exc
    raise HostError(f"cannot make the directory {path}: another user keeps creating something else at this path")


def close_to_others(path: Path, owner: str | None, *, more: int = 0) -> None:
    """Give an existing directory to ``owner`` unless that is None, and remove everybody else's write permission.

    ``more`` contains additional bits to set in the directory's mode. Only links created by root are followed. Raises
    ``HostError``.
    """
    with (
        attempting(f"close the directory {path} to others"),
        guarded.held(path) as path_fd,
        closing(guarded.open_directory(path_fd, "")) as fd,
    ):
        _set_owner_and_mode(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH) | more, owner)


def move_away(path: Path) -> None:
    """Rename whatever is at ``path`` unless root or this user created it, so that the agent never uses a file or
    directory that a job has put there.
    """
    with attempting(f"move {path} away"), suppress(FileNotFoundError):
        owner = path.lstat().st_uid
        if owner not in trusted_path.trusted_users():
            aside = path.rename(sibling(path))
            logger.warning("%s was created by user %d and was renamed to %s", path, owner, aside.name)


def _open_made(path: Path, mode: int) -> int:
    """Create a directory with its missing parents unless it exists, and open it. Callers pass only the owner's
    permissions as ``mode``, so that no other user can enter the directory before they call ``_set_owner_and_mode``.
    """
    with closing(trusted_path.hold(path, make=mode)) as path_fd:
        return guarded.open_directory(path_fd, "")


def swap_link(target: Path, link: Path) -> None:
    """Point ``link`` to ``target`` atomically. A real directory at ``link`` is removed first, in which case the change
    is not atomic.
    """
    with suppress(OSError):  # ``link`` does not exist or is not a link
        if os.readlink(link) == str(target):  # noqa: PTH115 - faster, and called for each package of each job
            return
    temp = sibling(link)
    with attempting(f"link {link} to {target}"):
        with suppress(FileExistsError):
            os.symlink(target, link)  # noqa: PTH211 - faster, and called thousands of times
            return
        temp.symlink_to(target)
        try:
            if link.is_dir() and not link.is_symlink():
                remove_tree(link)
            temp.replace(link)
        except BaseException:
            temp.unlink()
            raise


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a whole directory without following links. A missing path is not an error."""
    with attempting(f"remove {path}"), suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        _let_owner_write(str(path))
        with closing(os.open(path, _DIRECTORY)) as top:
            _empty(top)
        path.rmdir()


_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _empty(top: int) -> None:
    """Empty an open directory. Nested directories are first moved up into it, because a job can nest ten thousand of
    them, which is too deep for recursion.
    """
    prefix = f".{secrets.token_hex(8)}"
    new_names = (f"{prefix}-{number}" for number in itertools.count())
    waiting = _without_files(top)
    while waiting:
        name = waiting.pop()
        with closing(os.open(name, _DIRECTORY, dir_fd=top)) as parent:
            for child in _without_files(parent):
                try:
                    os.rename(child, new_name := next(new_names), src_dir_fd=parent, dst_dir_fd=top)
                except OSError as exc:
                    if exc.errno != errno.EXDEV:
                        raise
                    # overlayfs cannot rename a directory in an image layer, so empty it in place. This recursion is
                    # limited, because jobs cannot nest directories in an image.
                    with closing(os.open(child, _DIRECTORY, dir_fd=parent)) as layer:
                        _empty(layer)
                    os.rmdir(child, dir_fd=parent)
                else:
                    waiting.append(new_name)
        os.rmdir(name, dir_fd=top)


def _without_files(directory: int) -> list[str]:
    """Remove everything except subdirectories from an open directory. Return the names of the subdirectories."""
    with os.scandir(directory) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        if is_directory:
            _let_owner_write(name, directory)
        else:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in names if is_directory]


def _let_owner_write(name: str, directory: int | None = None) -> None:
    """Make a directory writable, so that an ordinary user can move and empty it. Go module caches, for example, are
    read-only.
    """
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=directory)


# --- bytes ------------------------------------------------------------------------------------------------------------


def copy_data(source: int, target: int) -> None:
    """Copy everything after the current position of the descriptor ``source`` to the descriptor ``target``."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := os.readv(source, [buffer]):
        write_all(target, buffer[:count])


def write_all(target: int, data: bytes | memoryview) -> None:
    """Write all of ``data``, because a single call may write only a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def sync_filesystem(path: Path) -> None:
    """Sync the whole file system that contains ``path``, with one call instead of thousands of fsyncs."""
    import ctypes  # imported late, because it uses half a megabyte and most processes never need it

    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise failed(f"sync the filesystem of {path}", OSError(code, os.strerror(code)))
