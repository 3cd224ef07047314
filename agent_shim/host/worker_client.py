"""The client half of the worker: what may be asked of it, and running it.

Transfers, archives and large copies run in a short-lived process, ``python -m agent_shim.daemon.worker``, whose memory
goes back to the system when it ends. Request and answer are one JSON document each and travel in memory
files, because they hold secrets: not in arguments, not in the environment, not on a disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent_shim.core.errors import ActionError, BlobError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files, process

GRACE: Final = 5.0
"""Seconds a worker has to tidy up when nobody wants its answer any more."""

PR_SET_PDEATHSIG: Final = 1  # include/uapi/linux/prctl.h


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where a blob is and what digest it must have; with a signed URL the id does not matter."""

    blob_id: str = ""
    signed_url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    digest: str = ""


class Target(msgspec.Struct, frozen=True):
    """A blob to fetch and unpack as the new directory ``path``.

    A ``job`` is the part of rendered templates that has its ``name``, a ``package`` a compiled one, a ``source`` what
    gets compiled.
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
    """Put a blob, once verified, at ``path``."""

    base: str
    store: Blobstore
    source: BlobRef
    path: str
    mode: int = 0o600


class Put(msgspec.Struct, frozen=True, tag=True):
    """Upload the file ``path``: to the signed URL if there is one, else to the blobstore under a new id."""

    base: str
    store: Blobstore
    path: str
    signed_url: str = ""
    headers: dict[str, str] = {}


class Tree(msgspec.Struct, frozen=True):
    """A directory to pack, its names put below ``prefix`` (which ends in ``/`` if it is one).

    Without ``patterns`` all of it, directories too, and it must exist. With patterns (``**/*.log``, as doublestar reads
    them for the Go agent) the files and links that match one of them; a pattern that is the name of a directory means
    all in it.
    """

    root: str
    prefix: str = ""
    patterns: list[str] = []


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Pack ``trees`` into the file ``path``, gzip unless told otherwise.

    What was modified after ``newest`` (seconds since 1970) is packed as modified then. With ``remarks`` the trees are
    written into meanwhile, and what is not in the archive as it was on disk is listed in an entry of this name.
    """

    trees: list[Tree]
    path: str
    compressed: bool = True
    mode: int = 0o600
    newest: int | None = None
    remarks: str = ""


class CopyTree(msgspec.Struct, frozen=True, tag=True):
    """Make the directory ``target`` hold what ``source`` holds but ``spared`` (``host.copytree``).

    How far that is, is written to the file ``progress`` from time to time.
    """

    source: str
    target: str
    spared: list[str]
    progress: str


class Rotate(msgspec.Struct, frozen=True, tag=True):
    """Rotate the log files ``paths`` below ``root`` (``host.copytruncate``), keeping ``keep`` archives of each.

    Of a file with more than ``most`` bytes the end is kept. The paths are bytes: jobs name files as they like.
    """

    root: str
    paths: list[bytes]
    keep: int
    most: int


Request = Install | Get | Put | Pack | CopyTree | Rotate


class Outcome(msgspec.Struct, frozen=True):
    """How it went with one target: the text of what failed, or "", and whether its archive was gzip.

    ``newest`` is when the youngest file of a source was modified (seconds since 1970), ``left_out`` the bytes of a log
    that were not kept.
    """

    error: str = ""
    compressed: bool = True
    newest: int = 0
    left_out: int = 0


class Done(msgspec.Struct, frozen=True):
    """The answer: the text of what failed, or what the request asked for.

    ``blob_id`` is that of a new blob, the digests (hex) are those of what was packed, the outcomes stand in the order
    of the targets.
    """

    error: str = ""
    blob_id: str = ""
    sha1: str = ""
    sha512: str = ""
    outcomes: list[Outcome] = []


def checked_blob_id(blob_id: str) -> str:
    """``blob_id`` itself; raises ``BlobError`` when it could mean more than a name in a directory or an option."""
    if not re.fullmatch(r"[^/\x00-\x1f\x7f]{1,255}", blob_id) or ".." in blob_id or blob_id[0] in ".-":
        raise BlobError(f"cannot use the blob id {blob_id[:100]!r}: it is not a plain name")
    return blob_id


# --- running it -----------------------------------------------------------------------------------------------------


async def work(request: Request, *, nice: int = 0) -> Done:
    """Have a worker do ``request``; raises ``ActionError`` with the worker's text when it could not."""
    try:
        answer = await run_worker(msgspec.json.encode(request), nice=nice, tidy=partial(_tidy, request))
        done = msgspec.json.decode(answer, type=Done)
        if done.error:
            raise ActionError(done.error)
    except BaseException:
        _count(request, "failed")
        raise
    _count(request, "done")
    return done


class Transfers:
    """Blobs since the process began: how many by direction and outcome (done, failed), bytes of those that are done.

    Directions are get and put with the blobstore, upload and download with a client over HTTPS.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sizes: Counter[str] = Counter()

    def add(self, direction: str, outcome: str, size: int = 0) -> None:
        """One more."""
        self.counts[direction, outcome] += 1
        self.sizes[direction] += size


transfers: Final = Transfers()


def _count(request: Request, outcome: str) -> None:
    if isinstance(request, Get | Put):
        size = 0
        with suppress(OSError):
            size = os.stat(request.path).st_size if outcome == "done" else 0  # noqa: PTH116 - a text
        transfers.add("get" if isinstance(request, Get) else "put", outcome, size)


async def run_worker(request: bytes, *, nice: int = 0, tidy: Callable[[int], None] = lambda _: None) -> bytes:
    """Run one worker and return its answer; raises ``ActionError`` if it dies. Cancelling ends its whole group.

    ``tidy`` is called in a thread with the pid of a worker that may not have come to tidying up.
    """
    command = [sys.executable, "-P", "-X", "utf8", "-m", "agent_shim.daemon.worker", str(os.getpid())]
    with _memory_file("request") as given, _memory_file("answer") as answer, _memory_file("errors") as errors:
        try:
            os.write(given, request)
            os.lseek(given, 0, os.SEEK_SET)
            worker = process.spawn(command, env=os.environ, stdin=given, stdout=answer, stderr=errors, nice=nice)
        except HostError as exc:
            raise ActionError(str(exc)) from exc
        try:
            status = await worker.wait()
        except asyncio.CancelledError:
            await worker.terminate(GRACE)
            await asyncio.to_thread(tidy, worker.pid)
            raise
        if status != 0:
            await asyncio.to_thread(tidy, worker.pid)
            raise ActionError(f"cannot finish the work: the worker {_end(status, _content(errors))}")
        return _content(answer)


def scratch(paths: Paths, pid: int) -> Path:
    """What the worker with this pid names its temporary files after."""
    return paths.tmp / f"worker-{pid}"


def _tidy(request: Request, pid: int) -> None:
    """Remove the files that a worker was killed over; bundles half made are their owner's to find."""
    with suppress(HostError):
        if isinstance(request, Get | Pack):
            files.remove_leftovers(Path(request.path))
        if isinstance(request, Get | Install):
            files.remove_leftovers(scratch(Paths(Path(request.base)), pid))


@contextmanager
def _memory_file(name: str) -> Iterator[int]:
    fd = os.memfd_create(name)
    try:
        yield fd
    finally:
        os.close(fd)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _end(status: int | None, errors: bytes) -> str:
    """How it ended. Of a traceback only the place and the kind of error: its text may hold a secret."""
    if status is not None and status > 128:
        return f"was killed by {signal.Signals(status - 128).name}"
    lines = errors.decode(errors="replace").splitlines() or [""]
    kind = re.match(r"[\w.]+", lines[-1])
    places = [line.strip() for line in lines if line.startswith('  File "')]
    return f"ended with code {status}" + (f": {kind[0]} in {places[-1]}" if kind and places else "")


def become_worker(parent: int) -> None:
    """What a worker does first: it ends with the process ``parent`` that started it, even if that was killed; when
    memory runs out the kernel takes it before the agent; and what it knows never lands in a core file.
    """
    import ctypes  # late: only workers need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before it could be watched
        raise SystemExit(128 + signal.SIGTERM)
    process.disable_core_dumps(for_good=True)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
