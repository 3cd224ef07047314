"""Tests persistent disks on real volumes, which are bind-mounted, linked if the agent has no capabilities, or mounted
by a manifest.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_shim.actions import disks as actions
from agent_shim.bulk import copytree
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.settings import DiskAssociation
from agent_shim.host import files, mounts, volumes
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import OURS, Marker
from tests.support.machine import revealing
from tests.support.volumes import (
    Asked,
    InstanceWithVolumes,
    alone,
    by,
    drop_capabilities,
    fill,
    fingerprint,
    holding,
    mount_ext4,
    mount_overlay,
    mount_tmpfs,
)

pytestmark = pytest.mark.root

Maker = Callable[[Path], object]


def ext4(point: Path) -> None:
    mount_ext4(point, point.with_suffix(".image"), size=64 << 20)


def overlay(point: Path) -> None:
    mount_overlay(point, mount_tmpfs(point.with_suffix(".layers")))


def subpath(point: Path) -> None:
    """Mount a directory in a larger volume, as Kubernetes does for a subPath."""
    inside = mount_tmpfs(point.with_suffix(".whole")) / "instance-0"
    inside.mkdir()
    point.mkdir()
    mounts.bind(inside, point)


KINDS = pytest.mark.parametrize("make", [mount_tmpfs, ext4, overlay, subpath])
"""The kinds of volumes to test. They are mounted at paths that contain spaces."""


def by_mounts(scratch: Path) -> InstanceWithVolumes:
    return InstanceWithVolumes(scratch, bind=None, system=True)


def by_links(scratch: Path) -> InstanceWithVolumes:
    return InstanceWithVolumes(scratch, bind=False)


# --- complete scenarios -----------------------------------------------------------------------------------------------


def mounted_at(place: Path) -> int:
    points = [line.split()[4] for line in mounts.MOUNTINFO.read_text().splitlines()]
    return points.count(str(place).replace(" ", r"\040"))


async def resize(instance: InstanceWithVolumes, between: Callable[[], None], *, as_root: bool) -> None:
    """Resize a disk as a Director does. Call ``between`` before and after each request."""
    agent: Any = Asked(instance)
    await actions.mount_disk(agent, "a")
    fill(instance.paths.store / "files", as_root=as_root)
    wanted = fingerprint(instance.paths.store)
    for request, arguments, listed in [
        (actions.add_persistent_disk, ["b", str(instance.volume("b"))], ["a"]),
        (actions.mount_disk, ["b"], ["a", "b"]),
        (actions.migrate_disk, ["a", "b"], ["b"]),
        (actions.remove_persistent_disk, ["a"], ["b"]),
    ]:
        between()
        agent = Asked(instance)
        await request(agent, *arguments)
        assert await actions.list_disk(agent) == listed
        assert fingerprint(instance.paths.store) == wanted, request
        assert mounted_at(instance.paths.store) <= 1, request  # A second mount would cover the first.
        between()
        assert await actions.list_disk(Asked(instance)) == listed
        assert fingerprint(instance.paths.store) == wanted
    assert fingerprint(instance.volume("a")) == wanted


def nothing(_: InstanceWithVolumes) -> None:
    """Do nothing to the container, as under Warden, which attaches disks live."""


@KINDS
@pytest.mark.parametrize("between", [nothing, InstanceWithVolumes.start_agent, InstanceWithVolumes.remake_container])
@pytest.mark.parametrize("way", [by_mounts, by_links])
@alone
async def test_disk_resize_with_mounts_keeps_all_files(
    tmp_path: Path,
    make: Maker,
    between: Callable[[InstanceWithVolumes], None],
    way: Callable[[Path], InstanceWithVolumes],
) -> None:
    instance = way(tmp_path)
    instance.attach("a", make)
    instance.attach("b", make)
    del instance.persistent["b"]

    def happens() -> None:
        between(instance)
        if instance.paths.store.exists() and between is not nothing:
            # A CPI that restarts the agent or recreates the container also lists the new disk in the settings. Under
            # Warden, the disk is attached while the agent runs, and only the disk hint names it.
            instance.persistent["b"] = str(instance.volume("b"))

    # Some overlay file systems do not support attributes that only root can set.
    await resize(instance, happens, as_root=make is not overlay)


@KINDS
@alone
async def test_disk_resize_works_without_any_capability(tmp_path: Path, make: Maker) -> None:
    instance = InstanceWithVolumes(tmp_path, bind=None)
    instance.attach("a", make)
    instance.attach("b", make)
    drop_capabilities()

    await resize(instance, instance.start_agent, as_root=False)
    assert instance.paths.store.is_symlink()


@alone
async def test_disk_resize_works_as_an_ordinary_user(tmp_path: Path) -> None:
    for path in [tmp_path, *tmp_path.parents]:
        if path.owner() == "root" and not path.stat().st_mode & 0o005:
            path.chmod(0o755)
    closed, aside, back = revealing(tmp_path, tmp_path)
    cover = f"for place in {closed}; do mount -t tmpfs -o mode=0755 tmpfs $place; done"
    subprocess.run(["sh", "-ec", f"{aside}\n{cover}\n{back}"], check=True)  # noqa: ASYNC221 - no other task runs
    os.chown(tmp_path, 1000, 1000)
    os.setgid(1000)
    os.setuid(1000)
    instance = InstanceWithVolumes(tmp_path, bind=None)
    instance.attach("a")
    instance.attach("b")

    await resize(instance, instance.start_agent, as_root=False)
    assert instance.paths.store.is_symlink()


# --- bind mounts ------------------------------------------------------------------------------------------------------


def test_new_volume_gets_the_same_mode_as_a_new_file_system(tmp_path: Path) -> None:
    """The provisioner may have created the volume with a mode that denies access to the jobs' users. The agent
    changes the mode only once so that a job can restrict it later.
    """
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o750)
    # The directory exists already when the agent does this, because acquiring the lease creates it.
    (volume / markers.DIRECTORY).mkdir(mode=0o700)
    markers.write(volume, Marker("a"))
    assert stat.S_IMODE(volume.stat().st_mode) == 0o755

    volume.chmod(0o700)
    markers.write(volume, Marker("a", "store"))
    assert stat.S_IMODE(volume.stat().st_mode) == 0o700


@pytest.mark.attack("a request refers to a directory that is not a disk")
@by("mounts")
async def test_plain_directory_is_not_accepted_as_a_volume(instance: InstanceWithVolumes) -> None:
    """A directory in the container's own file system is rejected, because files in it would be lost with the
    container.
    """
    place = Path("/usr/share")
    instance.persistent["a"] = str(place)

    with pytest.raises(ActionError, match=f"nothing is mounted at {place}"):
        await instance.disks.mount("a")


def with_node_directory(scratch: Path, *, bind: bool) -> tuple[InstanceWithVolumes, Path]:
    """Return an instance, and the node's directory on which a CPI will mount disk ``a``.

    Until the CPI has finished attaching the disk live, the instance sees this directory instead of the disk.
    """
    instance = InstanceWithVolumes(scratch, bind=bind, system=True)
    on_node = mount_tmpfs(scratch / "node/disks") / "a"
    on_node.mkdir()
    instance.persistent["a"] = str(on_node)
    return instance, on_node


@pytest.mark.attack("a request refers to a directory that is not a disk")
@pytest.mark.parametrize("bind", [True, False])
@alone
async def test_plain_directory_below_a_mount_is_not_accepted_as_a_volume(tmp_path: Path, bind: bool) -> None:
    """While a CPI attaches a disk to a running VM, the instance sees the plain directory between mkdir and mount. Files
    written to it would stay on the node.
    """
    instance, on_node = with_node_directory(tmp_path, bind=bind)

    with pytest.raises(ActionError, match=f"nothing is mounted at {on_node}"):
        await instance.disks.mount("a")
    assert not list(on_node.iterdir())
    assert await instance.disks.list() == []

    mount_tmpfs(on_node)
    await instance.disks.mount("a")
    instance.write("data", "of a job")
    assert await instance.disks.list() == ["a"]
    if bind:
        mounts.unmount(instance.paths.store)
    mounts.unmount(on_node)
    assert not list(on_node.iterdir())


@pytest.mark.parametrize("bind", [True, False])
@alone
async def test_disk_whose_mount_disappeared_is_reported_as_missing(tmp_path: Path, bind: bool) -> None:
    """When the mount disappears, the node's directory underneath becomes visible. Jobs must not be started while the
    store shows that directory.
    """
    instance, on_node = with_node_directory(tmp_path, bind=bind)
    mount_tmpfs(on_node)
    await instance.disks.mount("a")
    if bind:
        mounts.unmount(instance.paths.store)
    mounts.unmount(on_node)

    await instance.disks.recover()

    assert await instance.disks.problem() == f"disk a was mounted and is not there: no volume at {on_node}"
    assert await instance.disks.list() == []


@alone
async def test_disk_links_point_only_to_mounted_directories(tmp_path: Path) -> None:
    instance, on_node = with_node_directory(tmp_path, bind=True)
    instance.paths.dynamic_disks.mkdir()
    wanted = [DiskAssociation(cid="a", name="data")]

    with pytest.raises(ActionError, match=f"nothing is mounted at {on_node}"):
        await instance.disks.add_dynamic("a", str(on_node))
    with pytest.raises(ActionError, match=f"nothing is mounted at {on_node}"):
        await instance.disks.associate(wanted)
    mount_tmpfs(on_node)
    await instance.disks.add_dynamic("a", str(on_node))
    await instance.disks.associate(wanted)

    assert (instance.paths.dynamic_disks / "a").readlink() == on_node
    assert (instance.paths.instance_disks / "data").readlink() == on_node
    assert instance.disks.dynamic_places() == {"a": on_node}
    mounts.unmount(on_node)
    assert instance.disks.dynamic_places() == {}, "the reported usage would be that of the directory below"


@by("mounts")
async def test_mount_options_from_the_settings_are_set(instance: InstanceWithVolumes) -> None:
    instance.env = {"persistent_disk_mount_options": ["noexec", "noatime", "data=writeback"]}
    instance.attach("a")

    await instance.disks.mount("a")

    mount = mounts.mount_of(instance.paths.store)
    assert mount is not None
    assert {"noexec", "noatime"} <= mount.options


@by("mounts")
async def test_disk_is_read_only_while_it_is_migrated(instance: InstanceWithVolumes) -> None:
    await instance.mount("a", "b")
    said: list[str] = []

    async def copy(source: Path, target: Path, report: object) -> list[str]:
        try:
            instance.write("late", "x")
        except OSError as exc:
            said.append(errno.errorcode[exc.errno or 0])
        raise HostError("cut off")

    instance.copy = copy
    with pytest.raises(HostError, match="cut off"):
        await instance.disks.migrate("a", "b")

    assert said == ["EROFS"]
    instance.write("after", "x")


@by("mounts")
async def test_unmount_names_a_process_that_uses_a_bind_mounted_disk(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    mount_tmpfs(instance.paths.store / "nested")

    with holding(instance.paths.store, "cwd") as program, pytest.raises(ActionError) as caught:
        await instance.disks.unmount("a")

    assert f"pid {program.pid} (" in str(caught.value)
    assert "works in /var/vcap/store" in str(caught.value)
    assert "tmpfs is mounted on /var/vcap/store/nested" in str(caught.value)
    assert await instance.disks.list() == ["a"]


def mounted_on(place: Path) -> int:
    return sum(mount.point == place for mount in mounts.mounts())


# --- manifest that mounts the volume on the store ---------------------------------------------------------------------


def manifest(instance: InstanceWithVolumes) -> None:
    """Mount disk ``a`` on the store, as a kubelet does for a StatefulSet. Use the store's path as the disk's hint."""
    mounts.bind(instance.volume("a"), instance.paths.store)
    instance.persistent["a"] = str(instance.paths.store)


@by("mounts")
async def test_volume_mounted_on_the_store_is_used_for_a_disk_without_a_hint(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    manifest(instance)
    instance.persistent["a"] = None

    await instance.disks.mount("a")

    assert await instance.disks.list() == ["a"]
    assert instance.marker("a") == Marker("a", "store")


@by("mounts")
async def test_disk_mounted_by_a_manifest_can_be_migrated(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.attach("b")
    manifest(instance)
    await instance.disks.mount("a")
    fill(instance.paths.store / "files", as_root=True)
    wanted = fingerprint(instance.paths.store)
    await instance.disks.mount("b")

    await instance.disks.migrate("a", "b")

    for _ in range(2):
        assert await instance.disks.list() == ["b"]
        assert volumes.shows(instance.paths.store, instance.volume("b"))
        assert fingerprint(instance.paths.store) == wanted
        assert instance.marker("a") == Marker("a", "")
        instance.remake_container()
        manifest(instance)


@by("mounts")
async def test_interrupted_disk_swap_over_a_manifest_mount_is_completed(instance: InstanceWithVolumes) -> None:
    """The agent was killed after it had copied the files, but before it mounted the new disk at the store. The test
    writes the markers as they were at that moment.
    """
    for cid in "ab":
        instance.attach(cid)
    manifest(instance)
    markers.write(instance.volume("a"), Marker("a", "store"))
    markers.write(instance.volume("b"), Marker("b", "store", source="a", generation=1))

    await instance.disks.recover()

    assert await instance.disks.list() == ["b"]
    assert await instance.disks.problem() == ""
    assert instance.marker("a") == Marker("a", "")
    assert mounted_on(instance.paths.store) == 2, "the agent must not remove the manifest's mount"


@pytest.mark.parametrize("read_only", [False, True])
@alone
async def test_unmounted_disk_is_not_listed_although_the_manifest_mounts_it(tmp_path: Path, read_only: bool) -> None:
    """The container is not allowed to unmount what the manifest has mounted. The agent must therefore record in the
    disk's marker that the Director has unmounted the disk.
    """
    instance = InstanceWithVolumes(tmp_path, bind=False)
    instance.attach("a", mount_tmpfs)
    mounts.bind(instance.volume("a"), instance.paths.store)
    if read_only:
        for place in (instance.volume("a"), instance.paths.store):
            mounts.bind(place, place)
            mounts.set_flags(place, mounts.MS_RDONLY)
    drop_capabilities()
    await instance.disks.mount("a")
    assert (instance.marker("a") is None) == read_only
    assert await instance.disks.list() == ["a"]

    assert "Unmounted" in await instance.disks.unmount("a")

    assert await instance.disks.list() == []
    if read_only:
        return  # On a read-only volume, the agent cannot leave a marker for its successor.
    instance.start_agent()
    assert await instance.disks.list() == []
    await instance.disks.mount("a")
    assert await instance.disks.list() == ["a"]


@pytest.mark.attack("a job breaks a disk migration by creating a path or timestamp that cannot be copied")
@pytest.mark.parametrize("seconds", [-(2**40), 2**33])
@alone
def test_migration_tolerates_timestamps_that_the_new_disk_cannot_store(tmp_path: Path, seconds: int) -> None:
    """A job can set a file's times to any value, but ext4 with small inodes can store times only up to 2038."""
    source = mount_tmpfs(tmp_path / "source")
    target = mount_ext4(tmp_path / "target", tmp_path / "image", 16 << 20, "-I", "128")
    (source / "odd").write_text("text")
    os.utime(source / "odd", (seconds, seconds))

    copytree.mirror(source, target, spared=OURS)

    assert (target / "odd").read_text() == "text"
    assert abs((target / "odd").stat().st_mtime) <= 2**31


