"""Rotation of a file that its writers keep open: its content goes to ``FILE.1.gz``, and it is cut to nothing.

What logrotate calls copytruncate. The directories belong to jobs, which may put anything there at any time: no link is
followed, a file that has a second name is left alone, and every step works within a directory that is held open.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final, NamedTuple

from isal import isal_zlib

from agent_shim.errors import HostError
from agent_shim.host import files

LEVEL: Final = 2
GZIP: Final = 31
"""For zlib: a gzip head, and the largest window."""


class Moved(NamedTuple):
    """Bytes of a log that are in its archive now, and of those before them that are nowhere any more."""

    size: int = 0
    left_out: int = 0


def rotate(root: int, path: str, keep: int, most: int) -> Moved:
    """Rotate ``path`` below the directory with descriptor ``root``, keeping ``keep`` archives of it.

    Of a log with more than ``most`` bytes the end is kept, so many; a line at the beginning of its archive says so.
    Nothing is moved of what is no plain file any more, or empty. Raises ``HostError``; the file is as it was then. What
    is written while the last bytes are copied is copied too, up to half of ``most``: who writes faster than that is
    packed loses the rest. What comes in the moment before the cut is lost.
    """
    parent, _, name = path.rpartition("/")
    directory = files.open_beneath(root, parent, os.O_RDONLY | os.O_DIRECTORY) if parent else os.dup(root)
    try:
        source = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not status.st_size:
                return Moved()
            return _rotate(directory, name, source, status, keep, most)
        finally:
            os.close(source)
    except OSError as exc:
        if isinstance(exc, HostError):
            raise
        raise files.failed(f"rotate {path}", exc) from exc
    finally:
        os.close(directory)


def _rotate(directory: int, name: str, source: int, status: os.stat_result, keep: int, most: int) -> Moved:
    _shift(directory, name, keep)
    fresh = f"{name}.1.gz"
    target = os.open(
        fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
    )
    try:
        with suppress(PermissionError):  # root that may not give files away
            os.fchown(target, status.st_uid, status.st_gid)
        os.fchmod(target, stat.S_IMODE(status.st_mode) & 0o777)
        moved = _pack(source, target, status.st_size, most)
    except BaseException:
        os.unlink(fresh, dir_fd=directory)
        raise
    finally:
        os.close(target)
    return moved


def _shift(directory: int, name: str, keep: int) -> None:
    """Make room for a first archive: ``.1.gz`` becomes ``.2.gz`` and so on, up to the first gap; the oldest go."""
    names = set(os.listdir(directory))
    last = 0
    while f"{name}.{last + 1}.gz" in names:
        last += 1
    for number in range(last, 0, -1):
        old = f"{name}.{number}.gz"
        if number >= keep:
            os.unlink(old, dir_fd=directory)
        else:
            os.rename(old, f"{name}.{number + 1}.gz", src_dir_fd=directory, dst_dir_fd=directory)


def _pack(source: int, target: int, size: int, most: int) -> Moved:
    """Copy what ends at ``size`` and what came meanwhile, then cut the source, with little in between."""
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP)
    first = _first_data(source)
    begin = max(first, size - most)
    if begin > first:
        _write(target, packer.compress(f"({begin - first} bytes before this were too many to keep)\n".encode()))
    os.lseek(source, begin, os.SEEK_SET)
    moved = 0
    while begin + moved < size and (chunk := os.read(source, files.CHUNK)):
        moved += len(chunk)
        _write(target, packer.compress(chunk))
    # On disk before it is gone from there.
    _write(target, packer.flush(isal_zlib.Z_SYNC_FLUSH))
    os.fsync(target)
    rest = 0
    # The sync may have taken seconds. Cut is when a look finds nothing more, not after so many bytes.
    while rest < most // 2 and (chunk := os.read(source, files.CHUNK)):
        rest += len(chunk)
        _write(target, packer.compress(chunk))
    os.ftruncate(source, 0)
    _write(target, packer.flush())
    return Moved(moved + rest, begin - first)


def _first_data(source: int) -> int:
    """Where the content begins: a writer that does not append goes on where it was, and leaves a hole before that."""
    try:
        return os.lseek(source, 0, os.SEEK_DATA)
    except OSError:
        return 0


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
