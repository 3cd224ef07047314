"""Fixtures for tests of a whole agent process, and for blob tests.

Each agent has its own bus and Director. Blob tests get a directory tree and an HTTP server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.host import process
from tests.support.http import BlobServer, http_server
from tests.support.instance import COMMAND, RunningAgent, world


@pytest.fixture
async def instance() -> AsyncIterator[RunningAgent]:
    """Provide an instance whose agent has not been started yet."""
    async with world(COMMAND, poll=0.01) as made:
        yield made


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Provide a scratch tree that has the directories for blobs and bundles."""
    paths = Paths(tmp_path / "vcap")
    for directory in (paths.tmp, paths.blobs, paths.sensitive_blobs, paths.data_jobs, paths.data_packages):
        directory.mkdir(parents=True)
    return paths


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    """Provide an HTTP server for blobs."""
    async with http_server() as server:
        yield server


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[process.Process]:
    """Provide a list of all processes that the test has started through ``process.spawn``."""
    found: list[process.Process] = []
    honest = process.spawn

    def spawn(*arguments: object, **options: object) -> process.Process:
        found.append(honest(*arguments, **options))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(process, "spawn", spawn)
    return found
