"""Each callback of the runtime by its effect on the bus, on the volume and on the jobs."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.daemon.boot import GO_AGENT_PASSWORD
from agent_shim.services.volume_lease import NAME
from agent_shim_demo.director import HealthMonitor
from agent_shim_demo.pki import HEALTH_MONITOR
from benchmarks.idle import free_port
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made
from tests.support.waiting import until

PERIOD_S = 30.0
LATE_BOOT = Path("tests/support/programs/late_boot.py").resolve()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        yield one


async def deployed(world: World, jobs: int = 1, **more: dict[str, str]) -> None:
    """Start an agent with running jobs."""
    await world.start_agent()
    await world.run("apply", world.spec(jobs, 0, more=more))
    await world.run("start")
    await world.until_running()


async def ended(world: World) -> None:
    """Send SIGTERM."""
    assert world.agent is not None
    world.agent.send(signal.SIGTERM)
    assert await world.agent.wait() == 0


# --- the end of the agent -------------------------------------------------------------------------------------------


async def test_a_lease_stays_while_jobs_run_and_is_released_once_they_are_stopped(world: World) -> None:
    """Another agent would otherwise write to a volume whose jobs still run."""
    lease = Paths(world.base).mirror / NAME
    await deployed(world)

    await ended(world)
    assert json.loads(lease.read_bytes())["is_over"] is False

    await world.start_agent()
    await world.run("stop")
    await ended(world)
    assert json.loads(lease.read_bytes())["is_over"] is True


async def test_a_held_poll_is_answered_before_the_agent_leaves_the_bus(world: World) -> None:
    await deployed(world, more={"bin/run": "#!/bin/sh\nsleep 1000\n", "monit": ""})
    task = (await world.director.value(AGENT, "run_errand", "more"))["agent_task_id"]
    poll = asyncio.create_task(world.director.call(AGENT, "get_task", task, retries=0))
    await world.director.value(AGENT, "ping")  # the poll came before it
    assert not poll.done()

    await ended(world)

    assert (await poll)["value"] == {"agent_task_id": task, "state": "running"}


# --- a new connection -----------------------------------------------------------------------------------------------


async def test_an_alert_that_found_no_bus_comes_after_the_reconnect(world: World) -> None:
    monitor = HealthMonitor()
    async with monitor.on(world.server.peer(HEALTH_MONITOR)):
        await deployed(world)
        await world.server.kill()
        os.kill(world.pids()["job0"], signal.SIGKILL)
        await until(lambda: "1 alerts queued" in world.log_text())

        await world.server.start()

        alert = await monitor.wait_for("alert", AGENT, timeout=60)
        assert (alert.body["title"], alert.body["severity"]) == ("job0 (127.0.0.1) - Does not exist - restart", 1)


async def test_a_reconnect_sends_a_heartbeat_beside_those_of_the_period(world: World) -> None:
    """The others come at one phase of the period; an extra one has another phase, sooner or later."""
    monitor = HealthMonitor()
    async with monitor.on(world.server.peer(HEALTH_MONITOR)):
        await world.start_agent()
        first = (await monitor.wait_for("heartbeat", AGENT)).at
        phases: list[float] = []
        while len(phases) < 3:
            seen = len(monitor.of("heartbeat", AGENT))
            await world.server.kill()
            await world.server.start()
            await until(lambda: len(monitor.of("heartbeat", AGENT)) > seen)  # noqa: B023
            phases.append((monitor.of("heartbeat", AGENT)[seen].at - first) % PERIOD_S)

    assert max(phases) - min(phases) > 0.1, "all came at the time of the period"


# --- the start of the agent -----------------------------------------------------------------------------------------


async def test_jobs_wait_for_the_late_steps_of_the_boot(world: World) -> None:
    """They need the trusted authorities as soon as they start."""
    prepared = world.base / "data/prepared"
    await deployed(world, more={"bin/pre-start": f"#!/bin/sh\ntouch {prepared}\n", "monit": ""})
    await world.kill_agent()
    os.kill(world.pids()["job0"], signal.SIGKILL)
    for place in world.base.iterdir():  # a new root file system: the jobs are brought back by a task
        if place.is_dir() and not place.is_symlink() and place.name != "data":
            shutil.rmtree(place)
        elif place.name != "data":
            place.unlink()
    may_end = world.scratch / "may-end"
    world.command = shlex.join([sys.executable, str(LATE_BOOT), str(may_end), *shlex.split(COMMAND)[3:]])

    await world.start_agent()
    await world.run("list_disk")  # a task after that which brings the jobs back, if that has begun
    assert not prepared.exists()

    may_end.touch()
    await world.until_running()
    assert prepared.exists()


async def test_jobs_that_the_director_has_stopped_are_not_started_at_a_take_over_from_monit(world: World) -> None:
    """The Go agent leaves the marker too, and monit's files, and no state of this supervisor."""
    await deployed(world)
    await world.run("stop")
    await world.kill_agent()
    paths = Paths(world.base)
    paths.supervisor_state.unlink()
    (paths.monit_job / "0000_job0.monitrc").write_text((paths.jobs / "job0/monit").read_text())

    await world.start_agent()

    state = await world.director.value(AGENT, "get_state", "full")
    assert "taking over the processes of 1 jobs" in world.log_text()
    assert (state["job_state"], [one["state"] for one in state["processes"]]) == ("stopped", ["unknown"])
    assert len(world.starts()["job0"]) == 1


async def test_the_public_password_of_the_go_agent_is_replaced_and_another_is_kept(world: World) -> None:
    """The former is in the sources of the Go agent."""
    user = Paths(world.base).monit_user
    user.parent.mkdir(parents=True)
    user.write_text(f"vcap:{GO_AGENT_PASSWORD}\n")
    await world.start_agent()
    made = user.read_text()
    await world.kill_agent()
    await world.start_agent()

    assert GO_AGENT_PASSWORD not in made
    assert user.read_text() == made
    assert len(made.removeprefix("vcap:").strip()) == 32


# --- metrics --------------------------------------------------------------------------------------------------------


async def test_metrics_separate_running_from_waiting_tasks_and_sent_from_repeated_alerts(world: World) -> None:
    world.http = await free_port()
    await deployed(world, long=LONG)
    for times in (1.0, 2.0):
        os.kill(world.pids()["job0"], signal.SIGKILL)
        # A process that ends before the agent has seen it is a failed start, with another alert.
        restarted = {'agent_shim_process_restarts_total{process="job0"}': times}
        await until_scraped(world.http, {**restarted, 'agent_shim_process_up{process="job0"}': 1.0})
    for _ in range(3):
        await world.director.value(AGENT, "run_errand", "long")

    wanted = {
        "agent_shim_tasks_running": 1.0,
        "agent_shim_tasks_waiting": 2.0,
        'agent_shim_alerts_total{outcome="sent"}': 1.0,
        'agent_shim_alerts_total{outcome="collapsed"}': 1.0,
        'agent_shim_alerts_total{outcome="dropped"}': 0.0,
        "agent_shim_bus_connected": 1.0,
        "agent_shim_disk_migration_running": 0.0,
    }
    await until_scraped(world.http, wanted)


async def until_scraped(address: str, wanted: dict[str, float]) -> None:
    async with asyncio.timeout(60):
        while wanted.items() - (await scraped(address)).items():
            await asyncio.sleep(0.1)


LONG = {"bin/run": "#!/bin/sh\nexec sleep 1000\n", "monit": ""}


async def scraped(address: str) -> dict[str, float]:
    """Return the metrics by name and labels."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    lines = [line.rpartition(" ") for line in (await asyncio.to_thread(read)).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if name}
