"""Actions that report the agent's identity, state and tasks, update its settings, or shut it down."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import ActionError, HostError, SettingsError, errors_as
from agent_shim.core.settings import UpdateSettings
from agent_shim.host import files


@action("ping", Mode.NOW)
async def ping(agent: Agent) -> str:  # noqa: ARG001
    """Confirm that the agent is reachable (agent/action/ping.go)."""
    return "pong"


@action("info", Mode.NOW)
async def info(agent: Agent) -> dict[str, int]:  # noqa: ARG001
    """Return the API version. Version 1 supports errands by job name (agent/action/info.go)."""
    return {"api_version": 1}


@action("get_task", Mode.NOW)
async def get_task(agent: Agent, task_id: str) -> Any:
    """Return the result of a task, or its state while it runs. May be called repeatedly (agent/action/get_task.go)."""
    task = await agent.tasks.poll(task_id)
    if task.state == "running":
        return {"agent_task_id": task.id, "state": "running"}
    if task.state == "failed":
        raise ActionError(f"Task {task.id} result: {task.outcome}")
    return task.outcome


@action("cancel_task", Mode.NOW)
async def cancel_task(agent: Agent, task_id: str) -> str:
    """Cancel a running or queued task. ``get_task`` then reports the outcome (agent/action/cancel_task.go)."""
    agent.tasks.cancel(task_id)
    return "canceled"


@action("get_state", Mode.NOW)
async def get_state(agent: Agent, detail: str = "") -> dict[str, Any]:
    """Return the stored spec together with the current state. If ``detail`` is ``full``, the vitals are included too
    (agent/action/get_state.go).

    ``networks`` are those stored by the last ``apply``. They are never resolved again, because the Director recreates
    an instance that reports different networks (bosh-director deployment_plan/instance_plan.rb).
    """
    settings = agent.settings.current
    state = agent.spec.current.members()
    state["agent_id"] = settings.agent_id
    state["job_state"] = agent.supervisor.job_state()
    if detail == "full":
        state["vitals"] = await agent.vitals.sample()
    if processes := [_process_entry(process) for process in agent.supervisor.processes()]:
        state["processes"] = processes
    state["vm"] = {"name": settings.source.vm.name}
    return state


def _process_entry(process: Any) -> dict[str, Any]:
    """Return a process in the form that ``get_state`` reports. Zeros are omitted where Go omits them
    (jobsupervisor/job_supervisor_interface.go).
    """
    uptime = {"secs": process.uptime_secs} if process.uptime_secs > 0 else {}
    memory: dict[str, Any] = {"kb": process.mem_kb} if process.mem_kb > 0 else {}
    return {
        "name": process.name,
        "state": process.state,
        "uptime": uptime,
        "mem": {**memory, "percent": round(process.mem_percent, 1)},
        "cpu": {"total": round(process.cpu_total, 1)},
    }


async def record_health(agent: Agent) -> None:
    """Write ``instance/health.json`` for bosh-dns. An error while writing it is ignored (wrapper_job_supervisor.go).

    The file is not synced, because the next boot rewrites it.
    """
    health = msgspec.json.encode({"state": agent.supervisor.job_state()})
    with suppress(HostError):
        await asyncio.to_thread(files.write_atomic, agent.paths.health, health, mode=0o644, is_synced=False)


@action("update_settings", Mode.TASK, persistent=True)
async def update_settings(agent: Agent, news: UpdateSettings) -> str:
    """Apply new credentials, blobstores, trusted certificates and disk names without a restart
    (agent/action/update_settings.go).

    New bus credentials are stored only after a connection with them has succeeded. If they are rejected, the stored
    settings do not change.
    """
    with errors_as("Reloading settings", SettingsError):
        await agent.settings.refreshed()
    await agent.disks.associate(news.disk_associations)
    before, after = agent.settings.current, agent.settings.merged(news)
    # Credentials in the request are used even if the settings contain a newer certificate. If no connection with them
    # succeeds, the request is rejected.
    wanted = after.asked_mbus if news.mbus.cert.ca else after.mbus
    if wanted != before.mbus:
        await agent.edges.reconnect(wanted)
    await agent.settings.save_update(after.update)
    await agent.certificates.install(news.trusted_certs)  # if this fails, the next boot tries again
    return "ok"


@action("shutdown", Mode.NOW)
async def shutdown(agent: Agent) -> str:
    """Stop all jobs and stay idle, because a container cannot power itself off (agent/action/shutdown.go). The reply
    is sent immediately, before the jobs are stopped.
    """
    agent.edges.shut_down()
    return ""
