"""What the command ``monit``, and operators by ``agent-shim``, ask of services, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent_shim.core.errors import ActionError
from agent_shim.supervisor.process_stats import ServiceInfo
from agent_shim.supervisor.supervisor import Supervisor

BEGINNING: Final = frozenset({"start", "restart", "monitor"})
"""What may start a process: not done while the agent ends, or has not begun."""


async def answer(supervisor: Supervisor, request: Mapping[str, Any], *, obstacle: str) -> dict[str, Any]:
    """``{"services": …}``, all of them for ``show`` and else those meant, or the envelope of an exception.

    ``request`` has an ``action`` (one of the commands, ``show`` or ``quit``), ``names`` (``all`` is each of them), a
    ``group`` (of which they must be, if it is given) and ``wait`` (until nothing of it is underway). A wrong name
    leaves all as they were. ``obstacle`` says why nothing may be started.
    """
    action = str(request.get("action"))
    services = supervisor.services()
    try:
        if action == "show":
            return {"services": [describe(service) for service in services]}
        if action == "quit":
            for service in services:
                await supervisor.unmonitor_one(service.process.name)
            return {"services": []}
        if obstacle and action in BEGINNING:
            raise ActionError(f"cannot {action} anything: {obstacle}")
        names = _meant(services, request)
        await _do(supervisor, action, names)
        if request.get("wait"):
            return {"services": [describe(await supervisor.finished(name)) for name in names]}
        return {"services": [describe(service) for service in supervisor.services() if service.process.name in names]}
    except ActionError as exc:
        return {"exception": {"message": str(exc)}}


def describe(service: ServiceInfo) -> dict[str, Any]:
    """A service in one level: ``state`` is the Director's word, ``phase`` ours."""
    members: dict[str, Any] = msgspec.to_builtins(service)
    process: dict[str, Any] = members.pop("process")
    return process | members | {"state": service.process.state, "phase": service.state}


def _meant(services: list[ServiceInfo], request: Mapping[str, Any]) -> list[str]:
    """The names as they are written in the files; raises ``ActionError``, in monit's words, for one that is not."""
    known = {service.process.name.lower(): service for service in services}
    named = request.get("names", [])
    if not isinstance(named, list):
        raise ActionError("cannot read the request: the names of services are a list")
    wanted = [str(name) for name in named]
    for name in wanted:
        if name.lower() not in known and name != "all":
            raise ActionError("There is no service by that name")
    group = str(request.get("group") or "").lower()
    meant = known if "all" in wanted else dict.fromkeys(name.lower() for name in wanted)
    return [known[name].process.name for name in meant if not group or group in known[name].groups]


async def _do(supervisor: Supervisor, action: str, names: list[str]) -> None:
    actions = {
        "start": supervisor.start_one,
        "stop": supervisor.stop_one,
        "restart": supervisor.restart_one,
        "monitor": supervisor.monitor_one,
        "unmonitor": supervisor.unmonitor_one,
    }
    if action not in actions:
        raise ActionError(f"cannot {action}: there is no such action")
    for name in names:
        await actions[action](name)
