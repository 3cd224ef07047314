"""Formats service reports in the wording of monit 5.2.5, because scripts grep them (http/cervlet.c).

Services are mappings created by ``monit_api.describe``. This module imports little outside the standard library, so
that the ``monit`` command starts quickly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from agent_shim.core import safetext

VERSION: Final = "5.2.5"
"""The monit version that is reported to scripts."""

_GOOD: Final = {"process": "running", "system": "running", "host": "online with all services"}
"""Status of a service without a fault, by kind. Services of all other kinds are ``accessible``."""
_WORDS: Final = {
    "stopped": "not monitored",
    "unmonitored": "not monitored",
    "stopping": "not monitored - stop pending",
    "starting": "initializing - start pending",
    "restarting": "Does not exist - restart pending",
    "settling": "initializing",
    "broken": "Execution failed",
}


class HostFacts(NamedTuple):
    """Facts about the machine, and the time of the report."""

    name: str
    load: tuple[float, float, float]
    time: str

    @classmethod
    def now(cls) -> Self:
        return cls(os.uname().nodename, os.getloadavg(), time.ctime())


def summary(shown: Mapping[str, Any], machine: HostFacts) -> str:
    """Format a header and a line per service. The system comes last, unless a job has a check for it."""
    shown = safetext.value(shown)
    rows = [(_title(service), words(service)) for service in shown["services"]]
    if not has_system(shown):
        rows.append((f"System 'system_{machine.name}'", "running"))
    return "\n".join([_header(shown), "", *(f"{title:<35} {text}" for title, text in rows)])


def status(shown: Mapping[str, Any], machine: HostFacts) -> str:
    """Format a header and a paragraph per service. The system comes last, unless a job has a check for it."""
    shown = safetext.value(shown)
    lines = [_header(shown), ""]
    load = {"load average": " ".join(f"[{number:.2f}]" for number in machine.load)}
    for service in shown["services"]:
        text = words(service)
        is_monitored = not text.startswith("not monitored")
        lines.append(_title(service))
        lines += _fields({"status": text, "monitoring status": "monitored" if is_monitored else "not monitored"})
        if service["kind"] == "process" and service["pid"] and is_monitored:
            lines += _fields(_numbers(service))
        if service["kind"] == "system" and is_monitored:
            lines += _fields(load)
        if service["phase"] == "running":
            lines += [line for response in service["responses"] for line in _fields(_response(response))]
        if service["reason"]:
            lines += _fields({"message": service["reason"]})
        if service["unheeded"]:
            lines += _fields({"not acted on": ", ".join(service["unheeded"])})
        lines += [*_fields({"data collected": machine.time}), ""]
    if not has_system(shown):
        lines.append(f"System 'system_{machine.name}'")
        lines += _fields({"status": "running", "monitoring status": "monitored", **load})
        lines += [*_fields({"data collected": machine.time}), ""]
    return "\n".join(lines)


def has_system(shown: Mapping[str, Any]) -> bool:
    """Return True if a job has a ``check system``. Otherwise monit adds a default one."""
    return any(service["kind"] == "system" for service in shown["services"])


def _fields(values: Mapping[str, str]) -> list[str]:
    return [f"  {name:<33} {value}" for name, value in values.items()]


def _numbers(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels and values that monit shows only for a running process."""
    return {
        "pid": str(service["pid"]),
        "parent pid": str(service["parent"]),
        "uptime": duration(service["uptime_secs"]),
        "children": str(service["children"]),
        "memory kilobytes": str(service["own_mem_kb"]),
        "memory kilobytes total": str(service["mem_kb"]),
        "memory percent": f"{service['own_mem_percent']:.1f}%",
        "memory percent total": f"{service['mem_percent']:.1f}%",
        "cpu percent": f"{service['own_cpu']:.1f}%",
        "cpu percent total": f"{service['cpu_total']:.1f}%",
    }


def _response(response: Mapping[str, Any]) -> dict[str, str]:
    """Return the label and value for the result of a connection test or an echo request."""
    seconds = f"{max(0.0, response['seconds']):.3f}s"
    match response["kind"]:
        case "ICMP":
            return {"icmp response time": f"{seconds} [Echo Request]"}
        case "UNIX":
            return {"unix socket response time": f"{seconds} to {response['path']} [{response['protocol']}]"}
    target = f"{response['host']}:{response['port']}{response['request']}"
    return {"port response time": f"{seconds} to {target} [{response['protocol']} via {response['kind']}]"}


def _header(shown: Mapping[str, Any]) -> str:
    return f"The Monit daemon {VERSION} uptime: {duration(shown['uptime_secs'])}"


def _title(service: Mapping[str, Any]) -> str:
    kind = "Remote Host" if service["kind"] == "host" else service["kind"].capitalize()
    return f"{kind} '{service['name']}'"


def words(service: Mapping[str, Any]) -> str:
    """Return monit's status text for a service. If an action is pending, the text ends with a dash and the action.

    In ``service``, ``phase`` is the state of the state machine, and ``state`` is the one that is reported to the
    Director.
    """
    phase = service["phase"]
    if phase == "down":
        return "Execution failed" if service["reason"].startswith("cannot start") else "Does not exist"
    if phase == "running" and service["state"] == "starting":
        return "initializing"  # before the first check
    if phase == "running":
        is_good = service["state"] != "failing"
        return _GOOD.get(service["kind"], "accessible") if is_good else str(service["faults"][0])
    return _WORDS[phase]


def duration(seconds: int) -> str:
    """Format seconds as ``1d 2h 3m ``, ``2h 3m `` or ``3m ``, with a space at the end, as monit does."""
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    text = f"{minutes}m "
    if days or hours:
        text = f"{hours}h {text}"
    return f"{days}d {text}" if days else text
