"""Installs of small blobs in threads of the agent: faster than the start of a worker.

They are on this machine, as rendered templates that came over the bus, or come by one plain request. Every limit is
known before the unpacking or enforced by it, so neither memory nor the interpreter is held for long. A worker does
everything else, and repeats what failed here: its texts are those of the Go agent. The modules stay, a megabyte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import ShimError
from agent_shim.core.paths import Paths
from agent_shim.host import files, guarded, worker_client
from agent_shim.host.worker_client import BlobRef, Done, Install, Outcome, Request

logger = logging.getLogger(__name__)

MAX_TARGETS: Final = 16
MAX_PACKED_BYTES: Final = 8 * 1024 * 1024
"""Limit of the blobs of all targets together."""
MAX_DOWNLOADED_BYTES: Final = 1024 * 1024
"""Limit of those that are not on this machine: they are in memory."""
MAX_DOWNLOADS: Final = 2
"""Limit of their number: one is fetched after the other."""
DOWNLOAD_TIMEOUT_S: Final = 2.0
MAX_UNPACKED_BYTES: Final = 16 * 1024 * 1024
"""Limit of each target."""
MAX_MEMBERS: Final = 200
"""Limit of each target: a member takes the interpreter for 0.1 ms."""
MAX_RECORDS: Final = 2000
"""Limit of each target's records in extended headers: ten for each member."""
MAX_NAMES_BYTES: Final = 256 * 1024
"""Limit of the paths of each target's directories and links: one member may have 250 directories above it."""

_Key = tuple[str, str]
"""Id and signed URL of a blob."""


async def work(paths: Paths, request: Request) -> Done:
    """Run ``request`` here if it is a small install, else in a worker; raises as ``worker_client.work``."""
    if isinstance(request, Install) and len(request.targets) <= MAX_TARGETS:
        try:
            downloads: Mapping[_Key, bytes] = {}
            if request.store.provider == "dav" or any(target.source.signed_url for target in request.targets):
                download = partial(_download, paths, request)
                downloads = await guarded.aside("small blobs", download, timeout=DOWNLOAD_TIMEOUT_S)
            return Done(outcomes=await asyncio.to_thread(_install, paths, request, downloads))
        except (ShimError, OSError, ValueError) as exc:
            logger.debug("a worker does the install: %s", type(exc).__name__)  # a text could have parts of a signed URL
    return await worker_client.work(request)


def _download(paths: Paths, request: Install) -> Mapping[_Key, bytes]:
    """Return the blobs that are not on this machine."""
    from agent_shim.services.blobstore import blobs, providers, small_download

    until = time.monotonic() + DOWNLOAD_TIMEOUT_S
    ca, environment = providers.trusted_ca(request.store), providers.environment(request.store)
    room = MAX_DOWNLOADED_BYTES
    refs = {_key(target.source): target.source for target in request.targets}
    distant = {key: ref for key, ref in refs.items() if blobs.on_this_machine(ref, request.store, paths) is None}
    if len(distant) > MAX_DOWNLOADS:
        raise ValueError("a worker fetches several blobs at a time")
    found: dict[_Key, bytes] = {}
    for key, ref in distant.items():
        url, headers = providers.address(ref, request.store)
        found[key] = small_download.download(url, headers, room=room, until=until, ca=ca, environment=environment)
        room -= len(found[key])
    return found


def _install(paths: Paths, request: Install, downloads: Mapping[_Key, bytes]) -> list[Outcome]:
    """Install all targets; raises ``ShimError``, ``OSError`` or ``ValueError`` if one is too large or fails."""
    # Only a part of all agents needs them, and an import takes too long for the event loop.
    from agent_shim.daemon import worker
    from agent_shim.host import archive
    from agent_shim.services.blobstore import blobs, providers

    limits = archive.Limits(MAX_MEMBERS, MAX_UNPACKED_BYTES, names=MAX_NAMES_BYTES, records=MAX_RECORDS)
    pieces = [worker.Piece(target, files.sibling(Path(target.path))) for target in request.targets]
    room = MAX_PACKED_BYTES
    try:
        for piece in pieces:
            ref = piece.target.source
            path = blobs.on_this_machine(ref, request.store, paths)
            with providers.open_blob(path) if path is not None else _in_memory(downloads.get(_key(ref), b"")) as file:
                room -= os.fstat(file.fileno()).st_size
                if room < 0:
                    raise ValueError("the blobs are too large")
                expected = MultipleDigest.parse(ref.digest)
                hasher = expected.hasher()
                while chunk := file.read(files.CHUNK_BYTES):
                    hasher.update(chunk)
                expected.check(hasher)
                file.seek(0)
                worker.unpack(file, piece, paths.shared_owner, limits)
            if piece.outcome.error:
                raise ValueError(piece.outcome.error)
        worker.finish(pieces)
        if any(piece.outcome.error for piece in pieces):
            raise ValueError("not all are in their places")
        return [piece.outcome for piece in pieces]
    finally:
        for piece in pieces:
            files.remove_tree(piece.temp)


def _key(ref: BlobRef) -> _Key:
    return ref.blob_id, ref.signed_url


def _in_memory(content: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("blob"), "w+b")
    file.write(content)
    file.seek(0)
    return file
