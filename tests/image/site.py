"""Provides what the containers under test need: a message bus with its other clients, podman, and a network."""

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
from tests.support.pods import Container, ContainerNetwork, Podman
from tests.support.web import page

SETTINGS: Final = "/var/vcap/bosh/warden-cpi-agent-env.json"
AGENT_JSON: Final = "/var/vcap/bosh/agent.json"

FULL: Final = ("--cap-add=all",)
"""Podman options that grant all capabilities, as CPIs do. Unlike ``--privileged``, they do not give the container
access to the machine's devices.
"""


@dataclass(frozen=True)
class ContainerSite(Environment):
    """An environment in which tests can run containers from one image."""

    podman: Podman
    image: str
    network: ContainerNetwork

    @asynccontextmanager
    async def container(
        self, *command: str, options: tuple[str, ...] = FULL, files: dict[str, str] | None = None
    ) -> AsyncIterator[Container]:
        """Run a container that can reach the bus. Without ``files``, it has no settings."""
        self.blobs.mkdir(exist_ok=True)
        options = (f"--network={self.network.name}", f"--volume={self.blobs}:{BLOBS}:ro", *options)
        async with pods.running(self.podman, self.image, *command, options=options, files=files) as container:
            yield container


def project(directory: Path, name: str, content: str) -> None:
    """Write a file to a volume as the kubelet does for a Secret.

    The file is a symlink that leads through the ``..data`` link to a file in a newly named directory. To change the
    content, the kubelet writes a new directory and replaces ``..data``.
    """
    kept = Path(tempfile.mkdtemp(prefix="..2026_", dir=directory))
    kept.chmod(0o755)
    (kept / name).write_text(content)
    (directory / "..data_tmp").symlink_to(kept.name)
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / name).is_symlink():
        (directory / name).symlink_to(f"..data/{name}")


async def get(container: Container, path: str) -> tuple[int, str]:
    """Return the status and body of one of the agent's HTTP pages. Retry until the agent listens."""
    url = f"http://{await container.address()}:9190{path}"
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(page, url)
            except urllib.error.URLError:
                await asyncio.sleep(0.05)
