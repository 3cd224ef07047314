"""What the command ``bpm`` asks of the running agent, and what it is told. Errors are bpm's (``src/bpm/commands``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agent_shim.errors import ConfigError, HostError
from agent_shim.supervisor.bpm_run import Bpm
from agent_shim.supervisor.plan import BpmCall

if TYPE_CHECKING:
    from agent_shim.supervisor import bpm

PREFIXES: Final = {"start": "failed to start job-process", "run": "failed to run job-process"}
"""Before what went wrong; ``failed to get job`` for the others."""


async def answer(runner: Bpm, request: Mapping[str, Any]) -> dict[str, Any]:
    """``{"value": …}`` or ``{"error": …}``; ``request`` has a verb, and a job and a process unless it is ``list``."""
    verb = str(request.get("verb"))
    if verb == "list":
        rows, complaints = await asyncio.to_thread(runner.rows)
        return {"value": [[row.name, row.pid, row.status] for row in rows], "complaints": complaints}
    job, name = str(request.get("job")), str(request.get("process"))
    if any(not word or "/" in word or word.startswith(".") for word in (job, name)):
        return {"error": f"failed to get job: {job!r} {name!r} cannot be the names of a job and a process"}
    try:
        return {"value": await _do(runner, verb, job, name, request)}
    except (ConfigError, OSError) as exc:
        return {"error": f"{PREFIXES.get(verb, 'failed to get job')}: {exc}"}


async def _do(runner: Bpm, verb: str, job: str, name: str, request: Mapping[str, Any]) -> Any:
    call = BpmCall("start", job, name)
    if verb == "end run":
        return await runner.end_run(call)
    wanted = await asyncio.to_thread(runner.definition, job, name)
    match verb:
        case "start":
            started = await runner.start(call)
            return started.pid
        case "stop":
            return await runner.stop(call)
        case "run":
            volumes = [_volume(text) for text in request.get("volumes", ())]
            env = dict(_pair(text) for text in request.get("env", ()))
            return await runner.run(call, volumes, env)
        case "pid":
            found = runner.find(job, name)
            return found[0] if found else 0
        case "order":
            return await runner.shell_order(job, wanted)
    raise HostError(f"unknown command {verb!r}")


def _volume(text: str) -> bpm.Volume:
    """``PATH[:OPTION,…]``; raises ``ConfigError``."""
    from agent_shim.supervisor import bpm

    path, _, options = text.partition(":")
    flags = {option for option in options.split(",") if option}
    if unknown := flags - {"writable", "mount_only", "allow_executions", "shared"}:
        raise ConfigError(f"invalid volume options: {', '.join(sorted(unknown))}")
    return bpm.Volume(path, **dict.fromkeys(flags, True))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"invalid environment variable definition: {text}")
    return name, value
