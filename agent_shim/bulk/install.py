"""Unpacks blobs into directories: jobs, packages and sources.

Runs only in worker processes. A directory gets its final name only once it is complete and synced to disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from agent_shim.bulk import archive, compression
from agent_shim.bulk.blobs import Blobs
from agent_shim.bulk.modes import DIRECTORY_MODE, set_owners_and_modes
from agent_shim.bulk.protocol import Install, Outcome, UnpackTarget
from agent_shim.core.errors import ShimError
from agent_shim.core.paths import Paths
from agent_shim.host import files

FETCHING = {"job": "Getting job source from blobstore: ", "package": "Fetching package blob: ", "source": ""}
INSTALLING = {"job": "Installing job bundle: ", "package": "Installing package directory: ", "source": ""}
"""Prefixes of error messages by kind, as in the Go agent (rendered_job_applier.go, compiled_package_applier.go)."""


UNREACHED = Outcome("it was skipped, because other transfers had failed")

PATIENCE_S = 120.0
"""After a failure, new transfers are started for only this many more seconds. Without this limit, a blobstore that
stalls would delay the result by two minutes for each blob.
"""


class Piece(msgspec.Struct):
    """One target. It is unpacked to ``temp``, which is renamed to ``target.path`` when all targets are on disk."""

    target: UnpackTarget
    temp: Path
    outcome: Outcome = UNREACHED


async def install(request: Install, temps: list[Path]) -> list[Outcome]:
    """Install all targets. Targets from the same blob share one transfer. Temporary directories are added to ``temps``.

    If one target fails, the others are still installed, except those whose transfer has not begun within ``PATIENCE_S``
    seconds of the first failure.
    """
    paths = Paths(Path(request.base))
    pieces = [Piece(target, files.sibling(Path(target.path))) for target in request.targets]
    temps += [piece.temp for piece in pieces]
    by_blob: dict[tuple[str, str, str], list[Piece]] = {}
    for piece in pieces:
        source = piece.target.source
        by_blob.setdefault((source.blob_id, source.signed_url, source.digest), []).append(piece)
    gate, failed_at = asyncio.Semaphore(max(1, request.parallel)), list[float]()
    async with Blobs(request.store, paths) as blobs, asyncio.TaskGroup() as group:
        for same_blob in by_blob.values():
            group.create_task(_fetch_and_unpack(blobs, same_blob, gate, failed_at, paths.shared_owner))
    await asyncio.to_thread(finish, [piece for piece in pieces if not piece.outcome.error])
    return [piece.outcome for piece in pieces]


async def _fetch_and_unpack(
    blobs: Blobs, pieces: Sequence[Piece], gate: asyncio.Semaphore, failed_at: list[float], owner: str | None
) -> None:
    """Fetch one blob and unpack it for each of ``pieces``. Do nothing if the first failure in ``failed_at`` was
    more than ``PATIENCE_S`` seconds ago. The time of a new failure is appended to ``failed_at``.
    """
    async with gate:
        if failed_at and time.monotonic() > failed_at[0] + PATIENCE_S:
            return  # the outcome of these pieces remains ``UNREACHED``
        try:
            async with blobs.fetched(pieces[0].target.source) as file:
                for piece in pieces:
                    await asyncio.to_thread(_unpack, file, piece, owner)
        except (ShimError, OSError) as exc:
            failed_at.append(time.monotonic())
            for piece in pieces:
                piece.outcome = Outcome(f"{FETCHING[piece.target.kind]}{exc}")


def _unpack(file: BinaryIO, piece: Piece, owner: str | None) -> None:
    """Unpack one target to ``piece.temp``, and store the outcome in ``piece``."""
    target = piece.target
    try:
        if target.kind == "source":
            piece.temp.parent.mkdir(parents=True, exist_ok=True)
        else:
            files.make_dir(piece.temp.parent, DIRECTORY_MODE[target.kind], owner)
        archive.unpack(file, piece.temp, subtree=target.name if target.kind == "job" else "")
        set_owners_and_modes(target.kind, piece.temp, owner)
        newest = _newest(piece.temp) if target.kind == "source" else 0
        piece.outcome = Outcome(compressed=compression.is_compressed(file), newest=newest)
    except (ShimError, OSError) as exc:
        piece.outcome = Outcome(f"{INSTALLING[target.kind]}{exc}")


def _newest(tree: Path) -> int:
    """Return the latest modification time of a file in the tree (seconds since 1970), ignoring times in the future.
    Compilations use it instead of the current time, so that their results are reproducible.
    """
    now = tree.stat().st_ctime  # the file system's current time, because the directory was changed just now
    statuses = (Path(here, name).lstat() for here, _, names in os.walk(tree) for name in names)
    modified = (status.st_mtime for status in statuses if stat.S_ISREG(status.st_mode))
    return int(max((each for each in modified if each <= now), default=0))


def finish(pieces: Sequence[Piece]) -> None:
    """Sync unpacked directories, then rename them, so that a crash leaves either complete directories or none."""
    parents = {piece.temp.stat().st_dev: piece.temp.parent for piece in pieces}  # one for each file system
    for parent in parents.values():
        files.sync_filesystem(parent)
    for piece in pieces:
        path = Path(piece.target.path)
        try:
            if piece.target.kind == "source":
                # An earlier compilation may have left the directory behind.
                files.remove_tree(path)
            piece.temp.rename(path)
        except OSError as exc:
            # These two errors mean that another worker has installed the target.
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                piece.outcome = Outcome(f"{INSTALLING[piece.target.kind]}{files.failed(f'make {path}', exc)}")
    for parent in parents.values():
        files.sync_filesystem(parent)
