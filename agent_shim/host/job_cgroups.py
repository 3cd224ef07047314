"""Creates cgroups that limit a job's memory and number of processes, and that count OOM kills.

The cgroups are below our own cgroup or alongside it. This module creates their directories. A process joins its cgroups
in ``host.sandbox_exec``, before it executes the job's program.

Both cgroup versions are supported, but a controller is used only if creating a directory is enough. In version 2, our
cgroup can delegate a controller only while it contains no process, and moving all of a container's processes out of it
would break ``docker exec``. If systemd has put us into a subgroup of a delegated cgroup (``DelegateSubgroup=``), the
job cgroups are created alongside the subgroup.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from pathlib import Path
from typing import Final

from agent_shim.host import cgroups, proc

MAX_DEPTH: Final = 16
"""How many levels of nested cgroups are examined. A job may create cgroups below its own."""
_DIRECTORY: Final = "agent_shim"
_NO_LIMIT: Final = 1 << 62
"""Limits of this many bytes or more mean that there is no limit, which version 1 reports as a very large number."""

_LIMITS: Final = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}


_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a delegated cgroup (see systemd's CGROUP_DELEGATION)."""


def offered() -> frozenset[str]:
    """Find out by trial for which controllers (``memory``, ``pids``) a cgroup with a limit can be created. Return their
    names.
    """
    controllers = set()
    for controller, hierarchy in hierarchies():
        top = parent_of_job_cgroups(hierarchy)
        probe = top / f"probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            try:
                if hierarchy.version == 2:
                    _enable_below(top, controller)
                if (probe / _LIMITS[controller, hierarchy.version]).exists():
                    controllers.add(controller)
            finally:
                probe.rmdir()
    return frozenset(controllers)


def members_of(name: str) -> list[tuple[int, int]]:
    """Return the living processes in job cgroups called ``name`` and in cgroups nested in them. Each process is
    returned as its pid and start time. This function blocks.

    Version 0.2.0 of the agent, which had no keepers, put each program into such a cgroup. After an upgrade, this
    function finds the processes that were started by that version.
    """
    part = f"/{_DIRECTORY}/{_escaped(name)}/"
    return [
        process.identity
        for process in proc.table().values()
        if process.is_alive and any(part in f"{path}/" for path in proc.groups(process.pid).values())
    ]


def _escaped(name: str) -> str:
    """Escape slashes, so that the name is a single directory name."""
    return name.replace("%", "%25").replace("/", "%2f")


@functools.cache
def parent_of_job_cgroups(hierarchy: cgroups.Hierarchy) -> Path:
    """Return the parent directory for job cgroups: our own cgroup or, in version 2, the one above it if that is
    delegated.
    """
    if hierarchy.version == 2 and len(hierarchy.levels) > 1:
        parent = hierarchy.levels[1]
        for name in _DELEGATED:
            with contextlib.suppress(OSError):
                if os.getxattr(parent, name) == b"1":
                    return parent
    return hierarchy.levels[0]


class JobCgroup:
    """The cgroups of one job process, with a ``name`` that is unique on the machine. All methods block."""

    def __init__(self, name: str) -> None:
        below = f"{_DIRECTORY}/{_escaped(name)}"
        self._limited = [
            (controller, hierarchy, parent_of_job_cgroups(hierarchy) / below) for controller, hierarchy in hierarchies()
        ]
        """The controllers for which a limit can be set, each with its hierarchy and the cgroup's directory."""
        # In version 2, both controllers have the same directory.
        self._directories = dict.fromkeys(directory for _, _, directory in self._limited)

    def make(self, *, memory: int | None = None, processes: int | None = None) -> list[str]:
        """Create the cgroups with these limits, and return the directories to join. Raises ``OSError``.

        ``memory`` is in bytes, ``processes`` limits the total number of threads, and None means no limit.
        """
        joined = []
        for controller, hierarchy, directory in self._limited:
            limit = memory if controller == "memory" else processes
            if limit is None:
                continue
            if hierarchy.version == 2:
                _enable_below(parent_of_job_cgroups(hierarchy), controller)
                directory.parent.mkdir(exist_ok=True)
                _enable_below(directory.parent, controller)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _LIMITS[controller, hierarchy.version]).write_text(str(limit))
            if controller == "memory":
                _forbid_swap(directory, hierarchy.version, limit)
                if hierarchy.version == 2:
                    _kill_as_group(directory)
            joined.append(str(directory))
        return list(dict.fromkeys(joined))

    def remove(self) -> None:
        """Remove the cgroups. A cgroup with a living process is not removed."""
        for directory in self._directories:
            for cgroup in reversed(_below(directory)):  # children before their parents
                with contextlib.suppress(OSError):
                    cgroup.rmdir()

    def members(self) -> list[tuple[int, int]]:
        """Return the living processes in the cgroups and in cgroups nested in them, as pid and start time."""
        pids = set()
        for directory in self._directories:
            for cgroup in _below(directory):
                with contextlib.suppress(OSError):
                    pids |= set((cgroup / "cgroup.procs").read_text().split())
        return [stat.identity for pid in pids if (stat := proc.stat(int(pid))) is not None and stat.is_alive]

    def memory(self) -> tuple[int, int] | None:
        """Return the number of OOM kills and the peak memory in bytes, or None if memory is not limited. A figure that
        the kernel does not report is 0.
        """
        for controller, hierarchy, directory in self._limited:
            limit = cgroups.memory_limit(hierarchy.version, directory) if controller == "memory" else None
            if limit is not None and limit < _NO_LIMIT:
                kills = cgroups.oom_kills_of(hierarchy.version, directory)
                return kills or 0, cgroups.memory_peak(hierarchy.version, directory) or 0
        return None


