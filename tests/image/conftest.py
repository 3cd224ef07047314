"""Fixtures for the image tests: podman, the image, and a message bus that containers can reach."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.image.site import ContainerSite
from tests.support import pods
from tests.support.environment import environment
from tests.support.pods import Podman


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return pods.podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="session")
def base(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    return pods.base_image(podman, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def image(podman: Podman, base: str) -> str:
    return pods.build(podman, base)


@pytest.fixture(scope="session")
def network(podman: Podman) -> Iterator[pods.ContainerNetwork]:
    """Provide a container network whose gateway is this machine."""
    with pods.network(podman, f"agent-shim-test-{os.getpid()}") as made:
        yield made


@pytest.fixture
async def site(
    podman: Podman, image: str, network: pods.ContainerNetwork, tmp_path: Path
) -> AsyncIterator[ContainerSite]:
    async with environment(network.gateway, tmp_path) as made:
        yield ContainerSite(**vars(made), podman=podman, image=image, network=network)
