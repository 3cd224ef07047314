"""Unpack tar archives, which may be hostile, and read their members.

Short-lived processes import this module, and the agent for small archives. :class:`tarfile.TarInfo` parses the headers;
all else is done here: Python versions differ in the checks of ``tarfile``, and some loop for ever on a hostile archive.

The result is that of GNU tar run by root with ``--no-same-owner``, as the Go agent runs it (bosh-utils
fileutil/tarball_compressor.go): modes and times are kept, and the unpacking user owns all files.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec

from agent_shim.core.errors import ArchiveError
from agent_shim.host import files
from agent_shim.host.descriptors import closing

CHUNK_BYTES: Final = files.CHUNK_BYTES
BLOCK_BYTES: Final = tarfile.BLOCKSIZE

GZIP: Final = b"\x1f\x8b"
_GZIP_FLAGS_AT: Final = 3
_GZIP_RESERVED: Final = 0xE0
"""Flags without a meaning in RFC 1952, which demands an error; isal ignores them."""

REGULAR: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
LONG_NAMES: Final = frozenset({tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
PAX: Final = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE})
LABEL: Final = b"V"
"""GNU's volume label: a name without content."""

MAX_EXTENSION_BYTES: Final = 1024 * 1024
"""Limit of one extended header; real ones hold a path or two."""
MODE_BITS: Final = 0o7777
MAX_TARGET_BYTES: Final = 4095
"""Limit of the kernel for the target of a symbolic link."""
SMALL_BYTES: Final = 16 * 1024 * 1024
"""Archives of at most that size, unpacked, do without isal, and have one gzip member."""
MAX_PATH_PARTS: Final = 256
"""Limit of the parts of a path: recursive code could not remove a deeper tree."""
MAX_PATH_CHARS: Final = 4095
"""Limit of the kernel for a path; to split a name of a megabyte takes the interpreter for 30 ms."""


class Limits(msgspec.Struct, frozen=True):
    """Limits that no legitimate archive reaches. Sizes in bytes, unpacked."""

    members: int = 1_000_000
    size: int = 20 * 1024**3
    ratio: int = 200
    """Unpacked to packed size; zeros reach a thousand."""
    size_without_ratio: int = 1024**3
    """Size below which the ratio is ignored."""
    names: int = 64 * 1024**2
    """Paths of directories and links with their targets, which are kept until all is unpacked."""
    records: int = 16_000_000
    """Records of all extended headers: thousands fit into a kilobyte of gzip, and each takes microseconds to parse."""


def is_gzip(source: BinaryIO) -> bool:
    """Return True if a file starts like gzip; rewinds it."""
    source.seek(0)
    magic = source.read(len(GZIP))
    source.seek(0)
    return magic == GZIP


GENEROUS: Final = Limits()


def _broken() -> tuple[type[Exception], ...]:
    """Return the exceptions of a broken archive, for an ``except`` clause."""
    loaded = sys.modules.get("isal.isal_zlib")
    return ArchiveError, OSError, EOFError, zlib.error, *((loaded.error,) if loaded else ())


def unpack(
    source: BinaryIO, into: Path, *, subtree: str = "", outside_links: bool = False, limits: Limits = GENEROUS
) -> None:
    """Unpack all of ``source``, tar or gzipped tar, into the new directory ``into``.

    With ``subtree`` the archive holds rendered templates: it must be gzip, and only the content of that directory
    (``job/…`` or ``./job/…``) is unpacked, directly into ``into``. ``outside_links`` allows symbolic links to any path,
    as in compiled packages (``/var/vcap/packages/…``); nothing is ever written through one. Raises ``ArchiveError``
    after removing ``into``.
    """
    try:
        into.mkdir(mode=0o700)
    except OSError as exc:
        raise ArchiveError(f"cannot create {into}: {exc.strerror}") from exc
    try:
        if subtree and not is_gzip(source):
            raise ArchiveError("Detecting prefix of package files: the archive is not gzip")
        try:
            found = _unpack(source, into, _parts(subtree), outside_links, limits)
        except _broken() as exc:
            raise ArchiveError(f"cannot unpack the archive: {exc}") from exc
        if not found:  # the words of agent/tarpath/detector.go
            raise ArchiveError(f"Detecting prefix of package files: no file with prefix '{subtree}' found")
    except BaseException:
        files.remove_tree(into)
        raise


