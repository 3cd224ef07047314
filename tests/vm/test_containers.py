"""Runs the agent's image under podman on a machine that has only cgroup v2.

As under a kubelet, each container has a memory limit, and ``memory.oom.group`` is 1. The agent can change this setting
only if the container's cgroup is writable.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from agent_shim.core.paths import Paths
from tests.image.site import SETTINGS, ContainerSite
from tests.support import guest, jobs
from tests.support.environment import AGENT, environment
from tests.support.pods import Container, ContainerNetwork, Podman

pytestmark = pytest.mark.vm

LIMIT: Final = 400 << 20
"""Memory limit of a container in bytes."""
OF_KUBELET: Final = (f"--memory={LIMIT}", f"--memory-swap={LIMIT}", "--cgroup-conf=memory.oom.group=1")
WITH_WRITABLE_CGROUP: Final = {
    "privileged": "--privileged",
    "unprivileged": "--security-opt=unmask=/sys/fs/cgroup",  # containerd has cgroup_writable for this
}
EAT: Final = "/var/vcap/data/eat"
EATER: Final = f"echo $$ >$pidfile; while [ ! -e {EAT} ]; do sleep 0.2; done; rm {EAT}; exec tail /dev/zero"
"""Shell command that waits until a file exists, removes it, and then uses up all memory."""
CONFIGURATION: Final = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
"""


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ContainerSite]:
    if not guest.IMAGE.exists():
        pytest.skip(f"{guest.IMAGE} is missing: run ./dev test-vm, which passes the image to the guest")
    podman = Podman(tmp_path / "containers.conf")
    podman.config.write_text(CONFIGURATION)
    network = ContainerNetwork("host", "127.0.0.1")
    async with environment(network.gateway, tmp_path) as made:
        yield ContainerSite(**vars(made), podman=podman, image=f"{guest.IMAGE}:O", network=network)


@asynccontextmanager
async def deployed(site: ContainerSite, *options: str) -> AsyncIterator[Container]:
    """Run a container with two jobs, one of which uses up all memory when asked to. The container's volumes are those
    of a pod.
    """
    data, settings = site.scratch / "data", site.scratch / "settings.json"
    data.mkdir()
    settings.write_text(site.settings())
    volumes = (f"--volume={data}:{Paths().data}", f"--volume={settings}:{SETTINGS}:ro")
    async with site.container("/sbin/init", options=(*OF_KUBELET, *volumes, *options, "--rootfs")) as container:
        await site.deploy({name: job(name) for name in ("sleeper", "eater")})
        yield container


def job(name: str) -> dict[str, str]:
    return jobs.sleeper(Paths(), name) if name == "sleeper" else jobs.process(Paths(), name, EATER)


async def doctor(container: Container) -> str:
    """Return the output of ``agent-shim doctor``. Its exit code is ignored, because it is 1 if anything is limited."""
    return await container.exec("sh", "-c", "agent-shim doctor || true")


async def pid(container: Container, name: str) -> str:
    return await container.exec("cat", f"/var/vcap/sys/run/{name}/{name}.pid")


@pytest.mark.parametrize("tier", WITH_WRITABLE_CGROUP)
async def test_oom_kill_in_a_container_with_writable_cgroup_ends_one_process(site: ContainerSite, tier: str) -> None:
    """The agent clears memory.oom.group when it boots. The alert names the cause, and the other job keeps running."""
    async with deployed(site, WITH_WRITABLE_CGROUP[tier]) as container:
        found = await doctor(container)
        assert f"This container is {'privileged' if tier == 'privileged' else 'root with few capabilities'}." in found
        assert "version 2, without subgroups" in found
        assert f"memory {LIMIT >> 20} MiB" in found
        assert "memory.oom.group" not in found
        assert (await container.exec("cat", "/sys/fs/cgroup/memory.oom.group")).strip() == "0"
        before = {name: await pid(container, name) for name in ("sleeper", "eater")}
        await container.exec("touch", EAT)
        alert = await site.monitor.wait_for("alert", AGENT, lambda body: "eater" in body["title"], timeout=120)
        await site.until_state("running")

        assert alert.body["summary"] == "process is not running: killed by the kernel because memory ran out"
        assert await pid(container, "sleeper") == before["sleeper"]
        assert await pid(container, "eater") != before["eater"]


async def test_oom_kill_in_a_container_with_read_only_cgroup_ends_all_processes(site: ContainerSite) -> None:
    """``doctor`` reports that the agent cannot clear memory.oom.group. When the container is restarted, the jobs are
    started again.
    """
    async with deployed(site) as container:
        found = await doctor(container)
        assert f"memory {LIMIT >> 20} MiB" in found
        assert "memory.oom.group is 1" in found
        await container.status_of("touch", EAT)

        assert await container.ended() == 128 + signal.SIGKILL
        await container.start()
        await site.until_state("running")
