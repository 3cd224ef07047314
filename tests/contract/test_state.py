"""Tests the results of ``get_state``.

The codes ``s1`` to ``s6`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.host import network
from agent_shim.host.network import Address
from tests.contract.test_actions import deployed, running, store_of
from tests.support import jobs
from tests.support.specs import FRESH_SPEC
from tests.support.waiting import TIMEOUT_S, until
from tests.support.world import LocalAgent, write_settings
from tests.support.world import world as new_world


async def test_s1_fresh_state_matches_the_go_agent(world: LocalAgent) -> None:
    assert await world.value("get_state") == FRESH_SPEC | {
        "agent_id": "agent-1",
        "job_state": "running",
        "vm": {"name": "vm-1"},
    }


async def test_s2_get_state_returns_full_and_partial_specs(world: LocalAgent) -> None:
    full = await deployed(world, "web")
    partial = {"deployment": "dep", "job": {"name": "group"}, "index": 3, "id": "i-1", "networks": jobs.NETWORKS}

    known = await world.value("get_state")
    await world.value("apply", partial)
    bare = await world.value("get_state")

    template = {"name": "web", "version": "1"}
    assert known["job"] == {"name": "group", "release": "", "template": "web", "version": "1", "templates": [template]}
    assert known["packages"]["tool"] == {**full["packages"]["tool"], "signed_url": "", "blobstore_headers": None}
    assert known["rendered_templates_archive"] == full["rendered_templates_archive"]
    named = ("configuration_hash", "deployment", "name", "id", "az", "index", "persistent_disk")
    assert {name: known[name] for name in named} == {name: full[name] for name in named}
    assert bare["job"] == {"name": "group", "release": "", "template": "", "version": "", "templates": None}
    assert [bare[name] for name in named] == ["", "dep", "", "i-1", "", 3, 0]
    assert (bare["packages"], bare["rendered_templates_archive"]) == ({}, None)
    assert set(bare) - {"processes"} == set(known) - {"processes"}


class _Secs(msgspec.Struct):
    secs: int | None = None


class _Mem(msgspec.Struct):
    percent: float
    kb: int | None = None


class _Cpu(msgspec.Struct):
    total: float


class _ReportedProcess(msgspec.Struct):
    """A process in the reply to ``get_state``, with the types that the bosh CLI expects.

    The CLI decodes integers as unsigned.
    """

    name: str
    state: str
    uptime: _Secs
    mem: _Mem
    cpu: _Cpu


class _ReportedDisk(msgspec.Struct):
    percent: str
    inode_percent: str


class _VitalsMem(msgspec.Struct):
    kb: str
    percent: str


class _VitalsCpu(msgspec.Struct):
    sys: str
    user: str
    wait: str


class _ReportedVitals(msgspec.Struct):
    cpu: _VitalsCpu
    mem: _VitalsMem
    swap: _VitalsMem
    load: list[str]
    disk: dict[str, _ReportedDisk]
    uptime: _Secs


async def test_s3_full_state_adds_vitals_with_types_that_the_cli_can_decode(world: LocalAgent) -> None:
    state = await world.value("get_state", "full")

    vitals = msgspec.convert(state["vitals"], _ReportedVitals, strict=True)
    assert len(vitals.load) == 3
    assert "system" in vitals.disk
    assert vitals.uptime.secs is None or vitals.uptime.secs >= 0
    assert "vitals" not in await world.value("get_state", "anything else")


async def test_s5_process_values_have_types_that_the_cli_can_decode(world: LocalAgent) -> None:
    await deployed(world, "web")
    await world.value("start")

    state = await running(world)

    process = msgspec.convert(state["processes"][0], _ReportedProcess, strict=True)
    assert (process.name, process.state) == ("web", "running")
    assert process.mem.kb is None or process.mem.kb > 0
    assert process.uptime.secs is None or process.uptime.secs >= 0


async def test_s4_job_state_failing_overrides_running_and_stopped_overrides_both(world: LocalAgent) -> None:
    seen = [(await world.value("get_state"))["job_state"]]
    await deployed(world, "good", bad={"monit": "check process bad with nonsense"})
    await world.value("start")
    states: dict[str, str] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while states.get("good") != "running":
            state = await world.value("get_state")
            states = {process["name"]: process["state"] for process in state["processes"]}
            await asyncio.sleep(0.01)
    assert states == {"good": "running", "bad": "failing"}
    seen.append(state["job_state"])
    await world.value("stop")
    seen.append((await world.value("get_state"))["job_state"])

    assert seen == ["running", "failing", "stopped"]


async def test_s4_only_a_crashed_process_must_settle_before_it_counts_as_running(world: LocalAgent) -> None:
    await deployed(world, "web")
    await world.value("start")
    await running(world)
    os.kill(int((world.paths.run / "web/web.pid").read_text()), signal.SIGKILL)

    async with asyncio.timeout(TIMEOUT_S):
        await until(lambda: world.agent.supervisor.services()[0].restarts)
        while not (state := await world.value("get_state"))["processes"][0]["uptime"]:
            await asyncio.sleep(0.01)

    assert state["job_state"] in ("failing", "starting")


@pytest.mark.parametrize("seconds", [3600, 0.2])
async def test_s4_instance_is_starting_until_its_settling_time_is_over(tmp_path: Path, seconds: float) -> None:
    async with new_world(tmp_path, env={"bosh": {"agent": {"settings": {"settling_time": seconds}}}}) as world:
        await deployed(world, "web")
        assert (await world.value("get_state"))["job_state"] == "running"  # no service is monitored yet
        await world.value("start")

        async with asyncio.timeout(TIMEOUT_S):
            while (state := await world.value("get_state"))["processes"][0]["state"] != "running":
                await asyncio.sleep(0.01)
            if seconds > 60:
                assert state["job_state"] == "starting"
            while seconds < 1 and state["job_state"] != "running":
                state = await world.value("get_state")
                await asyncio.sleep(0.01)
        await world.value("stop")
        assert (await world.value("get_state"))["job_state"] == "stopped"


async def test_s4_job_state_is_never_running_during_a_crash_loop(world: LocalAgent) -> None:
    crash = jobs.sleeper(world.paths, "web")
    crash["bin/ctl"] = crash["bin/ctl"].replace("exec sleep 1000", "exec sleep 0.05")
    await deployed(world, web=crash)
    await world.value("start")

    await until(lambda: world.agent.supervisor.services()[0].restarts >= 3)

    for _ in range(20):
        assert (await world.value("get_state"))["job_state"] in ("failing", "starting")
        await asyncio.sleep(0.01)


async def test_s6_networks_are_returned_unchanged_and_survive_a_restart(world: LocalAgent) -> None:
    networks: dict[str, Any] = {
        "default": {
            "type": "manual",
            "ip": "10.0.0.5",
            "prefix": "32",
            "netmask": "255.255.255.0",
            "default": ["gateway", "dns"],
            "cloud_properties": {"n": 1, "f": 1.5, "nested": {"l": [3, 1, 2]}, "none": None},
            "dns": [],
        }
    }
    await world.value("apply", jobs.spec(store_of(world), {}, networks=networks))

    assert (await world.value("get_state"))["networks"] == networks
    assert (await world.agent.spec.load()).networks == networks
    assert json.loads(world.paths.spec.read_bytes())["networks"] == networks


@pytest.fixture
async def dynamic(world: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> Callable[[Address | None], None]:
    """Write settings with a dynamic network. Return a function that sets the address of the default route."""
    write_settings(world.paths.base.parent, networks={"default": {"type": "dynamic", "default": ["dns", "gateway"]}})
    await world.agent.settings.refreshed()
    return lambda address: monkeypatch.setattr(network, "default_address", lambda **_: address)


async def test_s6_dynamic_networks_get_their_addresses_only_during_apply(
    world: LocalAgent, dynamic: Callable[[Address | None], None]
) -> None:
    dynamic(Address("10.42.0.17", "255.255.255.0", "10.42.0.1"))
    wanted = {"type": "dynamic", "cloud_properties": {}, "prefix": "32", "default": ["dns", "gateway"]}

    await world.value("apply", {"networks": {"default": wanted}, "id": "x"})

    filled = wanted | {"ip": "10.42.0.17", "netmask": "255.255.255.0", "gateway": "10.42.0.1"}
    assert (await world.value("get_state"))["networks"] == {"default": filled}
    dynamic(Address("10.42.0.99", "x", "y"))
    assert (await world.value("get_state"))["networks"] == {"default": filled}
    await world.value("apply", {"networks": {"default": filled}, "id": "x"})
    assert (await world.value("get_state"))["networks"] == {"default": filled}


async def test_s6_first_apply_on_a_new_vm_replaces_the_previous_vms_address(
    world: LocalAgent, dynamic: Callable[[Address | None], None]
) -> None:
    """The Director sends the address that the instance's previous VM reported (network_settings.rb)."""
    dynamic(Address("10.42.0.18", "255.255.255.0", "10.42.0.1"))
    of_former = {"type": "dynamic", "ip": "10.42.0.17", "netmask": "255.255.254.0", "gateway": "10.42.0.9"}
    of_this = {"type": "dynamic", "ip": "10.42.0.18", "netmask": "255.255.255.0", "gateway": "10.42.0.1"}

    for _ in range(2):
        await world.value("apply", {"networks": {"default": of_former}, "id": "x"})

        assert (await world.value("get_state"))["networks"] == {"default": of_this}


async def test_s6_dynamic_network_without_a_default_route_is_rejected(
    world: LocalAgent, dynamic: Callable[[Address | None], None]
) -> None:
    dynamic(None)

    text = await world.error("apply", {"networks": {"default": {"type": "dynamic"}}, "id": "x"})

    assert "Resolving dynamic networks: cannot find the address of 'default'" in text
