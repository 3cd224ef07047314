"""Mirror one directory to another, verify the copy, and resume after an interruption at any point.

Preserves owner, mode, times, extended attributes and ACLs of files and directories, hard links, holes, links and
special files. An entry with the right modification time is complete, because that is set last: so a killed copy resumes
where it was. No link is followed on either side. Everything here blocks for as long as the data takes.
"""

from __future__ import annotations

import errno
import heapq
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent_shim.bulk.protocol import Progress, Report
from agent_shim.core.errors import HostError
from agent_shim.host import files, guarded
from agent_shim.host.descriptors import closing

CHUNK_BYTES: Final = 1 << 20
REPORT_PERIOD_S: Final = 0.5
"""Interval of progress reports."""
MAX_ATTEMPTS: Final = 3
"""Attempts to copy and compare before a source that keeps changing is given up."""
PIECE_BYTES: Final = 4000
"""Part of a path that the kernel takes at once: at most 4096 bytes with the end."""
COARSE_NS: Final = 2_000_000_000
"""Rounding of timestamps by file systems, in nanoseconds."""
_EXTREME_NS: Final = 2**62 * 10**9
"""Beyond the times of every file system."""
HELD_LEVELS: Final = 64
"""Levels between two directories that a walk holds open: a walk from the top takes a step for each level."""
MAX_HELD: Final = 200
"""Directories of each side that a walk holds open."""

_READ_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT: Final = ("user.", "trusted.", "security.capability", "system.posix_acl_")
"""Extended attributes that are data; labels given by a mount (SELinux, NFS) are not."""


_Leave = Callable[..., None]


def mirror(
    source: Path, target: Path, *, spared: Collection[str] = (), report: Report = lambda _progress: None
) -> None:
    """Make ``target`` equal to ``source``; all else in it is removed.

    Names in ``spared`` are skipped at the top of both. Raises ``HostError`` with the entry that cannot be copied
    exactly, or the entries that keep changing.
    """
    what = f"copy {source} to {target}"
    with (
        _errors_as(what),
        closing(os.open(source, _READ_DIR)) as below_source,
        closing(os.open(target, _READ_DIR)) as below_target,
    ):
        work = _Mirror(below_source, below_target, frozenset(spared), report)
        work.count()
        for _ in range(MAX_ATTEMPTS):
            work.copy()
            files.sync_filesystem(target)
            if not (differing := work.compare()):
                return
    raise HostError(f"cannot {what}: after {MAX_ATTEMPTS} attempts these differ: {', '.join(differing[:5])}")


class _Times(NamedTuple):
    """The earliest and the latest modification time of a file system, in nanoseconds."""

    first: int
    last: int


