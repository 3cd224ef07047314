"""Copying of a migration, in a worker process that may take hours and be killed at any time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from agent_shim.bulk import workers
from agent_shim.bulk.protocol import CopyTree, Report
from agent_shim.services.disks.markers import OURS

Copy = Callable[[Path, Path, Report], Awaitable[None]]
"""Copies the first directory to the second and reports its progress (``bulk.copytree``)."""


async def in_worker(source: Path, target: Path, report: Report) -> None:
    """Copy in a worker; raises ``ActionError`` with its text."""
    await workers.work(CopyTree(str(source), str(target), sorted(OURS)), report=report)
