"""Tests the agent runtime's callbacks through their effects on the bus, the volume and the jobs."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import urllib.request
from pathlib import Path

from agent_shim.core.paths import Paths
from agent_shim.daemon.boot import GO_AGENT_PASSWORD
from agent_shim.demo.director import HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.services.volume_lease import NAME
from tests.support.instance import AGENT, COMMAND, RunningAgent
from tests.support.ports import free_address
from tests.support.waiting import until

PERIOD_S = 30.0
PROGRAMS = Path("tests/support/programs").resolve()


def command_through(program: str, *arguments: object) -> str:
    """Return the command that runs an agent through ``program``, which modifies the agent first."""
    return shlex.join([sys.executable, str(PROGRAMS / program), *map(str, arguments), *shlex.split(COMMAND)[3:]])


# --- agent shutdown ---------------------------------------------------------------------------------------------------


async def test_volume_lease_is_released_only_after_the_jobs_stop(instance: RunningAgent) -> None:
    """While this agent's jobs are running, no other agent may write to the volume."""
    lease = Paths(instance.base).mirror / NAME
    await instance.deploy()

    assert await instance.stop_agent() == 0
    assert json.loads(lease.read_bytes())["is_over"] is False

    await instance.start_agent()
    await instance.run("stop")
    assert await instance.stop_agent() == 0
    assert json.loads(lease.read_bytes())["is_over"] is True


async def test_delayed_get_task_reply_is_sent_before_the_agent_disconnects(instance: RunningAgent) -> None:
    await instance.deploy(more={"more": {"bin/run": "#!/bin/sh\nsleep 1000\n", "monit": ""}})
    task = (await instance.director.value(AGENT, "run_errand", "more"))["agent_task_id"]
    poll = asyncio.create_task(instance.director.call(AGENT, "get_task", task, retries=0))
    await instance.director.value(AGENT, "ping")  # the poll was sent first, so it has arrived as well
    assert not poll.done()

    assert await instance.stop_agent() == 0

    assert (await poll)["value"] == {"agent_task_id": task, "state": "running"}


# --- a new connection -------------------------------------------------------------------------------------------------


async def test_reconnect_sends_pending_alerts_and_an_extra_heartbeat(instance: RunningAgent) -> None:
    """Regular heartbeats come at fixed times, so a heartbeat at another time is the extra one."""
    monitor = HealthMonitor()
    async with monitor.on(instance.server.peer(HEALTH_MONITOR)):
        await instance.deploy()
        first = (await monitor.wait_for("heartbeat", AGENT)).at
        await instance.server.kill()
        os.kill(instance.pids()["job0"], signal.SIGKILL)
        await until(lambda: "1 alerts queued" in instance.log_text())

        await instance.server.start()

        alert = await monitor.wait_for("alert", AGENT, timeout=60)
        assert (alert.body["title"], alert.body["severity"]) == ("job0 (127.0.0.1) - Does not exist - restart", 1)
        phases: list[float] = []
        # Try several times, because the monitor may reconnect too late for the extra heartbeat.
        while len(phases) < 8 and max(phases, default=0) - min(phases, default=0) <= 0.1:
            seen = len(monitor.of("heartbeat", AGENT))
            await instance.server.kill()
            await instance.server.start()
            await until(lambda: len(monitor.of("heartbeat", AGENT)) > seen)  # noqa: B023
            phases.append((monitor.of("heartbeat", AGENT)[seen].at - first) % PERIOD_S)

    assert max(phases) - min(phases) > 0.1, "all came at the time of the period"


async def test_reconnect_updates_the_packet_filter(instance: RunningAgent) -> None:
    """The bus may have a new address, and the packet filter must keep jobs from connecting to it."""
    written = instance.scratch / "written"
    instance.command = command_through("without_nft.py", written)
    await instance.start_agent()
    before = await until(lambda: written.exists() and written.read_text())
    await instance.server.kill()

    await instance.server.start()

    await until(lambda: written.read_text() != before)


# --- agent start ------------------------------------------------------------------------------------------------------


