"""The worker: a short-lived process for one heavy request, whose exit returns its memory to the system.

``python -m agent_shim.daemon.worker PARENT`` reads one request from standard input, executes it, and writes one answer
to standard output (types and client: ``host.worker_client``). Expected failures are part of the answer; any other ends
the worker with a traceback. It removes temporary files when it is terminated, also at the end of its parent.

Its start delays the action, so each kind of request imports only its own modules.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from agent_shim.core.errors import HostError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.host import files, worker_client
from agent_shim.host.descriptors import closing
from agent_shim.host.worker_client import CopyTree, Done, Get, Install, Outcome, Pack, Put, Request, Rotate, Target

if TYPE_CHECKING:
    from agent_shim.host.archive import Limits
    from agent_shim.services.blobstore.blobs import Blobs


def main() -> int:
    """Execute one request; the exit code is 143 when terminated."""
    worker_client.become_worker(int(sys.argv[1]))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    temps: list[Path] = []
    try:
        done = asyncio.run(serve(request, temps))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        # No thread writes any more: each fails when its file is closed, and the loop has waited for them.
        for temp in temps:
            files.remove_tree(temp)
    sys.stdout.buffer.write(msgspec.json.encode(done))
    return 0


async def serve(request: Request, temps: list[Path]) -> Done:
    """Execute ``request``; add every file to remove afterwards, also on failure, to ``temps``."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await _serve(request, temps)


async def _serve(request: Request, temps: list[Path]) -> Done:
    try:
        match request:
            case Install():
                return Done(outcomes=await _install(request, temps))
            case Get():
                return await _get(request)
            case Put():
                return await _put(request)
            case Pack():
                packed = await _pack(request)
                if request.put is None:
                    return packed
                put = await _serve(request.put, temps)
                return msgspec.structs.replace(packed, blob_id=put.blob_id, put_error=put.error)
            case CopyTree():
                return _copy_tree(request)
            case Rotate():
                return _rotate(request)
    except (ShimError, HostError) as exc:
        return Done(error=str(exc))
    except OSError as exc:
        return Done(error=_refused(request, exc))


def _refused(request: Request, exc: OSError) -> str:
    """Describe a failed system call: its file, else the file being written, and the free space."""
    if exc.filename is not None or not isinstance(request, Get | Pack):
        return f"cannot use {exc.filename or 'a file'}: {exc.strerror}"
    free = shutil.disk_usage(Path(request.path).parent).free
    return f"cannot write {request.path}: {exc.strerror}, {free // (1 << 20)} MiB are free"


async def _get(request: Get) -> Done:
    from agent_shim.services.blobstore.blobs import Blobs

    async with Blobs(request.store, Paths(Path(request.base))) as blobs, blobs.fetched(request.source) as file:
        with files.replacing(Path(request.path), mode=request.mode) as out:
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # the kernel's position, not that of the buffer before it
            files.copy_data(file.fileno(), out.fileno())
    return Done()


async def _put(request: Put) -> Done:
    from agent_shim.services.blobstore.blobs import Blobs

    async with Blobs(request.store, Paths(Path(request.base))) as blobs:
        return Done(blob_id=await blobs.put(Path(request.path), request.signed_url, request.headers))


async def _pack(request: Pack) -> Done:
    from agent_shim.host import packing

    # A file to upload is removed after it: its copy in a local store is synced.
    with files.replacing(Path(request.path), mode=request.mode, is_synced=request.put is None) as out:
        newest, remarks = request.newest, request.remarks
        digest = await asyncio.to_thread(
            packing.pack, out, request.trees, compressed=request.compressed, newest=newest, remarks=remarks
        )
    sha1, sha512 = (each.value for each in digest.digests)
    return Done(sha1=sha1, sha512=sha512)


def _copy_tree(request: CopyTree) -> Done:
    from agent_shim.host import copytree

    # No clean-up: the next worker resumes an interrupted copy.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    progress = Path(request.progress)

    def report(now: worker_client.Progress) -> None:
        progress.write_bytes(msgspec.json.encode(now))

    copytree.mirror(Path(request.source), Path(request.target), spared=request.spared, report=report)
    return Done()


