"""Pack directories into tar archives: compiled packages and logs.

Only short-lived processes import this module. The same tree always gives the same bytes: names sorted, owned by root,
times those of the files. A tree of logs changes during the read, and vcap may write to it: no link is followed, nothing
that could block is opened, and files that vanished are left out.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import mmap
import os
import posixpath
import re
import stat
import struct
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import BinaryIO, Final, Self

import msgspec
from isal import isal_zlib

from agent_shim.bulk.protocol import Tree
from agent_shim.core.digest import Digest, MultipleDigest
from agent_shim.core.errors import HostError
from agent_shim.host import cgroups, files, guarded
from agent_shim.host.descriptors import closing

GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Errors of an open after a file vanished, or was replaced by a link or a socket."""

VANISHED: Final = "it vanished before it was read"

BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``."""
PIECE_BYTES: Final = 512 * 1024
"""Part of the archive that is compressed and hashed at once, beside the reading of the next ones: half of it hands over
too often.
"""
MAX_PIECES: Final = 8
"""Pieces that wait for compression, digests and disk."""
LEVEL: Final = 2
"""Compression level of isal, 0 to 3: as fast as the disk; 3 is half as fast for one per cent less."""

MAX_COMPRESSORS: Final = 2
"""Threads that compress: a third would wait for the one that hashes and writes."""
GZIP_HEAD: Final = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
"""Head of gzip without name and time (RFC 1952)."""
DEFLATE_END: Final = b"\x03\0"
"""A last block without content (RFC 1951)."""

MAX_JOB_ENTRIES: Final = 20_000
"""Entries packed below each directory at the top of a live tree: bounds the memory that a job can claim."""
LONG_PATH_CHARS: Final = 256
"""A path of so many characters counts as two entries, of twice as many as three, and so on."""
MAX_REMARKS: Final = 1_000
LIVE_TIMEOUT_S: Final = 1200.0
"""Time for packing a live tree; after it the rest is left out."""
MAX_FIXED_BYTES: Final = 20 * 1024**3
"""Size of the files of a tree that is not live: no agent would unpack more, and a hole of terabytes keeps a worker for
hours."""
PERMISSIONS: Final = 0o777
"""Mode bits kept of a live file: setuid and setgid would give a job's program the rights of the unpacking user."""


class OutputError(OSError):
    """The archive cannot be written, whatever its content."""


def pack(
    out: BinaryIO, trees: Sequence[Tree], *, compressed: bool = True, newest: int | None = None, remarks: str = ""
) -> MultipleDigest:
    """Write ``trees`` as one archive, gzip by default; return its digests ``sha1;sha512``.

    If several entries have one name, that of the last tree is packed. A time after ``newest`` (seconds since 1970)
    becomes ``newest``: new files give the same bytes whenever they are made. Raises ``HostError``, and ``OutputError``
    if ``out`` cannot be written.

    With ``remarks`` the trees are live: other processes write to them. Renamed files are looked up again; a file that
    cannot be read, is truncated, or is a link out of its tree is not an error but a line in an entry of this name.
    """
    with ExitStack() as opened:
        sink = opened.enter_context(Sink(out, compressed=compressed, newest=newest))
        archive = _Archive(sink, is_live=bool(remarks))
        roots = [root for tree in trees if (root := archive.open(tree, opened)) is not None]
        for _ in range(2 if remarks else 1):
            wanted: dict[str, _Entry] = {}
            for root in roots:
                wanted.update((root.name_of(entry), entry) for entry in archive.chosen(root))
            archive.add_missing(wanted)
        return archive.finish(remarks)


class _Root(msgspec.Struct, frozen=True):
    """A directory to pack: an open descriptor, and the paths by which absolute links may name it."""

    fd: int
    tree: Tree
    places: tuple[str, ...]

    def name_of(self, entry: _Entry) -> str:
        return f"./{self.tree.prefix}{entry.path}".removesuffix("/")


class _Entry(msgspec.Struct, frozen=True):
    """An entry below a root; ``kind`` is its file type when it was listed."""

    root: _Root
    path: str
    kind: int

    @property
    def directory(self) -> tuple[_Root, str]:
        """Its directory, by root and path; the root is in itself."""
        return self.root, self.path.rpartition("/")[0]

    def open(self, directory: int) -> tuple[int, os.stat_result]:
        """Hold a directory or link, open a file, and return its status: nothing blocks and nothing is triggered."""
        held = guarded.hold(directory, self.path.rpartition("/")[2] or ".")
        status = os.fstat(held)
        if self.kind != stat.S_IFREG or not stat.S_ISREG(status.st_mode):
            return held, status
        try:
            return guarded.reopen(held, os.O_RDONLY, status), status
        finally:
            os.close(held)


