"""Measures the instance's vitals, in the format that heartbeats and ``get_state`` use (platform/vitals/service.go).

Every figure is a string, except the uptime. The uptime is a natural number, because the bosh CLI fails on anything
else. A figure that cannot be read is left out without affecting the others. If the container's limits are lower than
the machine's resources, the figures for memory, swap and CPU are relative to the container's limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.core.paths import Paths
from agent_shim.host import blocking, cgroups, clock, host_stats, proc
from agent_shim.host.host_stats import CpuTimes, Memory

logger = logging.getLogger(__name__)

CPU_PERIOD_S: Final = 10.0
"""Minimum period over which CPU time is averaged. The first sample covers the whole time since the start."""
DISK_TIMEOUT_S: Final = 1.0
"""Timeout for a disk. It is needed because a disk on a file server that is down never responds."""

UNREADABLE: Final = (OSError, ValueError, LookupError, ArithmeticError)
"""Errors caused by a file in ``/proc`` that is missing or hidden, or that has an unexpected format."""


CONTAINER: Final = "container"
HOST: Final = "host"


class Figures(msgspec.Struct, frozen=True):
    """The vitals as numbers, in bytes and seconds.

    ``memory``, ``cpu`` and ``processors`` are keyed by scope (``container`` or ``host``), ``load`` by the minutes that
    are averaged (``1``, ``5`` or ``15``), and ``disks`` by the disk's role or, for a dynamic disk, by its cid. Figures
    that cannot be read are left out. If the container has no memory limit, its memory figures are those of the machine.
    """

    memory: Mapping[str, Memory] = msgspec.field(default_factory=dict)
    cpu: Mapping[str, CpuTimes] = msgspec.field(default_factory=dict)
    """Cumulative CPU times. ``total`` is 0 if the available time is unknown."""
    processors: Mapping[str, float] = msgspec.field(default_factory=dict)
    load: Mapping[str, float] = msgspec.field(default_factory=dict)
    disks: Mapping[str, os.statvfs_result] = msgspec.field(default_factory=dict)
    """Disk usage, as of the last sample."""
    oom_kills: int | None = None


class Vitals:
    """Takes samples of the vitals.

    ``persistent_mounted`` returns True if a disk is mounted on the store. ``dynamic`` returns the directories of
    dynamic disks by cid.
    """

    def __init__(
        self,
        paths: Paths,
        persistent_mounted: Callable[[], bool],
        dynamic: Callable[[], Mapping[str, Path]] = dict,
        *,
        proc: Path = host_stats.PROC,
    ) -> None:
        self._paths = paths
        self._persistent_mounted = persistent_mounted
        self._dynamic = dynamic
        self._proc = proc
        self._cgroup = cgroups.find(proc)
        self._times = CpuTimes(0.0, 0.0, 0.0, 0.0)
        """The last reading of the CPU times. The first shares are those since the start, when all times were 0."""
        self._times_at = 0.0
        """Time at which the CPU times were last read (``clock.boot_time``)."""
        self._cpu: dict[str, str] = {}
        """The shares of CPU time up to the last reading."""
        self._usages: dict[str, os.statvfs_result] = {}
        """Disk usage as of the last sample, for ``figures``."""

    async def sample(self) -> dict[str, Any]:
        """Return the vitals. Usually takes a millisecond, and at most :data:`DISK_TIMEOUT_S`."""
        disks, figures = await self._disks(), self.figures()
        vitals: dict[str, Any] = {"disk": disks} if disks else {}
        with contextlib.suppress(*UNREADABLE):
            vitals["cpu"] = self._processor()
        if CONTAINER in figures.memory:
            vitals |= memory_vitals(figures.memory[CONTAINER])
        if figures.load:
            vitals["load"] = [f"{average:.2f}" for average in figures.load.values()]
        seconds = int(self._age())
        return vitals | {"uptime": {"secs": seconds} if seconds else {}}  # as in Go, 0 is omitted

    def figures(self) -> Figures:
        """Return the current figures in about 20 to 50 µs, without accessing a disk."""
        memory: dict[str, Memory] = {}
        cpu: dict[str, CpuTimes] = {}
        load: dict[str, float] = {}
        processors = {HOST: float(os.cpu_count() or 1)}
        processors[CONTAINER] = min(cgroups.processors(self._cgroup) or processors[HOST], processors[HOST])
        oom_kills = None
        with contextlib.suppress(*UNREADABLE):
            memory[HOST] = host_stats.memory(self._proc)
            memory[CONTAINER] = cgroups.memory(self._cgroup, memory[HOST]) or memory[HOST]
            oom_kills = cgroups.oom_kills(self._cgroup, memory[HOST].total)
        with contextlib.suppress(*UNREADABLE):
            cpu[HOST] = host_stats.cpu_times(self._proc)
        if (used := cgroups.cpu_used(self._cgroup)) is not None:
            cpu[CONTAINER] = CpuTimes(*used, wait=0.0, total=0.0)  # both are unknown
        with contextlib.suppress(*UNREADABLE):
            load = dict(zip(("1", "5", "15"), host_stats.load(self._proc), strict=True))
        return Figures(memory, cpu, processors, load, dict(self._usages), oom_kills)

    def _processor(self) -> dict[str, str]:
        """Return the shares of CPU time, measured no more often than every ``CPU_PERIOD_S`` seconds."""
        now = clock.boot_time()
        if not self._cpu or now - self._times_at >= CPU_PERIOD_S:
            times = cgroups.cpu_times(self._cgroup, self._age()) or host_stats.cpu_times(self._proc)
            self._cpu = shares(self._times, times)
            self._times, self._times_at = times, now
        return self._cpu

    def _age(self) -> float:
        """Return the container's age in seconds. This is the age of PID 1, or the time since the kernel booted if PID 1
        is hidden.
        """
        now = clock.boot_time()
        try:
            return max(0.0, now - proc.parse((self._proc / "1/stat").read_bytes()).start_ticks / clock.TICKS)
        except UNREADABLE:
            return now

    async def _disks(self) -> dict[str, dict[str, str]]:
        """Measure the usage of all disks, and return the vitals of those that are not dynamic disks, keyed by role."""
        mount_points = {"system": Path("/"), "ephemeral": self._paths.data}
        if self._persistent_mounted():
            mount_points["persistent"] = self._paths.store
        roles = set(mount_points)
        mount_points = {**await asyncio.to_thread(self._dynamic), **mount_points}
        usages = zip(mount_points, await asyncio.gather(*map(self._usage, mount_points.values())), strict=True)
        self._usages = {name: usage for name, usage in usages if usage is not None}
        return {name: disk_vitals(usage) for name, usage in self._usages.items() if name in roles}

    async def _usage(self, path: Path) -> os.statvfs_result | None:
        """Return a disk's usage, or None if the disk is missing or does not respond."""
        try:
            return await blocking.call(
                f"usage of {path}", partial(os.statvfs, path), timeout=DISK_TIMEOUT_S, is_urgent=True
            )
        except FileNotFoundError:
            return None
        except OSError as exc:
            logger.warning("vitals without %s: %s", path, exc.strerror)
            return None


