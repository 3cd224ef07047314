"""Runs job scripts: lifecycle scripts, drain scripts and errands."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.actions.state import record_health
from agent_shim.core.errors import ActionError
from agent_shim.core.spec import ApplySpec
from agent_shim.services.scripts import drain_arguments


class ScriptOptions(msgspec.Struct, frozen=True):
    """Second argument of ``run_script``."""

    env: dict[str, str] = {}


@action("run_script", Mode.TASK)
async def run_script(agent: Agent, name: str, options: ScriptOptions) -> dict[str, Any]:
    """Run ``bin/NAME`` for every job that has it, in parallel (agent/action/run_script.go)."""
    await agent.scripts.run_all(name, agent.spec.current.job_names, options.env)
    return {}


@action("drain", Mode.TASK)
async def drain(agent: Agent, cancelled: asyncio.Event, kind: str, wanted: ApplySpec | None = None) -> int:
    """Drain the jobs. ``kind`` is ``update`` (``wanted`` is then the new spec) or ``shutdown``. Always returns 0,
    because the agent itself waits until the jobs have drained (agent/action/drain.go).
    """
    current = agent.spec.current
    arguments = drain_arguments(kind, current, wanted)
    if kind == "shutdown":
        await agent.edges.announce_shutdown()
    await agent.supervisor.unmonitor()  # otherwise processes that exit during the drain would be restarted
    await record_health(agent)
    await agent.scripts.drain(current.job_names, arguments, current, wanted, cancelled)
    return 0


@action("run_errand", Mode.TASK)
async def run_errand(agent: Agent, cancelled: asyncio.Event, name: str | None = None) -> dict[str, Any]:
    """Run ``bin/run`` of a job. A non-zero exit code is part of the result and does not make the action fail
    (agent/action/run_errand.go).

    If ``name`` is None, run the errand of the first job in the instance group (``job.template``).
    """
    job = agent.spec.current.job
    if name is None:
        if not job.template:
            raise ActionError("At least one job template is required to run an errand")
        name = job.template
    elif name not in [template.name for template in job.templates or []]:
        raise ActionError(f"Could not find errand {name}")
    errand = await agent.scripts.errand(name, cancelled)
    return {"stdout": errand.stdout, "stderr": errand.stderr, "exit_code": errand.exit_code}
