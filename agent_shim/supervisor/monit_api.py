"""Answers requests about services from the ``monit`` command and from ``agent-shim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent_shim.core.errors import ActionError, HostError
from agent_shim.supervisor.process_stats import ServiceInfo
from agent_shim.supervisor.supervisor import Supervisor

STARTING_ACTIONS: Final = frozenset({"start", "restart", "monitor"})
"""Actions that may start a process. They are refused before the agent is ready and while it shuts down."""


async def answer(supervisor: Supervisor, request: Mapping[str, Any], *, obstacle: str) -> dict[str, Any]:
    """Answer a request with ``{"services": …}`` (all services for ``show``) or with an exception envelope.

    ``request`` contains an ``action`` (a command, ``show`` or ``quit``), ``names`` (``all`` for every service), an
    optional ``group`` that restricts the names, and ``wait`` (whether to wait until no start or stop is in progress).
    If any name is unknown, no service is changed. ``obstacle`` is the reason why nothing may be started, or "".
    """
    action = str(request.get("action"))
    services = supervisor.services()
    try:
        if action in ("show", "reload"):
            return {"services": [describe(service) for service in services]}
        if action == "quit":
            for service in services:
                await supervisor.unmonitor_one(service.process.name)
            return {"services": []}
        if obstacle and action in STARTING_ACTIONS:
            raise ActionError(f"cannot {action} anything: {obstacle}")
        names = _requested_names(services, request)
        await _do(supervisor, action, names)
        await supervisor.saved()  # so that the answer remains true after a crash
        if request.get("wait"):
            return {"services": [describe(await supervisor.finished(name)) for name in names]}
        return {"services": [describe(service) for service in supervisor.services() if service.process.name in names]}
    except (ActionError, HostError) as exc:
        return {"exception": {"message": str(exc)}}


def describe(service: ServiceInfo) -> dict[str, Any]:
    """Convert a service to a flat mapping. ``state`` is the state that is reported to the Director, and ``phase`` is
    the agent's own, more detailed state.
    """
    members: dict[str, Any] = msgspec.to_builtins(service)
    process: dict[str, Any] = members.pop("process")
    return process | members | {"state": service.process.state, "phase": service.state}


def with_events(supervisor: Supervisor) -> list[dict[str, Any]]:
    """Convert all services to flat mappings, each with the service's last events since the agent started."""
    services = supervisor.services()
    return [describe(each) | {"events": msgspec.to_builtins(supervisor.events(each.process.name))} for each in services]


def _requested_names(services: list[ServiceInfo], request: Mapping[str, Any]) -> list[str]:
    """Return the names of the requested services, spelled as in the files. Raises ``ActionError`` with monit's text for
    an unknown name.
    """
    known = {service.process.name.lower(): service for service in services}
    named = request.get("names", [])
    if not isinstance(named, list):
        raise ActionError("cannot read the request: names must be a list")
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
        raise ActionError(f"cannot {action}: unknown action")
    for name in names:
        await actions[action](name)
