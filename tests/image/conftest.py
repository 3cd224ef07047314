"""Fixtures for the image tests: podman, the image, and a message bus that containers can reach."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.image.site import ContainerSite
from tests.support import pods
from tests.support.environment import environment
from tests.support.pods import Podman


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return pods.podman(tmp_path_factory.mktemp("podman"))


def once(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[], str]) -> str:
    """Call ``build`` in the first pytest worker that needs its result, and return the result in all workers.

    ``name`` distinguishes the results of different functions.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return build()
    built = tmp_path_factory.getbasetemp().parent / name  # a directory that all workers in this run share
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            built.write_text(build())
    return built.read_text()


@pytest.fixture(scope="session")
def base(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    return once(tmp_path_factory, "base", lambda: pods.base_image(podman, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="session")
def image(podman: Podman, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return once(tmp_path_factory, "image", lambda: pods.build(podman, base))


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
