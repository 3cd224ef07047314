"""Reads the container's limits and usage from cgroup v1, v2 or both. Units are bytes and seconds.

There is no direct way to find the container's cgroup. The agent may be in a leaf below it, and in the host's cgroup
namespace, the hierarchy continues above it. The level with the lowest limit is therefore assumed to be the container's
cgroup. Without any limit, the jobs can use the whole machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from agent_shim.host import host_stats
from agent_shim.host import proc as processes
from agent_shim.host.mounts import Mount, parse

_INACTIVE: Final = {1: "total_inactive_file", 2: "inactive_file"}


class Hierarchy(msgspec.Struct, frozen=True):
    """One controller's hierarchy: its cgroup version, and the directories from our own cgroup up to the top of the
    mount.
    """

    version: int
    levels: tuple[Path, ...]


class Cgroup(msgspec.Struct, frozen=True):
    """This process's cgroups by controller, with None for a hidden controller. ``cpuacct`` exists only in version 1,
    where it reports the CPU usage that ``cpu`` reports in version 2.
    """

    memory: Hierarchy | None = None
    cpu: Hierarchy | None = None
    cpuacct: Hierarchy | None = None
    pids: Hierarchy | None = None


def find(proc: Path = host_stats.PROC) -> Cgroup:
    """Find this process's cgroups. The result is empty if ``/proc`` or the hierarchies are hidden."""
    try:
        return parse_membership((proc / "self/cgroup").read_text(), parse((proc / "self/mountinfo").read_bytes()))
    except (OSError, ValueError):
        return Cgroup()


def parse_membership(text: str, table: Sequence[Mount]) -> Cgroup:
    """Find our cgroup directories from the text of ``/proc/self/cgroup`` (``4:memory:/a`` in version 1, ``0::/a`` in
    version 2) and the mount table.
    """
    paths, visible = processes.parse_groups(text), _visible(table)

    def hierarchy(controller: str) -> Hierarchy | None:
        if controller in paths:
            mounts = [mount for mount in visible if mount.kind == "cgroup" and controller in mount.features]
            return _hierarchy(1, paths[controller], mounts)
        return _hierarchy(2, paths.get("", ""), [mount for mount in visible if mount.kind == "cgroup2"])

    return Cgroup(hierarchy("memory"), hierarchy("cpu"), hierarchy("cpuacct"), hierarchy("pids"))


def _visible(table: Sequence[Mount]) -> list[Mount]:
    """Return the mounts that are not hidden by a later mount on the same mount point.

    This is necessary because Podman's systemd mode mounts the container's cgroup on the same mount point as the host's
    whole hierarchy.
    """
    newest = {mount.point: mount for mount in table}
    return [mount for mount in table if newest[mount.point] is mount]


def contains_this_process(hierarchy: Hierarchy) -> bool:
    """Return True if the kernel lists this process in the directory that we take for our own cgroup.

    This check is necessary because the path in ``/proc/self/cgroup`` may be relative to another root, for example the
    host's. In that case, it could name an existing cgroup with other processes.
    """
    return str(os.getpid()) in _text(hierarchy.levels[0] / "cgroup.procs").split()


def _hierarchy(version: int, path: str, mounts: Sequence[Mount]) -> Hierarchy | None:
    """Return the directories from the cgroup ``path`` up to the top of its mount, which is one of ``mounts``. If
    ``path`` is outside the mounted part (Docker with version 1), return only the mount point. Return None if the
    hierarchy is not mounted.
    """
    if not mounts or not path:
        return None
    for mount in mounts:
        # A path with ".." is outside our cgroup namespace.
        if PurePosixPath(path).is_relative_to(mount.root) and ".." not in path:
            directory = mount.point / PurePosixPath(path).relative_to(mount.root)
            upwards = [directory, *directory.parents]
            return Hierarchy(version, tuple(upwards[: upwards.index(mount.point) + 1]))
    return Hierarchy(version, (mounts[-1].point,))


