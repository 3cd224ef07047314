"""Rotates a file that its writers keep open: its content is moved to ``FILE.1.gz``, and the file is truncated.

This is what logrotate calls copytruncate. Jobs own the directories and may put anything there at any time, so no link
is followed, a file with a second hard link is rejected, and every step works within an open directory.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final, NamedTuple

from isal import isal_zlib

from agent_shim.host import files, guarded
from agent_shim.host.descriptors import closing

LEVEL: Final = 2
"""isal's compression level (0 to 3)."""
GZIP: Final = 31
"""Value of zlib's window parameter that selects a gzip header and the largest window."""


class Moved(NamedTuple):
    """Result of a rotation: ``size`` bytes were archived, and ``left_out`` bytes before them were dropped."""

    size: int = 0
    left_out: int = 0


def rotate(root: int, path: str, keep: int, most: int) -> Moved:
    """Rotate the log ``path`` below the directory with descriptor ``root``, and keep ``keep`` archives.

    If the log has more than ``most`` bytes, only the last ``most`` bytes are kept, and the first line of the archive
    says so. Empty files, and paths that are no longer regular files, are skipped. If ``HostError`` is raised, the log
    is unchanged.

    Up to about ``most // 2`` bytes that are written during the copy are copied too. Any others are lost, as are bytes
    written between the last read and the truncation.
    """
    parent, _, name = path.rpartition("/")
    with files.attempting(f"rotate {guarded.shown(path)}"), closing(guarded.open_directory(root, parent)) as directory:
        # Use O_PATH, because a job may have put a pipe or a device there, and opening one for reading could have side
        # effects.
        with closing(guarded.open_beneath(directory, name, os.O_PATH)) as held:
            status = os.fstat(held)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not status.st_size:
                return Moved()
            source = guarded.reopen(held, os.O_RDWR)
        with closing(source):
            return _move(directory, name, source, os.fstat(source), keep, most)


def _move(directory: int, name: str, source: int, status: os.stat_result, keep: int, most: int) -> Moved:
    """Move the content of the open file ``source`` to a new archive, which gets the same owner and mode."""
    _shift(directory, name, keep)
    archive = f"{name}.1.gz"
    with closing(guarded.create(archive, directory, 0o600)) as target:
        try:
            with suppress(PermissionError):  # root might not be permitted to chown
                os.fchown(target, status.st_uid, status.st_gid)
            os.fchmod(target, stat.S_IMODE(status.st_mode) & 0o777)
            return _move_content(source, target, status.st_size, most)
        except BaseException:
            os.unlink(archive, dir_fd=directory)
            raise


def _shift(directory: int, name: str, keep: int) -> None:
    """Make room for a new archive ``.1.gz``: rename ``.1.gz`` to ``.2.gz`` and so on up to the first gap, and remove
    archives beyond ``keep``.
    """
    last = 0
    while _is_there(directory, f"{name}.{last + 1}.gz"):
        last += 1
    for number in range(last, 0, -1):
        old = f"{name}.{number}.gz"
        if number >= keep:
            os.unlink(old, dir_fd=directory)
        else:
            os.rename(old, f"{name}.{number + 1}.gz", src_dir_fd=directory, dst_dir_fd=directory)


def _is_there(directory: int, name: str) -> bool:
    """Return True if the directory has an entry ``name``, which may be a dangling link."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _move_content(source: int, target: int, size: int, most: int) -> Moved:
    """Compress the first ``size`` bytes of ``source`` into ``target``. If these are more than ``most`` bytes, keep only
    the last ``most`` bytes. Add what was appended to ``source`` in the meantime, up to about ``most // 2`` bytes, and
    immediately truncate ``source``.
    """
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP)
    # Skip holes. A writer without O_APPEND continues at its old offset after a truncation, which leaves a hole at the
    # beginning of the file.
    runs = list(guarded.segments(source, 0, size))
    left_out = excess = max(0, sum(end - begin for begin, end in runs) - most)
    if left_out:
        files.write_all(target, packer.compress(f"({left_out} bytes before this were too many to keep)\n".encode()))
    moved = 0
    for begin, end in runs:
        skipped = min(excess, end - begin)
        excess -= skipped
        for _, chunk in guarded.chunks(source, begin + skipped, end):
            moved += len(chunk)
            files.write_all(target, packer.compress(chunk))
    os.lseek(source, size, os.SEEK_SET)
    # Sync the archive before truncating the log.
    files.write_all(target, packer.flush(isal_zlib.Z_SYNC_FLUSH))
    os.fsync(target)
    appended = 0
    # The sync may have taken seconds. Copy what was written during that time, until a read finds no more data. Without
    # the limit, a job that writes fast enough would keep this loop running. Flush each chunk, because this process may
    # be killed after the truncation.
    while appended < most // 2 and (chunk := os.read(source, files.CHUNK_BYTES)):
        appended += len(chunk)
        files.write_all(target, packer.compress(chunk) + packer.flush(isal_zlib.Z_SYNC_FLUSH))
    os.ftruncate(source, 0)
    with suppress(OSError):  # only the checksum is missing, so keep the archive, which now has the only copy of the log
        files.write_all(target, packer.flush())
    return Moved(moved + appended, left_out)
