"""The status of a running agent as people read it. Pure."""

from __future__ import annotations

from typing import Any, Final

_COLUMNS: Final = ("PROCESS", "STATE", "PID", "UPTIME", "MEMORY", "CPU", "RESTARTS", "LAST EXIT")


def render(status: dict[str, Any]) -> str:
    """Header lines and a table of processes from what the control socket answers to ``status``."""
    bus = status["bus"]
    lines = [
        f"agent      {status['agent_id'] or '-'}, agent-shim {status['version']}, up {duration(status['uptime_secs'])}",
        f"bus        {'connected' if bus['connected'] else 'not connected: ' + (bus['error'] or 'connecting')}",
        f"deployment {status['deployment'] or '-'} / {status['instance'] or '-'}",
        f"job state  {status['job_state']}",
        f"disk       {status['disk'] or '-'}",
    ]
    lines += [f"warning    {text}" for text in status["warnings"]]
    if status["task"]:
        doing = f", {status['task_progress']}" if status["task_progress"] else ""
        since = duration(status["task_secs"])
        lines.append(f"task       {status['task']}{doing}, for {since} ({status['tasks_waiting']} waiting)")
    rows = [_COLUMNS, *(_row(process) for process in status["processes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines.append("")
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"  {process['name']}: {process['reason']}" for process in status["processes"] if process["reason"]]
    return "\n".join(lines)


def _row(process: dict[str, Any]) -> tuple[str, ...]:
    return (
        process["name"],
        process["state"],
        str(process["pid"] or "-"),
        duration(process["uptime_secs"]) if process["pid"] else "-",
        f"{process['mem_kb'] / 1024:.1f} MiB",
        f"{process['cpu_total']:.1f} %",
        str(process["restarts"]),
        process["last_exit"] or "-",
    )


def duration(seconds: int) -> str:
    """``3d 4h``, ``4h 5m``, ``5m 6s`` or ``6s``."""
    parts = [("d", seconds // 86400), ("h", seconds // 3600 % 24), ("m", seconds // 60 % 60), ("s", seconds % 60)]
    while len(parts) > 1 and parts[0][1] == 0:
        parts.pop(0)
    return " ".join(f"{number}{unit}" for unit, number in parts[:2])
