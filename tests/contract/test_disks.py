"""Tests the replies of the disk actions, with directories as volumes.

Each mount point is a symlink to its volume, so that no test changes the machine's mounts. ``tests/root`` tests real
mounts. Codes such as ``a20`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import volumes
from agent_shim.services.disks.service import DiskTimeouts
from tests.support.volumes import HASTY
from tests.support.world import LocalAgent, write_settings


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "can_bind", lambda _: False)


def volume(world: LocalAgent, cid: str) -> dict[str, str]:
    """Create a volume's directory, and return the hint that a CPI would send for it."""
    path = world.paths.base.parent / "volumes" / cid
    path.mkdir(parents=True)
    return {"path": str(path)}


async def mounted(world: LocalAgent, cid: str) -> Path:
    """Attach and mount a disk as the Director does. Return its volume's directory."""
    hint = volume(world, cid)
    assert await world.value("add_persistent_disk", cid, hint) == {}
    assert await world.value("mount_disk", cid) == {}
    return Path(hint["path"])


async def test_a19_list_disk_replies_immediately_or_as_a_task_depending_on_the_protocol(world: LocalAgent) -> None:
    await mounted(world, "disk-a")

    assert await world.call("list_disk", protocol=2) == {"value": ["disk-a"]}
    assert "agent_task_id" in (await world.call("list_disk", protocol=3))["value"]
    assert await world.value("list_disk") == ["disk-a"]


async def test_a20_first_disk_is_mounted_on_the_store_and_the_second_on_the_migration_target(world: LocalAgent) -> None:
    first = await mounted(world, "disk-a")
    assert world.paths.store.resolve() == first
    assert world.paths.managed_disk.read_text() == "disk-a"
    assert await world.value("mount_disk", "disk-a") == {}

    second = await mounted(world, "disk-b")
    assert (world.paths.store.resolve(), world.paths.store_migration_target.resolve()) == (first, second)


async def test_a21_unmount_disk_reply_says_whether_the_disk_was_mounted(world: LocalAgent) -> None:
    await mounted(world, "disk-a")

    assert (await world.value("unmount_disk", "disk-a"))["message"].startswith("Unmounted partition of {ID:disk-a ")
    again = (await world.value("unmount_disk", "disk-a"))["message"]
    assert again.startswith("Partition of {ID:disk-a ")
    assert again.endswith(" is not mounted")
    assert await world.value("list_disk") == []


async def test_a22_migrate_disk_without_arguments_moves_all_files(world: LocalAgent) -> None:
    await mounted(world, "disk-a")
    (world.paths.store / "data").write_text("precious")
    second = await mounted(world, "disk-b")

    assert await world.value("migrate_disk") == {}

    assert world.paths.store.resolve() == second
    assert (second / "data").read_text() == "precious"
    assert await world.value("list_disk") == ["disk-b"]


async def test_a22_migrate_disk_accepts_the_old_and_new_disk_ids(world: LocalAgent) -> None:
    await mounted(world, "disk-a")
    await mounted(world, "disk-b")

    assert await world.value("migrate_disk", "disk-a", "disk-b") == {}
    assert await world.value("list_disk") == ["disk-b"]


NOT_FOUND = "Persistent disk with volume id 'x' could not be found"


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("mount_disk", ["x"], f"Reading persistent disk settings: {NOT_FOUND}"),
        ("unmount_disk", ["x"], f"Getting persistent disk settings: {NOT_FOUND}"),
        ("migrate_disk", [], "Migrating persistent disk: no disk is on "),
        (
            "add_dynamic_disk",
            ["x", "/does/not/exist"],
            "Setting up dynamic disk: Timed out resolving device path for x: ",
        ),
        ("remove_dynamic_disk", ["../x"], "Setting up dynamic disk: "),
        (
            "update_settings",
            [{"disk_associations": [{"name": "d", "cid": "x"}]}],
            f"Fetching disk settings: {NOT_FOUND}",
        ),
    ],
)
async def test_disk_errors_match_the_go_agent(world: LocalAgent, method: str, arguments: list[Any], text: str) -> None:
    world.agent.disks.timeouts = HASTY

    assert text in await world.error(method, *arguments)


