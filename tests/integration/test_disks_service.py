"""Tests the Director's disk requests, in a container that can mount volumes and in one that can only link to them."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.bulk import protocol
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.settings import DiskAssociation, UpdateSettings
from agent_shim.host import files, mounts, volumes
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Marker
from agent_shim.services.disks.service import in_worker
from tests.support.volumes import (
    MORE_THAN_ALL,
    PATIENT,
    InstanceWithVolumes,
    by,
    fingerprint,
    holding,
    killed_before,
    migrate_until,
    mount_tmpfs,
)

each_way = by("links", "mounts")


@pytest.fixture
def unused_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report that no process uses the disks.

    Looking at every process on the machine would take most of the time in a test that makes many requests.
    """
    monkeypatch.setattr(volumes, "holders", lambda _: [])


def mounted(instance: InstanceWithVolumes) -> list[mounts.Mount]:
    """Return this instance's mounts, without those that other tests may add on this machine at the same time."""
    return [mount for mount in mounts.mounts() if mount.point.is_relative_to(instance.paths.base)]


@each_way
async def test_restored_mount_clears_the_error_of_a_failed_attempt(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk disappears later, the reported problem must not be the earlier attempt's error."""
    await instance.mount("a")

    def refused(*_: object, **__: object) -> None:
        raise HostError("no loop device")

    volumes.take_away(instance.paths.store)
    with monkeypatch.context() as broken:
        broken.setattr(volumes, "show", refused)
        await instance.disks.recover()
    assert (await instance.disks.problem()).endswith(": no loop device")
    await instance.disks.recover()
    volumes.take_away(instance.paths.store)

    assert (await instance.disks.problem()).endswith(": it has not been mounted")


@by("links")
async def test_mounting_a_disk_tolerates_only_eperm_when_mount_options_are_changed(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may forbid the container to change mount options (EPERM). Any other error must fail the mount."""

    def refused(*_: object, **__: object) -> None:
        raise HostError(number, "cannot change the mount options")

    monkeypatch.setattr(volumes, "set_options", refused)
    number = errno.EPERM
    await instance.mount("a")
    number = errno.EIO
    with pytest.raises(HostError, match="cannot change the mount options"):
        await instance.mount("b")


@each_way
async def test_volume_mounted_on_the_store_by_the_platform_is_treated_as_a_disk(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two exceptions: a volume whose marker says that its disk was unmounted, and the volume of a known disk
    that the Director has not yet asked the agent to mount.
    """
    store = instance.paths.store
    instance.attach("z")
    monkeypatch.setattr(mounts, "is_mount_point", lambda path, *_: path == store)

    assert (await instance.disks.list(), instance.disks.is_mounted) == ([], True)

    markers.write(store, Marker("a", ""))
    assert (await instance.disks.list(), instance.disks.is_mounted) == ([], False)

    markers.remove(store)
    instance.persistent["b"] = str(store)
    assert (await instance.disks.list(), instance.disks.is_mounted) == ([], False)


@pytest.mark.parametrize(("marker", "stays"), [(None, True), (Marker("b", "target", instance="another"), False)])
@each_way
async def test_disk_stays_mounted_after_a_restart_unless_it_belongs_to_another_instance(
    instance: InstanceWithVolumes, marker: Marker | None, stays: bool
) -> None:
    """Older agents wrote no markers, so a disk without a marker must stay mounted as well."""
    instance.id = "this"
    await instance.mount("a", "b")
    markers.remove(instance.volume("b"))
    if marker is not None:
        markers.write(instance.volume("b"), marker)

    instance.start_agent()
    await instance.disks.recover()

    assert await instance.disks.list() == ["a", "b"][: 1 + stays]
    assert instance.cid_at(instance.paths.store_migration_target) == ("b" if stays else "")


# --- mount and list ---------------------------------------------------------------------------------------------------


@each_way
async def test_first_disk_is_mounted_at_the_store_and_later_ones_at_the_migration_target(
    instance: InstanceWithVolumes,
) -> None:
    """A third disk replaces the second if a failed resize is retried without unmounting the first attempt's disk."""
    instance.attach("a")
    assert (await instance.disks.list(), instance.disks.is_mounted) == ([], False)

    await instance.disks.mount("a")
    assert instance.cid_at(instance.paths.store) == "a"
    assert (await instance.disks.list(), instance.disks.is_mounted) == (["a"], True)
    assert instance.marker("a") == Marker("a", "store")
    assert instance.paths.managed_disk.read_text() == "a"

    touched = [instance.paths.store, instance.paths.managed_disk, instance.volume("a") / ".agent_shim/disk.json"]
    before = [path.lstat().st_mtime_ns for path in touched], mounted(instance)
    await instance.disks.mount("a")
    assert ([path.lstat().st_mtime_ns for path in touched], mounted(instance)) == before
    assert not instance.paths.store_migration_target.exists()
    assert await instance.disks.list() == ["a"]

    await instance.mount("b", "b")
    assert instance.cid_at(instance.paths.store_migration_target) == "b"
    assert await instance.disks.list() == ["a", "b"]
    assert instance.marker("b") == Marker("b", "target")
    assert instance.paths.managed_disk.read_text() == "a"

    await instance.mount("c")
    assert await instance.disks.list() == ["a", "c"]
    assert instance.marker("b") == Marker("b", "")


@each_way
async def test_instance_without_disks_answers_disk_requests(instance: InstanceWithVolumes) -> None:
    assert await instance.disks.problem() == ""
    assert await instance.disks.list() == []
    with pytest.raises(ActionError, match=r"^Persistent disk with volume id 'x' could not be found$"):
        await instance.disks.find("x")

    instance.attach("a")
    assert (await instance.disks.unmount("a")).startswith("Partition of {ID:a ")
    instance.persistent["gone"] = "/does/not/exist"
    for cid in ("a", "gone"):
        assert (await instance.disks.unmount(cid)).endswith(" is not mounted")


@each_way
async def test_mount_waits_for_a_volume_that_appears_late(instance: InstanceWithVolumes) -> None:
    instance.persistent["a"] = {"path": str(instance.volume("a"))}
    instance.disks.timeouts = PATIENT
    mounting = asyncio.ensure_future(instance.disks.mount("a"))
    await asyncio.sleep(0.1)
    assert not mounting.done()

    instance.attach("a")
    await mounting

    assert await instance.disks.list() == ["a"]


@each_way
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/does/not/exist", "there is no /does/not/exist"),
        ("/etc/passwd", "/etc/passwd is not a directory"),
        ("/dev/shm/of-no-test", "there is no /dev/shm/of-no-test"),
        (None, "the CPI has named no path"),
    ],
)
async def test_mount_fails_if_the_volume_does_not_appear(
    instance: InstanceWithVolumes, place: str | None, why: str
) -> None:
    instance.persistent["a"] = place

    with pytest.raises(ActionError, match=f"^the volume of disk a is not there: {why}$"):
        await instance.disks.mount("a")