class _Mirror:
    """State of one copy: descriptors of both directories, and the hard links seen so far."""

    def __init__(self, source: int, target: int, spared: frozenset[str], report: Report) -> None:
        self._source = source
        self._target = target
        self._spared = spared
        self._report = report
        self._reported_at = 0.0
        self._progress = Progress("counting")
        self._times = _kept_times(target)

    def count(self) -> None:
        """Count files and bytes of the source."""
        for _, (here,), names in self._walk(self._source):
            for name in names:
                self._advance(_status(here, name))
        self._progress = Progress("", files_total=self._progress.files, size_total=self._progress.size)

    def copy(self) -> None:
        """Walk the source once and copy entries that are missing or differ in the target."""
        self._begin("copying")
        first: dict[tuple[int, int], tuple[str, str]] = {}
        for path, (source, target), names in self._walk(self._source, self._target, leave=_finish_directory):
            os.fchmod(target, stat.S_IMODE(os.fstat(target).st_mode) | 0o700)  # it may be closed by an earlier pass
            for name in self._surplus(source, target, path):
                _remove(target, name)
            for name in names:
                with _errors_as(f"copy {path}{name}"):
                    status = _status(source, name)
                    other = first.get(_inode(status)) if _is_shared(status) else None
                    if other is None:
                        _copy_entry(source, target, name, status, self._times)
                        if _is_shared(status):
                            first[_inode(status)] = path, name
                    else:
                        self._link(*other, target, name)
                    self._advance(status)

    def compare(self) -> list[str]:
        """Walk both once; remove the differing entries from the target, for the next copy, and return them."""
        self._begin("comparing")
        found = []
        made: dict[tuple[int, int], tuple[int, int]] = {}
        owner: dict[tuple[int, int], tuple[int, int]] = {}
        for path, (source, target), names in self._walk(self._source, self._target):
            surplus = self._surplus(source, target, path)
            for name in chain(names, surplus):
                with _errors_as(f"compare {path}{name}"):
                    wanted = None if name in surplus else _status(source, name)
                    there = _status_or_none(target, name)
                    if wanted and there and _same_entry(source, target, name, wanted, there, self._times):
                        one, other = _inode(wanted), _inode(there)
                        alone = not (_is_shared(wanted) or _is_shared(there))
                        # The hard links must be the same on both sides.
                        if alone or (made.setdefault(one, other), owner.setdefault(other, one)) == (other, one):
                            self._advance(wanted)
                            continue
                    found.append(f"{path}{name}")
                    if there and not stat.S_ISDIR(there.st_mode):
                        os.unlink(name, dir_fd=target)
        return found

    def _link(self, above: str, last: str, target: int, name: str) -> None:
        """Make ``name`` a hard link to the copy of ``last`` in the directory ``above``."""
        with closing(_open_below(self._target, above)) as there:
            wanted = _status(there, last)
            if (found := _status_or_none(target, name)) is not None:
                if _inode(found) == _inode(wanted):
                    return
                _remove(target, name)
            os.link(last, name, src_dir_fd=there, dst_dir_fd=target, follow_symlinks=False)

    def _walk(self, *tops: int, leave: _Leave = lambda *_: None) -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
        """Yield each directory that is below all of ``tops``, parents first: its path with a trailing slash, its
        descriptors, and its names below the first. ``leave`` is called with the descriptors after all below it.

        A job decides how many directories there are and how deep: only the names on the way to the present one are
        kept, and the descriptors of each ``HELD_LEVELS``-th directory, from which the ones below it are opened.
        """
        way: list[str] = []
        ahead = [[""]]
        held = [tops]

        def close(each: Iterable[int]) -> None:
            for fd in each:
                os.close(fd)

        with ExitStack() as rest:
            rest.callback(lambda: close(fd for those in held[1:] for fd in those))
            while ahead:
                is_new = bool(ahead[-1])
                if is_new:
                    way.append(ahead[-1].pop())
                else:
                    ahead.pop()
                if not way:
                    return
                path, level = "/".join([*way[1:], ""]), len(way) - 1
                near = min(level // HELD_LEVELS, len(held) - 1)
                below = "/".join(way[1 + near * HELD_LEVELS :])
                with _errors_as(f"copy {path}."), ExitStack() as opened:
                    found = tuple(opened.enter_context(closing(_open_below(top, below))) for top in held[near])
                    if is_new:
                        if level == len(held) * HELD_LEVELS and len(held) < MAX_HELD:
                            held.append(tuple(map(os.dup, found)))
                        names = _names(found[0], self._spare(path))
                        yield path, found, names
                        ahead.append([name for name in reversed(names) if all(_is_directory(fd, name) for fd in found)])
                    else:
                        leave(*found)
                        way.pop()
                        if 0 < near * HELD_LEVELS == level:
                            close(held.pop())

    def _surplus(self, source: int, target: int, path: str) -> set[str]:
        """Return the names that only the target has; a set of each side would take the memory of a huge directory."""
        spared = self._spare(path)
        with os.scandir(target) as entries:
            ours = (each.name for each in entries if each.name not in spared)
            return {name for name in ours if _status_or_none(source, name) is None}

    def _spare(self, path: str) -> frozenset[str]:
        return frozenset() if path else self._spared

    def _begin(self, phase: str) -> None:
        self._progress = msgspec.structs.replace(self._progress, phase=phase, files=0, size=0)
        self._reported_at = 0.0

    def _advance(self, status: os.stat_result) -> None:
        done = self._progress
        size = min(status.st_size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else 0
        self._progress = msgspec.structs.replace(done, files=done.files + 1, size=done.size + size)
        if time.monotonic() - self._reported_at >= REPORT_PERIOD_S:
            self._reported_at = time.monotonic()
            self._report(self._progress)


# --- one entry ------------------------------------------------------------------------------------------------------


def _kept_times(directory: int) -> _Times:
    """Find the earliest and the latest time that the file system of an open directory keeps; changes its times.

    A job may set the times of its files: those that the other disk cannot have must not end the copy.
    """
    found = []
    for extreme in (-_EXTREME_NS, _EXTREME_NS):
        with suppress(OSError):
            os.utime(directory, ns=(extreme, extreme))
            found.append(os.fstat(directory).st_mtime_ns)
    return _Times(*found) if len(found) == 2 else _Times(-_EXTREME_NS, _EXTREME_NS)


def _copy_entry(source: int, target: int, name: str, status: os.stat_result, times: _Times) -> None:
    """Copy ``name`` from the directory ``source`` to ``target``; a directory without its content."""
    if (found := _status_or_none(target, name)) is not None:
        if (stat.S_ISDIR(status.st_mode) and stat.S_ISDIR(found.st_mode)) or _looks_same(status, found, times):
            return
        _remove(target, name)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(name, 0o700, dir_fd=target)
    elif stat.S_ISREG(status.st_mode):
        _copy_file(source, target, name, status)
    else:
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        made = _status(target, name)
        if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_file(source: int, target: int, name: str, status: os.stat_result) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with closing(_open_file(source, name)) as old, closing(os.open(name, flags, 0o600, dir_fd=target)) as new:
        for at, end in guarded.segments(old, 0, status.st_size, limit=status.st_size):
            while at < end and (data := os.pread(old, min(CHUNK_BYTES, end - at), at)):
                at += os.pwrite(new, data, at)  # noqa: PLW2901 - the remaining part
        os.ftruncate(new, status.st_size)
        _copy_attributes(old, new, status)


def _copy_attributes(old: int, new: int, status: os.stat_result) -> None:
    """Copy owner, mode, extended attributes and times, in this order: each may be changed by setting one before it."""
    now = os.fstat(new)
    if (now.st_uid, now.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(new, status.st_uid, status.st_gid)
    os.fchmod(new, stat.S_IMODE(status.st_mode))
    wanted, there = _attributes(old), _attributes(new)
    for name in there.keys() - wanted.keys():
        os.removexattr(new, name)
    for name, value in wanted.items():
        if there.get(name) != value:
            os.setxattr(new, name, value)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))


def _attributes(fd: int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(fd, name) for name in os.listxattr(fd) if name.startswith(_KEPT)}
    except OSError as exc:
        if exc.errno == errno.ENOTSUP:
            return {}
        raise


def _finish_directory(source: int, target: int) -> None:
    _copy_attributes(source, target, os.fstat(source))


def _looks_same(one: os.stat_result, other: os.stat_result, times: _Times) -> bool:
    """Compare all attributes that are visible without reading."""
    wanted = min(max(one.st_mtime_ns, times.first), times.last)
    return (
        one.st_mode == other.st_mode
        and (one.st_uid, one.st_gid) == (other.st_uid, other.st_gid)
        and (stat.S_ISDIR(one.st_mode) or one.st_size == other.st_size)
        and one.st_rdev == other.st_rdev
        and abs(wanted - other.st_mtime_ns) < (COARSE_NS if other.st_mtime_ns % 1000 == 0 else 1)
    )


def _same_entry(
    source: int, target: int, name: str, wanted: os.stat_result, there: os.stat_result, times: _Times
) -> bool:
    """Compare everything that is copied, including the content."""
    if not _looks_same(wanted, there, times):
        return False
    if stat.S_ISLNK(wanted.st_mode):
        return os.readlink(name, dir_fd=source) == os.readlink(name, dir_fd=target)
    if not (stat.S_ISREG(wanted.st_mode) or stat.S_ISDIR(wanted.st_mode)):
        return True
    with closing(_open_file(source, name)) as old, closing(_open_file(target, name)) as new:
        if _attributes(old) != _attributes(new):
            return False
        return stat.S_ISDIR(wanted.st_mode) or _same_data(old, new, wanted.st_size)


def _same_data(old: int, new: int, size: int) -> bool:
    with suppress(OSError):  # compare with the disk, not with the page cache
        os.posix_fadvise(new, 0, 0, os.POSIX_FADV_DONTNEED)
    at = 0
    for begin, end in heapq.merge(*(guarded.segments(fd, 0, size, limit=size) for fd in (old, new))):
        at = max(at, begin)
        while at < end:
            one, other = (os.pread(fd, min(CHUNK_BYTES, end - at), at) for fd in (old, new))
            if one != other or not one:
                return False
            at += len(one)
    return True


# --- small things ---------------------------------------------------------------------------------------------------


def _names(directory: int, spared: Collection[str]) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name not in spared)


