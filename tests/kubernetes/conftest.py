"""Fixtures for tests with real pods: one node for all tests, and a new namespace and environment for each test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.environment import Environment, environment
from tests.support.kubernetes import node as nodes
from tests.support.kubernetes.node import FirstNode
from tests.support.kubernetes.objects import Namespace

NODE = pytest.StashKey[FirstNode]()


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> FirstNode:
    """Start the node and wait until it can run pods. The node is killed together with its namespaces after the last
    test.
    """
    made = FirstNode(nodes.here())
    request.config.stash[NODE] = made
    made.start()
    return made


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report how long the node took to start."""
    if NODE in config.stash:
        steps = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in config.stash[NODE].times.items())
        terminalreporter.write_line(f"node: {steps}")


@pytest.fixture
async def namespace(node: FirstNode, tmp_path: Path) -> AsyncIterator[Namespace]:
    """Provide a namespace for one test, and remove its pods after the test."""
    made = Namespace(node, f"test-{secrets.token_hex(4)}", tmp_path)
    await made.create()
    try:
        yield made
    finally:
        await made.clear()


@pytest.fixture
async def bosh(node: FirstNode, tmp_path: Path) -> AsyncIterator[Environment]:
    """Provide an environment with a Director that pods can reach at the node's address."""
    async with environment(nodes.ADDRESS, tmp_path) as made:
        yield made
