"""The surroundings of containers: an environment, podman, and a network that connects the two."""

from __future__ import annotations

import asyncio
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support import pods
from tests.support.environment import BLOBS, Environment
from tests.support.pods import Container, Network, Podman
from tests.support.web import page

SETTINGS: Final = "/var/vcap/bosh/warden-cpi-agent-env.json"
AGENT_JSON: Final = "/var/vcap/bosh/agent.json"

FULL: Final = ("--cap-add=all",)
"""As close to ``--privileged`` as matters, because CPIs grant all capabilities.

Devices of the machine are not passed.
"""


@dataclass(frozen=True)
class Site(Environment):
    """Surroundings in which ``container`` starts a container."""

    podman: Podman
    image: str
    network: Network

    @asynccontextmanager
    async def container(
        self, *command: str, options: tuple[str, ...] = FULL, files: dict[str, str] | None = None
    ) -> AsyncIterator[Container]:
        """Run a container on the network of the bus, initially without settings."""
        self.blobs.mkdir(exist_ok=True)
        options = (f"--network={self.network.name}", f"--volume={self.blobs}:{BLOBS}:ro", *options)
        async with pods.running(self.podman, self.image, *command, options=options, files=files) as container:
            yield container


def project(directory: Path, name: str, content: str) -> None:
    """Make a file visible in a directory as the kubelet does for Secrets: through a link that is swapped when it
    changes.
    """
    kept = Path(tempfile.mkdtemp(prefix="..2026_", dir=directory))
    kept.chmod(0o755)
    (kept / name).write_text(content)
    (directory / "..data_tmp").symlink_to(kept.name)
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / name).is_symlink():
        (directory / name).symlink_to(f"..data/{name}")


async def get(container: Container, path: str) -> tuple[int, str]:
    """Return status and body of a page of the agent, retrying until the port is open."""
    url = f"http://{await container.address()}:9190{path}"
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(page, url)
            except urllib.error.URLError:
                await asyncio.sleep(0.05)