@alone
def test_migration_error_reports_a_full_disk(tmp_path: Path) -> None:
    source = mount_tmpfs(tmp_path / "source")
    (source / "big").write_bytes(bytes(1) * (20 << 20))
    (source / "next").write_text("x")
    target = mount_ext4(tmp_path / "target", tmp_path / "image")

    with pytest.raises(HostError, match=r"cannot copy .*: \./big: .*; 0 MiB are free"):
        copytree.mirror(source, target, spared=OURS)


# --- SIGKILL ----------------------------------------------------------------------------------------------------------

POINTS = int(os.environ.get("SHIM_TEST_KILLS", "6"))
FILES = int(os.environ.get("SHIM_TEST_FILES", "300"))
SIZE = int(os.environ.get("SHIM_TEST_BYTES", str(8 << 20)))
"""``POINTS`` is the number of kills, ``FILES`` the number of files, and ``SIZE`` the total size of the files in bytes.
For a long and thorough run, set them to 50, 10000 and 2147483648.
"""


def in_a_process(instance: InstanceWithVolumes, *cids: str) -> int:
    """Fork a process in which an agent migrates a disk and exits. Return the process's pid."""
    pid = os.fork()
    if pid == 0:
        instance.start_agent()
        asyncio.run(instance.disks.migrate(*cids))
        os._exit(0)
    return pid