def memory(cgroup: Cgroup, host: host_stats.Memory) -> host_stats.Memory | None:
    """Return the container's memory and swap, or None if no limit is lower than the machine's memory. In that case, the
    machine's figures apply.

    Page cache that was not used recently counts as free, because the kernel reclaims it before it kills a process.
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
    return host_stats.Memory(total, max(0, current - idle), swap_total, min(swap_used or 0, swap_total))


def memory_total(cgroup: Cgroup, host: int) -> int:
    """Return how many bytes of memory the container may use. This is the lowest limit, or ``host`` (the machine's
    memory) if no limit is lower than that.
    """
    level = _tightest(cgroup.memory, host)
    limit = memory_limit(cgroup.memory.version, level) if cgroup.memory and level else None
    return host if limit is None else limit


def memory_limit(version: int, level: Path) -> int | None:
    """Return a cgroup's memory limit in bytes. If it has none, return None in version 2, and a number near 2**63 in
    version 1.
    """
    return _number(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))


def memory_current(version: int, level: Path) -> int | None:
    """Return the number of bytes charged to a cgroup, including page cache."""
    return _number(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))


def _swap(version: int, level: Path) -> tuple[int | None, int | None]:
    """Return the swap limit and usage in bytes, each None if it is unknown. If there is no limit, the limit is None in
    version 2 and a huge number in version 1.

    Version 1 reports only the sums of memory and swap, so the memory is subtracted.
    """
    if version == 2:
        return _number(level / "memory.swap.max"), _number(level / "memory.swap.current")
    limit, used = _number(level / "memory.memsw.limit_in_bytes"), _number(level / "memory.memsw.usage_in_bytes")
    memory_only_limit, memory_only_used = memory_limit(1, level), memory_current(1, level)
    if limit is None or used is None or memory_only_limit is None or memory_only_used is None:
        return None, None
    return max(0, limit - memory_only_limit), max(0, used - memory_only_used)


def oom_kills(cgroup: Cgroup, host: int) -> int | None:
    """Return the number of OOM kills in the container, or None if the kernel does not report it. ``host`` is the
    machine's memory in bytes.
    """
    level = oom_level(cgroup, host)
    return oom_kills_of(*level) if level else None


def oom_level(cgroup: Cgroup, host: int) -> tuple[int, Path] | None:
    """Return the version and directory of the container's memory cgroup, as arguments for ``oom_kills_of``. Return None
    if the memory controller is hidden.
    """
    if cgroup.memory is None:
        return None
    return cgroup.memory.version, _tightest(cgroup.memory, host) or cgroup.memory.levels[0]


def oom_kills_of(version: int, level: Path) -> int | None:
    """Return the number of OOM kills in a cgroup, or None if the kernel does not report it."""
    return _member(level / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill")


def oom_group(cgroup: Cgroup) -> Path | None:
    """Return the path of ``memory.oom.group`` if it makes the OOM killer kill all processes in this container together,
    or None if only one process is killed.

    In version 2, a kubelet sets this file to 1 for every container, unless its ``singleProcessOOMKill`` is true. The
    container's cgroup is the top of the mount. In the host's cgroup namespace, in which containerd leaves privileged
    containers, it is our own cgroup if that also contains PID 1. Other cgroups are not considered, because an operator
    set their files on purpose (``OOMPolicy=kill`` in a systemd unit).
    """
    if cgroup.memory is None or cgroup.memory.version != 2:
        return None
    ours, top = cgroup.memory.levels[0], cgroup.memory.levels[-1]
    has_init = "1" in _text(ours / "cgroup.procs").split()
    paths = [level / "memory.oom.group" for level in ([ours, top] if has_init else [top])]
    return next((path for path in paths if _text(path).strip() == "1"), None)


def end_oom_group(cgroup: Cgroup) -> bool:
    """Make the OOM killer kill a single process instead of all processes in this container. Return True if the setting
    had to be changed. Raises ``OSError``.
    """
    path = oom_group(cgroup)
    if path is not None:
        path.write_text("0")
    return path is not None


def memory_peak(version: int, level: Path) -> int | None:
    """Return the peak memory usage of a cgroup in bytes, or None if the kernel does not report it."""
    return _number(level / ("memory.peak" if version == 2 else "memory.max_usage_in_bytes"))


def _tightest(hierarchy: Hierarchy | None, most: int) -> Path | None:
    """Return the level with the smallest memory limit below ``most``. A limit of 0 does not count. If several levels
    have the smallest limit, return the one nearest to our own cgroup.
    """
    if hierarchy is None:
        return None
    limits = {level: memory_limit(hierarchy.version, level) for level in hierarchy.levels}
    lower_limits = {level: limit for level, limit in limits.items() if limit is not None and 0 < limit < most}
    return min(lower_limits, key=lambda level: lower_limits[level], default=None)


def cpu_times(cgroup: Cgroup, age: float) -> host_stats.CpuTimes | None:
    """Return the CPU seconds that the container has used since it started ``age`` seconds ago. ``total`` is the CPU
    time that the quota allows in that period, and ``wait`` is 0, because cgroups do not report the time spent waiting
    for disks.

    Return None unless there is a quota that is lower than the number of CPUs.
    """
    quota, index = min(_quotas(cgroup), default=(math.inf, 0))
    if quota >= (os.cpu_count() or 1) or (used := _cpu_used(cgroup, index)) is None:
        return None
    return host_stats.CpuTimes(user=used[0], system=used[1], wait=0.0, total=quota * max(0.0, age))


def cpu_used(cgroup: Cgroup) -> tuple[float, float] | None:
    """Return the container's CPU seconds in user and system mode. They are read from the cgroup with the lowest quota
    or, without a quota, from our own cgroup.
    """
    return _cpu_used(cgroup, min(_quotas(cgroup), default=(0.0, 0))[1])


def processors(cgroup: Cgroup) -> float | None:
    """Return the number of CPUs that the container may use on average, or None without a quota."""
    quota, _level = min(_quotas(cgroup), default=(None, 0))
    return quota


def _quotas(cgroup: Cgroup) -> list[tuple[float, int]]:
    """Return the CPU quota of each level that has one, together with the level's index."""
    quotas = [cpu_quota(cgroup.cpu.version, level) for level in cgroup.cpu.levels] if cgroup.cpu else []
    return [(quota, index) for index, quota in enumerate(quotas) if quota is not None]


