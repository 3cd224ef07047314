"""Formats a running agent's status as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from agent_shim.cli.ansi import Paint, clipped, plain, width, wrapped

_COLUMNS: Final = ("PROCESS", "STATE", "PID", "UPTIME", "MEMORY", "CPU", "RESTARTS", "LAST EXIT")
_INDENT: Final = " " * 11
_NUMBERS: Final = frozenset({"PID", "UPTIME", "MEMORY", "CPU", "RESTARTS"})
_COLOURS: Final = {
    "running": "good",
    **dict.fromkeys(("starting", "stopping", "restarting", "settling"), "limited"),
    **dict.fromkeys(("failing", "broken", "down", "stuck"), "wrong"),
    **dict.fromkeys(("stopped", "unmonitored"), "faint"),
}
"""Colours for process states, both those that the Director sees and the agent's own. Other states are not coloured."""


def render(status: dict[str, Any], paint: Paint = plain, columns: int = 0, lines: int = 0) -> str:
    """Format the control socket's answer to ``status`` as header lines and a table of processes, failing ones first.

    To fit a terminal of ``columns`` and ``lines``, the table is clipped and other lines are wrapped. 0 means no limit.
    """
    page: list[str] = []
    header = [*_header(status, paint), *_machine(status.get("vitals", {}), paint)]
    for label, text in (*header, *(("warning", paint(text, "limited")) for text in status["warnings"])):
        first, *further = wrapped(text, columns, _INDENT)
        colour = "limited" if label == "warning" else "faint"
        page += [paint(f"{label:<{len(_INDENT)}}", colour) + first.removeprefix(_INDENT), *further]
    page += ["", *_table(status["processes"], paint, columns)]
    if lines and len(page) > lines:
        hidden = len(page) - lines + 1
        page = [*page[: lines - 1], paint(f"… {hidden} more lines", "faint")]
    return "\n".join(clipped(line, columns) if columns else line for line in page)


def details(process: dict[str, Any], paint: Paint = plain, log: Sequence[str] = ()) -> str:
    """Format everything that is known about one process. ``log`` contains the last lines of the job's log files."""
    state, pid = shown_state(process), process["pid"]
    since = f" since {_moment(process['started_at'])}, {duration(process['uptime_secs'])} ago" if pid else ""
    retry = process["retry_secs"]
    rows = [
        ("state", paint(state, _COLOURS.get(state, "")) + since),
        ("next start", "" if retry is None else f"in {duration(round(retry))}"),
        ("reason", process["reason"]),
        ("faults", ", ".join(process["faults"])),
        ("pid", f"{pid}, {process['children']} descendants, {process['threads']} threads" if pid else ""),
        ("memory", f"{size(process['mem_kb'])} ({process['mem_percent']:.1f} %)" if pid else ""),
        ("cpu", f"{process['cpu_total']:.1f} %, {process['cpu_seconds']:.1f} s in total" if pid else ""),
        ("restarts", str(process["restarts"])),
        ("last exit", process["last_exit"] or "-"),
        ("groups", ", ".join(process["groups"])),
        ("mode", process["mode"] if process["mode"] != "active" else ""),
        ("ignored", ", ".join(process["unheeded"])),
        ("logs", f"agent-shim logs {process['job']}"),
    ]
    head = f"{paint('●', _COLOURS.get(state, ''))} {paint(process['name'], 'strong')} of job {process['job']}"
    about = [f"{paint(f'{label:>11}', 'faint')}  {text}" for label, text in rows if text]
    return "\n".join([head, *about, *_events(process, paint), *(["", *log] if log else [])])


def _events(process: dict[str, Any], paint: Paint) -> list[str]:
    """Return a heading followed by one line for each recent event, or nothing if there are no events. Older agents do
    not report events.
    """
    lines = []
    for event in process.get("events", ()):
        times = f" ({event['count']} times)" if event["count"] > 1 else ""
        lines.append(f"  {paint(_moment(event['at']), 'faint')}  {event['text']}{times}")
    return ["", paint("events since the agent started", "strong"), *lines] if lines else []


def _moment(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stamp))


def shown_state(process: dict[str, Any]) -> str:
    """Return the agent's own state for a service, which is more detailed than the one reported to the Director. If a
    running service fails a check, return ``failing``.
    """
    return "failing" if process["state"] == "failing" and process["phase"] == "running" else str(process["phase"])


def _header(status: dict[str, Any], paint: Paint) -> list[tuple[str, str]]:
    """Return labelled values that describe the agent. Only the daemon that replaces monit reports a control file."""
    if path := status.get("control_file"):
        waiting = f", {status['mails_waiting']} mails waiting" if status["mails_waiting"] else ""
        up = duration(status["uptime_secs"])
        about = f"replaced by agent-shim {status['version']} (control file {path}), up {up}{waiting}"
        return [("monit", about), ("job state", paint(status["job_state"], _COLOURS.get(status["job_state"], "")))]
    bus, state = status["bus"], status["job_state"]
    age = bus.get("heartbeat_secs")
    beat = f", last heartbeat {duration(age)} ago" if age is not None else ""
    connected = paint("connected", "good") + beat
    broken = paint(f"not connected: {bus['error'] or 'connecting'}", "wrong")
    # Older agents do not report ``is_used``.
    link = (connected if bus["connected"] else broken) if bus.get("is_used", True) else "not used (no Director)"
    rows = [
        ("agent", f"{status['agent_id'] or '-'}, agent-shim {status['version']}, up {duration(status['uptime_secs'])}"),
        ("bus", link),
        ("deployment", f"{status['deployment'] or '-'} / {status['instance'] or '-'}"),
        ("job state", paint(state, _COLOURS.get(state, ""))),
        ("disk", status["disk"] or "-"),
    ]
    if "bpm" in status:
        rows.append(("isolation", isolation(status["bpm"])))
    if firewall := status.get("firewall"):
        why = firewall["why"]
        rows.append(("firewall", f"jobs can reach the bus: {why}" if why else "jobs cannot reach the bus"))
    if status["phase"] != "running":
        rows.insert(1, ("phase", paint(status["phase"], "limited")))
    if status["task"]:
        doing = f", {status['task_progress']}" if status["task_progress"] else ""
        since = duration(status["task_secs"])
        rows.append(("task", f"{status['task']}{doing}, for {since} ({status['tasks_waiting']} waiting)"))
    return rows


