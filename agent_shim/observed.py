"""What is shown of an agent that knows who it is, to people and their tools: status, readiness, metrics."""

from __future__ import annotations

import os
import time
from typing import Any

from agent_shim import __version__, metrics
from agent_shim.agent import Agent
from agent_shim.running import Running, is_https
from agent_shim.supervisor import monit_answers
from agent_shim.supervisor.supervisor import ServiceInfo


def readiness(live: Running, level: str) -> tuple[bool, str]:
    """Whether the agent (``level`` agent), or else the jobs too, are as they should be, and why (not)."""
    if live.phase != "running":
        return False, live.phase
    if not live.bus.is_connected:
        return False, "not connected to the message bus"
    if level == "agent":
        return True, "connected"
    if live.standalone is not None and live.standalone.obstacle:
        return False, live.standalone.obstacle
    state = live.agent.supervisor.job_state()
    return state in ("running", "stopped"), f"jobs are {state}"


# --- status ---------------------------------------------------------------------------------------------------------


async def status(live: Running | None, phase: str, uptime: int) -> dict[str, Any]:
    """The answer to ``agent-shim status``; the members are there, empty, before there are settings (``live`` None)."""
    found: dict[str, Any] = {
        "version": __version__,
        "phase": phase,
        "uptime_secs": uptime,
        "agent_id": "",
        "bus": {"connected": False, "error": phase, "heartbeat_secs": None},
        "deployment": "",
        "instance": "",
        "job_state": "unknown",
        "task": "",
        "task_progress": "",
        "task_secs": 0,
        "disk": "",
        "warnings": [],
        "tasks_waiting": 0,
        "vitals": {},
        "processes": [],
    }
    if live is None:
        return found
    agent, bus = live.agent, live.bus
    spec, task = agent.spec.current, agent.tasks.running
    age = _heartbeat_age(live)
    return found | {
        "agent_id": agent.settings.current.agent_id,
        "bus": {
            "connected": bus.is_connected,
            "error": bus.stats.last_error,
            "heartbeat_secs": None if age is None else int(age),
        },
        "deployment": spec.deployment,
        "instance": f"{spec.name}/{spec.id}" if spec.name else "",
        "job_state": agent.supervisor.job_state(),
        "task": task.method if task else "",
        "task_progress": task.progress if task else "",
        "task_secs": int(time.monotonic() - task.begun_at) if task else 0,
        "disk": await _disk(agent),
        "warnings": _warnings(live),
        "tasks_waiting": agent.tasks.waiting,
        "vitals": await agent.vitals.sample(),
        "bpm": {"level": agent.supervisor.bpm.level},
        "processes": [monit_answers.describe(service) for service in agent.supervisor.services()],
    }


def _heartbeat_age(live: Running) -> float | None:
    """Seconds since the last heartbeat; None before the first, and on a bus that has none."""
    sent_at = None if is_https(live.bus.mbus) else live.heartbeat.sent_at
    return None if sent_at is None else time.monotonic() - sent_at


def _warnings(live: Running) -> list[str]:
    missing = [f"no interface has the address {ip} ({where})" for ip, where in live.drift.missing.items()]
    obstacle = live.comeback.obstacle
    jobs = [f"the jobs cannot be started: {obstacle}"] if obstacle else []
    return [*jobs, *missing, *live.expiry.warnings]


async def _disk(agent: Agent) -> str:
    """The persistent disk in a line: how far a migration is, what is wrong, or whether there is one."""
    if (progress := agent.disks.progress()) is not None:
        return f"migration, {progress}"
    return await agent.disks.problem() or ("mounted" if agent.disks.is_mounted() else "none")


# --- metrics --------------------------------------------------------------------------------------------------------


def readings(live: Running) -> metrics.Readings:
    """The values of one scrape."""
    agent, bus = live.agent, live.bus
    return metrics.Readings(
        bus=metrics.BusReading(
            connected=bus.is_connected,
            reconnects=bus.stats.reconnects,
            received=bus.stats.received,
            received_bytes=bus.stats.received_bytes,
            sent=bus.stats.sent,
            sent_bytes=bus.stats.sent_bytes,
            rejected=bus.stats.rejected,
            heartbeat_age=_heartbeat_age(live),
        ),
        machine=metrics.machine_reading(live.vitals),
        processes=[_process_reading(service) for service in agent.supervisor.services()],
        tasks_running=int(agent.tasks.running is not None),
        tasks_waiting=agent.tasks.waiting,
        addresses_missing=len(live.drift.missing),
        certificates=live.expiry.ends,
        migration=None if (progress := agent.disks.progress()) is None else progress.share,
    )


def _process_reading(service: ServiceInfo) -> metrics.ProcessReading:
    process = service.process
    return metrics.ProcessReading(
        name=process.name,
        state=process.state,
        is_up=service.pid != 0,
        uptime=process.uptime_secs,
        restarts=service.restarts,
        memory=process.mem_kb * 1024,
        cpu=process.cpu_total / 100 * (os.cpu_count() or 1),
    )
