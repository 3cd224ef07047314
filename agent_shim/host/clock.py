"""Reads the clocks. Seconds are floats. Ticks, the unit of times in ``/proc/PID/stat``, are counted from the kernel's
boot.

``CLOCK_BOOTTIME`` and the start times in ``/proc`` have the same origin, even in a time namespace. ``/proc/uptime`` is
not used, because lxcfs replaces it with a file that has another origin, so ages computed from it would be negative.
"""

from __future__ import annotations

import os
import time
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
"""Ticks per second."""
BEGUN_AT: Final = time.monotonic()
"""Reference time for periodic work (``until_beat``). It differs between the agents on a node, so that they do not all
wake at the same time.
"""


def until_beat(period: float) -> float:
    """Return the seconds until the time elapsed since ``BEGUN_AT`` is a multiple of ``period``. If one task's period is
    a multiple of another's, a single wake-up of the process then serves both tasks.
    """
    return period - (time.monotonic() - BEGUN_AT) % period


def boot_time() -> float:
    """Return the seconds since boot, including time spent suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_ticks() -> int:
    """Return the current tick, which is a lower bound for the start time of a process created now."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)


def uptime_of(start_ticks: int) -> int:
    """Return the age in whole seconds of a process started at ``start_ticks``. The result is never negative."""
    return max(0, int(time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS))


def wall_time() -> float:
    """Return the wall clock in seconds since 1970. Use it only for timestamps and certificates."""
    return time.time()


def wall_time_of(start_ticks: int) -> float:
    """Convert ticks to seconds since 1970, according to the current wall clock setting."""
    return time.time() - (boot_time() - start_ticks / TICKS)
