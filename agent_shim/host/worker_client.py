"""Client of the worker: its requests, and their execution.

Transfers, archives and large copies run in a short-lived process, ``python -m agent_shim.daemon.worker``, which returns
its memory to the system at its end. Request and answer are one JSON document each and are passed in memory files,
because they contain secrets: never in arguments, in the environment, or on a disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from agent_shim.core.errors import ActionError, BlobError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files, process
from agent_shim.host.descriptors import closing

GRACE_S: Final = 5.0
"""For a cancelled worker to remove its temporary files."""
POLL_S: Final = 0.5
"""Interval for the end of packing before an upload by the same worker."""

PR_SET_PDEATHSIG: Final = 1  # include/uapi/linux/prctl.h


# --- requests ---------------------------------------------------------------------------------------------------------


class BlobRef(msgspec.Struct, frozen=True):
    """Location and digest of a blob; with a signed URL the id is ignored."""

    blob_id: str = ""
    signed_url: str = ""
    headers: Mapping[str, str] = {}
    digest: str = ""

    def __repr__(self) -> str:
        return f"BlobRef({self.blob_id!r}, digest={self.digest!r})"  # the others may be secret


class Target(msgspec.Struct, frozen=True):
    """A blob to fetch and unpack into the new directory ``path``.

    A ``job`` is the part ``name`` of the rendered templates, a ``package`` is compiled, a ``source`` is to be compiled.
    """

    kind: Literal["job", "package", "source"]
    name: str
    path: str
    source: BlobRef


class Install(msgspec.Struct, frozen=True, tag=True):
    """Fetch and unpack all targets, at most ``parallel`` blobs at once; ``base`` is the root of the file tree."""

    base: str
    store: Blobstore
    parallel: int
    targets: list[Target]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Download a blob to ``path`` and verify it."""

    base: str
    store: Blobstore
    source: BlobRef
    path: str
    mode: int = 0o600


class Put(msgspec.Struct, frozen=True, tag=True):
    """Upload the file ``path``: to the signed URL if given, else to the blobstore under a new id."""

    base: str
    store: Blobstore
    path: str
    signed_url: str = ""
    headers: dict[str, str] = {}


class Tree(msgspec.Struct, frozen=True):
    """A directory to pack, with ``prefix`` before its names (ending in ``/`` for a directory).

    Without ``patterns`` it is packed completely, with directories, and must exist. With patterns (``**/*.log``, in the
    doublestar syntax of the Go agent) only files and links that match are packed; a pattern that names a directory
    includes its whole content.
    """

    root: str
    prefix: str = ""
    patterns: list[str] = []


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Pack ``trees`` into the file ``path``, gzip by default.

    Times after ``newest`` (seconds since 1970) become ``newest``. With ``remarks`` the trees are live, and deviations
    from the files on disk are listed in an entry of this name. The same worker executes ``put`` after it.
    """

    trees: list[Tree]
    path: str
    compressed: bool = True
    mode: int = 0o600
    newest: int | None = None
    remarks: str = ""
    put: Put | None = None


class CopyTree(msgspec.Struct, frozen=True, tag=True):
    """Mirror ``source`` to ``target``, except ``spared`` (``host.copytree``).

    The progress (:class:`Progress`) is written to the file ``progress`` periodically.
    """

    source: str
    target: str
    spared: list[str]
    progress: str


class Progress(msgspec.Struct, frozen=True):
    """Progress of a copy; ``phase`` is counting, copying or comparing, sizes are bytes of data without holes."""

    phase: str
    files: int = 0
    files_total: int = 0
    size: int = 0
    size_total: int = 0

    @property
    def share(self) -> float:
        """Return the completed part of the present phase, 0 to 1; 0 while the total is unknown."""
        return self.size / self.size_total if self.size_total else 0.0

    def __str__(self) -> str:
        if self.phase == "counting":
            return f"counting: {self.files} files, {self.size} bytes"
        return f"{self.phase}: {self.files}/{self.files_total} files, {self.size}/{self.size_total} bytes"


class Rotate(msgspec.Struct, frozen=True, tag=True):
    """Rotate the log files ``paths`` below ``root`` (``host.copytruncate``), keeping ``keep`` archives of each.

    Files with more than ``most`` bytes keep only their end. The paths are bytes, as jobs may use any name.
    """

    root: str
    paths: list[bytes]
    keep: int
    most: int


Request = Install | Get | Put | Pack | CopyTree | Rotate


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of one target: the error or "", and True if its archive was gzip.

    ``newest`` is the latest modification time of a source (seconds since 1970), ``left_out`` the bytes of a log that
    were dropped.
    """

    error: str = ""
    compressed: bool = True
    newest: int = 0
    left_out: int = 0


class Done(msgspec.Struct, frozen=True):
    """Answer of a worker: the error, or the results of the request.

    ``blob_id`` is that of a new blob, the digests (hex) are those of the packed archive, the outcomes are in the order
    of the targets. ``put_error`` is the error of the upload after packing.
    """

    error: str = ""
    put_error: str = ""
    blob_id: str = ""
    sha1: str = ""
    sha512: str = ""
    outcomes: list[Outcome] = []


Work: TypeAlias = Callable[[Request], Awaitable[Done]]