def _unpack(source: BinaryIO, into: Path, wanted: _Parts, outside_links: bool, limits: Limits) -> bool:
    """Unpack the members below ``wanted``; True if there are any."""
    found = not wanted
    reader = _Reader(source, limits)
    with closing(os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        tree = _Tree(fd, outside_links, limits.names)
        for member in reader.members():
            parts = _parts(member.name)
            is_below = len(parts) > len(wanted) or member.kind == tarfile.DIRTYPE or not wanted
            if is_below and parts[: len(wanted)] == wanted:
                found = True
                _place(tree, reader, member, parts[len(wanted) :], wanted)
        tree.finish()
    return found


def entries(source: BinaryIO, limits: Limits = GENEROUS) -> Iterator[tuple[Member, str, Iterator[bytes]]]:
    """Yield each member of ``source``, tar or gzipped tar, with its normalized path and its data.

    The path has no leading ``./`` and no trailing ``/``. Data left unread is skipped. Raises ``ArchiveError``.
    """
    try:
        reader = _Reader(source, limits)
        for member in reader.members():
            yield member, "/".join(_parts(member.name)), reader.data()
    except _broken() as exc:
        raise ArchiveError(f"cannot read the archive: {exc}") from exc


def _place(tree: _Tree, reader: _Reader, member: Member, parts: _Parts, wanted: _Parts) -> None:
    try:
        if member.kind == tarfile.DIRTYPE:
            tree.directory(parts, member)
        elif not parts:
            raise ArchiveError("it would take the place of the directory itself")
        elif member.kind in REGULAR:
            tree.file(parts, member, reader.data())
        elif member.kind == tarfile.SYMTYPE:
            tree.link(parts, member)
        elif member.kind == tarfile.LNKTYPE:
            target = _parts(member.target)
            if target[: len(wanted)] != wanted:
                raise ArchiveError("its target is not unpacked")
            tree.hard_link(parts, target[len(wanted) :])
        else:
            raise ArchiveError("it is neither file, directory nor link")
    except (ArchiveError, OSError) as exc:
        why = (exc.strerror or exc) if isinstance(exc, OSError) else exc
        raise ArchiveError(f"{_quoted(member.name)}: {why}") from exc


# --- reading --------------------------------------------------------------------------------------------------------

_Parts = tuple[str, ...]


class Member(msgspec.Struct, frozen=True):
    """A header and its extensions: ``kind`` as in ``tarfile``, ``size`` in bytes, ``mtime`` in ns since 1970."""

    kind: bytes
    name: str
    target: str
    mode: int
    size: int
    mtime: int


class _Source(Protocol):
    """Buffered: only its end makes a read shorter."""

    def read(self, size: int, /) -> bytes: ...


class _Inflated:
    """The content of a gzip file of one member, as almost all are; its head is read in C, where ``gzip`` has Python."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._inflater = zlib.decompressobj(31)
        self._ahead = b""

    def read(self, size: int, /) -> bytes:
        while len(self._ahead) < size and not self._inflater.eof:
            packed = self._inflater.unconsumed_tail or self._source.read(CHUNK_BYTES)
            piece = self._inflater.decompress(packed, CHUNK_BYTES)
            if not packed and not piece:
                raise EOFError("the gzip data ended before their end marker")
            self._ahead += piece
        if len(self._ahead) < size and (self._inflater.unused_data or self._source.read(1)):
            raise ArchiveError("more follows the gzip data")
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        return piece


class _Reader:
    """Members of a tar stream, read forward only, with a limit on every byte."""

    def __init__(self, source: BinaryIO, limits: Limits) -> None:
        self._stream: _Source = source
        if is_gzip(source):
            flags = source.read(_GZIP_FLAGS_AT + 1)[_GZIP_FLAGS_AT:]
            source.seek(0)
            if flags and flags[0] & _GZIP_RESERVED:
                raise ArchiveError("its gzip data have unknown flags")
            # isal takes a third of the time of zlib, and half a megabyte of memory.
            if limits.size <= SMALL_BYTES:
                self._stream = _Inflated(source)
            else:
                from isal import igzip

                self._stream = igzip.IGzipFile(fileobj=source)  # type: ignore[no-untyped-call]
        self._members = limits.members
        self._records = limits.records
        packed = os.fstat(source.fileno()).st_size
        self._room = min(limits.size, max(limits.size_without_ratio, packed * limits.ratio))
        """Bytes that may still be unpacked."""
        self._left = 0
        """Data bytes of the current member that are not read yet."""
        self._padding = 0

    def members(self) -> Iterator[Member]:
        """Yield each member; data not read before the next one is skipped."""
        defaults: dict[str, str] = {}
        extended: dict[str, str] = {}
        while (block := self._stream.read(BLOCK_BYTES)) not in (b"", bytes(BLOCK_BYTES)):
            # One empty block is enough for GNU tar, too.
            self._members -= 1
            if self._members < 0:
                raise ArchiveError("it has too many members")
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as exc:
                raise ArchiveError(f"{exc}") from exc
            if header.size < 0:
                raise ArchiveError(f"{_quoted(header.name)}: its size is negative")
            if header.type in LONG_NAMES:
                name = "path" if header.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                extended[name] = os.fsdecode(self._extension(header.size).partition(b"\0")[0])
            elif header.type in PAX:
                records = self._pax_records(self._extension(header.size))
                (defaults if header.type == tarfile.XGLTYPE else extended).update(records)
            elif header.type != LABEL:
                member = _member(header, {**defaults, **extended})
                extended = {}
                self._begin(member.size)
                yield member
                for _ in self.data():
                    pass
        # To the end, as the check of gzip follows the last byte. The padding of a tar file has at most a record.
        self._room += tarfile.RECORDSIZE
        while piece := self._stream.read(CHUNK_BYTES):
            self._room -= len(piece)
            if self._room < 0:
                raise ArchiveError("too much follows its last member")

    def data(self) -> Iterator[bytes]:
        """Yield the remaining data of the current member in chunks."""
        while self._left:
            if not (piece := self._stream.read(min(self._left, CHUNK_BYTES))):
                raise ArchiveError("it ends in the middle of a file")
            self._left -= len(piece)
            yield piece
        while self._padding:
            if not (piece := self._stream.read(self._padding)):
                raise ArchiveError("it ends too early")
            self._padding -= len(piece)

    def _extension(self, size: int) -> bytes:
        if size > MAX_EXTENSION_BYTES:
            raise ArchiveError("an extended header is too long")
        self._begin(size)
        return b"".join(self.data())

    def _pax_records(self, data: bytes) -> dict[str, str]:
        """Parse records ``LENGTH KEY=VALUE\n``; LENGTH counts the whole record. Returns those that are used."""
        records = {}
        at = 0
        while at < len(data) and data[at] != 0:
            self._records -= 1
            if self._records < 0:
                raise ArchiveError("it has too many records in extended headers")
            match = _PAX_RECORD.match(data, at)
            end = at + int(match[1]) if match else at
            if match is None or end <= match.end() or data[end - 1 : end] != b"\n":
                raise ArchiveError("an extended header is broken")
            if match[2] in _PAX_KEYS:
                records[match[2].decode()] = os.fsdecode(data[match.end() : end - 1])
            elif match[2].startswith(_PAX_HOLES):
                records[_PAX_HOLES.decode()] = ""
            at = end
        return records

    def _begin(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ArchiveError("it is too large when unpacked")
        self._left = size
        self._padding = -size % BLOCK_BYTES


def _member(header: tarfile.TarInfo, extended: dict[str, str]) -> Member:
    name = extended.get("path", header.name)
    if header.type == tarfile.GNUTYPE_SPARSE or _PAX_HOLES.decode() in extended:
        raise ArchiveError(f"{_quoted(name)}: it is stored as a file with holes")
    is_directory = header.type in REGULAR and name.endswith("/")
    try:
        size = int(extended.get("size", header.size)) if header.type in REGULAR and not is_directory else 0
        # Clamp to 33 bits of seconds, beyond any real time; a float would round today's seconds wrongly.
        seconds, _, fraction = extended.get("mtime", str(header.mtime)).partition(".")
        mtime = max(0, min(int(seconds), 2**33)) * 10**9 + int(f"{fraction:0<9.9}")
    except ValueError as exc:
        raise ArchiveError(f"{_quoted(name)}: {exc}") from exc
    if size < 0:
        raise ArchiveError(f"{_quoted(name)}: its size is negative")
    kind = tarfile.DIRTYPE if is_directory else header.type
    return Member(kind, name, extended.get("linkpath", header.linkname), header.mode & MODE_BITS, size, mtime)


_PAX_KEYS: Final = frozenset({b"path", b"linkpath", b"size", b"mtime"})
_PAX_HOLES: Final = b"GNU.sparse."
_PAX_RECORD: Final = re.compile(rb"(\d{1,7}) ([^=\n]+)=")


def _parts(name: str) -> _Parts:
    """Split a path of an archive; refuses absolute paths and those with ``..`` or NUL."""
    if len(name) > MAX_PATH_CHARS:
        raise ArchiveError(f"{_quoted(name)}: it is too long")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ArchiveError(f"{_quoted(name)}: it does not lie below the archive")
    if len(parts) > MAX_PATH_PARTS:
        raise ArchiveError(f"{_quoted(name)}: it lies too deep")
    return parts


def _quoted(name: str) -> str:
    """Quote and shorten a name for an error."""
    return repr(name if len(name) <= 200 else f"{name[:200]}…")


# --- placing --------------------------------------------------------------------------------------------------------


class _Tree(msgspec.Struct):
    """The tree unpacked so far into the directory with descriptor ``fd``.

    Symbolic links are made last: until then no path can lead through one. Modes and times of directories follow: a
    read-only directory must be filled first, and filling it changes its time.
    """

    fd: int
    outside_links: bool
    room: int
    """Bytes of names that may still be kept."""
    directories: dict[str, Member | None] = msgspec.field(default_factory=dict)
    links: dict[str, Member] = msgspec.field(default_factory=dict)

    def directory(self, parts: _Parts, member: Member) -> None:
        self._enter(parts)
        self.directories["/".join(parts)] = member

    def file(self, parts: _Parts, member: Member, data: Iterator[bytes]) -> None:
        path = self._vacate(parts)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(path, flags, 0o600, dir_fd=self.fd)) as fd:
            for piece in data:
                files.write_all(fd, piece)
            os.fchmod(fd, member.mode)
            os.utime(fd, ns=(member.mtime, member.mtime))

    def link(self, parts: _Parts, member: Member) -> None:
        if not member.target or "\0" in member.target:
            raise ArchiveError("it points nowhere")
        if len(os.fsencode(member.target)) > MAX_TARGET_BYTES:
            raise ArchiveError("its target is too long")
        if not self.outside_links and _points_out(len(parts) - 1, member.target):
            raise ArchiveError("it points outside")
        self._keep("/".join(parts), member.target)
        self.links[self._vacate(parts)] = member

    def hard_link(self, parts: _Parts, target: _Parts) -> None:
        other, path = "/".join(target), self._vacate(parts)
        if other in self.links:
            self.link(parts, self.links[other])
            return
        try:
            os.link(other, path, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            raise ArchiveError(f"it is a link to {_quoted(other)}, which is no file unpacked before it") from None

    def finish(self) -> None:
        for path, link in self.links.items():
            os.symlink(link.target, path, dir_fd=self.fd)
            os.utime(path, ns=(link.mtime, link.mtime), dir_fd=self.fd, follow_symlinks=False)
        self.directories.setdefault("", None)
        for path in sorted(self.directories, key=len, reverse=True):  # children before parents
            member = self.directories[path]
            os.chmod(path or ".", member.mode if member else 0o755, dir_fd=self.fd)
            if member:
                os.utime(path or ".", ns=(member.mtime, member.mtime), dir_fd=self.fd)

    def _enter(self, parts: _Parts) -> None:
        """Create a directory and its parents if missing."""
        path = "/".join(parts)
        if not parts or path in self.directories:
            return
        self._enter(parts[:-1])
        if path in self.links:
            raise ArchiveError(f"{_quoted(path)} is a link")
        try:
            os.mkdir(path, 0o700, dir_fd=self.fd)
        except FileExistsError:
            raise ArchiveError(f"{_quoted(path)} is no directory") from None
        self._keep(path)
        self.directories[path] = None

    def _keep(self, *names: str) -> None:
        self.room -= sum(map(len, names))
        if self.room < 0:
            raise ArchiveError("its names are too long")

    def _vacate(self, parts: _Parts) -> str:
        """Return the path for a new entry; of two members with one name the later wins."""
        path = "/".join(parts)
        self._enter(parts[:-1])
        if path in self.directories:
            raise ArchiveError("it is a directory as well")
        self.links.pop(path, None)
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self.fd)
        return path


def _points_out(depth: int, target: str) -> bool:
    """Return True if a link ``depth`` directories below the top could lead out, also through other such links.

    Leading ``..`` count only: after a step down, perhaps through another link, the parent is unknown.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    ups = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    return target.startswith("/") or ups > depth or ".." in steps[ups:]
