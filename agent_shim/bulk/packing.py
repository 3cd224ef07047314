"""Packs directories into tar archives: compiled packages and logs.

Only short-lived processes import this module. A tree that nobody writes to always produces the same bytes, because
names are sorted, root owns all entries, and entries keep the modification times of the files. Log directories change
while they are read, and vcap may write to them. Therefore, no link is followed, nothing that could block is opened, and
files that vanish are left out.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import posixpath
import re
import stat
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, Final, Self

import msgspec
from isal import igzip_threaded

from agent_shim.bulk import archive
from agent_shim.bulk.protocol import Tree
from agent_shim.core.digest import Digest, MultipleDigest
from agent_shim.core.errors import HostError
from agent_shim.host import files, guarded
from agent_shim.host.descriptors import closing

GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Errors from opening a file that has vanished or has been replaced by a link or a socket."""

VANISHED: Final = "it vanished before it was read"

PIECE_BYTES: Final = 512 * 1024
"""Size of the chunks that are compressed independently."""
LEVEL: Final = 2
"""isal's compression level (0 to 3). Level 2 is as fast as the disk. Level 3 is half as fast and saves only 1%."""
MAX_COMPRESSORS: Final = 2
"""Maximum number of compression threads. A third one would only wait for the thread that hashes and writes."""

MAX_JOB_ENTRIES: Final = 20_000
"""Maximum number of entries packed below each top-level directory of a live tree (see ``pack``). This limits the memory
that a job can make the worker use.
"""
LIVE_TIMEOUT_S: Final = 1200.0
"""Maximum time for packing a live tree. Files that are not packed by then are left out."""
MAX_FIXED_BYTES: Final = archive.MAX_BYTES
"""Maximum total size of the files in a tree that is not live. No agent would unpack more, and a terabyte-sized sparse
file would occupy a worker for hours.
"""
PERMISSIONS: Final = 0o777
"""Mode bits that are kept for a live file. If setuid and setgid were kept, a job's program in an unpacked archive would
run with the rights of the user who unpacked it.
"""


class OutputError(OSError):
    """Raised if the archive file cannot be written. Errors in reading the trees are of other types."""


def pack(
    out: BinaryIO, trees: Sequence[Tree], *, compressed: bool = True, newest: int | None = None, remarks: str = ""
) -> MultipleDigest:
    """Write ``trees`` to ``out`` as one archive, which is compressed with gzip by default. Return the SHA-1 and SHA-512
    digests of the archive.

    If several trees have an entry with the same name, the last tree's entry is packed. Modification times later than
    ``newest`` (seconds since 1970) are replaced by ``newest``, so that an archive with generated files has the same
    bytes whenever they were generated. Raises ``OutputError`` if ``out`` cannot be written, and ``HostError`` if a tree
    cannot be packed.

    ``remarks`` is set if the trees are live, which means that other processes may be writing to them. In that case,
    files that are renamed during packing are looked up again. A file that cannot be read or is truncated, or a link
    that leads out of its tree, does not raise an error. Instead, an additional archive entry named ``remarks`` lists
    it.
    """
    with ExitStack() as opened:
        sink = opened.enter_context(Sink(out, compressed=compressed, newest=newest))
        archive = _ArchiveWriter(sink, is_live=bool(remarks))
        roots = [root for tree in trees if (root := archive.open(tree, opened)) is not None]
        for _ in range(2 if remarks else 1):
            wanted: dict[str, _Listed] = {}
            for root in roots:
                wanted.update((root.name_of(entry), entry) for entry in archive.chosen(root))
            archive.add_missing(wanted)
        return archive.finish(remarks)


class _Root(msgspec.Struct, frozen=True):
    """A directory to pack: an open descriptor, and the paths by which absolute links may refer to it."""

    fd: int
    tree: Tree
    prefixes: tuple[str, ...]

    def name_of(self, entry: _Listed) -> str:
        """Return the entry's name in the archive."""
        return f"./{self.tree.prefix}{entry.path}".removesuffix("/")


