"""Fixtures for the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.http import BlobServer, http_server
from tests.support.world import LocalAgent
from tests.support.world import world as new_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalAgent]:
    async with new_world(tmp_path) as agent:
        yield agent


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    """Run an HTTP server that stores blobs."""
    async with http_server() as server:
        yield server