async def disks_after_restart(instance: InstanceWithVolumes) -> list[str]:
    """Start the next agent, check that it reports no problem, and return the disks that it has mounted."""
    instance.start_agent()
    await instance.disks.recover()
    assert await instance.disks.problem() == ""
    return await instance.disks.list()


@pytest.mark.parametrize("way", [by_mounts, by_links])
@alone
def test_agent_killed_during_a_migration_loses_no_file(
    tmp_path: Path, way: Callable[[Path], InstanceWithVolumes]
) -> None:
    """Files are migrated back and forth between two disks. The first migrations are killed at random times, after which
    the next agent must find all files.
    """
    instance = way(tmp_path)
    instance.copy = None
    for cid in "ab":
        instance.attach(cid, lambda point: mount_ext4(point, point.with_suffix(".image"), size=2 * SIZE + (64 << 20)))
    old, new = "a", "b"
    asyncio.run(instance.disks.mount(old))
    fill(instance.paths.store / "files", as_root=True)
    (instance.paths.store / "many").mkdir()
    for number in range(FILES):
        (instance.paths.store / "many" / str(number)).write_bytes(os.urandom(SIZE // FILES))
    wanted = fingerprint(instance.paths.store)
    asyncio.run(instance.disks.mount(new))
    begun_at = time.monotonic()
    os.waitpid(in_a_process(instance, old, new), 0)
    whole = time.monotonic() - begun_at
    killed = 0
    while True:
        there = asyncio.run(disks_after_restart(instance))
        assert there in ([old, new], [new])
        assert fingerprint(instance.paths.store) == wanted
        if there == [new]:
            if killed >= POINTS:
                return
            old, new = new, old
            for path in instance.volume(new).iterdir():
                if path.name not in OURS:
                    files.remove_tree(path)
            asyncio.run(instance.disks.mount(new))
        agent = in_a_process(instance, old, new)
        if killed < POINTS:
            time.sleep(random.Random(killed).uniform(0.1, 1.1) * whole)
            os.kill(agent, signal.SIGKILL)
            killed += 1
        os.waitpid(agent, 0)