def _rotate(request: Rotate) -> Done:
    from agent_shim.host import copytruncate

    # Each step leaves complete files: the worker may be killed between any two.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    outcomes = []
    with closing(os.open(request.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for path in request.paths:
            try:
                moved = copytruncate.rotate(root, os.fsdecode(path), request.keep, request.most)
                outcomes.append(Outcome(left_out=moved.left_out))
            except HostError as exc:
                outcomes.append(Outcome(error=str(exc)))
    return Done(outcomes=outcomes)


# --- install --------------------------------------------------------------------------------------------------------

FETCHING = {"job": "Getting job source from blobstore: ", "package": "Fetching package blob: ", "source": ""}
INSTALLING = {"job": "Installing job bundle: ", "package": "Installing package directory: ", "source": ""}
"""Error texts of the Go agent (rendered_job_applier.go, compiled_package_applier.go)."""


MOST_SYNCS = 4
"""Maximum number of directories synced one by one; beyond it one sync of the file system is cheaper."""

UNREACHED = Outcome("it was not reached")

PATIENCE_S = 120.0
"""Time in which transfers begin after the first failure: a store that stalls takes two minutes for each blob."""


class Piece(msgspec.Struct):
    """One target, unpacked to ``temp``; renamed to ``target.path`` when all are on disk."""

    target: Target
    temp: Path
    outcome: Outcome = UNREACHED


async def _install(request: Install, temps: list[Path]) -> list[Outcome]:
    """Install all targets; those of one blob share its transfer.

    The failure of one does not affect the others, unless they would begin ``PATIENCE_S`` later.
    """
    from agent_shim.services.blobstore.blobs import Blobs

    paths = Paths(Path(request.base))
    pieces = [Piece(target, files.sibling(Path(target.path))) for target in request.targets]
    temps += [piece.temp for piece in pieces]
    of_blob: dict[tuple[str, str, str], list[Piece]] = {}
    for piece in pieces:
        source = piece.target.source
        of_blob.setdefault((source.blob_id, source.signed_url, source.digest), []).append(piece)
    gate, failed_at = asyncio.Semaphore(max(1, request.parallel)), list[float]()
    async with Blobs(request.store, paths) as blobs, asyncio.TaskGroup() as group:
        for those in of_blob.values():
            group.create_task(_fetch_and_unpack(blobs, those, gate, failed_at, paths.shared_owner))
    await asyncio.to_thread(finish, [piece for piece in pieces if not piece.outcome.error])
    return [piece.outcome for piece in pieces]


async def _fetch_and_unpack(
    blobs: Blobs, pieces: Sequence[Piece], gate: asyncio.Semaphore, failed_at: list[float], owner: str | None
) -> None:
    async with gate:
        if failed_at and time.monotonic() > failed_at[0] + PATIENCE_S:
            return
        try:
            async with blobs.fetched(pieces[0].target.source) as file:
                for piece in pieces:
                    await asyncio.to_thread(unpack, file, piece, owner)
        except (ShimError, OSError) as exc:
            failed_at.append(time.monotonic())
            for piece in pieces:
                piece.outcome = Outcome(f"{FETCHING[piece.target.kind]}{exc}")


def unpack(file: BinaryIO, piece: Piece, owner: str | None, limits: Limits | None = None) -> None:
    """Unpack one target to ``piece.temp``, by default with generous limits; the outcome is in ``piece``."""
    from agent_shim.host import archive
    from agent_shim.services import bundles

    target = piece.target
    try:
        if target.kind == "source":
            piece.temp.parent.mkdir(parents=True, exist_ok=True)
        else:
            files.make_dir(piece.temp.parent, bundles.DIRECTORY_MODE[target.kind], owner)
        is_job, limits = target.kind == "job", limits or archive.GENEROUS
        subtree = target.name if is_job else ""
        archive.unpack(file, piece.temp, subtree=subtree, outside_links=not is_job, limits=limits)
        bundles.set_owners_and_modes(target.kind, piece.temp, owner)
        newest = _newest(piece.temp) if target.kind == "source" else 0
        piece.outcome = Outcome(compressed=archive.is_gzip(file), newest=newest)
    except (ShimError, OSError) as exc:
        piece.outcome = Outcome(f"{INSTALLING[target.kind]}{exc}")


def _newest(tree: Path) -> int:
    """The latest modification time in the tree, without times in the future."""
    now = tree.stat().st_ctime
    found = (Path(here, name).lstat() for here, _, names in os.walk(tree) for name in names)
    return int(max((each.st_mtime for each in found if stat.S_ISREG(each.st_mode) and each.st_mtime <= now), default=0))


def finish(pieces: Sequence[Piece]) -> None:
    """Sync unpacked directories, then rename them: a crash leaves complete directories or none."""
    places = {piece.temp.stat().st_dev: piece.temp.parent for piece in pieces}
    for place in places.values():
        files.sync_filesystem(place)
    for piece in pieces:
        path = Path(piece.target.path)
        try:
            if piece.target.kind == "source":
                files.remove_tree(path)
            piece.temp.rename(path)
            if len(pieces) <= MOST_SYNCS:
                files.sync_directory(path.parent)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another worker was faster
                piece.outcome = Outcome(f"{INSTALLING[piece.target.kind]}{files.failed(f'make {path}', exc)}")
    if len(pieces) > MOST_SYNCS:
        for place in places.values():
            files.sync_filesystem(place)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the end of the interpreter takes 35 ms, for memory that the system takes anyway
