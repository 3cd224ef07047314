"""Reports an agent's status, readiness and metrics."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import Any, Final

from agent_shim import __version__
from agent_shim.actions.agent import Agent
from agent_shim.bulk import workers
from agent_shim.core import keep_running, os_release, safetext
from agent_shim.core.spec import ApplySpec
from agent_shim.daemon.runtime import Runtime, is_https
from agent_shim.edges import metrics
from agent_shim.host import files
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import ServiceInfo

_SCRIPT_OUTPUT: Final = re.compile(r"( Jobs: [\w, .-]+?\.) [\w.-]+: .*", re.DOTALL)
"""Matches the last output lines of failed scripts, which an error lists after the job names. ``readiness`` removes this
output, because anybody may read its result.
"""
MAX_CULPRITS: Final = 3
"""Maximum number of services named by ``readiness``."""


def readiness(live: Runtime, level: str) -> tuple[bool, str]:
    """Return whether the agent is ready, and the reason. The ``boot`` level requires a completed boot. The ``agent``
    level also requires a bus connection, and the ``jobs`` level also requires that all jobs are running or were stopped
    on purpose. If they are not, the reason names some of the services.
    """
    if live.phase != "running":
        return False, live.phase
    if level == "boot":
        return True, "booted"
    if not live.bus.is_connected:
        return False, "not connected to the message bus"
    if level == "agent":
        return True, "connected"
    if live.standalone is not None and live.standalone.obstacle:
        return False, _SCRIPT_OUTPUT.sub(r"\1", live.standalone.obstacle)
    state = live.agent.supervisor.job_state()
    if state in ("running", "stopped"):
        return True, f"jobs are {state}"
    culprits = [_culprit(each) for each in live.agent.supervisor.services() if each.process.state != "running"]
    more = f"; and {len(culprits) - MAX_CULPRITS} more" if len(culprits) > MAX_CULPRITS else ""
    return False, f"jobs are {state}: {'; '.join(culprits[:MAX_CULPRITS])}{more}"


def _culprit(service: ServiceInfo) -> str:
    """Return the name of a service that is not reported as running, followed by the reasons: its state, unless that is
    ``running``, and its failed rules. The job's output is left out, because anybody may read the result.
    """
    state = f"{service.state} after {service.last_exit}" if service.last_exit and not service.pid else service.state
    reasons = [*([] if service.state == "running" else [state]), *service.faults]
    return safetext.label(f"{service.process.name} ({', '.join(reasons)})")


def _job_state(live: Runtime) -> str:
    """Return the state of the instance. Without a Director, the state is ``running`` only once the jobs have been
    deployed.
    """
    found, alone = live.agent.supervisor.job_state(), live.standalone
    if alone is None or not alone.obstacle or found == "stopped":
        return found
    return "failing" if alone.failure else "starting"


def _blocked(live: Runtime) -> str:
    """Return the reason why the jobs cannot be started or deployed, or "" if they can. While a first deployment is in
    progress, the jobs are not blocked.
    """
    alone = live.standalone
    return live.job_recovery.obstacle or (alone.failure if alone is not None else "")


# --- status -----------------------------------------------------------------------------------------------------------


async def status(live: Runtime | None, phase: str, uptime: int) -> dict[str, Any]:
    """Return the answer to ``agent-shim status``. Before the settings are known (``live`` is None), ``firewall`` and
    ``bpm`` are missing, and all other fields that depend on the settings have empty values.
    """
    found: dict[str, Any] = {
        "version": __version__,
        "phase": phase,
        "uptime_secs": uptime,
        "agent_id": "",
        "bus": {"is_used": True, "connected": False, "error": phase, "heartbeat_secs": None},
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
            "is_used": bool(bus.mbus.urls),
            "connected": bus.is_connected,
            "error": bus.stats.last_error,
            "heartbeat_secs": None if age is None else int(age),
        },
        "deployment": spec.deployment,
        "instance": f"{spec.name}/{spec.id}" if spec.name else "",
        "job_state": _job_state(live),
        "task": task.method if task else "",
        "task_progress": task.progress if task else "",
        "task_secs": int(time.monotonic() - task.begun_at) if task else 0,
        "disk": await _disk(agent),
        "warnings": _warnings(live),
        "tasks_waiting": agent.tasks.waiting,
        "vitals": await agent.vitals.sample(),
        "firewall": _firewall(live),
        "bpm": (await agent.supervisor.bpm.isolation())._asdict(),
        "processes": monit_api.with_events(agent.supervisor),
    }


def _firewall(live: Runtime) -> dict[str, Any] | None:
    """Return whether the firewall rules that keep jobs from the bus are ``enforced``, and if not, ``why``. Return None
    if there is no NATS bus.
    """
    mbus, obstacle = live.bus.mbus, live.firewall.obstacle
    return None if not mbus.urls or is_https(mbus) else {"enforced": not obstacle, "why": obstacle}


def _heartbeat_age(live: Runtime) -> float | None:
    """Return the seconds since the last heartbeat, or None before the first one and on a bus without heartbeats."""
    sent_at = None if is_https(live.bus.mbus) else live.heartbeat.sent_at
    return None if sent_at is None else time.monotonic() - sent_at


def _warnings(live: Runtime) -> list[str]:
    """Return the warnings that ``agent-shim status`` shows."""
    missing = [f"no interface has the address {ip} ({where})" for ip, where in live.address_watch.missing.items()]
    jobs = [f"the jobs cannot be started: {obstacle}"] if (obstacle := _blocked(live)) else []
    warnings = [*jobs, *missing]
    if live.bus.mbus.urls and live.bus.is_connected and live.bus.mbus != live.agent.settings.current.mbus:
        warnings.append("the bus cannot be reached with the credentials in the settings, so the agent uses other ones")
    return [*warnings, *live.certificate_watch.warnings]


async def _disk(agent: Agent) -> str:
    """Describe the persistent disk in one line: the progress of a migration, a problem, ``mounted`` or ``none``."""
    if (progress := agent.disks.progress) is not None:
        return f"migration, {progress}"
    return await agent.disks.problem() or ("mounted" if agent.disks.is_mounted else "none")


# --- metrics ----------------------------------------------------------------------------------------------------------


def readings(live: Runtime) -> metrics.Readings:
    """Return the current values of all metrics."""
    agent, bus = live.agent, live.bus
    progress, services = agent.disks.progress, agent.supervisor.services()
    return metrics.Readings(
        bus=metrics.BusReading(bus.is_connected if bus.mbus.urls else None, _heartbeat_age(live), bus.stats),
        alerts={"sent": live.alerts.sent, "dropped": live.alerts.dropped, "collapsed": live.alerts.collapsed},
        figures=agent.vitals.figures(),
        stemcell=_stemcell(agent.paths.etc / "os-release", agent.paths.bosh_etc / "stemcell_version"),
        instance=_instance(agent.spec.current),
        is_ready=readiness(live, "jobs")[0],
        job_state=_job_state(live),
        jobs_blocked=bool(_blocked(live)),
        processes=services,
        tasks_running=int(agent.tasks.running is not None),
        tasks_waiting=agent.tasks.waiting,
        failures=dict(keep_running.failures),
        firewall_enforced=not live.firewall.obstacle,
        addresses_missing=len(live.address_watch.missing),
        certificates=live.certificate_watch.ends,
        disk=metrics.DiskReading(agent.disks.is_mounted, progress is not None, progress.share if progress else 0.0),
        blobs=workers.transfers.counts,
        blob_bytes=workers.transfers.sizes,
    )


def _instance(spec: ApplySpec) -> dict[str, str]:
    """Return the values of the instance's labels. The mapping is empty before the first ``apply``."""
    if not spec.name:
        return {}
    index = "" if spec.index is None else str(spec.index)
    return {"deployment": spec.deployment, "group": spec.name, "index": index, "id": spec.id, "az": spec.az}


@functools.cache
def _stemcell(release: Path, version: Path) -> tuple[str, str] | None:
    """Return the stemcell's operating system and version, read from the files ``release`` and ``version``, or None if
    the image is not a stemcell.
    """
    try:
        system = os_release.operating_system(files.read(release).decode())
        return system, files.read(version).decode().strip()
    except (OSError, ValueError):
        return None
