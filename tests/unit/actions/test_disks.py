"""The actions of disks: texts, replies, and settings that are read again each time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_shim.actions import disks as actions
from agent_shim.actions.dispatch import ACTIONS, Mode
from agent_shim.actions.state import update_settings
from agent_shim.core.errors import ActionError
from agent_shim.core.settings import DiskAssociation, Effective, UpdateSettings
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.trusted_cas import TrustedCas
from tests.support.volumes import Instance


@dataclass
class Asked:
    """The parts of an agent that these actions use."""

    settings: SettingsStore
    disks: Any
    certificates: TrustedCas


class Stored(Instance):
    """An instance whose settings are read by a store."""

    store: SettingsStore

    def effective(self) -> Effective:
        return self.store.current


class World:
    """An instance whose settings are in a file of a CPI."""

    def __init__(self, scratch: Path) -> None:
        self.instance = Stored(scratch, bind=False)
        self.source = scratch / "cpi.json"
        self.store = self.instance.store = SettingsStore(self.instance.paths, [self.source])
        self.agent: Any = Asked(self.store, self.instance.disks, TrustedCas(self.instance.paths))

    def write(self, **persistent: Any) -> None:
        document = {"agent_id": "a-1", "mbus": "nats://h:1", "disks": {"persistent": persistent}}
        self.source.write_text(json.dumps(document))


@pytest.fixture
async def world(tmp_path: Path) -> World:
    found = World(tmp_path)
    found.write()
    await found.store.refreshed()
    return found


async def test_a_disk_from_attaching_to_detaching(world: World) -> None:
    """The replies that a Director got from the Go agent for the same calls."""
    volume = world.instance.attach("disk-a")

    assert await actions.add_persistent_disk(world.agent, "disk-a", {"path": str(volume)}) == {}
    assert await actions.list_disk(world.agent) == []
    assert await actions.mount_disk(world.agent, "disk-a") == {}
    assert await actions.list_disk(world.agent) == ["disk-a"]
    unmounted = await actions.unmount_disk(world.agent, "disk-a")
    assert unmounted["message"].startswith("Unmounted partition of {ID:disk-a ")
    assert await actions.list_disk(world.agent) == []
    assert await actions.remove_persistent_disk(world.agent, "disk-a") == {}


async def test_settings_are_read_anew(world: World) -> None:
    """A CPI that attaches live writes them just before."""
    world.write(a=str(world.instance.attach("a")))

    assert await actions.mount_disk(world.agent, "a") == {}
    assert await actions.list_disk(world.agent) == ["a"]


NOT_FOUND = "Persistent disk with volume id 'x' could not be found"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda agent: actions.mount_disk(agent, "x"), f"Reading persistent disk settings: {NOT_FOUND}"),
        (lambda agent: actions.unmount_disk(agent, "x"), f"Getting persistent disk settings: {NOT_FOUND}"),
        (actions.migrate_disk, "Migrating persistent disk: no disk is on "),
        (
            lambda agent: actions.add_dynamic_disk(agent, "x", "/does/not/exist"),
            "Setting up dynamic disk: Timed out resolving device path for x: ",
        ),
        (lambda agent: actions.remove_dynamic_disk(agent, "../x"), "Setting up dynamic disk: "),
        (
            lambda agent: update_settings(agent, UpdateSettings(disk_associations=[DiskAssociation("d", "x")])),
            f"Fetching disk settings: {NOT_FOUND}",
        ),
    ],
)
async def test_errors_read_as_those_of_the_go_agent(world: World, call: Any, text: str) -> None:
    with pytest.raises(ActionError) as caught:
        await call(world.agent)

    assert str(caught.value).startswith(text)


async def test_settings_that_cannot_be_read_are_told(world: World) -> None:
    world.source.unlink()
    world.instance.paths.settings_cache.unlink()

    for call in (actions.list_disk(world.agent), actions.mount_disk(world.agent, "a")):
        with pytest.raises(ActionError, match="^Refreshing the settings: cannot read settings from "):
            await call


async def test_associations_come_with_update_settings(world: World) -> None:
    world.write(a=str(world.instance.attach("a")))

    assert await update_settings(world.agent, UpdateSettings(disk_associations=[DiskAssociation("d", "a")])) == "ok"

    assert (world.instance.paths.instance_disks / "d").readlink() == world.instance.volume("a")
    assert await actions.list_disk(world.agent) == ["a"]


async def test_a24_a_dynamic_disk(world: World) -> None:
    world.instance.paths.dynamic_disks.mkdir()

    assert await actions.add_dynamic_disk(world.agent, "d", {"path": "/dev/null"}) == {}
    assert (world.instance.paths.dynamic_disks / "d").readlink() == Path("/dev/null")
    assert await actions.remove_dynamic_disk(world.agent, "d") == {}


def test_a19_list_disk_answers_the_cli_at_once() -> None:
    assert (ACTIONS["list_disk"].mode, ACTIONS["list_disk"].task_from_protocol) == (Mode.TASK, 3)
    assert ACTIONS["remove_dynamic_disk"].mode is Mode.NOW
