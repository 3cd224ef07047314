"""Tests the graceful shutdown, in which the agent drains and stops all jobs when the container is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.daemon.endings import write_termination_log
from agent_shim.daemon.orderly_stop import OrderlyStop
from tests.contract.test_actions import deployed, running
from tests.support import jobs
from tests.support.waiting import TIMEOUT_S, until
from tests.support.world import LocalAgent
from tests.support.world import world as made


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalAgent]:
    async with made(tmp_path) as one:
        yield one


def recording_scripts(world: LocalAgent, job: str, drain: str) -> dict[str, str]:
    """Return lifecycle scripts that record each call, and whether the job's process was running at that time."""
    trace = world.paths.base / "trace"
    alive = f"kill -0 $(cat {world.paths.run}/{job}/{job}.pid) 2>/dev/null && state=up || state=down"
    line = f"#!/bin/sh\n{alive}\necho {job} {{name}} $state >> {trace}\n"
    return {
        "bin/pre-stop": line.format(name="pre-stop"),
        "bin/drain": line.format(name="drain") + drain,
        "bin/post-stop": line.format(name="post-stop"),
    }


def recorded_calls(world: LocalAgent) -> list[str]:
    return (world.paths.base / "trace").read_text().splitlines()


async def started(world: LocalAgent, **files: Any) -> None:
    await deployed(world, **files)
    await world.value("start")
    await running(world)


async def test_orderly_stop_runs_all_drain_scripts_before_it_stops_processes(world: LocalAgent) -> None:
    fast, slow = recording_scripts(world, "fast", "echo 0\n"), recording_scripts(world, "slow", "sleep 0.3; echo 0\n")
    slow["bin/drain"] += (
        f"kill -0 $(cat {world.paths.run}/fast/fast.pid) && echo others-up >> {world.paths.base}/trace\n"
    )
    await started(world, fast=fast, slow=slow)

    stop = OrderlyStop(20)
    await stop.run(world.agent)

    assert stop.reasons == []
    lines = recorded_calls(world)
    assert sorted(lines[:2]) == ["fast pre-stop up", "slow pre-stop up"]
    assert sorted(lines[2:5]) == ["fast drain up", "others-up", "slow drain up"]
    assert sorted(lines[5:]) == ["fast post-stop down", "slow post-stop down"]
    assert not world.paths.stopped_marker.exists()


async def test_orderly_stop_aborts_a_drain_that_exceeds_the_grace_period(world: LocalAgent) -> None:
    await started(world, slow=recording_scripts(world, "slow", "echo 1000\n"))
    pid = int((world.paths.run / "slow/slow.pid").read_text())

    stop = OrderlyStop(2)
    async with asyncio.timeout(60):  # This is much less than the 1000 s that the drain script requests.
        await stop.run(world.agent)
        await until(lambda: not Path(f"/proc/{pid}").exists())

    assert "drain scripts were cut short" in stop.reasons
    assert stop.summary == "not clean: " + "; ".join(stop.reasons)


async def test_orderly_stop_does_not_drain_jobs_that_the_director_stopped(world: LocalAgent) -> None:
    """A drain script may wait for a process that has already been stopped. For example, a Director's drain script would
    wait for its stopped database until the grace period is over.
    """
    await started(world, web=recording_scripts(world, "web", "echo 0\n"))
    await world.value("stop")

    stop = OrderlyStop(20)
    await stop.run(world.agent)

    assert stop.reasons == []
    assert not (world.paths.base / "trace").exists()


async def test_process_killed_by_a_drain_script_is_not_restarted(world: LocalAgent) -> None:
    """In many releases, the drain script terminates the job's process itself. This must not be treated as a crash."""
    gate = world.paths.base / "gate"
    drain = f"kill $(cat {world.paths.run}/web/web.pid)\nwhile [ ! -e {gate} ]; do sleep 0.02; done\necho 0\n"
    await started(world, web={**jobs.sleeper(world.paths, "web"), "bin/drain": f"#!/bin/sh\n{drain}"})
    pid = int((world.paths.run / "web/web.pid").read_text())
    stopping = asyncio.create_task(OrderlyStop(30).run(world.agent))
    await until(lambda: not Path(f"/proc/{pid}").exists())
    (service,) = world.agent.supervisor.services()
    gate.touch()
    await stopping

    assert service.state == "unmonitored"
    assert [event.event for event in world.events if event.event == "Does not exist"] == []


DEAF = "trap '' TERM; echo $$ >$pidfile; while :; do sleep 0.1; done"


async def test_orderly_stop_that_has_to_kill_processes_is_unclean_and_names_them(
    world: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_shim.supervisor.supervisor.KILL_SHARE", 0.05)
    await started(world, web=jobs.process(world.paths, "web", DEAF, "exit"))

    stop = OrderlyStop(30)
    await stop.run(world.agent)

    assert stop.reasons == ["killed because the time was up: web"]


async def test_orderly_stop_stops_services_without_a_group(world: LocalAgent) -> None:
    """The Director does not see services outside the vcap group, but its start request starts them, as monit's reload
    would.
    """
    pidfiles = {name: world.paths.run / f"{name}/{name}.pid" for name in ("drained", "stopped")}
    files = {name: jobs.sleeper(world.paths, name) for name in pidfiles}
    for each in files.values():
        each["monit"] = each["monit"].replace("  group vcap\n", "")
    files["drained"]["bin/drain"] = f"#!/bin/sh\nkill $(cat {pidfiles['drained']})\nsleep 0.5\necho 0\n"
    await deployed(world, **files)
    await world.value("start")
    await until(lambda: {each.state for each in world.agent.supervisor.services()} == {"running"})
    pids = [int(each.read_text()) for each in pidfiles.values()]

    stop = OrderlyStop(20)
    await stop.run(world.agent)

    assert stop.reasons == []
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert [event.event for event in world.events if event.event == "Does not exist"] == []


async def test_second_signal_shortens_the_orderly_stop(world: LocalAgent) -> None:
    await started(world, slow=recording_scripts(world, "slow", "echo 1000\n"))
    pid = int((world.paths.run / "slow/slow.pid").read_text())
    stop = OrderlyStop(1000)
    stopping = asyncio.create_task(stop.run(world.agent))
    async with asyncio.timeout(TIMEOUT_S):
        await until(
            lambda: any(
                "drain" in line for line in (recorded_calls(world) if (world.paths.base / "trace").exists() else [])
            )
        )

        stop.hurry.set()
        await stopping

    assert not Path(f"/proc/{pid}").exists()


async def test_state_changing_actions_are_refused_while_the_container_shuts_down(world: LocalAgent) -> None:
    world.dispatcher.refusing = "the container ends"

    assert await world.error("apply", {}) == "Action Failed apply: cannot run apply: the container ends"
    assert await world.call("ping") == {"value": "pong"}
    assert "value" in await world.call("get_state")


def test_termination_log_is_overwritten_but_never_created(tmp_path: Path) -> None:
    """Kubernetes mounts this file into each container. Outside Kubernetes, it does not exist."""
    log = tmp_path / "termination-log"
    write_termination_log("agent-shim: all jobs stopped in order\n", log)
    assert not log.exists()

    log.write_text("what the container before this one has left, at some length: it was killed by somebody\n")
    write_termination_log("agent-shim: not clean: drain scripts were cut short\n", log)
    assert log.read_text() == "agent-shim: not clean: drain scripts were cut short\n"
