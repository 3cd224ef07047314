"""Unpacks tar archives, or reads their members one by one.

An archive's digest is checked before the archive is read, so whoever made the archive is as trusted as the Director.
The limits on size and time guard only against faulty archives. :mod:`tarfile` is used only to read
the headers. The files are created here, because Python versions differ in how ``tarfile`` creates them.

The result is the same as when root runs GNU tar with ``--no-same-owner``, as the Go agent does (bosh-utils
fileutil/tarball_compressor.go): modes and times are kept, and the unpacking user owns all files. As with GNU tar, an
archive may be in any compression format for which a program is installed (``bulk.compression``).
"""

from __future__ import annotations

import os
import posixpath
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from isal import isal_zlib

from agent_shim.bulk import compression
from agent_shim.core.errors import ArchiveError
from agent_shim.host import files
from agent_shim.host.descriptors import closing

CHUNK_BYTES: Final = files.CHUNK_BYTES
MAX_BYTES: Final = 20 * 1024**3
"""Maximum size of an unpacked archive."""
TIMEOUT_S: Final = 3600.0
"""Timeout for reading an archive, including unpacking it."""

REGULAR: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
EXTENDED: Final = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
LABEL: Final = b"V"
"""Member type of GNU tar's volume label, which has a name but no content."""
LATEST_S: Final = 2.0**33
"""Latest modification time that a member can get, in seconds since 1970. File systems do not support later ones."""

_BROKEN: Final[tuple[type[Exception], ...]] = (  # type: ignore[assignment]  # isal's is not typed
    *(ArchiveError, tarfile.TarError, isal_zlib.error, OSError, EOFError),
    *(ValueError, OverflowError, MemoryError, RecursionError),
)
"""Exceptions that reading a broken archive may raise. The last four come from invalid numbers and endless headers."""


def unpack(source: BinaryIO, into: Path, *, subtree: str = "") -> None:
    """Unpack all of ``source``, a tar file in any compression format, into the new directory ``into``.

    If ``subtree`` is given, as for rendered templates, only the content of that directory (``job/…`` or ``./job/…``) is
    unpacked, directly into ``into``. As in the Go agent, such an archive must be compressed with gzip. Symbolic links
    may point anywhere (those in packages point to ``/var/vcap/packages/…``), but nothing is ever written through a
    link. If the archive cannot be unpacked, ``into`` is removed and ``ArchiveError`` is raised.
    """
    try:
        into.mkdir(mode=0o700)
    except OSError as exc:
        raise ArchiveError(f"cannot create {into}: {exc.strerror}") from exc
    try:
        if subtree and not compression.is_gzip(source):
            raise ArchiveError("Detecting prefix of package files: the archive is not gzip")
        try:
            has_members = _unpack(source, into, subtree)
        except _BROKEN as exc:
            raise ArchiveError(f"cannot unpack the archive: {exc}") from exc
        if not has_members:  # the same error message as in agent/tarpath/detector.go
            raise ArchiveError(f"Detecting prefix of package files: no file with prefix '{subtree}' found")
    except BaseException:
        files.remove_tree(into)
        raise