async def test_disk_requests_reread_the_settings(world: LocalAgent) -> None:
    """A CPI that attaches disks to a running VM writes the settings just before the Director sends the request."""
    base = world.paths.base.parent
    write_settings(base, disks={"persistent": {"disk-a": volume(world, "disk-a")["path"]}})

    assert await world.value("mount_disk", "disk-a") == {}
    associations = [{"name": "data", "cid": "disk-a"}]
    assert await world.value("update_settings", {"disk_associations": associations}) == "ok"
    assert (world.paths.instance_disks / "data").readlink() == base / "volumes/disk-a"

    (base / "settings-source.json").unlink()
    world.paths.settings_cache.unlink()
    for method, arguments in (("list_disk", []), ("mount_disk", ["disk-a"])):
        assert "Refreshing the settings: cannot read settings from " in await world.error(method, *arguments)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("/dev/sdz", {"Path": "/dev/sdz", "VolumeID": "/dev/sdz"}),
        ({"path": "/a", "volume_id": "v", "lun": "1"}, {"Path": "/a", "VolumeID": "v", "Lun": "1"}),
        (None, {"Path": "", "VolumeID": ""}),
        (7, {"Path": "", "VolumeID": ""}),
        (
            {"iscsi_settings": {"username": "u", "password": "p", "target": "t", "initiator_name": "i"}},
            {"ISCSISettings": {"InitiatorName": "i", "Username": "u", "Target": "t", "Password": "p"}},
        ),
    ],
)
async def test_a23_disk_hints_are_stored_whatever_their_json_type(
    world: LocalAgent, hint: Any, expected: dict[str, Any]
) -> None:
    assert await world.value("add_persistent_disk", "disk-a", hint) == {}

    stored = json.loads(world.paths.disk_hints.read_bytes())["disk-a"]
    assert {name: stored[name] for name in ("ID", *expected)} == {"ID": "disk-a", **expected}
    assert world.paths.disk_hints.stat().st_mode & 0o077 == 0


async def test_a23_removing_a_missing_disk_hint_succeeds(world: LocalAgent) -> None:
    await world.value("add_persistent_disk", "disk-a", "/dev/sdz")

    for _ in range(2):
        assert await world.value("remove_persistent_disk", "disk-a") == {}
    assert "disk-a" not in json.loads(world.paths.disk_hints.read_bytes())


async def test_a24_dynamic_disk_is_linked_by_a_task_and_unlinked_immediately(world: LocalAgent) -> None:
    hint = volume(world, "disk-d")
    link = world.paths.dynamic_disks / "disk-d"

    for _ in range(2):
        assert "agent_task_id" in (await world.call("add_dynamic_disk", "disk-d", hint))["value"]
        assert await world.value("add_dynamic_disk", "disk-d", hint) == {}
    assert link.readlink() == Path(hint["path"])
    for _ in range(2):
        assert await world.call("remove_dynamic_disk", "disk-d") == {"value": {}}
    assert not link.is_symlink()


@pytest.mark.parametrize("hint", ["disk-d", "dev/vdb", {"path": "volume"}])
async def test_a24_dynamic_disk_without_an_absolute_path_is_rejected_immediately(world: LocalAgent, hint: Any) -> None:
    """The agent waits for a missing path to appear, but a path that is not absolute can never appear."""
    error = await world.error("add_dynamic_disk", "disk-d", hint)

    assert error.endswith("named no path")
    assert not (world.paths.dynamic_disks / "disk-d").is_symlink()


@pytest.mark.attack("a request contains no disk cid")
@pytest.mark.parametrize("cid", ["", None])
@pytest.mark.parametrize("method", ["mount_disk", "unmount_disk"])
async def test_a21_disk_request_without_a_cid_changes_no_disk(world: LocalAgent, method: str, cid: str | None) -> None:
    unmanaged = Path(volume(world, "of-the-operator")["path"])
    world.paths.store.rmdir() if world.paths.store.is_dir() else None
    world.paths.store.symlink_to(unmanaged)

    assert (await world.error(method, cid)).endswith(": Persistent disk with volume id '' could not be found")
    assert world.paths.store.resolve() == unmanaged


@pytest.mark.attack("a request contains no disk cid")
@pytest.mark.parametrize("cid", ["", None])
async def test_a23_disk_without_a_cid_is_never_stored(world: LocalAgent, cid: str | None) -> None:
    hint = volume(world, "nameless")

    assert (await world.error("add_persistent_disk", cid, hint)).endswith("cannot keep the hint: the disk has no cid")
    assert "cannot use '' as the name of a link" in await world.error("add_dynamic_disk", cid, hint)
    world.paths.disk_hints.write_text(json.dumps({"": {"ID": "", "Path": hint["path"]}}))
    assert (await world.error("mount_disk", cid)).endswith("Persistent disk with volume id '' could not be found")
    assert await world.value("list_disk") == []
    assert await world.value("remove_persistent_disk", cid) == {}


@pytest.mark.parametrize("hint", ["/dev/sdz", {"path": "/dev/disk/by-id/none"}])
async def test_a20_mounting_a_block_device_is_rejected_immediately_with_advice(world: LocalAgent, hint: Any) -> None:
    """A container needs a directory that the CPI has mounted, so waiting for the device would not help."""
    world.agent.disks.timeouts = DiskTimeouts(arrival=3600)
    await world.value("add_persistent_disk", "disk-a", hint)

    async with asyncio.timeout(30):
        text = await world.error("mount_disk", "disk-a")
    assert "Mounting persistent disk: cannot use disk disk-a: /dev/" in text
    assert "is a block device" in text
    assert "have the CPI mount the volume" in text