class _Archive:
    """The archive under construction: the packed names, and the remarks."""

    def __init__(self, sink: Sink, *, is_live: bool) -> None:
        self.names: set[str] = set()
        self._sink = sink
        self._is_live = is_live
        self._remarks: dict[str, str] = {}
        self._first_names: dict[tuple[int, int], str] = {}
        self._files: set[tuple[int, int, int]] = set()
        self._room = MAX_FIXED_BYTES
        self._give_up_at = time.monotonic() + LIVE_TIMEOUT_S

    def is_late(self) -> bool:
        """Return True, and add a remark, if packing a live tree has taken too long."""
        if not self._is_live or time.monotonic() < self._give_up_at:
            return False
        self._remarks["."] = f"the archive is incomplete: packing took longer than {LIVE_TIMEOUT_S:g} seconds"
        return True

    def open(self, tree: Tree, opened: ExitStack) -> _Root | None:
        """Open a tree; None if it is optional and missing."""
        try:
            fd = os.open(tree.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            if not (tree.patterns and exc.errno in GONE):
                self._cannot_read(tree.root, exc)
            return None
        opened.callback(os.close, fd)
        return _Root(fd, tree, (tree.root.rstrip("/"), os.path.realpath(tree.root)))

    def chosen(self, root: _Root) -> Iterator[_Entry]:
        """Yield the entries to pack: all, with directories, or the files and links that match a pattern."""
        if not root.tree.patterns:
            yield _Entry(root, "", stat.S_IFDIR)
            yield from self._below(root)
            return
        patterns = _compiled(root.tree.patterns)
        below = (entry for entry in self._below(root) if entry.kind != stat.S_IFDIR)
        if _ALL in patterns:
            yield from below
            return
        for entry in below:
            parts = entry.path.split("/")
            if any(_matches(each, parts) for each in patterns):
                yield entry

    def _below(self, root: _Root) -> Iterator[_Entry]:
        """Yield all directories, files and links below ``root``; in live trees, unreadable directories are skipped."""
        waiting = [""]
        left: dict[str, int] = {}
        while waiting:
            here = waiting.pop()
            job = here.partition("/")[0]
            weight = 1 + len(here) // LONG_PATH_CHARS if self._is_live else 1
            room = left.setdefault(job, MAX_JOB_ENTRIES) if self._is_live else sys.maxsize - 1
            limit = room // weight
            try:
                found = _listed(root, here, limit + 1)
            except OSError as exc:
                if exc.errno not in GONE:
                    self._cannot_read(root.name_of(_Entry(root, here, stat.S_IFDIR)), exc)
                continue
            if len(found) > limit:
                name = root.name_of(_Entry(root, here, stat.S_IFDIR))
                most = MAX_JOB_ENTRIES // weight
                self._remarks[name] = f"the rest of it is left out: it has more than {most} files"
                del found[limit:]
            left[job] = room - len(found) * weight
            yield from found
            waiting.extend(entry.path for entry in found if entry.kind == stat.S_IFDIR)

    def add_missing(self, wanted: Mapping[str, _Entry]) -> None:
        """Pack all entries that are not yet packed, in the order of their names."""
        missing = sorted(wanted.keys() - self.names)
        for (root, here), names in itertools.groupby(missing, lambda name: wanted[name].directory):
            self._add_of_directory(root, here, {name: wanted[name] for name in names})

    def _add_of_directory(self, root: _Root, here: str, found: Mapping[str, _Entry]) -> None:
        """Pack entries of the directory ``here``, which stays open meanwhile."""
        try:
            directory = guarded.open_beneath(root.fd, here, os.O_PATH | os.O_DIRECTORY) if here else os.dup(root.fd)
        except OSError as exc:
            for name in found:
                self._cannot_open(name, exc)
            return
        with closing(directory):
            for name, entry in found.items():
                if self.is_late():
                    return
                self._add(name, entry, directory)

    def _add(self, name: str, entry: _Entry, directory: int) -> None:
        """Pack ``entry`` of the open ``directory``, unless it vanished or was replaced."""
        try:
            fd, status = entry.open(directory)
        except OSError as exc:
            self._cannot_open(name, exc)
            return
        try:
            if status.st_nlink == 1 or not self._has_second_name(name, status):
                self._add_open(name, entry, fd, status)
        except OutputError:
            raise
        except OSError as exc:
            raise files.failed(f"pack {name}", exc) from exc
        finally:
            os.close(fd)

    def _has_second_name(self, name: str, status: os.stat_result) -> bool:
        """Return True, and add a remark, for a file of root with a second hard link in a live tree."""
        try:
            if self._is_live:
                guarded.refuse_second_name(status)
        except OSError as exc:
            self._remarks[name] = f"{exc.strerror}, and not packed"
            return True
        return False

    def _add_open(self, name: str, entry: _Entry, fd: int, status: os.stat_result) -> None:
        if stat.S_IFMT(status.st_mode) != entry.kind:
            self._remarks[name] = VANISHED
            return
        self._remarks.pop(name, None)
        header = tarfile.TarInfo(name)
        header.mode = stat.S_IMODE(status.st_mode)
        header.mtime = min(int(status.st_mtime), self._sink.newest)
        inode = status.st_dev, status.st_ino
        if self._is_live:
            header.mode &= PERMISSIONS
            header.uid, header.gid = status.st_uid, status.st_gid
        else:
            header.uname = header.gname = "root"
        if entry.kind == stat.S_IFDIR:
            header.type = tarfile.DIRTYPE
        elif entry.kind == stat.S_IFLNK:
            header.type = tarfile.SYMTYPE
            header.linkname = self._target(name, entry, os.readlink("", dir_fd=fd))
            if not header.linkname:
                return
        elif status.st_nlink > 1 and (first := self._first_names.setdefault(inode, name)) != name:
            header.type = tarfile.LNKTYPE
            header.linkname = first
        elif self._is_known(status):
            return  # packed under its earlier name
        if header.type == tarfile.REGTYPE:
            runs = [(0, status.st_size)]
            header.size = status.st_size
            if self._is_live and status.st_blocks * BLOCK_BYTES < header.size:
                runs = list(guarded.segments(fd, 0, header.size))
                header.size = sum(end - begin for begin, end in runs)
            self._room -= header.size
            if self._room < 0 and not self._is_live:
                raise OSError(errno.EFBIG, f"the files exceed {MAX_FIXED_BYTES >> 30} GiB")
            self._sink.write_header(header)
            self._write_content(name, fd, status, runs, header.size)
        else:
            self._sink.write_header(header)
        self.names.add(name)

    def _write_content(
        self, name: str, fd: int, status: os.stat_result, runs: Sequence[tuple[int, int]], size: int
    ) -> None:
        there, problem = self._sink.write_file(fd, runs, size)
        if problem is not None and not self._is_live:
            raise problem
        if there < size:
            why = problem.strerror if problem else "it was truncated during the read"
            self._remarks[name] = f"zeros replace everything after the first {there} of {size} bytes: {why}"
        elif (holes := status.st_size - size) > 0:
            self._remarks[name] = f"{holes} bytes of it are holes and not packed"
        elif (grown := os.fstat(fd).st_size - size) > 0:
            self._remarks[name] = f"the last {grown} bytes were written during the read and are not packed"

    def _is_known(self, status: os.stat_result) -> bool:
        """Return True if this file was packed before, unchanged; the time guards against a reused inode number."""
        if not self._is_live:
            return False
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        known = identity in self._files
        self._files.add(identity)
        return known

    def _target(self, name: str, entry: _Entry, target: str) -> str:
        """Return the target of a link as it is written; "" for one that leads out of a live tree."""
        if not self._is_live:
            return target
        inner = _inner_target(entry, target)
        if not inner:
            self._remarks[name] = f"it is a link that leads out of the directory, to {guarded.shown(target)}"
        return inner

    def _cannot_open(self, name: str, exc: OSError) -> None:
        if exc.errno in GONE:
            self._remarks[name] = VANISHED
        else:
            self._cannot_read(name, exc)

    def _cannot_read(self, name: str, exc: OSError) -> None:
        if not self._is_live:
            raise files.failed(f"pack {name}", exc) from exc
        self._remarks[name] = f"cannot read it: {os.strerror(exc.errno or 0)}"

    def finish(self, remarks: str) -> MultipleDigest:
        """End the archive, with the entry ``remarks`` if there are any."""
        if self._is_live and self._remarks:
            lines = [f"{guarded.shown(name)}: {what}\n" for name, what in sorted(self._remarks.items())]
            if len(lines) > MAX_REMARKS:
                lines[MAX_REMARKS:] = [f"and {len(lines) - MAX_REMARKS} more\n"]
            self._sink.write_text(f"./{remarks}", "".join(lines))
        return self._sink.finish()


def _listed(root: _Root, here: str, limit: int) -> list[_Entry]:
    """List the entries of the directory ``here`` below ``root`` that can be packed, at most ``limit``."""
    with closing(guarded.open_directory(root.fd, here)) as fd, os.scandir(fd) as entries:
        some = itertools.islice(entries, limit)
        front = f"{here}/" if here else ""
        return [_Entry(root, front + entry.name, kind) for entry in some if (kind := _kind(entry))]


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the file type; 0 for FIFOs, sockets and devices."""
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFLNK if entry.is_symlink() else 0


def _inner_target(entry: _Entry, target: str) -> str:
    """Return ``target`` relative to its link if by the names alone it stays below the root; else "".

    An absolute target becomes relative: it would be dangling where the archive is unpacked.
    """
    here = posixpath.dirname(entry.path)
    if target.startswith("/"):
        places = [place for place in entry.root.places if target.startswith(f"{place}/")]
        path = target.removeprefix(places[0]).lstrip("/") if places else ".."
    else:
        path = posixpath.join(here, target)
    path = posixpath.normpath(path)
    return "" if path == ".." or path.startswith("../") else posixpath.relpath(f"/{path}", f"/{here}")


def header_block(header: tarfile.TarInfo) -> bytes:
    """Return what ``header.tobuf`` does, for a usual regular file in a fraction of the time."""
    name = header.name.encode("utf-8", "surrogateescape")
    size, mtime = header.size, int(header.mtime)
    parts = _owner_parts(header.mode, header.uid, header.gid, header.uname, header.gname)
    is_usual = (
        header.type == tarfile.REGTYPE
        and not header.linkname
        and len(name) <= tarfile.LENGTH_NAME
        and 0 <= size < 8**11
        and 0 <= mtime < 8**11
    )
    if parts is None or not is_usual:
        return header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    front, tail, total = parts
    middle = b"%011o\0%011o\0" % (size, mtime)
    total += isal_zlib.adler32(name + middle, 0) & 0xFFFF  # this half is the sum of so few bytes
    return b"%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), front, middle, total, tail)


@functools.lru_cache(maxsize=64)
def _owner_parts(mode: int, uid: int, gid: int, uname: str, gname: str) -> tuple[bytes, bytes, int] | None:
    """Return the parts of a header that many files share, before its size and after its sum, and their sum; or None."""
    user, group = (text.encode("utf-8", "surrogateescape") for text in (uname, gname))
    numbers = mode & 0o7777, uid, gid
    if max(len(user), len(group)) > 32 or min(numbers) < 0 or max(numbers) >= 8**7:
        return None
    front = b"%07o\0%07o\0%07o\0" % numbers
    tail = (tarfile.REGTYPE + bytes(100) + tarfile.GNU_MAGIC + user.ljust(32, b"\0") + group).ljust(356, b"\0")
    return front, tail, sum(front) + sum(tail) + 8 * 32  # the sum counts its own field as eight blanks


def _new_piece() -> memoryview:
    """Return a piece of whole pages: in one that begins 16 bytes after a page each eighth file takes ten times as long
    to read, as processors copy slowly to that place from a page.
    """
    return memoryview(mmap.mmap(-1, PIECE_BYTES))


class Sink:
    """Output of the archive: through gzip and the digests to the file. A context manager.

    The caller's thread reads, others compress, one hashes and writes: all release the interpreter for most of it. Each
    piece is compressed without those before it, so the number of threads does not change the archive. An error of a
    thread is raised by a later write.
    """

    def __init__(self, out: BinaryIO, *, compressed: bool, newest: int | None) -> None:
        self._out = out
        self.newest = sys.maxsize if newest is None else newest
        self._newest_seen = 0
        self._hashers = [hashlib.sha1(usedforsecurity=False), hashlib.sha512(usedforsecurity=False)]
        self._is_compressed = compressed
        self._crc = self._size = 0
        # A pool starts its second thread when the first is busy: seldom for small files, which take longer to read.
        self._compressing = ThreadPoolExecutor(_compressors())
        self._putting = ThreadPoolExecutor(1)
        self._pieces: deque[tuple[memoryview, Future[None]]] = deque()
        self._piece = _new_piece()
        self._filled = 0
        if compressed:
            self._emit(GZIP_HEAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._compressing.shutdown(cancel_futures=True)
        self._putting.shutdown(cancel_futures=True)

    def write(self, data: bytes | memoryview) -> None:
        """Write ``data``."""
        while data:
            room = self._room()[: len(data)]
            room[:] = data[: len(room)]
            self._filled += len(room)
            data = data[len(room) :]

    def _room(self) -> memoryview:
        """Return the rest of the piece to fill, at least one byte."""
        if self._filled == PIECE_BYTES:
            self._submit(self._piece)
            is_full = len(self._pieces) > MAX_PIECES
            self._piece = self._finished() if is_full else _new_piece()
            self._filled = 0
        return self._piece[self._filled :]

    def _submit(self, piece: memoryview) -> None:
        packed = self._compressing.submit(_deflated, piece) if self._is_compressed else None
        self._pieces.append((piece, self._putting.submit(self._put, piece, packed)))

    def _finished(self) -> memoryview:
        """Wait for the oldest piece and return it, to be filled again."""
        piece, put = self._pieces.popleft()
        put.result()
        return piece

    def write_header(self, header: tarfile.TarInfo) -> None:
        self._newest_seen = max(self._newest_seen, int(header.mtime))
        self.write(header_block(header))

    def write_text(self, name: str, text: str) -> None:
        """Write a generated file, as old as the newest packed one."""
        content = text.encode("utf-8", "surrogateescape")
        header = tarfile.TarInfo(name)
        header.size, header.mtime = len(content), self._newest_seen
        header.uname = header.gname = "root"
        self.write_member(header, [content])

    def write_member(self, header: tarfile.TarInfo, content: Iterable[bytes]) -> None:
        """Write an entry and its ``content``, ``header.size`` bytes in total."""
        self.write_header(header)
        for piece in content:
            self.write(piece)
        self._fill(-header.size % tarfile.BLOCKSIZE)

    def write_file(self, fd: int, runs: Sequence[tuple[int, int]], size: int) -> tuple[int, OSError | None]:
        """Write the ``size`` bytes of ``runs`` and the padding: a longer file is cut, a shorter one filled up with
        zeros.

        Returns the number of bytes read, and the disk's error if it stopped the read.
        """
        there, problem = 0, None
        for begin, end in runs:
            count, problem = self._write_run(fd, begin, end - begin)
            there += count
            if count < end - begin:
                break
        self._fill(size - there + -size % tarfile.BLOCKSIZE)
        return there, problem

    def _write_run(self, fd: int, begin: int, size: int) -> tuple[int, OSError | None]:
        left = size
        while left:
            try:
                count = os.preadv(fd, [self._room()[:left]], begin + size - left)
            except OutputError:
                raise
            except OSError as exc:
                return size - left, exc
            if not count:
                break
            self._filled += count
            left -= count
        return size - left, None

    def _fill(self, left: int) -> None:
        while left:
            self.write(bytes(min(left, PIECE_BYTES)))
            left -= min(left, PIECE_BYTES)

    def finish(self) -> MultipleDigest:
        """Write the end of the archive: two empty blocks."""
        self.write(bytes(2 * tarfile.BLOCKSIZE))
        self._submit(self._piece[: self._filled])
        while self._pieces:
            self._finished()
        if self._is_compressed:
            self._emit(DEFLATE_END + struct.pack("<LL", self._crc, self._size % 2**32))
        return MultipleDigest(tuple(Digest(each.name, each.hexdigest()) for each in self._hashers))

    def _put(self, piece: memoryview, packed: Future[bytes] | None) -> None:
        if packed is None:
            self._emit(piece)
            return
        self._crc = isal_zlib.crc32(piece, self._crc)
        self._size += len(piece)
        self._emit(packed.result())

    def _emit(self, data: bytes | memoryview) -> None:
        for each in self._hashers:
            each.update(data)
        try:
            self._out.write(data)
        except OSError as exc:
            raise OutputError(exc.errno, exc.strerror) from exc


def _compressors() -> int:
    """Return the number of threads that compress: without a second processor a second one is no gain, and with a quota
    of less it makes jobs and the agent wait for the next period.
    """
    quota = cgroups.processors(cgroups.find()) or MAX_COMPRESSORS
    return max(1, min(MAX_COMPRESSORS, len(os.sched_getaffinity(0)), int(quota)))


def _deflated(piece: memoryview) -> bytes:
    """Return a part of a deflate stream that ends at a byte and refers to nothing before it."""
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, -15)
    return packer.compress(piece) + packer.flush(isal_zlib.Z_FULL_FLUSH)


# --- patterns -------------------------------------------------------------------------------------------------------

_Pattern = list[re.Pattern[str] | None]
"""One expression for each step of a path; None matches any number of steps."""
_ALL: Final[_Pattern] = [None]

MAX_PATTERNS: Final = 1000
"""Limit of patterns after the expansion of braces; each file is compared with all of them."""
MAX_PATTERN_CHARS: Final = 1024
"""Limit of one pattern: unclosed brackets take quadratic time."""
MAX_BRACES: Final = 50
"""Limit for one pattern."""
MAX_EXPANDED_CHARS: Final = 5_000
"""Limit of all patterns after the expansion, which take half a second to compile."""
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_PIECE: Final = re.compile(
    r"\\(?P<escaped>.)|\[(?P<no>[!^]?)(?P<set>(?:\\.|[^\]\\])+)\]|(?P<stars>\*+)|(?P<any>\?)|(?P<plain>.)", re.DOTALL
)


def _compiled(patterns: Sequence[str]) -> list[_Pattern]:
    """Expand and compile patterns; raises ``HostError`` for too many: thirty braces expand to a billion."""
    expanded = list(itertools.islice((one for pattern in patterns for one in _expanded(pattern)), MAX_PATTERNS + 1))
    if len(expanded) > MAX_PATTERNS or sum(map(len, expanded)) > MAX_EXPANDED_CHARS:
        most = f"{MAX_PATTERNS} patterns or {MAX_EXPANDED_CHARS} characters"
        raise HostError(f"cannot use the patterns: their braces expand to more than {most}")
    return [_compile(pattern) for pattern in expanded]


def _expanded(pattern: str) -> Iterator[str]:
    """Expand ``{a,b}``, which is either."""
    if len(pattern) > MAX_PATTERN_CHARS or pattern.count("{") > MAX_BRACES:
        most = f"more than {MAX_PATTERN_CHARS} characters or {MAX_BRACES} braces"
        raise HostError(f"cannot use the pattern '{pattern[:100]}': it has {most}")
    choice = _BRACES.search(pattern)
    if choice is None:
        yield pattern
        return
    for arm in choice[1].split(","):
        yield from _expanded(pattern[: choice.start()] + arm + pattern[choice.end() :])


def _compile(pattern: str) -> _Pattern:
    """Compile one pattern: ``**`` spans directories; ``*``, ``?``, ``[a-z]``, ``[^a-z]`` stay within one."""
    steps = [step for step in posixpath.normpath(pattern).split("/") if step not in ("", ".")]
    if steps == ["**", "*"]:
        return _ALL
    try:
        compiled: _Pattern = [None if step == "**" else re.compile(_step(step), re.DOTALL) for step in steps]
    except re.error as exc:
        raise HostError(f"cannot read the pattern '{pattern[:100]}': {exc}") from exc
    return compiled if re.search(r"[*?\[\\]", pattern) else [*compiled, None]


def _step(step: str) -> str:
    """Return the expression of one step; all stars but the last are lazy and atomic: no exponential backtracking."""
    runs = [""]
    for match in _PIECE.finditer(step):
        if match["stars"]:
            runs.append("")
        else:
            runs[-1] += _piece(match)
    first, *others = runs
    if not others:
        return first
    return first + "".join(f"(?>.*?{run})" for run in others[:-1]) + ".*" + others[-1]


def _piece(match: re.Match[str]) -> str:
    if match["any"]:
        return "."
    if match["set"]:
        inside = re.sub(r"([\[\]^&~|])", r"\\\1", match["set"])
        return f"[{'^' if match['no'] else ''}{inside}]"
    return re.escape(match["escaped"] or match["plain"])


def _matches(pattern: _Pattern, parts: Sequence[str]) -> bool:
    """Match by extending only the last ``**`` on a mismatch: extending an earlier one gains nothing."""
    at = step = stretched = 0
    star = -1
    while at < len(parts):
        wanted = pattern[step] if step < len(pattern) else ...
        if wanted is None:
            star, stretched = step, at
            step += 1
        elif wanted is not ... and wanted.fullmatch(parts[at]):
            at += 1
            step += 1
        elif star >= 0:
            stretched += 1
            at, step = stretched, star + 1
        else:
            return False
    return all(rest is None for rest in pattern[step:])
