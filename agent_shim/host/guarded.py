"""Safely accesses files that a job can influence. Root opens, reads, lists or appends to such files only through this
module.

At any time, a job may create anything in a directory that it can write to, for example a link to a secret, a pipe
without a writer, a terabyte-sized sparse file, or a file that grows while it is read. Therefore,

* links below a directory given as ``root`` are never followed; elsewhere, links are followed only if the root user
  created them in a directory where no other user can create links;
* only regular files are opened, and only after their type was checked, so a pipe cannot block and a device is not
  touched. They are opened with ``O_NONBLOCK``, because the kernel would otherwise wait if the owner of a file holds a
  lease on it; with this flag, the open fails instead;
* every read, listing and walk has a limit in bytes, entries or seconds.

All functions block on disk access, perhaps forever if a file server hangs. On the event loop, call them through
:func:`agent_shim.host.blocking.call`. All failures raise ``OSError``, except that a path that is not below its ``root``
raises ``ValueError``.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

from agent_shim.core.errors import HostError
from agent_shim.host import trusted_path
from agent_shim.host.descriptors import closing

T = TypeVar("T")
StrPath: TypeAlias = str | os.PathLike[str]
Skipped: TypeAlias = Callable[[str, OSError | None], None]

MAX_ENTRIES: Final = 10_000
"""Maximum number of entries read from one directory."""
CHUNK_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``."""


# --- opening ----------------------------------------------------------------------------------------------------------


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open ``path`` below the open directory ``directory``, without following links or leaving that directory.

    The path is opened one directory at a time, so that it cannot be redirected by renaming a directory in the meantime.
    Raises ``HostError``.
    """
    parent = directory
    try:
        parts = [name for name in path.split("/") if name not in ("", ".")] or [".."]  # reject an empty path
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise OSError(errno.EXDEV, "the path leaves its directory")
        # Open a directory in two steps: first by its name with O_PATH, then as ".". With O_DIRECTORY in the first step,
        # a link would fail with ENOTDIR instead of ELOOP.
        *parents, last = [*parts, "."] if flags & os.O_DIRECTORY else parts
        for name in parents:
            child = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            if parent != directory:
                os.close(parent)
            parent = child
            if stat.S_ISLNK(os.fstat(parent).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
        if flags & os.O_PATH and stat.S_ISLNK(os.fstat(descriptor).st_mode):  # open has returned the link itself
            os.close(descriptor)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return descriptor
    except OSError as exc:
        why = "the path contains a symbolic link" if exc.errno == errno.ELOOP else exc.strerror or exc
        error = HostError(f"cannot open {shown(path)}: {why}")
        error.errno = exc.errno
        raise error from exc
    finally:
        if parent != directory:
            os.close(parent)


def shown(path: str) -> str:
    """Escape invalid UTF-8, line breaks and terminal control characters in a name for display."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in path)


@contextmanager
def held(path: StrPath, root: StrPath | None = None) -> Iterator[int]:
    """Yield an ``O_PATH`` descriptor of the file at ``path``, for ``fstat`` and for paths below it. The file itself is
    not opened.

    ``root`` is a directory above the file. Links below it are never followed. Without this argument, links are followed
    if the root user created them. Raises ``ValueError`` if ``path`` is not below ``root``.
    """
    below = "" if root is None else _below(path, root)
    if root is None or not below:
        descriptor = trusted_path.hold(path)
    else:
        with held(root) as top:
            descriptor = open_beneath(top, below, os.O_PATH)
    with closing(descriptor):
        yield descriptor


def _below(path: StrPath, root: StrPath) -> str:
    """Return ``path`` relative to ``root``, or "" for ``root`` itself. Raises ``ValueError`` for any other path."""
    top, names = trusted_path.start(path)
    top_of_root, names_of_root = trusted_path.start(root)
    depth = len(names_of_root)
    if top != top_of_root or list(names)[:depth] != list(names_of_root):
        raise ValueError(f"{os.fspath(path)!r} is not below {os.fspath(root)!r}")
    return "/".join(list(names)[depth:])


# --- regular files ----------------------------------------------------------------------------------------------------


def open_file(path: StrPath, root: StrPath | None = None) -> int:
    """Open a regular file for reading. ``root`` has the same meaning as for :func:`held`.

    Below ``root``, a file that belongs to the root user is rejected if it has a second hard link, because jobs can
    create hard links to any file unless the kernel protects against that.
    """
    with _named(path), held(path, root) as descriptor:
        if root is not None:
            refuse_second_name(os.fstat(descriptor))
        return reopen(descriptor, os.O_RDONLY)


def refuse_second_name(file_status: os.stat_result) -> None:
    """Raise ``OSError`` if a file belongs to root and has more than one hard link, because a job may have created the
    second link to get hold of a file that the job itself cannot read. Other users' files may have several links.
    """
    if file_status.st_nlink > 1 and file_status.st_uid == 0 and stat.S_ISREG(file_status.st_mode):
        raise OSError(errno.EINVAL, "it is a file of root with a second hard link")


