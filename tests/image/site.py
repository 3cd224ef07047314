"""Where containers are started: a bus with its peers, a network, and a small release to deploy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_shim.demo.broker import NatsServer
from agent_shim.demo.director import Director, HealthMonitor, RpcTimeoutError
from agent_shim.paths import Paths
from tests.image import pods
from tests.image.pods import Container, Network, Podman
from tests.support import jobs
from tests.support.proxy import Proxy

AGENT: Final = "agent-of-the-image"
SETTINGS: Final = "/var/vcap/bosh/warden-cpi-agent-env.json"
AGENT_JSON: Final = "/var/vcap/bosh/agent.json"
BLOBS: Final = "/blobs"
"""Where the containers see the directory of the blobstore."""

FULL: Final = ("--cap-add=all",)
"""As near to ``--privileged`` as matters: CPIs give all capabilities; the devices of the machine stay out."""


@dataclass(frozen=True)
class Site:
    """``container`` starts one; what it is given to read and what it says goes over ``server``."""

    podman: Podman
    image: str
    network: Network
    proxy: Proxy
    server: NatsServer
    director: Director
    monitor: HealthMonitor
    scratch: Path

    @property
    def blobs(self) -> Path:
        return self.scratch / "blobs"

    @asynccontextmanager
    async def container(
        self, *command: str, options: tuple[str, ...] = FULL, files: dict[str, str] | None = None
    ) -> AsyncIterator[Container]:
        """A container without settings yet, on the network of the bus."""
        self.blobs.mkdir(exist_ok=True)
        options = (f"--network={self.network.name}", f"--volume={self.blobs}:{BLOBS}:ro", *options)
        async with pods.running(self.podman, self.image, *command, options=options, files=files) as container:
            yield container

    def settings(self, *, bootstrap: bool = True, **members: Any) -> str:
        """What a CPI would write; ``bootstrap``: with the credentials that are for the first contact alone."""
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
        """What follows the first contact: credentials to stay; those of the settings are not let in any more."""
        mbus = self.server.mbus(AGENT)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        await self.director.run(AGENT, "update_settings", {"mbus": {"urls": self._urls(), "cert": cert}})
        await self.server.add_agent(AGENT, bootstrap=False)

    def _urls(self) -> list[str]:
        return [f"nats://{self.network.gateway}:{self.proxy.port}"]

    async def until_pong(self) -> None:
        """Ask until the agent answers."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(RpcTimeoutError):
                    assert await self.director.value(AGENT, "ping", timeout=0.5) == "pong"
                    return

    async def deploy(self, release: Mapping[str, Mapping[str, str | bytes]] | None = None) -> None:
        """Deploy jobs (else one that sleeps) as the Director does, until they run."""
        spec = jobs.spec(self.blobs, release or {"sleeper": jobs.sleeper(Paths(), "sleeper")})
        await self.until_pong()
        await self.director.run(AGENT, "apply", spec)
        await self.director.run(AGENT, "start")
        await self.until_state("running")

    async def until_state(self, wanted: str) -> None:
        """Until the jobs are so; the first request after a restart must not be one that nobody hears."""
        await self.until_pong()
        async with asyncio.timeout(60):
            while (await self.director.value(AGENT, "get_state"))["job_state"] != wanted:
                await asyncio.sleep(0.05)


def project(directory: Path, name: str, content: str) -> None:
    """Show a file in a directory as the kubelet does with Secrets: behind a link that is swapped when it changes."""
    kept = Path(tempfile.mkdtemp(prefix="..2026_", dir=directory))
    kept.chmod(0o755)
    (kept / name).write_text(content)
    (directory / "..data_tmp").symlink_to(kept.name)
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / name).is_symlink():
        (directory / name).symlink_to(f"..data/{name}")


async def get(container: Container, path: str) -> tuple[int, str]:
    """Status and body of a page of the agent; asks again until somebody listens."""
    url = f"http://{await container.address()}:9190{path}"

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(ask)
            except urllib.error.URLError:
                await asyncio.sleep(0.05)
