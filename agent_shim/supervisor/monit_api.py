"""Answers requests about services from the ``monit`` command and from ``agent-shim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent_shim.core.errors import ActionError, HostError
from agent_shim.supervisor.process_stats import ServiceInfo
from agent_shim.supervisor.supervisor import Supervisor

STARTING_ACTIONS: Final = frozenset({"start", "restart", "monitor"})
"""Actions that may start a process. They are rejected before the agent is ready and while it shuts down."""


async def answer(supervisor: Supervisor, request: Mapping[str, Any], *, obstacle: str) -> dict[str, Any]:
    """Answer a request with ``{"services": …}`` or with an exception envelope.

    ``request`` contains an ``action``, ``names`` (``all`` for every service), an optional ``group`` that restricts the
    names, and ``wait`` (whether to wait until no service is starting or stopping). If any name is unknown, no service
    is changed. Three actions apply to all services, whatever the names: ``show`` and ``reload`` return them, and
    ``quit`` stops monitoring them but keeps the agent running. ``obstacle`` is the reason why nothing may be started,
    or "".
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
    fields: dict[str, Any] = msgspec.to_builtins(service)
    process: dict[str, Any] = fields.pop("process")
    return process | fields | {"state": service.process.state, "phase": service.state}


def with_events(supervisor: Supervisor) -> list[dict[str, Any]]:
    """Convert all services to flat mappings, each with the service's last events since the agent started."""
    services = supervisor.services()
    return [describe(each) | {"events": msgspec.to_builtins(supervisor.events(each.process.name))} for each in services]


def _requested_names(services: list[ServiceInfo], request: Mapping[str, Any]) -> list[str]:
    """Return the names of the requested services, as spelled in the monit files. Raises ``ActionError``, with monit's
    message, for an unknown name.
    """
    known = {service.process.name.lower(): service for service in services}
    given = request.get("names", [])
    if not isinstance(given, list):
        raise ActionError("cannot read the request: names must be a list")
    wanted = [str(name) for name in given]
    for name in wanted:
        if name.lower() not in known and name != "all":
            raise ActionError("There is no service by that name")
    group = str(request.get("group") or "").lower()
    selected = known if "all" in wanted else dict.fromkeys(name.lower() for name in wanted)
    return [known[name].process.name for name in selected if not group or group in known[name].groups]


async def _do(supervisor: Supervisor, action: str, names: list[str]) -> None:
    """Apply an action to the services, one after the other."""
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