async def test_jobs_start_only_after_the_late_boot_steps(instance: RunningAgent) -> None:
    """Jobs need the results of these steps, such as trusted CAs, as soon as they start."""
    prepared = instance.base / "data/prepared"
    await instance.deploy(more={"more": {"bin/pre-start": f"#!/bin/sh\ntouch {prepared}\n", "monit": ""}})
    await instance.kill_agent()
    os.kill(instance.pids()["job0"], signal.SIGKILL)
    for place in instance.base.iterdir():  # simulate a new root file system, so that the agent starts the jobs
        if place.is_dir() and not place.is_symlink() and place.name != "data":
            shutil.rmtree(place)
        elif place.name != "data":
            place.unlink()
    may_end = instance.scratch / "may-end"
    instance.command = command_through("late_boot.py", may_end)

    await instance.start_agent()
    await instance.run("list_disk")  # would hang if the agent were already starting the jobs
    assert not prepared.exists()

    may_end.touch()
    await instance.until_running()
    assert prepared.exists()


async def test_takeover_from_monit_does_not_start_stopped_jobs(instance: RunningAgent) -> None:
    """The supervisor has no saved state, but a marker file from the Go agent says that the jobs are stopped."""
    await instance.deploy()
    await instance.run("stop")
    await instance.kill_agent()
    paths = Paths(instance.base)
    paths.supervisor_state.unlink()
    (paths.monit_job / "0000_job0.monitrc").write_text((paths.jobs / "job0/monit").read_text())

    await instance.start_agent()

    state = await instance.director.value(AGENT, "get_state", "full")
    assert "taking over the processes of 1 jobs" in instance.log_text()
    assert (state["job_state"], [one["state"] for one in state["processes"]]) == ("stopped", ["unknown"])
    assert len(instance.starts()["job0"]) == 1


async def test_default_monit_password_of_the_go_agent_is_replaced(instance: RunningAgent) -> None:
    """The Go agent's default password is public."""
    user = Paths(instance.base).monit_user
    user.parent.mkdir(parents=True)
    user.write_text(f"vcap:{GO_AGENT_PASSWORD}\n")
    await instance.start_agent()
    made = user.read_text()
    await instance.kill_agent()
    await instance.start_agent()

    assert GO_AGENT_PASSWORD not in made
    assert user.read_text() == made
    assert len(made.removeprefix("vcap:").strip()) == 32


# --- metrics ----------------------------------------------------------------------------------------------------------


async def test_metrics_count_running_and_waiting_tasks_and_sent_and_collapsed_alerts(
    instance: RunningAgent,
) -> None:
    instance.http = free_address()
    await instance.deploy(more={"long": LONG})
    for times in (1.0, 2.0):
        os.kill(instance.pids()["job0"], signal.SIGKILL)
        # Wait until the agent has seen the new process. If the process were killed earlier, the agent would report a
        # failed start instead of a restart.
        restarted = {'agent_shim_process_restarts_total{process="job0"}': times}
        await until_scraped(instance.http, {**restarted, 'agent_shim_process_up{process="job0"}': 1.0})
    for _ in range(3):
        await instance.director.value(AGENT, "run_errand", "long")

    wanted = {
        "agent_shim_tasks_running": 1.0,
        "agent_shim_tasks_waiting": 2.0,
        'agent_shim_alerts_total{outcome="sent"}': 1.0,
        'agent_shim_alerts_total{outcome="collapsed"}': 1.0,
        'agent_shim_alerts_total{outcome="dropped"}': 0.0,
        "agent_shim_bus_connected": 1.0,
        "agent_shim_disk_migration_running": 0.0,
    }
    await until_scraped(instance.http, wanted)


async def until_scraped(address: str, wanted: dict[str, float]) -> None:
    async with asyncio.timeout(60):
        while wanted.items() - (await scraped(address)).items():
            await asyncio.sleep(0.1)


LONG = {"bin/run": "#!/bin/sh\nexec sleep 1000\n", "monit": ""}


async def scraped(address: str) -> dict[str, float]:
    """Return the values of all metrics, keyed by name and labels."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    lines = [line.rpartition(" ") for line in (await asyncio.to_thread(read)).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if name}
