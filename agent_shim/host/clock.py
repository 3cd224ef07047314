"""Clocks. Seconds are floats. Ticks are the unit of ``/proc/PID/stat``, since the kernel's boot.

``CLOCK_BOOTTIME`` and the start times in ``/proc`` share one origin, even in a time namespace. ``/proc/uptime`` differs
where lxcfs replaces it: ages computed with it are negative.
"""

from __future__ import annotations

import os
import time
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
"""Ticks per second."""
BEGUN_AT: Final = time.monotonic()
"""Origin of the beats: agents of one node do not beat together."""


def until_beat(period: float) -> float:
    """Return the seconds until the next beat of ``period``: sleepers whose periods divide each other wake together."""
    return period - (time.monotonic() - BEGUN_AT) % period


def boot_time() -> float:
    """Return the seconds since the kernel's boot, including suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_ticks() -> int:
    """Return the current tick: a lower bound for the start time of a process made now."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)


def uptime_of(start_ticks: int) -> int:
    """Return the age in whole seconds of a process started at ``start_ticks``. Never negative."""
    return max(0, int(time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS))


def wall_time() -> float:
    """Return the wall clock in seconds since 1970, for comparison with timestamps of files only."""
    return time.time()


def wall_time_of(start_ticks: int) -> float:
    """Convert ticks to the wall clock as it is set now, in seconds since 1970."""
    return time.time() - (boot_time() - start_ticks / TICKS)
