"""Tests a real agent's reports about disks in status, metrics, vitals and errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
import urllib.request
from typing import Any

import msgspec
import pytest

from agent_shim.demo.director import RpcRemoteError
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Marker
from tests.support.pod import PodInstance
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.root


def status(pod: PodInstance) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pod.machine.run(f"{sys.executable} -m agent_shim.cli status --json"))
    return found


async def metric(pod: PodInstance, name: str) -> float | None:
    """Return a value from the metrics page, or None if it is missing. The agent caches the page for a second."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{pod.http}/metrics", timeout=10) as page:
            return str(page.read().decode())

    found = re.search(rf"^agent_shim_{name} (\S+)$", await asyncio.to_thread(read), re.MULTILINE)
    return float(found[1]) if found else None


async def test_migration_progress_is_shown_in_status_and_metrics(pod: PodInstance) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pod.http = f"127.0.0.1:{free.getsockname()[1]}"
    for cid in ("disk-1", "disk-2"):
        pod.attach(cid)
    for number in range(1000):
        (pod.volume("disk-1") / str(number)).write_bytes(os.urandom(10_000))
    await pod.start()
    assert status(pod)["disk"] == "none"
    await pod.run("mount_disk", "disk-1")
    assert status(pod)["disk"] == "mounted"
    await pod.run("mount_disk", "disk-2")
    assert await metric(pod, "disk_migration_running") == 0

    migrating = asyncio.create_task(pod.run("migrate_disk", "disk-1", "disk-2"))
    copying = await pod.stop_copying("disk-2")
    async with asyncio.timeout(TIMEOUT_S):
        await until(lambda: re.fullmatch(r"migration, copying: \d+/1\d{7} bytes", status(pod)["disk"]))
        while not await metric(pod, "disk_migration_running"):
            await asyncio.sleep(0.1)
    ratio = await metric(pod, "disk_migration_ratio")
    assert ratio is not None
    assert 0 < ratio <= 1
    assert "migrate_disk" in status(pod)["task"]
    os.kill(copying, signal.SIGCONT)

    assert await migrating == {}
    assert status(pod)["disk"] == "mounted"
    async with asyncio.timeout(TIMEOUT_S):
        while await metric(pod, "disk_migration_running"):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("prefix", [(), ("setpriv", "--bounding-set=-all", "--")], ids=["by mount", "by link"])
async def test_vitals_include_the_persistent_disk_only_while_it_is_mounted(
    pod: PodInstance, prefix: tuple[str, ...]
) -> None:
    pod.prefix = prefix
    pod.attach("disk-1")
    await pod.start()

    for method, names in [
        ("list_disk", {"system", "ephemeral"}),
        ("mount_disk", {"system", "ephemeral", "persistent"}),
        ("unmount_disk", {"system", "ephemeral"}),
    ]:
        await pod.run(method, *(["disk-1"] if method != "list_disk" else []))
        disks = (await pod.run("get_state", "full"))["vitals"]["disk"]
        assert disks.keys() == names, method
        assert all(value["percent"].isdigit() and value["inode_percent"].isdigit() for value in disks.values())


async def test_vitals_include_a_volume_that_only_the_manifest_mounts(pod: PodInstance) -> None:
    """The Director has never requested the volume, so the agent must report it without writing to it."""
    (pod.scratch / "volume").mkdir()
    pod.seen["/var/vcap/store"] = pod.scratch / "volume"
    await pod.start()

    assert "persistent" in (await pod.run("get_state", "full"))["vitals"]["disk"]
    assert status(pod)["disk"] == "mounted"
    assert await pod.run("list_disk") == []
    assert list((pod.scratch / "volume").iterdir()) == []


