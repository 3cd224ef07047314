"""Who the agent is, what state it is in, and the tasks it works on."""

from __future__ import annotations

from typing import Any

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import ActionError, HostError, SettingsError
from agent_shim.core.settings import UpdateSettings
from agent_shim.host import files


@action("ping", Mode.NOW)
async def ping(agent: Agent) -> str:  # noqa: ARG001
    """Say that the agent is there (agent/action/ping.go)."""
    return "pong"


@action("info", Mode.NOW)
async def info(agent: Agent) -> dict[str, int]:  # noqa: ARG001
    """1 means that errands may be run by job name (agent/action/info.go)."""
    return {"api_version": 1}


@action("get_task", Mode.NOW)
async def get_task(agent: Agent, task_id: str) -> Any:
    """The bare result of a task, or that it still runs; may be asked any number of times (agent/action/get_task.go)."""
    task = await agent.tasks.poll(task_id)
    if task.state == "running":
        return {"agent_task_id": task.id, "state": "running"}
    outcome = await agent.tasks.outcome(task)
    if task.state == "failed":
        raise ActionError(f"Task {task.id} result: {outcome}")
    return outcome


@action("cancel_task", Mode.NOW)
async def cancel_task(agent: Agent, task_id: str) -> str:
    """Ask a drain or an errand to end; the outcome appears in the task (agent/action/cancel_task.go)."""
    agent.tasks.cancel(task_id)
    return "canceled"


@action("get_state", Mode.NOW)
async def get_state(agent: Agent, detail: str = "") -> dict[str, Any]:
    """The stored spec with what lives now beside it; ``full`` adds vitals (agent/action/get_state.go).

    ``networks`` are those stored at the last ``apply``, never resolved anew: a difference makes the Director recreate
    the instance (bosh-director deployment_plan/instance_plan.rb).
    """
    settings = agent.settings.current
    state = agent.spec.current.members()
    state["agent_id"] = settings.agent_id
    state["job_state"] = agent.supervisor.job_state()
    if detail == "full":
        state["vitals"] = await agent.vitals.sample()
    processes = [_process_entry(process) for process in agent.supervisor.processes()]
    if processes:
        state["processes"] = processes
    state["vm"] = {"name": settings.source.vm.name}
    return state


def _process_entry(process: Any) -> dict[str, Any]:
    """Numbers throughout, zeros left out where Go leaves them out (jobsupervisor/job_supervisor_interface.go)."""
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
    """``instance/health.json``, which bosh-dns reads; failing to write it is no failure (wrapper_job_supervisor.go)."""
    try:
        await files.save(agent.paths.health, msgspec.json.encode({"state": agent.supervisor.job_state()}), mode=0o644)
    except HostError:
        return


@action("update_settings", Mode.TASK, persistent=True)
async def update_settings(agent: Agent, news: UpdateSettings) -> str:
    """Take new credentials, blobstores, trusted certificates (agent/action/update_settings.go), without a restart.

    New credentials of the bus are stored once a link made with them works; refused ones change nothing.
    """
    try:
        await agent.settings.refreshed()
    except SettingsError as exc:
        raise ActionError(f"Reloading settings: {exc}") from exc
    await agent.disks.associate(news.disk_associations)
    await agent.certificates.install(news.trusted_certs)
    before, after = agent.settings.current, agent.settings.merged(news)
    # What the Director gives now is used now, and refused if it is no good, whatever the settings hold.
    wanted = after.asked_mbus if news.mbus.cert.ca else after.mbus
    if wanted != before.mbus:
        await agent.edges.reconnect(wanted)
    await agent.settings.save_update(after.update)
    return "ok"


@action("shutdown", Mode.NOW)
async def shutdown(agent: Agent) -> str:
    """Stop all jobs and stay idle: a container has no machine to power off (agent/action/shutdown.go)."""
    agent.edges.shut_down()
    return ""