def _status(directory: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def _status_or_none(directory: int, name: str) -> os.stat_result | None:
    try:
        return _status(directory, name)
    except FileNotFoundError:
        return None


def _is_directory(directory: int, name: str) -> bool:
    status = _status_or_none(directory, name)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_shared(status: os.stat_result) -> bool:
    return status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)


def _remove(directory: int, name: str) -> None:
    if stat.S_ISDIR(_status(directory, name).st_mode):
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def _open_below(top: int, path: str) -> int:
    """Open a directory in pieces: its path may be longer than the kernel takes at once."""
    rest, here = os.fsencode(path.rstrip("/")), os.dup(top)
    while rest:
        end = len(rest) if len(rest) <= PIECE_BYTES else rest.rindex(b"/", 0, PIECE_BYTES)
        with closing(here):
            here = guarded.open_beneath(here, os.fsdecode(rest[:end]), _READ_DIR)
        rest = rest[end + 1 :]
    return here


def _open_file(directory: int, name: str) -> int:
    """Open a file for reading, without an update of its access time if allowed; a pipe in its place does not block."""
    with closing(guarded.open_beneath(directory, name, os.O_PATH)) as held:
        if stat.S_ISDIR(os.fstat(held).st_mode):
            return guarded.open_directory(held, "")
        try:
            return guarded.reopen(held, os.O_RDONLY | os.O_NOATIME)
        except PermissionError:
            return guarded.reopen(held, os.O_RDONLY)


@contextmanager
def _errors_as(what: str) -> Iterator[None]:
    """Raise an ``OSError`` of the block as :func:`files.failed` describes it, unless it is a ``HostError`` already."""
    try:
        yield
    except HostError:
        raise
    except OSError as exc:
        raise files.failed(what, exc) from exc