def _below(directory: Path) -> list[Path]:
    """Return a cgroup and all cgroups below it, parents first, or an empty list if it does not exist."""
    cgroups_found = [directory] if directory.is_dir() else []
    for cgroup in cgroups_found:  # the loop also visits the children that it appends
        with contextlib.suppress(OSError), os.scandir(cgroup) as entries:
            if len(cgroup.parts) - len(directory.parts) < MAX_DEPTH:
                cgroups_found += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return cgroups_found


@functools.cache
def hierarchies() -> tuple[tuple[str, cgroups.Hierarchy], ...]:
    """Return the hierarchies of the ``memory`` and ``pids`` controllers by name, leaving out unavailable controllers.
    The result is cached, because the agent's cgroup does not change while it runs.
    """
    ours = cgroups.find()
    return tuple(
        (controller, hierarchy)
        for controller, hierarchy in (("memory", ours.memory), ("pids", ours.pids))
        if hierarchy is not None and cgroups.contains_this_process(hierarchy)
    )


def _enable_below(directory: Path, controller: str) -> None:
    """Enable a controller for the cgroups below a directory (version 2). Raises ``OSError`` if this fails or if the
    directory's cgroup contains processes.

    If it contains processes, the kernel itself would refuse to enable ``memory`` but not ``pids``. With ``pids``, the
    cgroup would become "domain threaded", and no process could enter the cgroups below it
    (Documentation/admin-guide/cgroup-v2.rst, "Threads"). Only the root cgroup is exempt from this rule.
    """
    if (kind := _type(directory)) is not None:  # not the root cgroup
        if kind != "domain":
            raise OSError(errno.EOPNOTSUPP, f"its type is {kind}", str(directory))
        if (directory / "cgroup.procs").read_text().strip():
            raise OSError(errno.EBUSY, "it contains processes", str(directory))
    control = directory / "cgroup.subtree_control"
    if controller not in control.read_text().split():
        control.write_text(f"+{controller}")


def _type(directory: Path) -> str | None:
    """Return the type of a cgroup (version 2), or None for the root cgroup."""
    try:
        return (directory / "cgroup.type").read_text().strip()
    except FileNotFoundError:
        return None


def _forbid_swap(directory: Path, version: int, limit: int) -> None:
    """Forbid swap for a cgroup with the memory limit ``limit``. Errors are ignored, because a kernel without swap
    accounting cannot limit swap.
    """
    # Version 1 limits the sum of memory and swap, so an equal limit leaves no room for swap.
    name, value = ("memory.swap.max", 0) if version == 2 else ("memory.memsw.limit_in_bytes", limit)
    with contextlib.suppress(OSError):
        (directory / name).write_text(str(value))


def _kill_as_group(directory: Path) -> None:
    """Make the OOM killer kill all processes in a cgroup together, because it is better to restart a job than to let it
    run without one of its processes. Errors are ignored, because kernels before 4.19 do not support this.
    """
    with contextlib.suppress(OSError):
        (directory / "memory.oom.group").write_text("1")