@each_way
async def test_mount_waits_until_the_lease_of_a_dead_vm_expires(instance: InstanceWithVolumes) -> None:
    """If a VM is recreated on another node, its predecessor's lease on the disk stays valid for a while."""
    instance.attach("a")
    answers = ["agent a on a machine that is gone", "agent a on a machine that is gone", ""]
    instance.holder = lambda _: answers.pop(0) if answers else ""

    await instance.disks.mount("a")

    assert answers == []
    assert await instance.disks.list() == ["a"]


@each_way
async def test_disk_leased_by_another_agent_is_never_mounted(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.holder = lambda _: "agent b on node-7"

    with pytest.raises(ActionError, match="disk a is in use by agent b on node-7"):
        await instance.disks.mount("a")
    instance.holder = lambda _: ""
    assert await instance.disks.list() == []

    await instance.disks.mount("a")
    instance.remake_container()
    instance.holder = lambda _: "agent b on node-7"

    await instance.disks.recover()

    assert await instance.disks.list() == []
    assert (await instance.disks.problem()).endswith(": disk a is in use by agent b on node-7")


@each_way
async def test_unmarked_disk_leased_by_another_agent_is_rejected(instance: InstanceWithVolumes) -> None:
    """Without the lease check, a disk with files but without a marker would be mistaken for the instance's earlier
    disk.
    """
    former = instance.attach("a")
    (former / "data").write_text("precious")
    instance.attach("b")
    instance.holder = lambda place: "agent b on node-7" if place.is_relative_to(former) else ""

    with pytest.raises(ActionError, match="disk a is in use by agent b on node-7"):
        await instance.disks.mount("b")
    assert instance.marker("a") is None
    assert not instance.paths.store.is_symlink()


@each_way
async def test_volume_marked_with_a_different_cid_is_rejected(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    await instance.disks.unmount("a")
    instance.persistent = {"b": str(instance.volume("a"))}

    with pytest.raises(ActionError, match="is marked as disk a, not b"):
        await instance.disks.mount("b")
    assert await instance.disks.list() == []
    markers.write(instance.volume("a"), Marker("a", "store"))
    await instance.disks.unmount("b")
    assert instance.marker("a") == Marker("a", "store")


@each_way
async def test_marker_alone_does_not_replace_the_mounted_disk(instance: InstanceWithVolumes) -> None:
    """Jobs use the files on the mounted disk, so another disk's marker is not enough reason to replace it."""
    for cid in "ab":
        instance.attach(cid)
    await instance.disks.mount("b")
    markers.remove(instance.volume("b"))
    markers.write(instance.volume("a"), Marker("a", "store"))

    with pytest.raises(ActionError, match="disk a belongs on .*, but disk b is there"):
        await instance.disks.mount("a")
    assert instance.cid_at(instance.paths.store) == "b"


@by("links")
async def test_existing_files_are_not_hidden_by_a_disk_link(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.write("precious", "x")

    with pytest.raises(HostError, match="it holds files, and this container may not mount over them"):
        await instance.disks.mount("a")
    assert instance.read("precious") == "x"
    assert await instance.disks.list() == []


@each_way
async def test_unknown_link_or_mount_at_the_store_is_not_replaced(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    if instance.bind:
        mount_tmpfs(instance.paths.store)
    else:
        instance.paths.store.rmdir()
        instance.paths.store.symlink_to(instance.scratch)
    instance.write("data", "of somebody")

    with pytest.raises(ActionError, match="is not a known disk"):
        await instance.disks.mount("a")
    assert instance.read("data") == "of somebody"


@each_way
async def test_full_disk_can_be_mounted_and_unmounted_without_a_marker(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.attach("a")

    def full(*_: object) -> None:
        raise HostError("cannot mark: No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(markers, "write", full)
        await instance.disks.mount("a")
        assert await instance.disks.list() == ["a"]
        instance.start_agent()
        assert await instance.disks.list() == ["a"]
        await instance.disks.unmount("a")
        assert await instance.disks.list() == []

    await instance.disks.mount("a")
    assert instance.marker("a") == Marker("a", "store")
    monkeypatch.setattr(markers, "write", full)
    await instance.disks.unmount("a")
    assert instance.marker("a") is None
    assert await instance.disks.list() == []


@each_way
async def test_read_only_disk_can_be_unmounted(instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker on the read-only disk still assigns the disk to the store. A record on the root file system must
    override the marker, even after the agent restarts.
    """
    await instance.mount("a")

    def read_only(path: Path, *_: object) -> None:
        assert path.is_relative_to(instance.volume("a"))
        raise HostError("cannot write: Read-only file system")

    monkeypatch.setattr(markers, "write", read_only)
    monkeypatch.setattr(files, "sync_filesystem", read_only)
    monkeypatch.setattr(markers, "remove", read_only)
    assert "Unmounted" in await instance.disks.unmount("a")
    monkeypatch.undo()

    assert instance.marker("a") == Marker("a", "store")
    instance.start_agent()
    await instance.disks.recover()
    assert await instance.disks.list() == []
    await instance.disks.mount("a")
    instance.start_agent()
    assert await instance.disks.list() == ["a"]


@each_way
async def test_mount_is_undone_if_neither_marker_nor_record_can_be_written(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the next agent would not know that the disk is mounted."""
    instance.attach("a")
    real, before = files.write_atomic, mounted(instance)

    def full(path: Path, data: bytes, **options: Any) -> None:
        if path == instance.paths.managed_disk:
            raise HostError("cannot write: No space left on device")
        real(path, data, **options)

    def full_volume(*_: object) -> None:
        raise HostError("cannot mark: No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    with monkeypatch.context() as filled:
        filled.setattr(markers, "write", full_volume)
        with pytest.raises(HostError, match="No space left on device"):
            await instance.disks.mount("a")
        assert await instance.disks.list() == []
        assert not instance.paths.store.is_symlink()
        assert mounted(instance) == before

    await instance.disks.mount("a")
    instance.start_agent()
    assert await instance.disks.list() == ["a"]


@by("links")
async def test_mount_that_silently_fails_is_reported(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.attach("a")
    monkeypatch.setattr(volumes, "show", lambda *_, **__: None)

    with pytest.raises(ActionError, match="^cannot mount disk a: it is not mounted afterwards$"):
        await instance.disks.mount("a")


@each_way
async def test_unmount_that_fails_and_cannot_be_recorded_is_reported(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.attach("a")
    real = files.write_atomic

    def refused(*_: object, **__: object) -> None:
        raise HostError(errno.EPERM, "not permitted")

    def full(path: Path, data: bytes, **options: Any) -> None:
        if path == instance.paths.taken_down:
            raise HostError("cannot write: No space left on device")
        real(path, data, **options)

    monkeypatch.setattr(markers, "write", refused)
    await instance.disks.mount("a")
    with monkeypatch.context() as broken:
        broken.setattr(volumes, "take_away", refused)
        broken.setattr(files, "write_atomic", full)
        with pytest.raises(ActionError, match=f"^disk a is still mounted on {instance.paths.store}$"):
            await instance.disks.unmount("a")

    assert "Unmounted" in await instance.disks.unmount("a")


@each_way
async def test_failed_unmount_is_recorded_on_the_root_file_system(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker on the volume cannot be written, so the agent records the unmount elsewhere."""
    instance.attach("a")

    def refused(*_: object, **__: object) -> None:
        raise HostError(errno.EPERM, "not permitted")

    with monkeypatch.context() as broken:
        broken.setattr(markers, "write", refused)
        await instance.disks.mount("a")
        broken.setattr(volumes, "take_away", refused)
        assert "Unmounted" in await instance.disks.unmount("a")
    for _ in range(2):
        assert await instance.disks.list() == []
        instance.start_agent()

    await instance.disks.mount("a")
    assert await instance.disks.list() == ["a"]


# --- volume mounted on the store --------------------------------------------------------------------------------------


def at_the_store(instance: InstanceWithVolumes) -> None:
    """Simulate a pod whose manifest mounts the volume at the store, and a CPI that therefore sends the store as the
    disk hint.
    """
    if instance.bind:
        mounts.bind(instance.attach("a"), instance.paths.store)
    instance.persistent["a"] = str(instance.paths.store)


@each_way
async def test_unmount_disk_does_not_unmount_a_volume_that_a_manifest_mounted_at_the_store(
    instance: InstanceWithVolumes,
) -> None:
    at_the_store(instance)
    instance.write("data", "precious")
    before = mounted(instance)
    assert await instance.disks.list() == [], "the Director has not had it mounted"

    for _ in range(2):
        await instance.disks.mount("a")
        assert await instance.disks.list() == ["a"]
        instance.start_agent()
        assert await instance.disks.list() == ["a"]
        assert "Unmounted" in await instance.disks.unmount("a")
        assert await instance.disks.list() == []
        instance.start_agent()
        assert await instance.disks.list() == []

    assert instance.read("data") == "precious"
    assert mounted(instance) == before
    instance.persistent.clear()
    assert await instance.disks.list() == [], "nor when the settings name it no longer"


@by("links")
async def test_volume_mounted_at_the_store_cannot_be_migrated_if_the_agent_may_not_mount(
    instance: InstanceWithVolumes,
) -> None:
    """A link cannot replace the mounted volume, so the request must fail before anything is copied."""
    instance.persistent["a"] = str(instance.paths.store)
    await instance.disks.mount("a")
    await instance.mount("b")

    with pytest.raises(ActionError, match="this container may not mount"):
        await instance.disks.migrate("a", "b")
    assert instance.marker("b") == Marker("b", "target")
    assert await instance.disks.list() == ["a", "b"]


# --- hints ------------------------------------------------------------------------------------------------------------


@each_way
async def test_disk_known_only_from_a_hint_stays_mounted_after_the_hint_is_removed(
    instance: InstanceWithVolumes,
) -> None:
    volume = instance.attach("a")
    del instance.persistent["a"]
    await instance.disks.remove("a")
    assert not instance.paths.disk_hints.exists()

    await instance.disks.add("a", {"path": str(volume)})
    await instance.disks.mount("a")
    assert await instance.disks.list() == ["a"]

    await instance.disks.remove("a")
    await instance.disks.remove("a")
    assert await instance.disks.list() == ["a"], "it is still mounted"
    assert (await instance.disks.unmount("a")).startswith("Unmounted partition of {ID:a ")
    assert await instance.disks.list() == []


# --- unmount ----------------------------------------------------------------------------------------------------------


@by("links")
async def test_dangling_link_at_the_store_is_replaced(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.paths.store.rmdir()
    instance.paths.store.symlink_to(instance.scratch / "gone")

    await instance.disks.mount("a")

    assert instance.cid_at(instance.paths.store) == "a"


@each_way
async def test_new_disk_replaces_the_old_one_at_the_store_after_an_interrupted_migration(
    instance: InstanceWithVolumes,
) -> None:
    """The migration was interrupted after the new disk was marked but before it was mounted at ``/var/vcap/store``."""
    for cid in "ab":
        instance.attach(cid)
    await instance.disks.mount("a")
    markers.write(instance.volume("b"), Marker("b", "store", "a", 1))

    await instance.disks.recover()

    assert await instance.disks.problem() == ""
    assert instance.cid_at(instance.paths.store) == "b"
    assert instance.released == [instance.volume("a") / markers.DIRECTORY], "another agent may take it"


@each_way
async def test_disk_is_synced_before_it_is_unmounted(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = instance.attach("a")
    await instance.disks.mount("a")
    synced: list[tuple[Path, str]] = []
    monkeypatch.setattr(
        files, "sync_filesystem", lambda path: synced.append((path, instance.cid_at(instance.paths.store)))
    )

    await instance.disks.unmount("a")

    assert synced == [(volume, "a")]


@each_way
async def test_unmounting_the_migration_target_ignores_processes_that_use_the_store(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that use the disk at ``/var/vcap/store`` must not delay the unmount."""
    await instance.mount("a", "b")
    looked_at: list[set[Path]] = []

    def holders(places: Sequence[Path]) -> list[volumes.Holder]:
        looked_at.append(set(places))
        return []

    monkeypatch.setattr(volumes, "holders", holders)
    assert (await instance.disks.unmount("b")).startswith("Unmounted partition of {ID:b ")

    assert looked_at == [{instance.paths.store_migration_target, instance.volume("b")}]
    assert instance.cid_at(instance.paths.store_migration_target) == ""
    assert await instance.disks.list() == ["a"]


@each_way
async def test_unmounted_disk_stays_unmounted(instance: InstanceWithVolumes) -> None:
    volume = instance.attach("a")
    await instance.disks.mount("a")
    assert instance.released == []

    text = await instance.disks.unmount("a")

    assert text == f"Unmounted partition of {{ID:a DeviceID: VolumeID:{volume} Path:{volume}}}"
    assert instance.released == [volume / markers.DIRECTORY], "another agent may take it"
    assert instance.cid_at(instance.paths.store) == ""
    assert mounts.is_mount_point(volume) is instance.bind, "the mount of the runtime is not ours"
    assert not instance.paths.managed_disk.exists()
    assert not instance.disks.is_mounted
    for _ in range(2):
        assert await instance.disks.list() == []
        assert await instance.disks.problem() == ""
        instance.remake_container()
        await instance.disks.recover()
    await instance.disks.mount("a")
    assert await instance.disks.list() == ["a"]


@each_way
async def test_unmount_names_a_process_that_uses_the_disk_and_leaves_it_running(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    instance.write("file", "x")

    with holding(instance.paths.store) as program:
        with pytest.raises(ActionError, match=f"{instance.paths.store} is in use: pid {program.pid} .*/file open"):
            await instance.disks.unmount("a")
        assert program.poll() is None

    assert await instance.disks.list() == ["a"]
    assert "Unmounted" in await instance.disks.unmount("a")


@each_way
async def test_unmount_waits_for_processes_to_release_the_disk(instance: InstanceWithVolumes) -> None:
    instance.timeouts = msgspec.structs.replace(instance.timeouts, use=60.0)
    await instance.mount("a")
    instance.write("file", "x")
    with holding(instance.paths.store) as program:
        unmounting = asyncio.ensure_future(instance.disks.unmount("a"))
        await asyncio.sleep(0.1)
        assert not unmounting.done()
        program.kill()

        assert "Unmounted" in await unmounting


@each_way
async def test_disk_unmount_kills_job_processes(instance: InstanceWithVolumes) -> None:
    """After the processes have been killed, the disk must be checked again, even if the time limit has passed."""
    await instance.mount("a")
    instance.write("file", "x")
    instance.timeouts = msgspec.structs.replace(instance.timeouts, use=0.0)
    instance.start_agent()
    with holding(instance.paths.store) as program:
        instance.of_jobs.add(program.pid)

        assert "Unmounted" in await instance.disks.unmount("a")


@each_way
async def test_disk_unmount_terminates_job_processes_in_parallel(instance: InstanceWithVolumes) -> None:
    """If the processes were terminated one after the other, the request would take minutes."""
    instance.timeouts = msgspec.structs.replace(instance.timeouts, grace=60.0)
    instance.start_agent()
    await instance.mount("a")
    instance.write("file", "x")
    told = instance.paths.base / "told"
    told.mkdir()
    trap = f"touch {told}/$$; until [ $(ls {told} | wc -l) = 3 ]; do sleep 0.02; done; exit 0"
    script = f"exec 9<{instance.paths.store}/file; trap '{trap}' TERM; echo ready; while :; do sleep 0.02; done"
    programs = []
    try:
        for _ in range(3):
            program = await asyncio.create_subprocess_exec("/bin/sh", "-c", script, stdout=asyncio.subprocess.PIPE)
            programs.append(program)
            assert program.stdout is not None
            assert await program.stdout.readline() == b"ready\n"
            instance.of_jobs.add(program.pid)

        assert "Unmounted" in await instance.disks.unmount("a")
        assert [await program.wait() for program in programs] == [0, 0, 0]
    finally:
        for program in programs:
            if program.returncode is None:
                program.kill()


# --- after a restart --------------------------------------------------------------------------------------------------


@each_way
async def test_disks_are_mounted_again_in_a_recreated_container(instance: InstanceWithVolumes) -> None:
    await instance.mount("a", "b")
    instance.write("data", "precious")
    instance.remake_container()

    await instance.disks.recover()

    assert instance.read("data") == "precious"
    assert await instance.disks.list() == ["a", "b"]
    assert instance.disks.is_mounted
    instance.remake_container()
    assert "disk a is not on" in await instance.disks.problem()
    assert await instance.disks.list() == ["a", "b"]
    assert await instance.disks.problem() == ""


@by("links")
async def test_disk_that_cannot_be_mounted_again_is_reported_as_a_problem(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    instance.remake_container()
    instance.write("in the way", "x")

    await instance.disks.recover()

    assert await instance.disks.list() == []
    assert "it holds files, and this container may not mount over them" in await instance.disks.problem()


@each_way
async def test_list_disk_answers_after_an_unexpected_error(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await instance.mount("a")

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(volumes, "show", broken)

    assert await instance.disks.list() == ["a"]


@by("links")
async def test_missing_disk_is_reported_as_a_problem(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    instance.volume("a").rename(instance.scratch / "elsewhere")

    assert await instance.disks.list() == []
    assert "disk a was mounted and is not there" in await instance.disks.problem()


@each_way
async def test_disk_of_another_instance_is_mounted_only_if_the_director_requests_it(
    instance: InstanceWithVolumes,
) -> None:
    """A new VM gets ``mount_disk`` before it learns its own instance id."""
    await instance.mount("a")
    instance.id = "i-2"
    await instance.disks.list()
    assert instance.marker("a") == Marker("a", "store", instance="i-2")
    instance.remake_container()
    instance.id = "i-1"

    await instance.disks.recover()
    assert await instance.disks.list() == []
    assert "belongs to another instance" in await instance.disks.problem()

    await instance.disks.mount("a")
    assert await instance.disks.list() == ["a"]
    assert instance.marker("a") == Marker("a", "store", instance="i-1")


@each_way
async def test_two_disks_marked_for_the_store_stay_unmounted_until_one_is_requested(
    instance: InstanceWithVolumes,
) -> None:
    """The agent cannot know which of the two disks belongs at ``/var/vcap/store``."""
    for cid in "ab":
        markers.write(instance.attach(cid), Marker(cid, "store"))

    await instance.disks.recover()
    assert await instance.disks.list() == []
    assert await instance.disks.problem() == "the disks a and b both claim the store"

    await instance.disks.mount("b")
    assert await instance.disks.list() == ["b"]
    assert await instance.disks.problem() == ""


@each_way
async def test_disk_from_an_older_agent_is_adopted(instance: InstanceWithVolumes) -> None:
    """Older agents wrote no markers and named their disk only in managed_disk_settings.json."""
    instance.attach("a")
    instance.paths.managed_disk.write_text("a")

    assert await instance.disks.list() == ["a"]
    assert instance.marker("a") == Marker("a", "store")


@each_way
async def test_disk_migration_begun_by_an_older_agent_is_resumed(instance: InstanceWithVolumes) -> None:
    """Agents that write no markers, such as the Go agent, record the new disk as the managed disk before they copy
    anything (platform/linux_platform.go).
    """
    instance.attach("a")
    instance.attach("b")
    instance.paths.store.rmdir()
    instance.paths.store.symlink_to(instance.volume("a"))
    instance.paths.store_migration_target.symlink_to(instance.volume("b"))
    instance.paths.managed_disk.write_text("b")

    assert await instance.disks.list() == ["a", "b"]
    await instance.disks.migrate("a", "b")
    assert await instance.disks.list() == ["b"]


@each_way
async def test_unmarked_disk_with_files_is_mounted_at_the_store(instance: InstanceWithVolumes) -> None:
    """The container was recreated to attach a second, empty disk, which the Director now wants to mount. The disk with
    files must be the earlier one.
    """
    (instance.attach("a") / "data").write_text("precious")
    (instance.attach("b") / "lost+found").mkdir()

    await instance.disks.mount("b")

    assert instance.read("data") == "precious"
    assert await instance.disks.list() == ["a", "b"]
    assert instance.marker("a") == Marker("a", "store")


@each_way
@pytest.mark.parametrize("why", ["both have files", "it has a name"])
async def test_unmarked_disk_is_not_mounted_if_it_may_not_be_the_earlier_store_disk(
    instance: InstanceWithVolumes, why: str
) -> None:
    """If both disks have files, or if the disk with files is linked by name, the agent cannot know which disk was at
    the store.
    """
    for cid in "ab" if why == "both have files" else "a":
        (instance.attach(cid) / "data").write_text(cid)
    instance.attach("b")
    if why == "it has a name":
        instance.update = UpdateSettings(disk_associations=[DiskAssociation("data", "a")])

    await instance.disks.mount("b")

    assert await instance.disks.list() == ["b"]
    with pytest.raises(ActionError, match="disk a is not on .*: disk b is"):
        await instance.disks.migrate("a", "b")


# --- migrate ----------------------------------------------------------------------------------------------------------


async def resizing(instance: InstanceWithVolumes) -> dict[str, object]:
    """Mount two disks for a migration. Only the first one contains files.

    Return the content that the second disk must have after the migration.
    """
    (instance.attach("a") / "db").mkdir()
    (instance.volume("a") / "db/data").write_bytes(os.urandom(5000))
    instance.attach("b")
    (instance.volume("b") / "lost+found").mkdir()
    await instance.disks.mount("a")
    await instance.disks.mount("b")
    return fingerprint(instance.volume("a"))


@pytest.mark.parametrize("cids", [("a", "b"), ()])
@each_way
async def test_migration_copies_all_files_once(instance: InstanceWithVolumes, cids: tuple[str, ...]) -> None:
    wanted = await resizing(instance)

    await instance.disks.migrate(*cids)

    assert [path.samefile(instance.volume("a") / markers.DIRECTORY) for path in instance.released] == [True]
    assert fingerprint(instance.paths.store) == wanted
    assert fingerprint(instance.volume("a")) == wanted
    assert instance.cid_at(instance.paths.store) == "b"
    assert await instance.disks.list() == ["b"]
    assert instance.marker("a") == Marker("a", "")
    assert instance.marker("b") == Marker("b", "store", source="a", generation=1)
    assert instance.paths.managed_disk.read_text() == "b"
    assert instance.cid_at(instance.paths.store_migration_target) == ""

    instance.write("new data", "of jobs that run again")
    wanted = fingerprint(instance.paths.store)
    await instance.disks.migrate(*cids)
    assert fingerprint(instance.paths.store) == wanted
    for others in (("a", "c"), ("c", "b"), ("b", "a")):
        with pytest.raises(ActionError, match="is not on"):
            await instance.disks.migrate(*others)

    await instance.mount("c")
    await instance.disks.migrate(*(("b", "c") if cids else ()))
    assert await instance.disks.list() == ["c"]
    assert fingerprint(instance.paths.store) == wanted


@each_way
async def test_migration_requires_both_disks_to_be_mounted(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.attach("b")
    with pytest.raises(ActionError, match=f"^no disk is on {instance.paths.store}$"):
        await instance.disks.migrate()
    await instance.disks.mount("a")
    with pytest.raises(ActionError, match=f"^disk b is not on {instance.paths.store_migration_target}$"):
        await instance.disks.migrate("a", "b")
    await instance.disks.mount("b")
    with pytest.raises(ActionError, match=f"^disk b is not on {instance.paths.store}: disk a is$"):
        await instance.disks.migrate("b", "a")

    await instance.disks.migrate("a", "b")

    assert await instance.disks.list() == ["b"]


@each_way
async def test_migration_does_not_copy_an_empty_disk_over_one_with_files(instance: InstanceWithVolumes) -> None:
    await instance.mount("a")
    (instance.attach("b") / "data").write_text("precious")
    await instance.disks.mount("b")

    for marker in (None, Marker("b", "target", "c")):
        if marker is not None:
            markers.write(instance.volume("b"), marker)
        with pytest.raises(ActionError, match="disk b holds files that are not a copy of disk a"):
            await instance.disks.migrate("a", "b")
    markers.write(instance.volume("b"), Marker("b", "target", "a"))
    with pytest.raises(ActionError, match="disk a is empty and disk b is not"):
        await instance.disks.migrate("a", "b")
    assert (instance.volume("b") / "data").read_text() == "precious"
    assert await instance.disks.list() == ["a", "b"]


@each_way
async def test_failed_migration_copy_keeps_the_old_disk_and_resumes_later(instance: InstanceWithVolumes) -> None:
    wanted = await resizing(instance)

    async def cut_off(source: Path, target: Path, report: Callable[[protocol.Progress], None]) -> list[str]:
        report(protocol.Progress("copying"))
        (target / "half").write_text("copied")
        raise HostError("cannot copy half: No space left on device")

    instance.copy, whole = cut_off, instance.copy
    with pytest.raises(HostError, match="No space left"):
        await instance.disks.migrate("a", "b")
    assert await instance.disks.list() == ["a", "b"]
    assert instance.marker("b") == Marker("b", "target", source="a", generation=1)
    assert instance.disks.progress is None

    instance.copy = whole
    await instance.disks.migrate("a", "b")
    assert fingerprint(instance.paths.store) == wanted


@each_way
@pytest.mark.parametrize("step", [(markers, "write"), (volumes, "show")])
async def test_failed_disk_swap_keeps_the_old_disk_on_the_store(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    wanted = await resizing(instance)
    module, name = step
    real, new = getattr(module, name), instance.volume("b")

    def broken(volume: Path, what: object, **options: bool) -> None:
        if volume == new and (what == instance.paths.store or (isinstance(what, Marker) and what.role == "store")):
            raise HostError("Input/output error")
        real(volume, what, **options)

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(HostError, match="Input/output error"):
        await instance.disks.migrate("a", "b")

    assert instance.cid_at(instance.paths.store) == "a"
    assert await instance.disks.list() == ["a", "b"]
    assert fingerprint(instance.paths.store) == wanted
    instance.write("after", "it can be written")
    assert instance.mounts_on_store() == instance.bind


@each_way
async def test_migration_copies_in_a_worker_and_reports_progress(instance: InstanceWithVolumes) -> None:
    seen: list[protocol.Progress] = []

    async def copy(source: Path, target: Path, _: object) -> list[str]:
        return await in_worker(source, target, seen.append)

    instance.copy = copy
    for number in range(100):
        (instance.attach("a") / str(number)).write_bytes(b"x" * 90_000)
    wanted = await resizing(instance)

    await instance.disks.migrate("a", "b")

    assert fingerprint(instance.paths.store) == wanted
    assert [progress.phase for progress in seen[:2]] == ["counting", "copying"]
    assert seen[-1].size <= seen[-1].size_total
    assert seen[-1].size_total > 100 * 90_000


@each_way
async def test_unfinished_disk_copy_is_not_used_and_is_resumed(instance: InstanceWithVolumes) -> None:
    """Another instance must refuse to mount the new disk, and this instance must complete the copy when the disk is
    mounted again.
    """
    wanted = await resizing(instance)
    markers.write(instance.volume("b"), Marker("b", "target", source="a", generation=1))
    (instance.volume("b") / "tw").write_text("half")
    await instance.disks.unmount("b")
    assert instance.marker("b") == Marker("b", "", source="a", generation=1)
    elsewhere = InstanceWithVolumes(instance.scratch / "elsewhere", bind=False)
    elsewhere.persistent["b"] = str(instance.volume("b"))
    with pytest.raises(ActionError, match="disk b holds an unfinished copy of disk a"):
        await elsewhere.disks.mount("b")

    await instance.disks.mount("b")
    await instance.disks.migrate("a", "b")

    assert fingerprint(instance.paths.store) == wanted


@each_way
async def test_migration_is_refused_while_a_process_uses_the_disk(instance: InstanceWithVolumes) -> None:
    await resizing(instance)
    instance.write("file", "x")
    with holding(instance.paths.store), pytest.raises(ActionError, match="is in use: pid"):
        await instance.disks.migrate("a", "b")
    assert instance.marker("b") == Marker("b", "target"), "nothing was begun"

    with ExitStack() as later:

        async def interrupted(source: Path, target: Path, report: object) -> list[str]:
            later.enter_context(holding(instance.paths.store))
            return []

        instance.copy = interrupted
        with pytest.raises(ActionError, match="is in use: pid"):
            await instance.disks.migrate("a", "b")
    assert await instance.disks.list() == ["a", "b"]


@each_way
async def test_disks_can_be_listed_but_not_unmounted_during_a_migration(
    instance: InstanceWithVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await resizing(instance)
    going, go = asyncio.Event(), asyncio.Event()

    async def slow(source: Path, target: Path, report: object) -> list[str]:
        assert callable(report)
        report(protocol.Progress("copying", 1, 2))
        going.set()
        await go.wait()
        return []

    instance.copy = slow
    migrating = asyncio.ensure_future(instance.disks.migrate("a", "b"))
    await going.wait()

    assert instance.disks.progress == protocol.Progress("copying", 1, 2)
    with monkeypatch.context() as without_mounts:
        without_mounts.setattr(volumes, "show", None)
        assert await instance.disks.problem() == "migrate_disk a b is in progress"
        assert await instance.disks.list() == ["a", "b"]
        with pytest.raises(ActionError, match="cannot unmount_disk a: migrate_disk a b is in progress"):
            await instance.disks.unmount("a")
    go.set()
    await migrating
    assert instance.disks.progress is None


@each_way
async def test_migration_logs_files_that_it_could_not_copy(
    instance: InstanceWithVolumes, caplog: pytest.LogCaptureFixture
) -> None:
    await resizing(instance)

    async def copy(source: Path, target: Path, report: object) -> list[str]:
        return ["ACLs: 2, first of ./db (Operation not supported)"]

    instance.copy = copy
    await instance.disks.migrate("a", "b")

    text = "disk b cannot store what disk a has: ACLs: 2, first of ./db (Operation not supported)"
    assert text in [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("unused_disks")
@pytest.mark.parametrize("restart", [InstanceWithVolumes.start_agent, InstanceWithVolumes.remake_container])
@pytest.mark.parametrize("step", range(MORE_THAN_ALL))
@each_way
async def test_migration_killed_at_any_step_is_completed(
    instance: InstanceWithVolumes, step: int, restart: Callable[[InstanceWithVolumes], None]
) -> None:
    """After the restart, one of the two disks must be mounted on the store and contain all files."""
    wanted = await resizing(instance)
    assert await migrate_until(step, instance) or step < MORE_THAN_ALL - 1
    restart(instance)

    await instance.disks.recover()
    assert await instance.disks.problem() == ""
    assert await instance.disks.list() in (["a", "b"], ["b"])
    assert fingerprint(instance.paths.store) == wanted
    assert instance.mounts_on_store() == instance.bind
    instance.write("db/data", "it can be written")
    wanted = fingerprint(instance.paths.store)

    await instance.disks.migrate("a", "b")
    assert await instance.disks.list() == ["b"]
    assert fingerprint(instance.paths.store) == wanted
    assert instance.marker("a") == Marker("a", "")
    assert instance.marker("b") == Marker("b", "store", source="a", generation=1)


@pytest.mark.usefixtures("unused_disks")
@pytest.mark.parametrize("step", range(MORE_THAN_ALL))
@each_way
async def test_reverse_migration_killed_at_any_step_is_completed(instance: InstanceWithVolumes, step: int) -> None:
    """The files are moved back to the old disk, so each disk has at some time been marked as a copy of the other."""
    await resizing(instance)
    await instance.disks.migrate("a", "b")
    instance.write("newer", "than the copy was")
    wanted = fingerprint(instance.volume("b"))
    files.remove_tree(instance.volume("a") / "db")
    await instance.disks.mount("a")
    assert await migrate_until(step, instance, "b", "a") or step < MORE_THAN_ALL - 1
    instance.remake_container()

    await instance.disks.recover()
    assert await instance.disks.problem() == ""
    assert await instance.disks.list() in (["b", "a"], ["a"])
    assert fingerprint(instance.paths.store) == wanted

    await instance.disks.migrate("b", "a")
    assert await instance.disks.list() == ["a"]
    assert fingerprint(instance.paths.store) == wanted


@pytest.mark.usefixtures("unused_disks")
@pytest.mark.parametrize("restart", [InstanceWithVolumes.start_agent, InstanceWithVolumes.remake_container])
@each_way
async def test_mount_and_unmount_killed_at_any_step_can_be_repeated(
    instance: InstanceWithVolumes, restart: Callable[[InstanceWithVolumes], None]
) -> None:
    for cid in "abc":
        instance.attach(cid)
    stories: list[tuple[Callable[[], Awaitable[object]], list[str]]] = [
        (lambda: instance.disks.mount("a"), ["a"]),
        (lambda: instance.disks.mount("b"), ["a", "b"]),
        (lambda: instance.disks.mount("c"), ["a", "c"]),
        (lambda: instance.disks.unmount("c"), ["a"]),
        (lambda: instance.disks.unmount("a"), []),
    ]
    before: list[str] = []
    kills = 0
    for request, listed in stories:
        step = 0
        while not await killed_before(step, request):
            restart(instance)
            await instance.disks.recover()
            assert await instance.disks.problem() == ""
            found = await instance.disks.list()
            assert found in (before, listed, [cid for cid in before if cid in listed]), step
            assert instance.mounts_on_store() == (instance.bind and "a" in found)
            step += 1
        kills += step
        assert await instance.disks.list() == listed
        before = listed
    assert kills >= 10
    assert [instance.marker(cid) for cid in "abc"] == [Marker(cid, "") for cid in "abc"]


# --- links ------------------------------------------------------------------------------------------------------------


@each_way
async def test_associated_disks_are_linked_listed_and_unlinked(instance: InstanceWithVolumes) -> None:
    wanted = [DiskAssociation("data", "b"), DiskAssociation("backup", "a")]
    for cid in "ab":
        instance.attach(cid)

    await instance.disks.associate(wanted)
    instance.update = UpdateSettings(disk_associations=wanted)

    assert (instance.paths.instance_disks / "data").readlink() == instance.volume("b")
    assert stat.S_IMODE(instance.paths.instance_disks.stat().st_mode) == 0o755
    assert await instance.disks.list() == ["b", "a"]
    assert not instance.paths.store.is_symlink()
    assert not instance.disks.is_mounted
    assert "Unmounted" in await instance.disks.unmount("a")
    assert await instance.disks.list() == ["b"]


@each_way
async def test_disk_association_links_are_restored(instance: InstanceWithVolumes) -> None:
    instance.attach("a")
    instance.persistent["late"] = "/does/not/exist"
    wanted = [DiskAssociation("x", "gone"), DiskAssociation("y", "late"), DiskAssociation("data", "a")]
    instance.update = UpdateSettings(disk_associations=wanted)

    await instance.disks.recover()

    assert await instance.disks.list() == ["a"]
    assert [link.name for link in instance.paths.instance_disks.iterdir()] == ["data"]


@each_way
async def test_disk_association_may_refer_to_a_device(instance: InstanceWithVolumes) -> None:
    instance.persistent["a"] = {"path": "/dev/null"}

    await instance.disks.associate([DiskAssociation("raw", "a")])

    assert (instance.paths.instance_disks / "raw").readlink() == Path("/dev/null")


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            DiskAssociation("x", "no"),
            "^Fetching disk settings: Persistent disk with volume id 'no' could not be found$",
        ),
        (DiskAssociation("../x", "a"), "^Associating disk with name ../x: cannot use '../x' as the name of a link$"),
        (DiskAssociation("x", "late"), "^Associating disk with name x: there is no /does/not/exist$"),
    ],
)
@each_way
async def test_error_names_an_invalid_disk_association(
    instance: InstanceWithVolumes, wanted: DiskAssociation, text: str
) -> None:
    instance.attach("a")
    instance.persistent["late"] = "/does/not/exist"

    with pytest.raises(ActionError, match=text):
        await instance.disks.associate([wanted])


@each_way
async def test_dynamic_disk_is_linked_when_it_appears_and_can_be_unlinked(instance: InstanceWithVolumes) -> None:
    """The CPI may attach the disk only after the request has arrived."""
    instance.paths.dynamic_disks.mkdir()
    link = instance.paths.dynamic_disks / "a"
    instance.disks.timeouts = PATIENT
    adding = asyncio.ensure_future(instance.disks.add_dynamic("a", str(instance.volume("a"))))
    await asyncio.sleep(0.1)
    assert not adding.done()

    volume = instance.attach("a")
    await adding
    assert link.readlink() == volume

    await instance.disks.add_dynamic("a", str(volume))
    assert link.readlink() == volume
    assert instance.disks.dynamic_places() == {"a": volume}
    for _ in range(2):
        await instance.disks.remove_dynamic("a")
        assert not link.is_symlink()
    assert instance.disks.dynamic_places() == {}


@pytest.mark.parametrize(("hint", "why"), [("/does/not/exist", "there is no /does/not/exist"), (None, "the CPI has")])
@each_way
async def test_dynamic_disk_that_does_not_appear_or_has_an_unsafe_name_is_an_error(
    instance: InstanceWithVolumes, hint: str | None, why: str
) -> None:
    with pytest.raises(ActionError, match=f"^Timed out resolving device path for d: {why}"):
        await instance.disks.add_dynamic("d", hint)
    with pytest.raises(ActionError, match="cannot use"):
        await instance.disks.remove_dynamic("../d")
