"""Tests a persistent disk under each supported CPI: attached, mounted, resized, detached, and moved to another
instance.

A real agent runs in real containers, which the CPI restarts or recreates between any two of the Director's requests.
After each request and each restart, ``list_disk`` must be correct and no file may have changed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Marker
from tests.support import cpi as cpis
from tests.support.cpi import CpiTraits
from tests.support.pod import PodInstance
from tests.support.pod import pod as made
from tests.support.volumes import fill, fingerprint
from tests.support.waiting import until

pytestmark = pytest.mark.root

WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")

OURS = [cpis.OURS, cpis.OURS_LIVE]
ALL = [cpis.DOCKER, cpis.GARDEN, cpis.WARDEN_WITH_SYSTEMD, cpis.LXD, cpis.KUBERNETES, cpis.SYKESM, cpis.SAP, *OURS]
WITH_TWO_DISKS = [cpis.DOCKER, cpis.CREATE_ENV, cpis.GARDEN, cpis.LXD, cpis.KUBERNETES, cpis.SYKESM, *OURS]
AS_VCAP = "setpriv --reuid=vcap --regid=vcap --clear-groups --"

EACH_WAY = pytest.mark.parametrize("prefix", [(), WITHOUT_CAPABILITIES], ids=["by mount", "without capabilities"])


class CpiInstance:
    """Performs the actions of a CPI and a Director on one instance, and checks the invariants after each action."""

    def __init__(self, pod: PodInstance) -> None:
        self.pod = pod
        self.cpi = pod.cpi
        self.content: dict[str, Any] = {}
        """Expected content of the disk that is mounted on the store."""
        pod.keeps_root = self.cpi.attaches == "by restart"

    @property
    def jobs_reach_disks(self) -> bool:
        """Return True if jobs can enter the store.

        SAP's CPI attaches disks in a directory that jobs cannot enter. If the container is not allowed to mount file
        systems, the store is only a link into that directory, so jobs cannot reach the disk.
        """
        return not (self.pod.prefix and self.cpi.place.startswith(cpis.BOSH))

    # --- the CPI ------------------------------------------------------------------------------------------------------

    async def create_vm(self, agent_id: str) -> None:
        """Replace the instance with a new VM, which has an empty root file system and no disk."""
        pod = self.pod
        pod.kill()
        pod.agent_id = agent_id
        pod.lose_data()
        shutil.rmtree(pod.scratch / "root")
        (pod.scratch / "root").mkdir()
        await pod.server.add_agent(agent_id)
        await pod.start()
        await pod.run("update_settings", {"trusted_certs": "", "disk_associations": []})

    async def attach(self, cid: str) -> None:
        self.pod.attach(cid)
        if self.cpi.attaches == "live":
            self.pod.deliver()
        else:
            await self.recreate_container(loses_data=self.cpi.attaches == "by recreation")

    async def detach(self, cid: str) -> None:
        self.pod.disks.remove(cid)
        if self.cpi.attaches == "live":
            self.pod.machine.run(f"umount {self.cpi.disk(cid)}")
            self.pod.deliver()
        else:
            await self.recreate_container(loses_data=self.cpi.attaches == "by recreation")

    async def recreate_container(self, *, loses_data: bool) -> None:
        """Kill the container and start another one with the files that the CPI preserves."""
        pod = self.pod
        saved = {path: raw for path in self.cpi.saves if (raw := _content(pod.machine.root / path.lstrip("/")))}
        pod.kill()
        if loses_data:
            pod.lose_data()
        await pod.start()
        for path, raw in saved.items():
            place = pod.machine.root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(raw)

    async def disrupt(self) -> None:
        """Cause an unplanned disruption. Depending on the CPI, the agent is killed, the container is restarted, or the
        node is lost.
        """
        if self.cpi.attaches == "live":
            self.pod.end_agent(signal.SIGKILL)
            await self.pod.start_agent()
        else:
            await self.recreate_container(loses_data=self.cpi.loses_data_unasked)

    # --- the Director -------------------------------------------------------------------------------------------------

    async def attach_and_mount(self, cid: str) -> None:
        """Attach and mount a disk in the Director's order (attach_disk_step.rb, mount_disk_step.rb).

        Under CPIs that attach live, the volume appears only after the Director has requested the mount.
        """
        await self.attach(cid)
        if self.cpi.tells_the_agent:
            await self.pod.run("add_persistent_disk", cid, self.cpi.hint(cid))
        mounting = asyncio.create_task(self.pod.run("mount_disk", cid))
        if self.cpi.attaches == "live":
            place = self.cpi.disk(cid)
            self.pod.machine.run(f"mkdir -p {place}; mount --bind /mnt/node/{cid} {place}")
        assert await mounting == {}

    async def unmount_and_detach(self, cid: str) -> None:
        """Unmount and detach a disk as the Director does (unmount_disk_step.rb, detach_disk_step.rb).

        A disk is unmounted only if ``list_disk`` returns it.
        """
        if cid in await self.pod.run("list_disk"):
            reply = await self.pod.run("unmount_disk", cid)
            assert reply["message"].startswith("Unmounted partition of "), reply
        await self.pod.run("remove_persistent_disk", cid)
        await self.detach(cid)

    async def check_disks(self, *listed: str) -> None:
        """Check that exactly the disks in ``listed`` are mounted, before and after an unplanned disruption.

        The first disk must be on the store and have the expected content.
        """
        await self._check_disks(*listed)
        await self.disrupt()
        await self._check_disks(*listed)

    async def _check_disks(self, *listed: str) -> None:
        assert await self.pod.run("list_disk") == list(listed)
        places = ["/var/vcap/store", "/var/vcap/store_migration_target"]
        for place, cid in zip(places, listed, strict=False):
            found = self.pod.volume(cid).stat()
            shown = self.pod.machine.run(f"stat -Lc %d:%i {place}; stat -c %F {place}").splitlines()
            assert shown[0] == f"{found.st_dev}:{found.st_ino}", f"{cid} is not on {place}"
            assert shown[1] == ("symbolic link" if self.pod.prefix else "directory")
        if listed:
            if self.jobs_reach_disks:
                self.pod.machine.run(f"{AS_VCAP} ls /var/vcap/store")
            assert fingerprint(self.pod.volume(listed[0])) == self.content


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@asynccontextmanager
async def site(scratch: Path, cpi: CpiTraits, prefix: tuple[str, ...]) -> AsyncIterator[CpiInstance]:
    async with made(scratch, cpi) as pod:
        pod.prefix = prefix
        (scratch / "disks").mkdir()
        if cpi.attaches == "live":
            pod.seen = {"/mnt/node": scratch / "disks"}
        yield CpiInstance(pod)


async def write_to_store(one: CpiInstance, cid: str, *, as_root: bool) -> None:
    """Write files with every kind of attribute that a copy must preserve. Also check that vcap can write to the store
    but cannot read the settings.
    """
    run = one.pod.machine.run
    run("mkdir /var/vcap/store/of-vcap; chown vcap:vcap /var/vcap/store/of-vcap")
    if one.jobs_reach_disks:
        run(f"{AS_VCAP} sh -ec 'cd /var/vcap/store; echo kept >of-vcap/file; df . >/dev/null'")
    run("rm -r /var/vcap/store/of-vcap")
    assert not run(f"{AS_VCAP} cat {one.cpi.settings} 2>/dev/null || true"), "credentials are closed to jobs"
    fill(one.pod.volume(cid) / "files", as_root=as_root)
    one.content = fingerprint(one.pod.volume(cid))


@EACH_WAY
@pytest.mark.parametrize("cpi", ALL, ids=str)
async def test_disk_and_its_content_move_to_a_recreated_vm(
    tmp_path: Path, cpi: CpiTraits, prefix: tuple[str, ...]
) -> None:
    async with site(tmp_path, cpi, prefix) as one:
        await one.create_vm("first")
        await one.attach_and_mount("disk-1")
        await write_to_store(one, "disk-1", as_root=not prefix)
        await one.check_disks("disk-1")
        assert await one.pod.run("mount_disk", "disk-1") == {}, "the disk is already mounted"

        await one.unmount_and_detach("disk-1")
        await one.check_disks()
        await one.create_vm("second")
        await one.attach_and_mount("disk-1")
        await one.check_disks("disk-1")


@EACH_WAY
@pytest.mark.parametrize("cpi", WITH_TWO_DISKS, ids=str)
async def test_disk_resize_survives_container_recreation_between_its_steps(
    tmp_path: Path, cpi: CpiTraits, prefix: tuple[str, ...]
) -> None:
    async with site(tmp_path, cpi, prefix) as one:
        await one.create_vm("first")
        await one.attach_and_mount("disk-1")
        await write_to_store(one, "disk-1", as_root=not prefix)

        await one.attach_and_mount("disk-2")
        await one.check_disks("disk-1", "disk-2")
        arguments = ("disk-1", "disk-2") if cpi.names_disks_to_migrate else ()
        assert await one.pod.run("migrate_disk", *arguments) == {}
        await one.check_disks("disk-2")
        assert await one.pod.run("migrate_disk", *arguments) == {}, "the disk is already migrated"
        await one.unmount_and_detach("disk-1")
        await one.check_disks("disk-2")

        assert fingerprint(one.pod.volume("disk-1")) == one.content, (
            "the old disk must stay complete until it is deleted"
        )
        assert markers.read(one.pod.volume("disk-1")) == Marker("disk-1", "")


@EACH_WAY
async def test_disk_migration_continues_after_the_container_was_killed(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    async with site(tmp_path, cpis.DOCKER, prefix) as one:
        await one.create_vm("first")
        await one.attach_and_mount("disk-1")
        for number in range(1000):
            (one.pod.volume("disk-1") / str(number)).write_bytes(os.urandom(10_000))
        one.content = fingerprint(one.pod.volume("disk-1"))
        await one.attach_and_mount("disk-2")

        migrating = asyncio.create_task(one.pod.run("migrate_disk", "disk-1", "disk-2"))
        await one.pod.stop_copying("disk-2")
        migrating.cancel()
        await one.recreate_container(loses_data=True)

        await one.check_disks("disk-1", "disk-2")
        await one.pod.run("migrate_disk", "disk-1", "disk-2")
        await one.check_disks("disk-2")


@EACH_WAY
async def test_volume_mounted_on_the_store_by_a_manifest_is_used(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    """The disk belongs to a StatefulSet, so no CPI attaches it. After the Director has unmounted the disk, the agent
    must not mount it again.
    """
    async with site(tmp_path, cpis.STATEFUL_SET, prefix) as one:
        one.pod.attach("disk-1")
        await one.create_vm("first")
        assert await one.pod.run("list_disk") == [], "the Director has not requested the mount yet"
        await one.pod.run("mount_disk", "disk-1")
        await write_to_store(one, "disk-1", as_root=not prefix)

        for loses_data in (False, True):
            await one.recreate_container(loses_data=loses_data)
            assert await one.pod.run("list_disk") == ["disk-1"]
            one.pod.machine.run("test -e /var/vcap/store/files/twin")
        await one.pod.run("unmount_disk", "disk-1")
        await one.recreate_container(loses_data=False)
        assert await one.pod.run("list_disk") == [], "the Director has unmounted the disk"
        await one.pod.run("mount_disk", "disk-1")
        assert await one.pod.run("list_disk") == ["disk-1"]
        assert fingerprint(one.pod.volume("disk-1")) == one.content


async def test_host_names_resolve_after_warden_unmounted_the_hosts_file(tmp_path: Path) -> None:
    """Warden unmounts /etc/hosts after the agent has started, which uncovers the image's own file.

    The agent must add the host name and localhost to that file, because sudo and compilations look up both names.
    """
    async with made(tmp_path, cpis.WARDEN_WITH_SYSTEMD) as pod:
        await pod.start()
        names = ("localhost", pod.machine.run("hostname").strip())
        assert pod.machine.run("! mountpoint -q /etc/hosts; getent -s hosts:files ahosts localhost").split()[0]

        await until(lambda: all(pod.machine.run(f"getent -s hosts:files ahosts {name} || true") for name in names))
