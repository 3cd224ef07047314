"""Pods of deploy/kubernetes, run by ``podman kube play`` as far as that goes.

It honours commands, users, capabilities, read-only root file systems, ConfigMaps, host paths and restarts. What it does
not do the tests do in its place: volumes get the group of the pod, the preStop hook is called by hand.
"""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.image import pods
from tests.image.pods import Container, Podman
from tests.image.test_manifests import DEPLOY, kustomized

pytestmark = pytest.mark.image

EXAMPLE: Final = "localhost/agent-shim/example"
LAST_WORDS: Final = ("/opt/agent_shim/bin/agent-shim", "drain", "--timeout", "50")

TIERS = {"base": "0", "privileged": "0", "restricted": "1000"}
"""Overlays, and the user that the agent is in them."""


@pytest.fixture(scope="module")
def example(podman: Podman, image: str) -> str:
    podman("build", "--quiet", f"--build-arg=IMAGE={image}", "--tag", EXAMPLE, str(DEPLOY / "example"))
    return EXAMPLE


def playable(name: str, scratch: Path) -> tuple[str, dict[str, Any]]:
    """What ``kube play`` reads of an overlay, volumes below ``scratch``; and the pod in it."""
    documents = list(yaml.safe_load_all(kustomized(name)))
    owner = next(document for document in documents if document["kind"] == "StatefulSet")
    template, claims = owner["spec"]["template"], owner["spec"]["volumeClaimTemplates"]
    metadata = {**template["metadata"], "name": f"shim-{name}-{os.getpid()}"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    group = pod["spec"].get("securityContext", {}).get("fsGroup", 0)
    kept = [volume for volume in pod["spec"]["volumes"] if "emptyDir" not in volume]
    made = [volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
    for volume in [*made, *(claim["metadata"]["name"] for claim in claims)]:
        path = scratch / volume
        path.mkdir()
        os.chown(path, 0, group)
        path.chmod(0o2775)
        kept.append({"name": volume, "hostPath": {"path": str(path), "type": "Directory"}})
    pod["spec"]["volumes"] = kept
    for container in pod["spec"]["containers"]:
        # podman would open the ports on this machine too, where somebody else may have them.
        for member in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
            container.pop(member)
    maps = [document for document in documents if document["kind"] == "ConfigMap"]
    return yaml.safe_dump_all([*maps, pod]), pod


@asynccontextmanager
async def played(podman: Podman, network: pods.Network, name: str, scratch: Path) -> AsyncIterator[Container]:
    """The container of an overlay's pod, for the length of the block."""
    text, pod = playable(name, scratch)
    manifest = scratch / "pod.yaml"
    manifest.write_text(text)
    container = Container(podman, f"{pod['metadata']['name']}-instance")
    await asyncio.to_thread(podman, "kube", "play", "--network", network.name, str(manifest))
    try:
        yield container
    finally:
        print(await asyncio.to_thread(container.logs))  # noqa: T201 - pytest shows it when the test fails
        await asyncio.to_thread(podman.run, "pod", "rm", "--force", "--time", "0", pod["metadata"]["name"])
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                await asyncio.to_thread(podman.run, "volume", "rm", volume["configMap"]["name"])


async def answer(container: Container, port: int, path: str) -> str:
    """A page of the pod, asked for until it is there."""
    url = f"http://{await address(container)}:{port}{path}"

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=5) as got:
            return str(got.read().decode())

    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(ask)
            except (urllib.error.URLError, ConnectionError):
                await asyncio.sleep(0.1)


async def address(container: Container) -> str:
    """The pod's: as its container sees it."""
    return (await container.exec("hostname", "-I")).split()[0]


async def user_of(container: Container, words: str) -> str:
    """The number of the user whose process has these words in its command line."""
    pid = (await container.exec("pgrep", "--full", words)).strip()
    return (await container.exec("stat", "--format=%u", f"/proc/{pid}")).strip()


@pytest.mark.parametrize(("name", "user"), TIERS.items())
async def test_a_job_answers_in_every_tier(
    podman: Podman, example: str, network: pods.Network, tmp_path: Path, name: str, user: str
) -> None:
    """Ready means that the job answers; the hook drains it, and the container then ends well."""
    async with played(podman, network, name, tmp_path) as container:
        assert await answer(container, 9190, "/readyz") == "jobs are running\n"
        assert await answer(container, 8080, "/") == "hello from hello\n"
        assert (await user_of(container, "http.server"), await user_of(container, "bin/bosh-agent")) == ("1000", user)

        assert await container.exec(*LAST_WORDS) == "all jobs stopped in order\n"
        assert (tmp_path / "store/hello/starts.txt").read_text() == "prepared\ndrained\n"


async def test_a_container_that_dies_comes_back_with_its_job(
    podman: Podman, example: str, network: pods.Network, tmp_path: Path
) -> None:
    """The restart policy starts it again, and nobody has to ask for the job."""
    async with played(podman, network, "base", tmp_path) as container:
        assert await answer(container, 8080, "/starts.txt") == "prepared\n"
        pid = int(await asyncio.to_thread(podman, "inspect", "--format", "{{.State.Pid}}", container.name))
        os.kill(pid, 9)
        async with asyncio.timeout(60):
            while await container.status_of("agent-shim", "probe", "ready") != 0:
                await asyncio.sleep(0.1)

        assert await answer(container, 8080, "/") == "hello from hello\n"