async def test_start_is_refused_while_the_disk_is_missing(pod: PodInstance) -> None:
    pod.attach("disk-1")
    await pod.start()
    await pod.run("mount_disk", "disk-1")
    await pod.deploy()
    pod.kill()
    pod.start_container()
    pod.machine.run("umount /var/vcap/bosh/disks/disk-1")
    await pod.start_agent()

    reason = "disk disk-1 was mounted and is not there: no volume at /var/vcap/bosh/disks/disk-1"
    with pytest.raises(RpcRemoteError, match=reason):
        await pod.run("start")

    assert status(pod)["disk"] == reason
    assert (await pod.run("get_state"))["job_state"] == "failing"
    assert not (pod.vcap / "data/sys/run/web/web.pid").exists()


async def with_a_job_on_its_disk(pod: PodInstance) -> None:
    """Deploy a job, and make vcap the owner of the root directory of the job's disk, as many pre-start scripts do."""
    pod.attach("disk-1")
    await pod.start()
    await pod.run("mount_disk", "disk-1")
    await pod.deploy()
    pod.machine.run("chown vcap:vcap /var/vcap/store; echo kept >/var/vcap/store/kept")


@pytest.mark.attack("a job forges its disk's marker")
async def test_disk_marker_forged_by_vcap_is_ignored(pod: PodInstance) -> None:
    await with_a_job_on_its_disk(pod)
    as_vcap = "cd /var/vcap/store; setpriv --reuid=vcap --regid=vcap --clear-groups sh -ec"
    wrong = Marker("disk-9", "store"), Marker("disk-1", ""), Marker("disk-1", "store", instance="another")
    for number, forged in enumerate([*wrong, None]):
        forge = f"mv .agent_shim gone{number}"
        if forged is not None:
            text = msgspec.json.encode(forged).decode()
            forge += f"; mkdir .agent_shim; echo {shlex.quote(text)} >.agent_shim/disk.json"
        pod.machine.run(f"{as_vcap} {shlex.quote(forge)}")

        await pod.restart()

        await pod.until("running")
        assert await pod.run("list_disk") == ["disk-1"], forged
        assert pod.machine.run("cat /var/vcap/store/kept") == "kept\n"
        assert markers.read(pod.volume("disk-1")) is not None, f"root's marker is back after {forged}"


@pytest.mark.attack("a job forges its disk's marker")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Marker("disk-9", "store"), "its volume at /var/vcap/bosh/disks/disk-1 is marked as disk disk-9"),
        (Marker("disk-1", ""), "its marker says unmounted"),
        (Marker("disk-1", "store", instance="another"), "disk disk-1 belongs to another instance"),
    ],
)
async def test_wrong_disk_marker_prevents_jobs_from_starting(pod: PodInstance, wrong: Marker, reason: str) -> None:
    """If the agent started jobs without the disk, they would write to the container's own file system. Markers can be
    wrong because a job that runs as root can change them.
    """
    await with_a_job_on_its_disk(pod)
    markers.write(pod.volume("disk-1"), wrong)

    await pod.restart()

    await pod.until("failing")
    assert reason in status(pod)["disk"]
    with pytest.raises(RpcRemoteError, match=reason):
        await pod.run("start")
    assert not (pod.vcap / "data/sys/run/web/web.pid").exists()


@pytest.mark.attack("a request refers to a directory that is not a disk")
async def test_container_directory_is_not_accepted_as_a_disk(pod: PodInstance) -> None:
    """If the agent accepted a directory of the container as a disk, the store would contain the container's own files,
    and unmounting the disk would kill every job.
    """
    await pod.start()
    for place in ["/", "/run", "/dev", "/proc", "/sys/fs", "/tmp", "/var/vcap", "/var/vcap/data"]:
        await pod.run("add_persistent_disk", "disk-1", place)

        with pytest.raises(RpcRemoteError, match=f" {place} is a directory of the container itself"):
            await pod.run("mount_disk", "disk-1")

        assert await pod.run("list_disk") == []
    assert pod.machine.run("ls -A /var/vcap/store 2>/dev/null || true") == ""