class _Listed(msgspec.Struct, frozen=True):
    """An entry below a root directory. ``kind`` is the file type that it had when it was listed."""

    root: _Root
    path: str
    kind: int

    @property
    def directory(self) -> tuple[_Root, str]:
        """The root, and the path of the directory that contains the entry. The root's own path is ""."""
        return self.root, self.path.rpartition("/")[0]

    def open(self, directory: int) -> tuple[int, os.stat_result]:
        """Open a directory or a link with O_PATH, or a file for reading. Return the descriptor and the status.

        Opening neither blocks nor has side effects.
        """
        held = guarded.hold(directory, self.path.rpartition("/")[2] or ".")
        status = os.fstat(held)
        if self.kind != stat.S_IFREG or not stat.S_ISREG(status.st_mode):
            return held, status
        try:
            return guarded.reopen(held, os.O_RDONLY, status), status
        finally:
            os.close(held)


class _ArchiveWriter:
    """Writes the archive, and remembers which entries are packed and which are missing or incomplete."""

    def __init__(self, sink: Sink, *, is_live: bool) -> None:
        self.names: set[str] = set()
        """The names of the packed entries."""
        self._sink = sink
        self._is_live = is_live
        self._remarks: dict[str, str] = {}
        """Why an entry is missing or incomplete, by its name."""
        self._first_names: dict[tuple[int, int], str] = {}
        """The first name under which a file with several hard links was packed, by device and inode number."""
        self._files: set[tuple[int, int, int]] = set()
        """Device, inode number and modification time of each file in a live tree (see ``_is_known``)."""
        self._remaining_bytes = MAX_FIXED_BYTES
        """How many more bytes of file content may be packed if the trees are not live."""
        self._give_up_at = time.monotonic() + LIVE_TIMEOUT_S

    def is_late(self) -> bool:
        """Return True, and add a remark, if packing a live tree has taken too long."""
        if not self._is_live or time.monotonic() < self._give_up_at:
            return False
        self._remarks["."] = f"the archive is incomplete: packing took longer than {LIVE_TIMEOUT_S:g} seconds"
        return True

    def open(self, tree: Tree, opened: ExitStack) -> _Root | None:
        """Open the root directory of a tree, which may be a link.

        Return None if a tree with patterns does not exist. Such a tree contains logs, which may be missing. Other
        trees, such as a compiled package, must exist. If the root of a live tree cannot be read, add a remark and
        return None.
        """
        try:
            fd = os.open(tree.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            if not (tree.patterns and exc.errno in GONE):
                self._cannot_read(tree.root, exc)
            return None
        opened.callback(os.close, fd)
        return _Root(fd, tree, prefixes=(tree.root.rstrip("/"), os.path.realpath(tree.root)))

    def chosen(self, root: _Root) -> Iterator[_Listed]:
        """Yield the entries to pack: all of them, including directories, or only the files and links that match a
        pattern.
        """
        if not root.tree.patterns:
            yield _Listed(root, "", stat.S_IFDIR)
            yield from self._below(root)
            return
        pattern = _compiled(root.tree.patterns)
        for entry in self._below(root):
            if entry.kind != stat.S_IFDIR and pattern.fullmatch(entry.path):
                yield entry

    def _below(self, root: _Root) -> Iterator[_Listed]:
        """Yield all directories, files and links below ``root``. Directories that have vanished are skipped. In live
        trees, directories that cannot be read are skipped too.
        """
        pending = [""]
        limits: dict[str, int] = {}
        while pending:
            here = pending.pop()
            # In a live tree, each job has a directory of its own.
            job = here.partition("/")[0]
            # Other trees have no limit, so use the largest number for which ``islice`` accepts ``limit + 1``.
            limit = limits.setdefault(job, MAX_JOB_ENTRIES) if self._is_live else sys.maxsize - 1
            try:
                found = _listed(root, here, limit + 1)  # one more, to find out whether the limit is exceeded
            except OSError as exc:
                if exc.errno not in GONE:
                    self._cannot_read(root.name_of(_Listed(root, here, stat.S_IFDIR)), exc)
                continue
            if len(found) > limit:
                name = root.name_of(_Listed(root, here, stat.S_IFDIR))
                self._remarks[name] = f"the rest of it is left out: it has more than {MAX_JOB_ENTRIES} files"
                del found[limit:]
            limits[job] = limit - len(found)
            yield from found
            pending.extend(entry.path for entry in found if entry.kind == stat.S_IFDIR)

    def add_missing(self, wanted: Mapping[str, _Listed]) -> None:
        """Pack all entries that are not yet packed, in the order of their names."""
        missing = sorted(wanted.keys() - self.names)
        for (root, here), names in itertools.groupby(missing, lambda name: wanted[name].directory):
            self._add_from_directory(root, here, {name: wanted[name] for name in names})

    def _add_from_directory(self, root: _Root, here: str, found: Mapping[str, _Listed]) -> None:
        """Pack entries of the directory ``here``, which stays open until all of them are packed."""
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

    def _add(self, name: str, entry: _Listed, directory: int) -> None:
        """Pack an entry in the open ``directory``, unless the entry has vanished or been replaced."""
        try:
            fd, status = entry.open(directory)
        except OSError as exc:
            self._cannot_open(name, exc)
            return
        try:
            if status.st_nlink == 1 or not self._has_second_name(name, status):
                self._add_open(name, entry, fd, status)
        except OutputError:  # ``pack`` raises it as it is, because this entry is not the cause
            raise
        except OSError as exc:
            raise files.failed(f"pack {name}", exc) from exc
        finally:
            os.close(fd)

    def _has_second_name(self, name: str, status: os.stat_result) -> bool:
        """Return True, and add a remark, if a file in a live tree belongs to root and has a second hard link.

        A job may have created the second link to get hold of a file that the job itself cannot read.
        """
        try:
            if self._is_live:
                guarded.refuse_second_name(status)
        except OSError as exc:
            self._remarks[name] = f"{exc.strerror}, and not packed"
            return True
        return False

    def _add_open(self, name: str, entry: _Listed, fd: int, status: os.stat_result) -> None:
        """Pack the entry that is open as ``fd``. A file that has been packed before becomes a hard link or, if it was
        renamed in a live tree, is left out.
        """
        if stat.S_IFMT(status.st_mode) != entry.kind:
            self._remarks[name] = VANISHED
            return
        self._remarks.pop(name, None)  # the first pass may have added one
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
                return  # a remark has been added
        elif status.st_nlink > 1 and (first := self._first_names.setdefault(inode, name)) != name:
            header.type = tarfile.LNKTYPE
            header.linkname = first
        elif self._is_known(status):
            return  # this file was already packed under an earlier name
        if header.type == tarfile.REGTYPE:
            runs = [(0, status.st_size)]
            header.size = status.st_size
            if self._is_live and status.st_blocks * guarded.BLOCK_BYTES < header.size:  # leave out holes
                runs = list(guarded.segments(fd, 0, header.size))
                header.size = sum(end - begin for begin, end in runs)
            self._remaining_bytes -= header.size
            if self._remaining_bytes < 0 and not self._is_live:
                raise OSError(errno.EFBIG, f"the files exceed {MAX_FIXED_BYTES >> 30} GiB")
            self._sink.write_header(header)
            self._write_content(name, fd, status, runs, header.size)
        else:
            self._sink.write_header(header)
        self.names.add(name)

    def _write_content(
        self, name: str, fd: int, status: os.stat_result, runs: Sequence[tuple[int, int]], size: int
    ) -> None:
        """Write the ranges ``runs`` of the file ``fd``, ``size`` bytes in total. In a live tree, add a remark if the
        archive does not contain the whole file. ``status`` is the file's status before the read.
        """
        read_bytes, problem = self._sink.write_file(fd, runs, size)
        if problem is not None and not self._is_live:
            raise problem
        if read_bytes < size:
            why = problem.strerror if problem else "it was truncated during the read"
            self._remarks[name] = f"zeros replace everything after the first {read_bytes} of {size} bytes: {why}"
        elif (holes := status.st_size - size) > 0:
            self._remarks[name] = f"{holes} bytes of it are holes and not packed"
        elif (grown := os.fstat(fd).st_size - size) > 0:
            self._remarks[name] = f"the last {grown} bytes were written during the read and are not packed"

    def _is_known(self, status: os.stat_result) -> bool:
        """Return True if this file in a live tree has already been packed. Otherwise, remember it for later calls. The
        modification time is compared too, because the inode number may have been reused.
        """
        if not self._is_live:
            return False
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        known = identity in self._files
        self._files.add(identity)
        return known

    def _target(self, name: str, entry: _Listed, target: str) -> str:
        """Return the target to store for a symlink. If a link leads out of a live tree, return "" and add a remark."""
        if not self._is_live:
            return target
        inner = _inner_target(entry, target)
        if not inner:
            self._remarks[name] = f"it is a link that leads out of the directory, to {guarded.shown(target)}"
        return inner

    def _cannot_open(self, name: str, exc: OSError) -> None:
        """Add a remark about an entry that cannot be opened. Raises ``HostError`` if the entry still exists and the
        tree is not live.
        """
        if exc.errno in GONE:
            self._remarks[name] = VANISHED
        else:
            self._cannot_read(name, exc)

    def _cannot_read(self, name: str, exc: OSError) -> None:
        """Add a remark about an entry that cannot be read. Raises ``HostError`` if the tree is not live."""
        if not self._is_live:
            raise files.failed(f"pack {name}", exc) from exc
        self._remarks[name] = f"cannot read it: {os.strerror(exc.errno or 0)}"

    def finish(self, remarks: str) -> MultipleDigest:
        """Finish the archive, and return its digests. If there are remarks about a live tree, list them in an entry
        named ``remarks``.
        """
        if self._is_live and self._remarks:
            lines = [f"{guarded.shown(name)}: {what}\n" for name, what in sorted(self._remarks.items())]
            self._sink.write_text(f"./{remarks}", "".join(lines))
        return self._sink.finish()


def _listed(root: _Root, here: str, limit: int) -> list[_Listed]:
    """Read at most ``limit`` entries of the directory ``here`` below ``root``, and return those that can be packed."""
    with closing(guarded.open_directory(root.fd, here)) as fd, os.scandir(fd) as entries:
        some = itertools.islice(entries, limit)
        front = f"{here}/" if here else ""
        return [_Listed(root, front + entry.name, kind) for entry in some if (kind := _kind(entry))]


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the file type, or 0 for FIFOs, sockets and devices."""
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFLNK if entry.is_symlink() else 0


def _inner_target(entry: _Listed, target: str) -> str:
    """Return a link's ``target`` relative to the link's directory, or "" if the target is outside the packed tree. Only
    the paths are compared, so no link is followed.

    An absolute target is made relative, because it would not exist where the archive is unpacked.
    """
    here = posixpath.dirname(entry.path)
    if target.startswith("/"):
        prefixes = [prefix for prefix in entry.root.prefixes if target.startswith(f"{prefix}/")]
        path = target.removeprefix(prefixes[0]).lstrip("/") if prefixes else ".."
    else:
        path = posixpath.join(here, target)
    path = posixpath.normpath(path)
    return "" if path == ".." or path.startswith("../") else posixpath.relpath(f"/{path}", f"/{here}")


class _Digested(msgspec.Struct):
    """The archive file, and the digests of all data written to it.

    The first write error is stored in ``error`` instead of being raised, and nothing is written afterwards, because
    isal 1.8 and earlier wait forever for a thread that has exited with an error.
    """

    out: BinaryIO
    error: OutputError | None = None
    hashers: list[Any] = msgspec.field(
        default_factory=lambda: [hashlib.sha1(usedforsecurity=False), hashlib.sha512(usedforsecurity=False)]
    )

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            for hasher in self.hashers:
                hasher.update(data)
            try:
                self.out.write(data)
            except OSError as exc:
                self.error = OutputError(exc.errno, exc.strerror)
        return len(data)

    def flush(self) -> None:
        """Do nothing. The owner of the file flushes it."""


class Sink:
    """The output stream of an archive, used as a context manager: it compresses the archive, computes its digests and
    writes the file.

    Compression and writing are done by threads. An error in one of them is raised by a later write. The archive's
    bytes do not depend on the number of threads.
    """

    def __init__(self, out: BinaryIO, *, compressed: bool, newest: int | None) -> None:
        self.newest = sys.maxsize if newest is None else newest
        self._newest_seen = 0
        self._file = _Digested(out)
        self._stream: Any = self._file
        if compressed:
            threads = min(MAX_COMPRESSORS, len(os.sched_getaffinity(0)))
            self._stream = igzip_threaded.open(self._file, "wb", LEVEL, threads=threads, block_size=PIECE_BYTES)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the compression threads. After ``finish``, this does nothing."""
        if self._stream is not self._file:
            self._stream.close()

    def _write(self, data: bytes) -> None:
        """Write data of the uncompressed archive. Raises the error that ``_Digested`` has stored, if any."""
        self._stream.write(data)
        if self._file.error is not None:
            raise self._file.error

    def write_header(self, header: tarfile.TarInfo) -> None:
        self._newest_seen = max(self._newest_seen, int(header.mtime))
        self._write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def write_text(self, name: str, text: str) -> None:
        """Write a generated file with the modification time of the newest packed file."""
        content = text.encode("utf-8", "surrogateescape")
        header = tarfile.TarInfo(name)
        header.size, header.mtime = len(content), self._newest_seen
        header.uname = header.gname = "root"
        self.write_member(header, [content])

    def write_member(self, header: tarfile.TarInfo, content: Iterable[bytes]) -> None:
        """Write an entry. The total length of ``content`` must be ``header.size``."""
        self.write_header(header)
        for piece in content:
            self._write(piece)
        self._fill(-header.size % tarfile.BLOCKSIZE)

    def write_file(self, fd: int, runs: Sequence[tuple[int, int]], size: int) -> tuple[int, OSError | None]:
        """Write the data segments ``runs`` of the open file ``fd``, ``size`` bytes in total, and pad them to a full
        block.

        If the file has grown since it was opened, the additional bytes are left out. If it has shrunk, zeros are
        appended.

        Returns the number of bytes read, and the I/O error that stopped the reading, if any.
        """
        read_bytes, problem = 0, None
        for begin, end in runs:
            at = begin
            while at < end:
                try:
                    piece = os.pread(fd, min(PIECE_BYTES, end - at), at)
                except OSError as exc:
                    problem = exc
                    break
                if not piece:
                    break
                self._write(piece)
                at += len(piece)
            read_bytes += at - begin
            if at < end:
                break
        self._fill(size - read_bytes + -size % tarfile.BLOCKSIZE)
        return read_bytes, problem

    def _fill(self, size: int) -> None:
        """Write ``size`` zero bytes."""
        while size:
            self._write(bytes(min(size, PIECE_BYTES)))
            size -= min(size, PIECE_BYTES)

    def finish(self) -> MultipleDigest:
        """Write the two empty blocks that end the archive, and return the digests of the archive."""
        self._fill(2 * tarfile.BLOCKSIZE)
        if self._stream is not self._file:
            self._stream.close()
        if self._file.error is not None:
            raise self._file.error
        return MultipleDigest(tuple(Digest(hasher.name, hasher.hexdigest()) for hasher in self._file.hashers))


# --- patterns ---------------------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"(?P<below>/\*\*(?=[,}]|\Z))|(?P<all>(?<![^/{,])\*\*(?=[,}]|\Z))|(?P<deep>(?<![^/{,])\*\*/)|(?P<stars>\*+)|(?P<any>\?)"
    r"|(?P<open>\{)|(?P<or>,)|(?P<close>\})|\[(?P<no>[!^]?)(?P<set>(?:\\.|[^\]\\]){1,40})\]|\\(?P<escaped>.)|(?P<plain>.)",
    re.DOTALL,
)
"""Matches one token of a pattern. ``below``, ``all`` and ``deep`` are the forms in which ``**`` spans directories."""
_MEANING: Final = {
    "below": "(?:/.*)?",
    "all": ".*",
    "deep": "(?:[^/]+/)*",
    "stars": "[^/]*",
    "any": "[^/]",
    "open": "(?:",
    "close": ")",
}
"""The regular expressions for tokens that always have the same meaning."""


