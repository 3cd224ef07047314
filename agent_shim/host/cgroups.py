"""What the container may use and has used, as cgroup v1, v2 or a mixture of both tells it. Bytes, seconds.

The figures wanted are those of the container, and nothing says which cgroup that is: the agent may sit in a leaf below
it, and with the host's cgroup namespace the hierarchy goes on above it. So the limits decide: the level with the
tightest one is the container, and without a limit the machine itself is what jobs have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from agent_shim.host import host_stats
from agent_shim.host import proc as processes
from agent_shim.host.mounts import Mount, parse

_INACTIVE: Final = {1: "total_inactive_file", 2: "inactive_file"}


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One controller: the version that has it and the directories from our own cgroup up to the top of the mount."""

    version: int
    levels: tuple[Path, ...]

    @property
    def own(self) -> Path:
        return self.levels[0]


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Where this process is accounted; None for a controller that cannot be seen. Version 1 counts in ``cpuacct``."""

    memory: Hierarchy | None = None
    cpu: Hierarchy | None = None
    cpuacct: Hierarchy | None = None
    pids: Hierarchy | None = None


def find(proc: Path = host_stats.PROC) -> Cgroup:
    """The cgroup of this process; empty where ``/proc`` or the hierarchies are hidden."""
    try:
        return parse_membership((proc / "self/cgroup").read_text(), parse((proc / "self/mountinfo").read_bytes()))
    except (OSError, ValueError):
        return Cgroup()


def parse_membership(text: str, table: Sequence[Mount]) -> Cgroup:
    """Join ``/proc/self/cgroup`` (``4:memory:/a`` in version 1, ``0::/a`` in version 2) with the mounts."""
    paths = processes.parse_groups(text)

    def hierarchy(controller: str) -> Hierarchy | None:
        if controller in paths:
            ours = [mount for mount in table if mount.kind == "cgroup" and controller in mount.features]
            return _hierarchy(1, paths[controller], ours)
        return _hierarchy(2, paths.get("", ""), [mount for mount in table if mount.kind == "cgroup2"])

    return Cgroup(hierarchy("memory"), hierarchy("cpu"), hierarchy("cpuacct"), hierarchy("pids"))


@dataclass(frozen=True, slots=True)
class Tree:
    """A hierarchy in which processes can be told apart; ``controller`` is ``""`` in version 2.

    ``path`` is our own cgroup as ``/proc/PID/cgroup`` shows it.
    """

    controller: str
    hierarchy: Hierarchy
    path: str


TRACKING: Final = ("", "freezer", "pids", "name=systemd", "perf_event", "net_cls,net_prio", "devices", "memory")
"""Hierarchies for telling processes apart, best first: version 2 kills all of a cgroup, ``freezer`` holds it still,
``pids`` lets it make no new processes; the others only know its members."""


def trees(root: Path = host_stats.PROC) -> list[Tree]:
    """The mounted hierarchies of ``TRACKING`` that this process is in, in that order."""
    try:
        paths = processes.parse_groups((root / "self/cgroup").read_text())
        table = parse((root / "self/mountinfo").read_bytes())
    except (OSError, ValueError):
        return []
    found = []
    for controller in TRACKING:
        path = paths.get(controller.partition(",")[0], "")
        kind = "cgroup" if controller else "cgroup2"
        ours = [m for m in table if m.kind == kind and (not controller or controller.partition(",")[0] in m.features)]
        if hierarchy := _hierarchy(1 if controller else 2, path, ours):
            found.append(Tree(controller.partition(",")[0], hierarchy, path))
    return found


def _hierarchy(version: int, path: str, ours: Sequence[Mount]) -> Hierarchy | None:
    """A path outside the part that is mounted (Docker with version 1) is unknown: the mount itself stands for it."""
    if not ours or not path:
        return None
    for mount in ours:
        if PurePosixPath(path).is_relative_to(mount.root) and ".." not in path:
            below = mount.point / PurePosixPath(path).relative_to(mount.root)
            upwards = [below, *below.parents]
            return Hierarchy(version, tuple(upwards[: upwards.index(mount.point) + 1]))
    return Hierarchy(version, (ours[-1].point,))


def memory(cgroup: Cgroup, host: host_stats.Memory) -> host_stats.Memory | None:
    """Memory and swap of the container; None when no limit is tighter than the machine, which is then what counts.

    Page cache that nobody used lately is not in use: the kernel gives it back before it kills.
    """
    hierarchy = cgroup.memory
    level = _tightest(hierarchy, host.total)
    if hierarchy is None or level is None:
        return None
    total, current = memory_limit(hierarchy.version, level), memory_current(hierarchy.version, level)
    if total is None or current is None:
        return None
    idle = _member(level / "memory.stat", _INACTIVE[hierarchy.version]) or 0
    swap_limit, swap_used = _swap(hierarchy.version, level)
    swap_total = 0 if swap_used is None else min(host.swap_total, host.swap_total if swap_limit is None else swap_limit)
    return host_stats.Memory(
        total=total,
        used=max(0, current - idle),
        swap_total=swap_total,
        swap_used=min(swap_used or 0, swap_total),
    )


def memory_total(cgroup: Cgroup, host: int) -> int:
    """Bytes the container may use: its tightest limit, or the ``host``'s memory where none is tighter."""
    level = _tightest(cgroup.memory, host)
    limit = memory_limit(cgroup.memory.version, level) if cgroup.memory and level else None
    return host if limit is None else limit


