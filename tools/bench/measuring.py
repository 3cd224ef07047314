"""Readings of processes from outside, and the form of a figure.

A figure is ``{"unit", "median", "min", "max", "samples"}`` and, if it has a floor, ``"floor"`` (the median of a minimal
program that does the same, in the same run), ``"floor_is"`` (a description of it) and ``"ratio"``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

MB: Final = 1024 * 1024
Figure = dict[str, Any]
Figures = dict[str, Figure]
"""Figures by name. A part adds each as soon as it has it: a later failure removes none."""


def figure(samples: Sequence[float], unit: str, *, floor: Sequence[float] = (), floor_is: str = "") -> Figure:
    """Return the median of some samples with their minimum and maximum, and the floor."""
    made: Figure = {
        "unit": unit,
        "median": _rounded(statistics.median(samples)),
        "min": _rounded(min(samples)),
        "max": _rounded(max(samples)),
        "samples": len(samples),
    }
    if floor:
        least = statistics.median(floor)
        made |= {"floor": _rounded(least), "floor_is": floor_is}
        if least > 0:
            made["ratio"] = round(statistics.median(samples) / least, 2)
    return made


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def pss(pid: int) -> float:
    """Return the proportional memory (PSS) of a process, in MB."""
    return memory_of(pid, "Pss:")


def own_memory(pid: int) -> float:
    """Return the memory that a process has written and shares with none, in MB.

    Its growth is that of the process alone: PSS changes by a megabyte when another process maps the same interpreter.
    """
    return memory_of(pid, "Private_Dirty:")


def memory_of(pid: int, field: str) -> float:
    """Return a field of a process's memory, such as ``Rss:``, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process, to the nanosecond where the kernel reports it."""
    total = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((path / "schedstat").read_text().split()[0])
    return total / 1e9 if total else _cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_at


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Add how long the block took."""
    watch = Stopwatch()
    yield
    into.append(watch.seconds)
