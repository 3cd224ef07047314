"""Reads the processor times, memory, swap and load of the whole machine. Units are bytes and seconds.

Processor times and memory are read with psutil. The functions raise ``ValueError`` for figures that no kernel reports,
such as negative ones.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

PROC: Final = Path("/proc")


class CpuTimes(msgspec.Struct, frozen=True):
    """Cumulative CPU time. ``total`` is all the time that was available, including idle time."""

    user: float
    system: float
    wait: float
    total: float


class Memory(msgspec.Struct, frozen=True):
    """Total and used bytes of memory and swap."""

    total: int
    used: int
    swap_total: int
    swap_used: int


def cpu_times(proc: Path = PROC) -> CpuTimes:
    """Return the CPU times since boot, summed over all processors. Guest time is not added, because the kernel's
    user and nice times already include it.
    """
    try:
        times = _psutil(proc).cpu_times()
    except (LookupError, TypeError) as exc:  # psutil raises these for a malformed file
        raise ValueError(f"cannot read {proc}/stat: {exc}") from exc
    user, system, wait = times.user + times.nice, times.system, times.iowait
    total = user + system + wait + times.idle + times.irq + times.softirq + getattr(times, "steal", 0.0)
    _require_not_negative(*times)
    return CpuTimes(user, system, wait, total)


def memory(proc: Path = PROC) -> Memory:
    """Return the machine's memory and swap. All memory that the kernel does not report as available counts as used."""
    psutil = _psutil(proc)
    try:
        with warnings.catch_warnings():  # ignore warnings about psutil fields that are not used here
            warnings.simplefilter("ignore", RuntimeWarning)
            ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    except (LookupError, ArithmeticError) as exc:  # psutil raises these for a malformed file
        raise ValueError(f"cannot read {proc}/meminfo: {exc}") from exc
    figures = Memory(ram.total, max(0, ram.total - ram.available), swap.total, max(0, swap.total - swap.free))
    _require_not_negative(figures.total, figures.used, figures.swap_total, figures.swap_used)
    return figures


def memory_total() -> int:
    """Return the total memory in bytes. psutil is not used here, because its import would delay the supervisor's first
    answer.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load(proc: Path = PROC) -> tuple[float, float, float]:
    """Return the machine's load averages over 1, 5 and 15 minutes. The kernel does not compute them for single
    containers.
    """
    one, five, fifteen = (float(field) for field in (proc / "loadavg").read_bytes().split()[:3])
    _require_not_negative(one, five, fifteen)
    return one, five, fifteen


def _psutil(proc: Path) -> ModuleType:
    """Return psutil, configured to read from ``proc``. psutil is imported on first use, because the import takes
    0.8 MB and 10 ms.
    """
    import psutil

    psutil.PROCFS_PATH = str(proc)
    return psutil


def _require_not_negative(*figures: float) -> None:
    """Raise ``ValueError`` if a figure is negative, infinite or not a number."""
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
        raise ValueError(f"{figures} are not numbers that a kernel reports")