def checked_blob_id(blob_id: str) -> str:
    """Return ``blob_id``; raises ``BlobError`` if it could be a path or an option."""
    is_plain = re.fullmatch(r"[^/\x00-\x1f\x7f.-][^/\x00-\x1f\x7f]*", blob_id) and ".." not in blob_id
    if not is_plain or len(blob_id.encode()) > 255:
        raise BlobError(f"cannot use the blob id {blob_id[:100]!r}: it is not a plain name")
    return blob_id


# --- running it -----------------------------------------------------------------------------------------------------


async def work(request: Request, *, nice: int = 0) -> Done:
    """Run ``request`` in a worker; raises ``ActionError`` with the worker's error."""
    try:
        answer = await run_worker(msgspec.json.encode(request), nice=nice, tidy=partial(_tidy, request))
        done = msgspec.json.decode(answer, type=Done)
        if done.error:
            raise ActionError(done.error)
    except BaseException:
        _count(request, "failed")
        raise
    _count(request, "failed" if done.put_error else "done")
    return done


async def pack_and_put(work: Work, pack: Pack, report: Callable[[str], None], timeout: float | None = None) -> Done:
    """Run ``pack``, which has a ``put``, by ``work``; ``timeout`` is that of packing alone, a ``TimeoutError``.

    ``report`` is called with "packing", and with "uploading" for an upload that takes a while.
    """
    report("packing")
    working = asyncio.ensure_future(work(pack))
    try:
        async with asyncio.timeout(timeout):
            while not working.done() and not await asyncio.to_thread(os.path.exists, pack.path):
                await asyncio.wait([working], timeout=POLL_S)
        if not working.done():
            report("uploading")
        return await working
    except BaseException:
        working.cancel()
        await asyncio.wait([working])
        raise


class Transfers:
    """Counters of blobs since the process started: number by direction and outcome (done, failed), bytes of successful
    ones.

    Directions are get and put for the blobstore, upload and download for clients over HTTPS.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sizes: Counter[str] = Counter()

    def add(self, direction: str, outcome: str, size: int = 0) -> None:
        """Count one transfer."""
        self.counts[direction, outcome] += 1
        self.sizes[direction] += size


transfers: Final = Transfers()


def _count(request: Request, outcome: str) -> None:
    transfer = request.put if isinstance(request, Pack) else request
    if isinstance(transfer, Get | Put):
        size = 0
        with suppress(OSError):
            size = os.stat(transfer.path).st_size if outcome == "done" else 0  # noqa: PTH116 - a text
        transfers.add("get" if isinstance(transfer, Get) else "put", outcome, size)


async def run_worker(request: bytes, *, nice: int = 0, tidy: Callable[[int], None] = lambda _: None) -> bytes:
    """Run one worker and return its answer; raises ``ActionError`` if it dies. Cancellation kills its process group.

    ``tidy`` is called in a thread with the pid of a worker that could not clean up.
    """
    command = [sys.executable, "-P", "-X", "utf8", "-m", "agent_shim.daemon.worker", str(os.getpid())]
    with ExitStack() as opened:
        try:
            given, answer, errors = (
                opened.enter_context(closing(os.memfd_create(name))) for name in ("request", "answer", "errors")
            )
            os.write(given, request)
            os.lseek(given, 0, os.SEEK_SET)
            worker = process.spawn(command, env=os.environ, stdin=given, stdout=answer, stderr=errors, nice=nice)
        except OSError as exc:
            raise ActionError(str(exc if isinstance(exc, HostError) else files.failed("start a worker", exc))) from exc
        try:
            status = await worker.wait()
        except asyncio.CancelledError:
            await worker.terminate(GRACE_S)
            await asyncio.to_thread(tidy, worker.pid)
            raise
        if status != 0:
            await asyncio.to_thread(tidy, worker.pid)
            raise ActionError(f"cannot finish the work: the worker {_end(status, _content(errors))}")
        return _content(answer)


def scratch(paths: Paths, pid: int) -> Path:
    """Return the path prefix of the temporary files of the worker with this pid."""
    return paths.tmp / f"worker-{pid}"


def _tidy(request: Request, pid: int) -> None:
    """Remove the temporary files of a killed worker; unfinished bundles are removed by their owner."""
    with suppress(HostError):
        if isinstance(request, Get | Pack):
            files.remove_leftovers(Path(request.path))
        if isinstance(request, Get | Install):
            files.remove_leftovers(scratch(Paths(Path(request.base)), pid))


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _end(status: int | None, errors: bytes) -> str:
    """Describe the end of a worker. From a traceback only location and type are used: its text may contain a secret."""
    if status is not None and status > 128:
        return f"was killed by {signal.Signals(status - 128).name}"
    lines = errors.decode(errors="replace").splitlines() or [""]
    kind = re.match(r"[\w.]+", lines[-1])
    places = [line.strip() for line in lines if line.startswith('  File "')]
    return f"ended with code {status}" + (f": {kind[0]} in {places[-1]}" if kind and places else "")


def become_worker(parent: int) -> None:
    """Set up a worker: it dies with ``parent``, is the OOM killer's choice before the agent, and dumps no core."""
    import ctypes  # late import: only workers need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before it could be watched
        raise SystemExit(128 + signal.SIGTERM)
    process.disable_core_dumps(for_good=True)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
