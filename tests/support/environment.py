"""Provides the BOSH side of container tests: a bus with its other clients, a blobstore, and settings like those from a
CPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, HealthMonitor, RpcTimeoutError
from agent_shim.demo.pki import HEALTH_MONITOR, Authority
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.proxy import Proxy

AGENT: Final = "agent-of-the-image"
BLOBS: Final = "/blobs"
"""Path of the blobstore directory inside the containers."""


@dataclass(frozen=True)
class Environment:
    """The services that a container's agent talks to. Containers connect to ``proxy`` at ``address``, and ``proxy``
    forwards the connections to ``server``.
    """

    address: str
    proxy: Proxy
    server: NatsServer
    director: Director
    monitor: HealthMonitor
    scratch: Path
    timeout_s: float = field(default=60, kw_only=True)
    """How long to wait for an agent to answer and for its jobs to reach a state."""

    @property
    def blobs(self) -> Path:
        return self.scratch / "blobs"

    def settings(self, *, bootstrap: bool = True, **members: Any) -> str:
        """Return the settings that a CPI would write. With ``bootstrap`` they contain only the short-lived bootstrap
        credentials.
        """
        mbus = self.server.mbus(AGENT, bootstrap=bootstrap)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        store = {"provider": "local", "options": {"blobstore_path": BLOBS}}
        document = {
            "agent_id": AGENT,
            "vm": {"name": "c-1", "id": "c-1"},
            "networks": {name: {**one, "dns": ["192.0.2.53"]} for name, one in jobs.NETWORKS.items()},
            "disks": {"system": "", "persistent": {}},
            "env": {"bosh": {"mbus": {"urls": self._urls(), "cert": cert}, "blobstores": [store]}},
        }
        return json.dumps(document | members)

    async def replace_credentials(self) -> None:
        """Replace the bootstrap credentials with permanent ones, as the Director does on first contact.

        Afterwards the server rejects the bootstrap credentials.
        """
        mbus = self.server.mbus(AGENT)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        await self.director.run(AGENT, "update_settings", {"mbus": {"urls": self._urls(), "cert": cert}})
        await self.server.add_agent(AGENT, bootstrap=False)

    def _urls(self) -> list[str]:
        return [f"nats://{self.address}:{self.proxy.port}"]

    async def until_pong(self) -> None:
        """Send pings until the agent answers."""
        async with asyncio.timeout(self.timeout_s):
            while True:
                with contextlib.suppress(RpcTimeoutError):
                    assert await self.director.value(AGENT, "ping", timeout=0.3) == "pong"
                    return

    async def deploy(self, release: Mapping[str, Mapping[str, str | bytes]] | None = None) -> None:
        """Deploy jobs (by default one that sleeps) as the Director does, and wait until they are running."""
        spec = jobs.spec(self.blobs, release or {"sleeper": jobs.sleeper(Paths(), "sleeper")})
        await self.until_pong()
        await self.director.run(AGENT, "apply", spec)
        await self.director.run(AGENT, "start")
        await self.until_state("running")

    async def until_state(self, wanted: str) -> None:
        """Wait until the agent answers and reports the job state ``wanted``."""
        await self.until_pong()
        async with asyncio.timeout(self.timeout_s):
            while (await self.director.value(AGENT, "get_state"))["job_state"] != wanted:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def environment(
    address: str, scratch: Path, *, listen: str = "", timeout_s: float = 60
) -> AsyncIterator[Environment]:
    """Run an environment in which the agent ``AGENT`` can connect to the bus.

    Containers connect to ``address``, which may be assigned later. The bus listens on that address, or on ``listen`` if
    ``address`` belongs to another network.
    """
    authority = Authority()
    pair = authority.server(hosts=("127.0.0.1", address))
    async with NatsServer(scratch / "bus", authority, pair=pair) as server:
        await server.add_agent(AGENT)
        director, monitor = Director(poll=0.1), HealthMonitor()
        async with (
            Proxy(server.port, listen or address) as proxy,
            monitor.on(server.peer(HEALTH_MONITOR)),
            director.on(server.peer()),
        ):
            yield Environment(address, proxy, server, director, monitor, scratch, timeout_s=timeout_s)