def cpu_quota(version: int, level: Path) -> float | None:
    """Return a level's quota as a number of CPUs, for example 1.5, or None if it has no quota."""
    if version == 2:
        fields = _text(level / "cpu.max").split()
        quota, period = (_natural(fields[0]), _natural(fields[1])) if len(fields) == 2 else (None, None)
    else:
        quota, period = _number(level / "cpu.cfs_quota_us"), _number(level / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _cpu_used(cgroup: Cgroup, index: int) -> tuple[float, float] | None:
    """Return the user and system CPU seconds of a level. In version 1, they come from the ``cpuacct`` hierarchy, at the
    same depth.
    """
    if cgroup.cpu is None:
        return None
    level = cgroup.cpu.levels[index]
    if cgroup.cpu.version == 2:
        user, system = _member(level / "cpu.stat", "user_usec"), _member(level / "cpu.stat", "system_usec")
        scale = 1e6
    else:
        levels = cgroup.cpuacct.levels if cgroup.cpuacct else (level,)
        cpuacct = levels[min(index, len(levels) - 1)]
        user, system = _number(cpuacct / "cpuacct.usage_user"), _number(cpuacct / "cpuacct.usage_sys")
        scale = 1e9
    return None if user is None or system is None else (user / scale, system / scale)


def _text(path: Path) -> str:
    """Read a file. Return "" if it is missing or not readable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # five times faster than read_text
        content = b""
        try:
            # The kernel returns ``cgroup.procs`` one page at a time.
            while chunk := os.read(descriptor, processes.MAX_KERNEL_BYTES):
                content += chunk
        finally:
            os.close(descriptor)
        return content.decode()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    """Read a file that consists of one number. Return None for no limit, or if the file cannot be read."""
    return _natural(_text(path).strip())


def _member(path: Path, name: str) -> int | None:
    """Return a value from a file that consists of ``name value`` lines, or None if it is missing."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name} "):
            return _natural(line.removeprefix(f"{name} ").strip())
    return None


def _natural(text: str) -> int | None:
    """Parse a natural number. Return None for ``max`` and -1, which mean no limit, and for any other text."""
    # A signed 64-bit number has at most 19 digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