@contextmanager
def _named(path: StrPath) -> Iterator[None]:
    """Add the path to an ``OSError`` raised in the block."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, HostError):
            raise
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc


def hold(directory: int, name: str) -> int:
    """Return an ``O_PATH`` descriptor of the entry ``name`` in an open directory. If the entry is a link, the
    descriptor refers to the link itself.
    """
    if "/" in name or name == "..":
        raise OSError(errno.EXDEV, "the path leaves its directory")
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def reopen(descriptor: int, flags: int, file_status: os.stat_result | None = None) -> int:
    """Open the file behind the ``O_PATH`` descriptor if it is a regular file. Pipes, sockets and devices are never
    opened.

    ``file_status`` is the file's status, if the caller already has it.
    """
    if not stat.S_ISREG((file_status or os.fstat(descriptor)).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    # Open the file through the kernel's own link. Because no name is resolved, the file cannot have been replaced.
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def status(path: StrPath, root: StrPath | None = None) -> os.stat_result:
    """Return the ``fstat`` result for a path. ``root`` has the same meaning as for :func:`held`."""
    with held(path, root) as descriptor:
        return os.fstat(descriptor)


def head(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Read at most the first ``limit`` bytes of a regular file."""
    with closing(open_file(path, root)) as descriptor:
        return os.pread(descriptor, limit, 0)


def tail(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Read at most the last ``limit`` bytes of a regular file."""
    with closing(open_file(path, root)) as descriptor:
        return os.pread(descriptor, limit, max(0, os.fstat(descriptor).st_size - limit))


def segments(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each data segment between the offsets ``begin`` and ``end``, leaving out holes.

    A terabyte-sized hole costs its writer nothing, but reading it takes hours.
    """
    at = begin
    while at < end:
        try:
            first = os.lseek(descriptor, at, os.SEEK_DATA)
            at = min(end, os.lseek(descriptor, first, os.SEEK_HOLE))
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # only a hole follows
                return
            first, at = at, end  # the file system does not report holes
        if first < end:
            yield first, at


def chunks(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the content between two offsets in chunks, each with its offset. Holes are skipped."""
    for first, last in segments(descriptor, begin, end):
        at = first
        while at < last and (chunk := os.pread(descriptor, min(CHUNK_BYTES, last - at), at)):
            yield at, chunk
            at += len(chunk)


def open_log(path: Path, mode: int, *, owner: tuple[int, int] = (-1, -1)) -> int:
    """Open a log for appending. If it does not exist, create it with ``mode`` and ``owner``.

    A file with a second hard link is rejected. The owner of an existing file is not changed, because a job may have
    moved a file that belongs to root to this path.
    """
    with _named(path), held(path.parent) as directory:
        # Retry if the file is removed after the first step has found it and before the second step opens it, which can
        # happen during log rotation. The number of attempts is limited, because an attacker could remove the file each
        # time.
        for _ in range(3):
            with suppress(FileExistsError):
                return create(path.name, directory, mode, owner)
            with suppress(FileNotFoundError):
                return _append_to(path.name, directory)
        raise OSError(errno.EAGAIN, "it is removed and created repeatedly")


def create(name: str, directory: int, mode: int, owner: tuple[int, int] = (-1, -1)) -> int:
    """Create a file for appending in an open directory, with ``mode`` and ``owner`` (by default this process's user).

    A job may give its directory the set-group-ID bit or a default ACL, which would let the job read new files. The file
    is therefore created without group permissions, which are added only after the group has been set and the ACL
    removed. The owner has its permissions from the start.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, mode & 0o700, dir_fd=directory)
    try:
        uid, gid = owner
        # If no ``owner`` is given, a failure to set the group is ignored, because a volume may map all owners to one
        # user.
        with suppress(PermissionError) if gid == -1 else nullcontext():
            os.fchown(descriptor, uid, os.getegid() if gid == -1 else gid)
        with suppress(OSError):  # there is no ACL, or the file system does not support them
            os.removexattr(descriptor, "system.posix_acl_access")
        os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _append_to(name: str, directory: int) -> int:
    """Open an existing regular file for appending. A file with a second hard link is rejected.

    The descriptor is in blocking mode, because it may become the output of a program.
    """
    with closing(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as held_file:
        descriptor = reopen(held_file, os.O_WRONLY | os.O_APPEND)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise OSError(errno.EINVAL, "it has a second hard link", name)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --- directories ------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An entry below the top of a :func:`walk`. ``path`` is relative, with surrogates for invalid UTF-8."""

    path: str
    status: os.stat_result


def names(directory: int, limit: int = MAX_ENTRIES) -> list[str]:
    """Return at most ``limit`` names in an open directory. They are not sorted, because there may be millions."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, limit)]


def walk(
    top: int, below: str = "", *, depth: int, limit: int, skipped: Skipped = lambda _path, _why: None
) -> Iterator[Entry]:
    """Yield regular files below the directory with descriptor ``top``, breadth first, without following links.

    The walk starts at ``below``, a path relative to ``top``. ``depth`` is the number of directory levels; 1 means only
    the start itself. ``limit`` is the maximum number of entries that are read. ``skipped`` is called with the path of
    each directory that cannot be read and the reason, and with None as the reason for the directory in which the limit
    was reached.
    """
    waiting = deque([(below, depth)])
    while waiting:
        parent, levels = waiting.popleft()
        try:
            directory = open_directory(top, parent)
        except OSError as exc:
            skipped(parent, exc)
            continue
        with closing(directory):
            for name in names(directory, limit + 1):
                if limit <= 0:
                    skipped(parent, None)
                    return
                limit -= 1
                path = f"{parent}/{name}" if parent else name
                with suppress(OSError):  # the entry was removed in the meantime
                    entry_status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISREG(entry_status.st_mode):
                        yield Entry(path, entry_status)
                    elif stat.S_ISDIR(entry_status.st_mode) and levels > 1:
                        waiting.append((path, levels - 1))


def open_directory(top: int, below: str) -> int:
    """Open the directory ``below`` for listing or, if that is "", ``top`` itself. ``top`` may be an ``O_PATH``
    descriptor.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return open_beneath(top, below, flags) if below else os.open(".", flags, dir_fd=top)
