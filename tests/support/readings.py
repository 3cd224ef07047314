"""Measures the memory and CPU time of processes from outside."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def pss(pid: int) -> float:
    """Return the proportional memory (PSS) of a process, in MB."""
    return memory_of(pid, "Pss:")


def own_memory(pid: int) -> float:
    """Return a process's private dirty memory in MB.

    Only the process itself can change this value. PSS, in contrast, changes by a megabyte when another process maps the
    same interpreter.
    """
    return memory_of(pid, "Private_Dirty:")


def memory_of(pid: int, field: str) -> float:
    """Return the value of one memory field of a process, in MB. ``field`` includes the colon, as in ``Rss:``."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process's running threads have used, with nanosecond resolution if the kernel
    provides it.
    """
    total = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((path / "schedstat").read_text().split()[0])
    return total / 1e9 if total else _cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
