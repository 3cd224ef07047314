"""Defines the requests that a worker receives and the answers that it sends. Each is a JSON document on a single line.

Requests contain secrets, so they are never passed in arguments or in the environment, and never stored on a disk.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from agent_shim.core.errors import BlobError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore


class BlobRef(msgspec.Struct, frozen=True):
    """Location and digest of a blob. If there is a signed URL, the id is ignored."""

    blob_id: str = ""
    signed_url: str = ""
    headers: Mapping[str, str] = {}
    digest: str = ""

    def __repr__(self) -> str:
        return f"BlobRef({self.blob_id!r}, digest={self.digest!r})"  # the other fields may be secret


class UnpackTarget(msgspec.Struct, frozen=True):
    """A blob to fetch and unpack into the new directory ``path``.

    ``kind`` is ``job`` for the job ``name`` in the rendered templates, ``package`` for a compiled package, and
    ``source`` for a package to compile.
    """

    kind: Literal["job", "package", "source"]
    name: str
    path: str
    source: BlobRef


class Install(msgspec.Struct, frozen=True, tag=True):
    """Fetch and unpack all targets, transferring at most ``parallel`` blobs at once. ``base`` is the root of the file
    tree.
    """

    base: str
    store: Blobstore
    parallel: int
    targets: list[UnpackTarget]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Download a blob to ``path`` and verify it."""

    base: str
    store: Blobstore
    source: BlobRef
    path: str
    mode: int = 0o600


class Put(msgspec.Struct, frozen=True, tag=True):
    """Upload the file ``path`` to the signed URL if there is one, otherwise to the blobstore under a new id."""

    base: str
    store: Blobstore
    path: str
    signed_url: str = ""
    headers: dict[str, str] = {}


class Tree(msgspec.Struct, frozen=True):
    """A directory to pack. ``prefix`` is put before the name of each entry. A prefix that is a directory must end in
    ``/``.

    If ``patterns`` are given (such as ``**/*.log``, in the Go agent's doublestar syntax), only files and links that
    match one of them are packed. A pattern that names a directory matches everything in it. If there are no patterns,
    ``root`` must exist and is packed completely, including directories.
    """

    root: str
    prefix: str = ""
    patterns: list[str] = []


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Pack ``trees`` into the file ``path``, which is compressed with gzip by default.

    Modification times later than ``newest`` (seconds since 1970) are replaced by ``newest``. ``remarks`` is set if
    other processes may be writing to the trees; it names the archive entry that lists the files that were left out or
    changed while they were read. If ``put`` is given, the same worker uploads the file afterwards.
    """

    trees: list[Tree]
    path: str
    compressed: bool = True
    mode: int = 0o600
    newest: int | None = None
    remarks: str = ""
    put: Put | None = None


class CopyTree(msgspec.Struct, frozen=True, tag=True):
    """Empty ``target``, except for the entries named in ``spared``, and copy ``source`` to it (``bulk.copytree``)."""

    source: str
    target: str
    spared: list[str]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a request. ``phase`` is ``uploading`` after packing, and ``counting`` or ``copying`` in a disk
    migration. The sizes are bytes of tar output.
    """

    phase: str
    size: int = 0
    size_total: int = 0

    @property
    def share(self) -> float:
        """Return the completed fraction of the current phase, or 0 while the total is unknown."""
        return self.size / self.size_total if self.size_total else 0.0

    def __str__(self) -> str:
        return f"{self.phase}: {self.size}/{self.size_total} bytes" if self.size_total else self.phase


class Rotate(msgspec.Struct, frozen=True, tag=True):
    """Rotate the log files ``paths`` below ``root`` (``bulk.copytruncate``), keeping ``keep`` archives of each.

    If a file has more than ``most`` bytes, only its last ``most`` bytes are archived. The paths are bytes, because jobs
    may use any name.
    """

    root: str
    paths: list[bytes]
    keep: int
    most: int


Request = Install | Get | Put | Pack | CopyTree | Rotate


class Outcome(msgspec.Struct, frozen=True):
    """Outcome for one target or log file: the error or "", and whether the unpacked archive was compressed.

    ``newest`` is the latest modification time in a source (seconds since 1970), and ``left_out`` is the number of bytes
    that were dropped from a log.
    """

    error: str = ""
    compressed: bool = True
    newest: int = 0
    left_out: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer: the error, or the results of the request.

    ``blob_id`` is the id of a new blob. ``sha1`` and ``sha512`` (hex) are digests of the packed archive. ``outcomes``
    has the same order as the targets or log files. ``put_error`` is the error from an upload after packing. ``losses``
    describes the attributes that could not be copied because the target file system cannot store them.
    """

    error: str = ""
    put_error: str = ""
    blob_id: str = ""
    sha1: str = ""
    sha512: str = ""
    outcomes: list[Outcome] = []
    losses: list[str] = []


Report = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Ignore progress reports."""


class Execute(Protocol):
    """Type of a function that executes a request in a worker, such as ``Workers.execute``."""

    def __call__(self, request: Request, *, nice: int = 0, report: Report = ignore) -> Awaitable[Done]: ...


def scratch(paths: Paths, pid: int) -> Path:
    """Return the path prefix for the temporary files that the worker with this pid creates."""
    return paths.tmp / f"worker-{pid}"


def checked_blob_id(blob_id: str) -> str:
    """Return ``blob_id``. Raises ``BlobError`` if the id could be interpreted as a path or as a command-line option."""
    is_plain = re.fullmatch(r"[^/\x00-\x1f\x7f.-][^/\x00-\x1f\x7f]*", blob_id) and ".." not in blob_id
    if not is_plain or len(blob_id.encode()) > 255:  # the maximum length of a file name
        raise BlobError(f"cannot use the blob id {blob_id[:100]!r}: it is not a plain name")
    return blob_id
