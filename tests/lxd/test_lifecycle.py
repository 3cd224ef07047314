"""Tests the lifecycle of a VM that the LXD CPI creates from our stemcell, in a privileged and an unprivileged
container.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.lxd.cpi import Lxc, LxdCpi
from tests.support.environment import AGENT, BLOBS, Environment

pytestmark = pytest.mark.lxd

PRIVILEGED = {"privileged": "true", "unprivileged": "false"}


async def create(cpi: LxdCpi, bosh: Environment, stemcell: str, kind: str, ip: str) -> str:
    """Create a VM as a Director does."""
    network = {"type": "manual", "ip": ip, "netmask": "255.255.255.0", "gateway": "10.245.0.1", "dns": ["10.245.0.1"]}
    properties: dict[str, Any] = {
        "ephemeral_disk": 500,
        "instance_type": "c1-m2",
        "config": {"security.privileged": PRIVILEGED[kind]},
        "devices": {"blobs": {"type": "disk", "source": str(bosh.blobs), "path": BLOBS}},
    }
    env = json.loads(bosh.settings())["env"]
    networks = {"default": {**network, "default": ["dns", "gateway"], "cloud_properties": {}}}
    return await asyncio.to_thread(cpi.create_vm, AGENT, stemcell, properties, networks, env)


def doctor(lxc: Lxc, vm: str) -> dict[str, Any]:
    """Return the ``agent-shim doctor`` report. Its exit code is ignored, because it is 1 if the report contains
    errors.
    """
    found: dict[str, Any] = json.loads(lxc("exec", vm, "--", "sh", "-c", "agent-shim doctor --json || test $? = 1"))
    return found


@pytest.mark.parametrize(("kind", "ip"), [("unprivileged", "10.245.0.20"), ("privileged", "10.245.0.21")])
async def test_lxd_vm_keeps_jobs_and_files_through_its_lifecycle(
    lxc: Lxc, cpi: LxdCpi, stemcell: str, bosh: Environment, kind: str, ip: str
) -> None:
    def inside(vm: str, *command: str) -> str:
        return lxc("exec", vm, "--", *command)

    vm = await create(cpi, bosh, stemcell, kind, ip)
    await bosh.deploy()
    state = await bosh.director.value(AGENT, "get_state", "full")
    assert state["vitals"]["uptime"].get("secs", 0) >= 0
    assert all(process["uptime"].get("secs", 0) >= 0 for process in state["processes"])
    # LXD does not mount /dev/shm, so the agent must mount it. Otherwise, semaphores would fail.
    inside(vm, "python3", "-c", "import multiprocessing; multiprocessing.Lock()")

    # The CPI sets LXD limits from the instance type. The doctor must suggest LXD's configuration keys, not other
    # container runtimes' options.
    assert lxc("config", "get", vm, "limits.memory").strip() in {"2048MB", "2048MiB"}
    report = doctor(lxc, vm)
    assert report["tier"].startswith("unprivileged: root of a user namespace" if kind == "unprivileged" else "priv")
    if "lxcfs" in inside(vm, "cat", "/proc/mounts"):  # with lxcfs, /proc/meminfo shows the container's memory
        assert "the host's" not in str(report)
    assert not re.search("Ulimits|ShmSize|Memory: BYTES|ReadonlyRootfs|bosh recreate", str(report))

    # The CPI kills the container to attach a disk. The agent then starts the jobs without a request, but mounts the
    # disk only when the Director requests it.
    disk = await asyncio.to_thread(cpi.create_disk, 200)
    hint = await asyncio.to_thread(cpi.attach_disk, vm, disk)
    await bosh.until_state("running")
    await bosh.director.run(AGENT, "add_persistent_disk", disk, hint)
    await bosh.director.run(AGENT, "mount_disk", disk)
    await asyncio.to_thread(inside, vm, "touch", "/var/vcap/store/kept")

    # After a reboot, the agent must mount the disk and start the jobs without the Director.
    await asyncio.to_thread(cpi.reboot_vm, vm)
    await bosh.until_state("running")
    assert await bosh.director.run(AGENT, "list_disk") == [disk]
    await asyncio.to_thread(inside, vm, "test", "-e", "/var/vcap/store/kept")
    assert "waiting until another agent ends" not in inside(vm, "sh", "-c", "cat /var/vcap/bosh/log/*")

    # LXD stops a container by sending SIGPWR. The agent must then drain and stop the jobs.
    await asyncio.to_thread(lxc, "stop", vm)
    await asyncio.to_thread(lxc, "start", vm)
    await bosh.until_state("running")
    assert "all jobs stopped in order" in inside(vm, "sh", "-c", "cat /var/vcap/bosh/log/*")
    assert "started" not in inside(vm, "ls", "/var/vcap"), "nothing runs the CPI's rc.local"

    # The files on the disk must survive when the VM is deleted and created again.
    await asyncio.to_thread(cpi.delete_vm, vm)
    vm = await create(cpi, bosh, stemcell, kind, ip)
    await bosh.until_pong()
    hint = await asyncio.to_thread(cpi.attach_disk, vm, disk)
    await bosh.until_pong()
    await bosh.director.run(AGENT, "add_persistent_disk", disk, hint)
    await bosh.director.run(AGENT, "mount_disk", disk)
    await bosh.deploy()
    await asyncio.to_thread(inside, vm, "test", "-e", "/var/vcap/store/kept")

    # The Director stops the jobs before it detaches the disk. They must stay stopped in the restarted container.
    await bosh.director.run(AGENT, "stop")
    await bosh.director.run(AGENT, "unmount_disk", disk)
    await bosh.director.run(AGENT, "remove_persistent_disk", disk)
    await asyncio.to_thread(cpi.detach_disk, vm, disk)
    await bosh.until_pong()
    assert await bosh.director.run(AGENT, "list_disk") == []
    assert (await bosh.director.value(AGENT, "get_state"))["job_state"] == "stopped"
    await asyncio.to_thread(cpi.delete_vm, vm)