def shares(before: CpuTimes, after: CpuTimes) -> dict[str, str]:
    """Return the shares of user, system and I/O wait time between two readings, as percentages."""
    total = after.total - before.total
    spent = {"user": after.user - before.user, "sys": after.system - before.system, "wait": after.wait - before.wait}
    return {name: f"{_percent(seconds, total):.1f}" for name, seconds in spent.items()}


def memory_vitals(memory: Memory) -> dict[str, Any]:
    """Return memory and swap usage, both in KiB and as percentages."""

    def part(used: int, total: int) -> dict[str, str]:
        return {"kb": str(used // 1024), "percent": f"{_percent(used, total):.0f}"}

    return {"mem": part(memory.used, memory.total), "swap": part(memory.swap_used, memory.swap_total)}


def disk_vitals(usage: os.statvfs_result) -> dict[str, str]:
    """Return a disk's usage as a percentage. Space reserved for root counts as free. If the file system has no inodes,
    their usage is given as 0.
    """
    return {
        "percent": f"{_percent(usage.f_blocks - usage.f_bfree, usage.f_blocks):.0f}",
        "inode_percent": f"{_percent(usage.f_files - usage.f_ffree, usage.f_files):.0f}",
    }


def _percent(part: float, whole: float) -> float:
    """Return ``part`` as a percentage of ``whole``, limited to 0–100 because the figures may be inconsistent."""
    return min(100.0, max(0.0, 100.0 * part / whole)) if whole > 0 else 0.0
