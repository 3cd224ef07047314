"""What image tests share: podman, the image, and a bus with its peers that containers reach."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_shim.demo.broker import NatsServer
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR, Authority
from tests.image import pods
from tests.image.pods import Podman
from tests.image.site import AGENT, Site
from tests.support.proxy import Proxy


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return pods.podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="session")
def image(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    return pods.build(podman, pods.base_image(podman, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="session")
def network(podman: Podman) -> Iterator[pods.Network]:
    """A network of containers that this machine is the gateway of."""
    with pods.network(podman, f"agent-shim-test-{os.getpid()}") as made:
        yield made


@pytest.fixture
async def site(podman: Podman, image: str, network: pods.Network, tmp_path: Path) -> AsyncIterator[Site]:
    authority = Authority()
    pair = authority.server(hosts=("127.0.0.1", network.gateway))
    async with NatsServer(tmp_path / "bus", authority, pair=pair) as server:
        await server.add_agent(AGENT)
        director, monitor = Director(poll=0.1), HealthMonitor()
        async with (
            Proxy(server.port, network.gateway) as proxy,
            monitor.on(server.peer(HEALTH_MONITOR)),
            director.on(server.peer()),
        ):
            yield Site(podman, image, network, proxy, server, director, monitor, tmp_path)