def _unpack(source: BinaryIO, into: Path, subtree: str) -> bool:
    """Unpack the members below ``subtree``. Return False if there are none. If ``subtree`` is "", the archive may be
    empty, so the result is always True.
    """
    has_members = not subtree
    with closing(os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        tree = _UnpackedTree(fd)
        for member, path, data in _members(source):
            inner = _relative(subtree, path)
            # ``subtree`` must be a directory, so skip a file with that name.
            if inner is not None and (inner or member.isdir() or not subtree):
                has_members = True
                try:
                    _place(tree, member, inner, data, subtree)
                except (ArchiveError, OSError) as exc:
                    why = (exc.strerror or exc) if isinstance(exc, OSError) else exc
                    raise ArchiveError(f"{_quoted(member.name)}: {why}") from exc
        tree.finish()
    return has_members


def _relative(directory: str, path: str) -> str | None:
    """Return ``path`` relative to a directory, or None if it is outside. Every path is inside the directory ""."""
    if not directory:
        return path
    return path[len(directory) + 1 :] if f"{path}/".startswith(f"{directory}/") else None


def _place(tree: _UnpackedTree, member: tarfile.TarInfo, path: str, data: Iterator[bytes], subtree: str) -> None:
    """Unpack one member to ``path``, which is relative to the target directory. A hard link's target is a path in the
    archive, so it is first made relative to ``subtree``. Raises ``ArchiveError`` or ``OSError``.
    """
    if member.isdir():
        tree.add_directory(path, member)
    elif not path:
        raise ArchiveError("it would replace the target directory")
    elif member.type in REGULAR:
        tree.add_file(path, member, data)
    elif member.issym():
        tree.add_link(path, member)
    elif member.islnk():
        target = _relative(subtree, _normalized(member.linkname))
        if target is None:
            raise ArchiveError("its target is outside the directory to unpack")
        tree.add_hard_link(path, target)
    else:
        raise ArchiveError("it is neither file, directory nor link")


# --- reading ----------------------------------------------------------------------------------------------------------


class _Blocks:
    """Wraps the stream from which ``tarfile`` reads headers, and raises an error for a defective header.

    ``tarfile`` itself treats most defects after the first header as the end of the archive. The stream is wrapped
    because overriding methods of ``TarFile`` would not be reliable. Even patch releases of the same Python version
    differ in which method reads a header.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_header = True
        """True if the next read returns a header."""
        self.is_at_end = False
        """True if the last header read was an empty block, which marks the end of the archive, or the stream ended."""
        self.tell, self.seek = stream.tell, stream.seek

    def read(self, size: int) -> bytes:
        """Read data for ``tarfile``. Raises ``ArchiveError`` if the data is a defective header."""
        data: bytes = self._stream.read(size)
        if not self._is_header:
            self._is_header = True  # this was the data of an extended header, which is followed by another header
        elif size == tarfile.BLOCKSIZE:  # ``tarfile`` also reads single bytes, to find out whether a file is cut off
            self._check(data)
        return data

    def _check(self, block: bytes) -> None:
        """Raise ``ArchiveError`` if a header is defective. The data of an extended header is not checked."""
        self.is_at_end = not block.strip(b"\0")
        if self.is_at_end:
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise ArchiveError(f"{exc}") from exc
        if not 0 <= header.size <= MAX_BYTES:
            raise ArchiveError(f"{_quoted(header.name)}: its size is {header.size}")
        self._is_header = header.type not in EXTENDED


def entries(source: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, str, Iterator[bytes]]]:
    """Yield each member of ``source``, a tar file in any compression format, with its normalized path and its data.

    This is for callers that do not unpack the archive, such as the reader of release tarballs. The path has no leading
    ``./`` and no trailing ``/``. Unread data is skipped. Raises ``ArchiveError``.
    """
    try:
        yield from _members(source)
    except _BROKEN as exc:
        raise ArchiveError(f"cannot read the archive: {exc}") from exc


def _members(source: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, str, Iterator[bytes]]]:
    """Yield members as ``entries`` does. Raises ``ArchiveError`` or one of the exceptions in ``_BROKEN``."""
    with compression.decompressed(source) as stream:
        yield from _members_of_tar(stream)


def _members_of_tar(stream: Any) -> Iterator[tuple[tarfile.TarInfo, str, Iterator[bytes]]]:
    """Yield the members of an uncompressed tar file."""
    give_up_at = time.monotonic() + TIMEOUT_S
    blocks: Any = _Blocks(stream)
    tar = tarfile.TarFile(fileobj=blocks, encoding="utf-8", errors="surrogateescape")
    previous_end = 0
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # otherwise, the list would keep all headers
        if tar.offset > MAX_BYTES:
            raise ArchiveError("it is too large when unpacked")
        if tar.offset <= previous_end or member.size < 0:
            raise ArchiveError(f"{_quoted(member.name)}: its size is negative")
        if time.monotonic() > give_up_at:
            raise ArchiveError(f"it took longer than {TIMEOUT_S:g} seconds")
        previous_end = tar.offset
        if member.issparse():
            raise ArchiveError(f"{_quoted(member.name)}: it is stored as a file with holes")
        if member.type == tarfile.REGTYPE and member.name.endswith("/"):
            member.type = tarfile.DIRTYPE  # ``tarfile`` itself does this only for the oldest type of header
        if member.type != LABEL:
            yield member, _normalized(member.name), _data(stream, member)
    if not blocks.is_at_end:  # ``tarfile`` has stopped early, for example at an invalid extended header
        raise ArchiveError("a header after the first is invalid")
    while stream.read(CHUNK_BYTES):
        pass  # read to the end, because gzip and other formats end with a checksum


def _data(stream: Any, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield the content of the member whose header was read last."""
    remaining = member.size if member.type in REGULAR else 0
    while remaining:
        if not (piece := stream.read(min(remaining, CHUNK_BYTES))):
            raise ArchiveError("it ends in the middle of a file")
        remaining -= len(piece)
        yield piece


def _normalized(name: str) -> str:
    """Return a path from an archive without its empty and ``.`` components. Raises ``ArchiveError`` if the path is
    absolute or contains ``..`` or NUL.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ArchiveError(f"{_quoted(name)}: it is not a path inside the archive")
    return "/".join(parts)


def _quoted(name: str) -> str:
    """Quote and shorten a name for use in an error message."""
    return repr(name if len(name) <= 200 else f"{name[:200]}…")


# --- placing ----------------------------------------------------------------------------------------------------------


class _UnpackedTree(msgspec.Struct):
    """The tree unpacked so far into the directory with descriptor ``fd``.

    Symbolic links are created after all other entries, so that no path can lead through one. The modes and times of
    directories are set at the very end, because a read-only directory could not be filled, and filling a directory
    changes its time.
    """

    fd: int
    directories: dict[str, tarfile.TarInfo | None] = msgspec.field(default_factory=dict)
    """The directories by path. The value is None for a directory that is not a member itself but contains one."""
    links: dict[str, tarfile.TarInfo] = msgspec.field(default_factory=dict)
    """The symbolic links by path."""

    def add_directory(self, path: str, member: tarfile.TarInfo) -> None:
        """Create a directory. ``finish`` will set its mode and time."""
        self._make_directory(path)
        self.directories[path] = member

    def add_file(self, path: str, member: tarfile.TarInfo, data: Iterator[bytes]) -> None:
        """Create a file with ``data`` as content. An earlier entry with the same path is replaced."""
        self._vacate(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(path, flags, 0o600, dir_fd=self.fd)) as fd:
            for piece in data:
                files.write_all(fd, piece)
            os.fchmod(fd, _mode(member))
            os.utime(fd, _times(member))

    def add_link(self, path: str, member: tarfile.TarInfo) -> None:
        """Register a symbolic link, which ``finish`` will create."""
        if not member.linkname or "\0" in member.linkname:
            raise ArchiveError("its target is empty or invalid")
        self._vacate(path)
        self.links[path] = member

    def add_hard_link(self, path: str, target: str) -> None:
        """Create a hard link to ``target``, an entry unpacked earlier. If that entry is a symlink, which does not exist
        yet, register a second symlink with the same target instead.
        """
        self._vacate(path)
        if target in self.links:
            self.add_link(path, self.links[target])
            return
        try:
            os.link(target, path, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            raise ArchiveError(f"it is a link to {_quoted(target)}, which is not a file unpacked before it") from None

    def finish(self) -> None:
        """Create the symbolic links, then set the modes and times of all directories."""
        for path, link in self.links.items():
            os.symlink(link.linkname, path, dir_fd=self.fd)
            os.utime(path, _times(link), dir_fd=self.fd, follow_symlinks=False)
        self.directories.setdefault("", None)  # the target directory itself
        for path in sorted(self.directories, key=len, reverse=True):  # children first, because a parent may deny access
            member = self.directories[path]
            os.chmod(path or ".", _mode(member) if member else 0o755, dir_fd=self.fd)
            if member:
                os.utime(path or ".", _times(member), dir_fd=self.fd)

    def _make_directory(self, path: str) -> None:
        """Create a directory and its parents if they do not exist yet."""
        if not path or path in self.directories:
            return
        self._make_directory(posixpath.dirname(path))
        if path in self.links:
            raise ArchiveError(f"{_quoted(path)} is a link")
        try:
            os.mkdir(path, 0o700, dir_fd=self.fd)
        except FileExistsError:
            raise ArchiveError(f"{_quoted(path)} is not a directory") from None
        self.directories[path] = None

    def _vacate(self, path: str) -> None:
        """Make room for a new entry at ``path``: create the directory that contains it, and remove an earlier entry,
        because the last of several members with the same name replaces the others.
        """
        self._make_directory(posixpath.dirname(path))
        if path in self.directories:
            raise ArchiveError("the archive also contains a directory of this name")
        self.links.pop(path, None)
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self.fd)


def _mode(member: tarfile.TarInfo) -> int:
    return member.mode & 0o7777  # some archivers also store the file type in this field


def _times(member: tarfile.TarInfo) -> tuple[float, float]:
    """Return the access and modification times for ``os.utime``. Both are the modification time, because tar does not
    store the access time.
    """
    modified = min(max(float(member.mtime), 0.0), LATEST_S)
    return modified, modified
