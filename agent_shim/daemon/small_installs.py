"""Installs of small blobs on this machine, in a thread of the agent: faster than the start of a worker.

Rendered templates that came over the bus are such blobs. Every limit is known before the unpacking or enforced by it,
so neither memory nor the interpreter is held for long. A worker does everything else, and repeats what failed here:
its texts are those of the Go agent. The modules stay in memory, 0.8 MB.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import ShimError
from agent_shim.core.paths import Paths
from agent_shim.host import files, worker_client
from agent_shim.host.worker_client import Done, Install, Outcome, Request

MAX_TARGETS: Final = 8
MAX_PACKED_BYTES: Final = 256 * 1024
"""Limit of the blobs of all targets together."""
MAX_UNPACKED_BYTES: Final = 4 * 1024 * 1024
"""Limit of each target."""
MAX_MEMBERS: Final = 200
"""Limit of each target: a member takes the interpreter for 0.1 ms."""
MAX_RECORDS: Final = 2000
"""Limit of each target's records in extended headers: ten for each member."""


async def work(paths: Paths, request: Request) -> Done:
    """Run ``request`` here if it is a small install, else in a worker; raises as ``worker_client.work``."""
    if isinstance(request, Install) and len(request.targets) <= MAX_TARGETS:
        outcomes = await asyncio.to_thread(_install, paths, request)
        if outcomes is not None:
            return Done(outcomes=outcomes)
    return await worker_client.work(request)


def _install(paths: Paths, request: Install) -> list[Outcome] | None:
    """Install all targets; None for those of a worker: one is not on this machine, too large, or fails."""
    # Only a part of all agents needs them, and an import takes too long for the event loop.
    from agent_shim.daemon import worker
    from agent_shim.host import archive
    from agent_shim.services.blobstore import blobs

    limits = archive.Limits(MAX_MEMBERS, MAX_UNPACKED_BYTES, records=MAX_RECORDS)
    pieces = [worker.Piece(target, files.sibling(Path(target.path))) for target in request.targets]
    room = MAX_PACKED_BYTES
    try:
        for piece in pieces:
            path = blobs.on_this_machine(piece.target.source, request.store, paths)
            if path is None:
                return None
            with path.open("rb") as file:
                content = file.read(room + 1)
                room -= len(content)
                if room < 0:
                    return None
                MultipleDigest.parse(piece.target.source.digest).verify(content)
                worker.unpack(file, piece, paths.shared_owner, limits)
            if piece.outcome.error:
                return None
        worker.finish(pieces)
        return None if any(piece.outcome.error for piece in pieces) else [piece.outcome for piece in pieces]
    except (ShimError, OSError):
        return None
    finally:
        for piece in pieces:
            files.remove_tree(piece.temp)