def _compiled(patterns: Sequence[str]) -> re.Pattern[str]:
    """Compile ``patterns`` to a regular expression that matches a path if any of them does. Raises ``HostError``."""
    expressions = [_expression(pattern) for pattern in patterns]
    for pattern, expression in zip(patterns, expressions, strict=True):
        try:
            re.compile(expression)
        except (re.error, RecursionError) as exc:
            raise HostError(f"cannot read the pattern '{pattern[:100]}': {exc}") from exc
    return re.compile("|".join(expressions), re.DOTALL)


def _expression(pattern: str) -> str:
    """Translate one pattern to a regular expression. ``**`` spans directories. ``*``, ``?`` and ``[a-z]`` match within
    one name, and ``{a,b}`` matches either ``a`` or ``b``.

    A pattern without wildcards that names a directory also matches everything in the directory.
    """
    text = posixpath.normpath(pattern).strip("/")
    if text in ("", "."):
        return ".*"
    # The pattern is split into chunks at ``**``, the chunks into steps at ``/``, and the steps into parts at ``*``.
    depth, chunks = 0, [[[""]]]
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        depth += (kind == "open") - (kind == "close")
        part = _MEANING.get(kind, "")
        if kind == "or":
            part = "|" if depth else ","
        elif kind == "set":
            inside = re.sub(r"([\[\]^&~|])", r"\\\1", match["set"])
            part = f"(?!/)[{'^' if match['no'] else ''}{inside}]"
        elif kind in ("escaped", "plain"):
            part = re.escape(match[kind])
        if not depth and kind == "deep":
            chunks.append([[""]])
        elif not depth and kind == "stars":
            chunks[-1][-1].append("")
        elif not depth and part == "/":
            chunks[-1].append([""])
        else:
            chunks[-1][-1][-1] += part
    steps = ["/".join(_starred(step, _MEANING["stars"]) for step in chunk) for chunk in chunks]
    expression = _starred(steps, _MEANING["deep"])
    return expression if re.search(r"[*?\[\\]", text) else f"{expression}(?:/.*)?"


def _starred(parts: Sequence[str], star: str) -> str:
    """Join ``parts`` with ``star``. A part between two stars matches only at its first occurrence after the preceding
    part.

    The first occurrence suffices, because it leads to a match whenever a later one does. Trying all occurrences would
    take exponential time for some names, and jobs choose the names.
    """
    first, *others = parts
    # An atomic group prevents backtracking. A part with alternatives cannot be in one, because another alternative may
    # be needed for the rest to match.
    middle = [f"({'?:' if '(?:' in part else '?>'}{star}?{part})" for part in others[:-1]]
    return "".join([first, *middle, *(star + part for part in others[-1:])])