def _machine(vitals: dict[str, Any], paint: Paint) -> list[tuple[str, str]]:
    """Return memory, CPU and disk usage in two lines. Unavailable figures are omitted."""
    parts = []
    if memory := vitals.get("mem"):
        parts.append(f"memory {_share(memory['percent'], paint)} ({size(int(memory['kb']))})")
    if cpu := vitals.get("cpu"):
        busy = float(cpu["user"]) + float(cpu["sys"])
        parts.append(f"cpu {_share(f'{busy:.0f}', paint)}, waiting {float(cpu['wait']):.0f} %")
    if load := vitals.get("load"):
        parts.append(f"load {' '.join(load)}")
    rows = [("machine", ", ".join(parts))] if parts else []
    disks = [f"{name} {_share(disk['percent'], paint)}" for name, disk in vitals.get("disk", {}).items()]
    return [*rows, ("space", ", ".join(disks))] if disks else rows


def _share(percent: str, paint: Paint) -> str:
    """Return a percentage, coloured if it is 80% or more."""
    number = float(percent)
    return paint(f"{percent} %", "wrong" if number >= 90 else "limited" if number >= 80 else "")


def _table(processes: list[dict[str, Any]], paint: Paint, columns: int = 0) -> list[str]:
    """Return the table of processes. Below a process, wrapped lines say what is wrong with it, and which statements in
    its monit file the agent ignores.
    """
    processes = sorted(processes, key=_urgency)
    rows = [_row(process) for process in processes]
    widths = [max(width(row[column]) for row in (_COLUMNS, *rows)) for column in range(len(_COLUMNS))]

    def line(cells: tuple[str, ...], colour: str) -> str:
        """Join ``cells`` into a line of the table. ``colour`` applies only to the state."""
        aligned = zip(_COLUMNS, map(_aligned, _COLUMNS, cells, widths), strict=True)
        shown = (paint(text, colour if name == "STATE" else "") for name, text in aligned)
        return "  ".join(shown).rstrip()

    lines = [paint(line(_COLUMNS, ""), "strong")]
    for process, cells in zip(processes, rows, strict=True):
        lines.append(line(cells, _COLOURS.get(shown_state(process), "")))
        if process["reason"]:
            lines += [paint(text, "limited") for text in wrapped(process["reason"], columns, "  ")]
        if process["unheeded"]:
            unheeded = f"not acted on: {', '.join(process['unheeded'])}"
            lines += [paint(text, "faint") for text in wrapped(unheeded, columns, "  ")]
    return lines if processes else [paint("no processes: nothing is deployed yet", "faint")]


def _urgency(process: dict[str, Any]) -> int:
    """Return the sort key of a process in the table, which lists failing processes first."""
    return {"wrong": 0, "limited": 1}.get(_COLOURS.get(shown_state(process), ""), 2)


def _aligned(column: str, text: str, columns: int) -> str:
    """Pad a cell: on the left in a column of numbers, otherwise on the right."""
    padding = " " * (columns - width(text))
    return padding + text if column in _NUMBERS else text + padding


def isolation(found: dict[str, Any]) -> str:
    """Describe the isolation of bpm.yml processes (``host.sandbox.Isolation``) in one line."""
    level = {1: "separate namespaces", 2: "Landlock rules", 3: "files are not isolated"}[found["level"]]
    memory = "cgroups" if found["memory"] else "a watchdog"
    why = f" ({found['obstacle']})" if found["obstacle"] else ""
    # Only level 1 has a mount namespace with a private /tmp. At other levels, the only private directory is the one
    # that TMPDIR names.
    temporary = "" if found["level"] == 1 else "; /tmp is shared by all jobs"
    return f"level {found['level']} for bpm.yml: {level}{why}; memory limits enforced by {memory}{temporary}"


def _row(process: dict[str, Any]) -> tuple[str, ...]:
    return (
        process["name"],
        shown_state(process),
        str(process["pid"] or "-"),
        duration(process["uptime_secs"]) if process["pid"] else "-",
        size(process["mem_kb"]) if process["pid"] else "-",
        f"{process['cpu_total']:.1f} %" if process["pid"] else "-",
        str(process["restarts"]),
        process["last_exit"] or "-",
    )


def size(kib: int) -> str:
    """Return a size such as ``12.3 MiB`` or ``1.2 GiB``."""
    return f"{kib / 1024:.1f} MiB" if kib < 1024 * 1024 else f"{kib / (1024 * 1024):.1f} GiB"


def duration(seconds: int) -> str:
    """Return a duration such as ``3d 4h``, ``4h 5m``, ``5m 6s`` or ``6s``."""
    parts = [("d", seconds // 86400), ("h", seconds // 3600 % 24), ("m", seconds // 60 % 60), ("s", seconds % 60)]
    while len(parts) > 1 and parts[0][1] == 0:
        parts.pop(0)
    return " ".join(f"{number}{unit}" for unit, number in parts[:2])
