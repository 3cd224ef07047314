"""Tests that this agent does not share the faults that the Go agent and monit are known to have in containers. The
docstrings describe the faults. The agent runs in a container with real mounts.

The last test is not about a fault: it checks that the agent executes actions in the same order as monit.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from tests.support import jobs
from tests.support.pod import PodInstance
from tests.support.waiting import until

pytestmark = pytest.mark.root

MONIT = f"{sys.executable} -m agent_shim.cli.monit"


async def with_disks(pod: PodInstance, *cids: str) -> None:
    """Start a container and mount the disks ``cids`` one after the other. Write the first disk's name to a file on that
    disk.
    """
    for cid in cids:
        pod.attach(cid)
    (pod.volume(cids[0]) / "whose").write_text(cids[0])
    await pod.start()
    for cid in cids:
        await pod.run("mount_disk", cid)


def mounts(pod: PodInstance) -> dict[str, str]:
    """Return the names of the volumes that the agent has mounted, keyed by mount point."""
    lines = pod.machine.run("findmnt -rno TARGET,FSROOT").splitlines()
    found = [line.split() for line in lines if line.startswith("/var/vcap/store")]
    assert len(found) == len({place for place, _ in found}), "something is mounted twice"
    return {place.removeprefix("/var/vcap/"): Path(volume).name for place, volume in found}


def managed(pod: PodInstance) -> str:
    path = pod.vcap / "bosh/managed_disk_settings.json"
    return path.read_text() if path.exists() else ""


async def test_mounting_a_disk_twice_does_not_use_the_migration_target(pod: PodInstance) -> None:
    """If the Go agent gets mount_disk twice for the same disk, it also mounts the disk on the migration target."""
    await with_disks(pod, "disk-1")

    await pod.run("mount_disk", "disk-1")

    assert mounts(pod) == {"store": "disk-1"}
    assert await pod.run("list_disk") == ["disk-1"]


async def test_mounting_a_second_disk_keeps_the_first_as_the_managed_disk(pod: PodInstance) -> None:
    """The Go agent records a second disk as the managed disk when it is mounted, before anything is copied to it."""
    await with_disks(pod, "disk-1", "disk-2")

    assert mounts(pod) == {"store": "disk-1", "store_migration_target": "disk-2"}
    assert managed(pod) == "disk-1"
    await pod.restart()
    assert mounts(pod) == {"store": "disk-1", "store_migration_target": "disk-2"}


async def test_migrate_disk_mounts_the_new_disk_on_the_store(pod: PodInstance) -> None:
    """The Go agent fails in the last step of a migration, and afterwards neither disk is mounted."""
    await with_disks(pod, "disk-1", "disk-2")

    await pod.run("migrate_disk", "disk-1", "disk-2")

    assert mounts(pod) == {"store": "disk-2"}
    assert managed(pod) == "disk-2"
    assert await pod.run("list_disk") == ["disk-2"]
    assert (pod.vcap / "store/whose").read_text() == "disk-1"


async def test_unmount_disk_unmounts_the_store_and_forgets_the_disk(pod: PodInstance) -> None:
    """The Go agent unmounts the volume that the container runtime has mounted, but the store stays mounted and the disk
    stays recorded.
    """
    await with_disks(pod, "disk-1")

    await pod.run("unmount_disk", "disk-1")

    assert mounts(pod) == {}
    assert managed(pod) == ""
    assert await pod.run("list_disk") == []
    pod.machine.run("mountpoint -q /var/vcap/bosh/disks/disk-1")


async def test_disk_is_mounted_and_listed_after_a_restart(pod: PodInstance) -> None:
    """After a restart, the Go agent lists the disk but does not mount it, so the store is an empty directory in the
    container.
    """
    await with_disks(pod, "disk-1")

    await pod.restart()

    assert mounts(pod) == {"store": "disk-1"}
    assert await pod.run("list_disk") == ["disk-1"]


async def test_agent_boots_after_its_disk_was_removed(pod: PodInstance) -> None:
    """The Go agent never clears the file that names the mounted disk, so it fails at each boot once the disk has been
    removed.
    """
    pod.keeps_root = True
    await with_disks(pod, "disk-1")
    await pod.run("unmount_disk", "disk-1")
    pod.disks.clear()

    await pod.restart()

    assert await pod.run("list_disk") == []
    assert (await pod.run("get_state"))["job_state"] == "running"


async def test_sync_dns_writes_to_a_mounted_hosts_file(pod: PodInstance) -> None:
    """The kubelet mounts /etc/hosts. The Go agent fails when it tries to rename a new file to that path (EBUSY),
    so bosh-dns never sees new records.
    """
    pod.start_container()
    line = f"10.1.2.3\t{socket.gethostname()}"
    (pod.machine.root / "mnt/hosts").write_text(f"{line}\n")
    pod.machine.run("mount --bind /mnt/hosts /etc/hosts; touch /etc/other; ! mv /etc/other /etc/hosts")
    await pod.start_agent()
    records = json.dumps({"version": 3, "records": [["10.9.8.7", "neighbour.bosh"]]}).encode()
    blob = jobs.blob(pod.scratch / "blobs", records)

    assert await pod.run("sync_dns", blob["blobstore_id"], blob["sha1"], 3) == "synced"

    assert (pod.vcap / "instance/dns/records.json").read_bytes() == records
    hosts = pod.machine.run("mountpoint -q /etc/hosts; cat /etc/hosts").splitlines()
    assert "10.9.8.7 neighbour.bosh" in hosts
    assert line in hosts


async def test_uptimes_are_not_negative_under_lxcfs(pod: PodInstance) -> None:
    """lxcfs makes /proc/uptime show the container's uptime, while process start times are relative to the host's boot.
    monit subtracts one from the other and reports negative uptimes.
    """
    pod.start_container()
    (pod.machine.root / "mnt/uptime").write_text("0.50 0.50\n")
    pod.machine.run("mount --bind /mnt/uptime /proc/uptime")
    await pod.start_agent()
    await pod.deploy()

    state = await pod.run("get_state", "full")

    ages = [state["vitals"]["uptime"], *(process["uptime"] for process in state["processes"])]
    assert len(ages) == 2
    for age in ages:
        secs = age.get("secs", 0)  # The agent omits the seconds if they are 0.
        assert isinstance(secs, int)
        assert 0 <= secs < 600


SLOW_TO_STOP = """#!/bin/sh
pidfile=/var/vcap/sys/run/web/web.pid
case $1 in
start) echo $$ >$pidfile; exec sleep 1000 ;;
stop)
    touch /var/vcap/data/stopping
    while [ ! -e /var/vcap/data/go-on ]; do sleep 0.05; done
    kill $(cat $pidfile); rm -f $pidfile ;;
esac
"""


async def summary(pod: PodInstance, words: str) -> None:
    """Wait until ``monit summary`` shows ``words`` as the status of the job."""
    await until(lambda: pod.machine.run(f"{MONIT} summary | grep web").split("'web'")[1].strip() == words)


async def test_monit_start_during_a_pending_stop_is_executed_afterwards(pod: PodInstance) -> None:
    """After ``monit stop``, the stop is pending until the stop program has exited. If the operator runs ``monit start``
    in the meantime, monit starts the service after the stop.
    """
    files = {**jobs.sleeper(Paths(), "web"), "bin/ctl": SLOW_TO_STOP}
    await pod.start()
    await pod.deploy({"web": files})
    await summary(pod, "running")
    pidfile = pod.vcap / "data/sys/run/web/web.pid"
    before = pidfile.read_text()

    pod.machine.run(f"{MONIT} stop web")
    await summary(pod, "not monitored - stop pending")
    await until((pod.data / "stopping").exists)
    pod.machine.run(f"{MONIT} start web")
    assert pidfile.read_text() == before
    assert (pod.machine.root / "proc" / before.strip()).exists()
    (pod.data / "go-on").touch()

    await summary(pod, "running")
    assert pidfile.read_text() != before
