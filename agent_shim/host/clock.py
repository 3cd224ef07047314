"""The clocks. Seconds are floats; a tick is what ``/proc/PID/stat`` counts in, since the kernel's boot.

``CLOCK_BOOTTIME`` and the start times in ``/proc`` share one origin, also in a time namespace. ``/proc/uptime`` does
not where lxcfs replaces it: ages computed with it are negative.
"""

from __future__ import annotations

import os
import time
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
"""Ticks in a second."""


def boot_time() -> float:
    """Seconds since the kernel's boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_ticks() -> int:
    """Now, as the start time that a process made now has at least."""
    return int(boot_time() * TICKS)


def uptime_of(start_ticks: int) -> int:
    """Age in whole seconds of what started at ``start_ticks``; never negative."""
    return max(0, int(boot_time() - start_ticks / TICKS))


def wall_time() -> float:
    """Now by the wall clock, in seconds since 1970: what stamps of files are compared with, and nothing else."""
    return time.time()


def wall_time_of(start_ticks: int) -> float:
    """When that was by the wall clock as it is set now, in seconds since 1970."""
    return time.time() - (boot_time() - start_ticks / TICKS)


def mail_date() -> str:
    """Now, as monit writes it: ``Sun, 22 May 2011 20:07:41 +0500``."""
    return time.strftime("%a, %d %b %Y %H:%M:%S %z")
