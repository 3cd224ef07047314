"""Copying of a migration, in a worker process that may take hours and be killed at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.paths import Paths
from agent_shim.host import worker_client
from agent_shim.host.worker_client import Progress
from agent_shim.services.disks.markers import OURS

Report = Callable[[Progress], None]
Copy = Callable[[Path, Path, Report], Awaitable[None]]
"""Copies the first directory to the second and reports its progress (``host.copytree``)."""

POLL_S: Final = 1.0
"""Poll interval of the progress file."""


def in_worker(paths: Paths) -> Copy:
    """Return a copy function that starts a worker; raises ``ActionError`` with the worker's text."""

    async def copy(source: Path, target: Path, report: Report) -> None:
        progress = paths.shim_run / "migration.json"
        watching = asyncio.create_task(_watch(progress, report), name="migration progress")
        try:
            await worker_client.work(worker_client.CopyTree(str(source), str(target), sorted(OURS), str(progress)))
        finally:
            watching.cancel()
            await asyncio.to_thread(progress.unlink, missing_ok=True)

    return copy


async def _watch(progress: Path, report: Report) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        with suppress(OSError, ValueError):  # not written yet, or being written
            report(msgspec.json.decode(await asyncio.to_thread(progress.read_bytes), type=Progress))