def memory_limit(version: int, level: Path) -> int | None:
    """Bytes; None without a limit (version 1 writes a number near 2**63)."""
    return _number(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))


def memory_current(version: int, level: Path) -> int | None:
    """Bytes charged, page cache included."""
    return _number(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))


def _swap(version: int, level: Path) -> tuple[int | None, int | None]:
    """Limit and use; version 1 knows them together with memory only."""
    if version == 2:
        return _number(level / "memory.swap.max"), _number(level / "memory.swap.current")
    limit, used = _number(level / "memory.memsw.limit_in_bytes"), _number(level / "memory.memsw.usage_in_bytes")
    of_memory, current = memory_limit(1, level), memory_current(1, level)
    if limit is None or used is None or of_memory is None or current is None:
        return None, None
    return max(0, limit - of_memory), max(0, used - current)


def oom_kills(cgroup: Cgroup, host: host_stats.Memory) -> int | None:
    """Processes the kernel has killed in the container for want of memory; None where it does not say."""
    level = oom_level(cgroup, host)
    return oom_kills_of(*level) if level else None


def oom_level(cgroup: Cgroup, host: host_stats.Memory) -> tuple[int, Path] | None:
    """What ``oom_kills_of`` takes for the container; None where it does not say."""
    if cgroup.memory is None:
        return None
    return cgroup.memory.version, _tightest(cgroup.memory, host.total) or cgroup.memory.own


def oom_kills_of(version: int, level: Path) -> int | None:
    """Processes the kernel has killed there; None where it does not say."""
    return _member(level / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill")


def memory_peak(version: int, level: Path) -> int | None:
    """The most bytes that were ever charged; None where the kernel does not say."""
    return _number(level / ("memory.peak" if version == 2 else "memory.max_usage_in_bytes"))


def _tightest(hierarchy: Hierarchy | None, most: int) -> Path | None:
    """The level with the smallest memory limit below ``most``; the one nearest to us when several have it."""
    if hierarchy is None:
        return None
    limits = {level: memory_limit(hierarchy.version, level) for level in hierarchy.levels}
    known = {level: limit for level, limit in limits.items() if limit is not None and 0 < limit < most}
    return min(known, key=lambda level: known[level], default=None)


def cpu_times(cgroup: Cgroup, age: float) -> host_stats.CpuTimes | None:
    """Seconds used by the container, of the ``total`` its quota gave in ``age`` seconds; None without a quota.

    A cgroup does not know how long it waited for disks.
    """
    hierarchy = cgroup.cpu
    if hierarchy is None:
        return None
    quotas = [cpu_quota(hierarchy.version, level) for level in hierarchy.levels]
    known = [(quota, index) for index, quota in enumerate(quotas) if quota is not None]
    if not known:
        return None
    quota, index = min(known)
    used = _cpu_used(cgroup, hierarchy.levels[index], index)
    if quota >= (os.cpu_count() or 1) or used is None:
        return None
    return host_stats.CpuTimes(user=used[0], system=used[1], wait=0.0, total=quota * max(0.0, age))


def cpu_used(cgroup: Cgroup) -> tuple[float, float] | None:
    """Seconds in user and in system mode of the container: of the level with the tightest quota, else of our own."""
    if cgroup.cpu is None:
        return None
    quotas = [cpu_quota(cgroup.cpu.version, level) for level in cgroup.cpu.levels]
    known = [(quota, index) for index, quota in enumerate(quotas) if quota is not None]
    index = min(known)[1] if known else 0
    return _cpu_used(cgroup, cgroup.cpu.levels[index], index)


def processors(cgroup: Cgroup) -> float | None:
    """How many processors the container may use on average; None without a quota."""
    quotas = [cpu_quota(cgroup.cpu.version, level) for level in cgroup.cpu.levels] if cgroup.cpu else []
    return min((quota for quota in quotas if quota is not None), default=None)


def cpu_quota(version: int, level: Path) -> float | None:
    """Processors that may be used on average, 1.5 say; None without a quota."""
    if version == 2:
        fields = _text(level / "cpu.max").split()
        quota, period = (_natural(fields[0]), _natural(fields[1])) if len(fields) == 2 else (None, None)
    else:
        quota, period = _number(level / "cpu.cfs_quota_us"), _number(level / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _cpu_used(cgroup: Cgroup, level: Path, index: int) -> tuple[float, float] | None:
    """Seconds in user and in system mode; version 1 counts in a hierarchy of its own, at the same height."""
    if cgroup.cpu is None or cgroup.cpu.version == 2:
        user, system = _member(level / "cpu.stat", "user_usec"), _member(level / "cpu.stat", "system_usec")
        scale = 1e6
    else:
        levels = cgroup.cpuacct.levels if cgroup.cpuacct else (level,)
        beside = levels[min(index, len(levels) - 1)]
        user, system = _number(beside / "cpuacct.usage_user"), _number(beside / "cpuacct.usage_sys")
        scale = 1e9
    return None if user is None or system is None else (user / scale, system / scale)


def _text(path: Path) -> str:
    """The file, or nothing where it is missing or may not be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    return _natural(_text(path).strip())


def _member(path: Path, name: str) -> int | None:
    """A value of a file of ``name value`` lines."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name} "):
            return _natural(line.removeprefix(f"{name} ").strip())
    return None


def _natural(text: str) -> int | None:
    """``max`` and -1, which mean no limit, are None, and so is what cannot be read."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
