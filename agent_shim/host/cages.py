"""Cgroups of our own, below or beside the one we are in, that limit the memory and the number of processes of a job.

Both versions; a controller is used only where that needs no more than making a directory: in version 2 the kernel
hands a controller down only while no process sits in our own cgroup, and moving all of a container away from there
would take ``docker exec`` from its users. Where whoever started us has put us into a subgroup of what is ours (systemd
with ``DelegateSubgroup=``), they are made beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Final

from agent_shim.host import cgroups, proc

_LIMITS: Final = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}


_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""How systemd marks a cgroup that is ours to divide (its CGROUP_DELEGATION)."""


def offered() -> frozenset[str]:
    """The controllers (``memory``, ``pids``) for which a cgroup can be made and limited; found out by making one."""
    found = set()
    for controller, hierarchy in _hierarchies():
        top = place(hierarchy)
        probe = top / f"probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            try:
                if hierarchy.version == 2:
                    _hand_down(top, controller)
                if (probe / _LIMITS[controller, hierarchy.version]).exists():
                    found.add(controller)
            finally:
                probe.rmdir()
    return frozenset(found)


def place(hierarchy: cgroups.Hierarchy) -> Path:
    """Where cgroups of ours can be made: in version 2 beside our own, if the one above is marked as ours."""
    if hierarchy.version == 2 and len(hierarchy.levels) > 1:
        above = hierarchy.levels[1]
        for name in _DELEGATED:
            with contextlib.suppress(OSError):
                if os.getxattr(above, name) == b"1":
                    return above
    return hierarchy.own


class Cage:
    """The cgroups of one process of a job, by a ``name`` that nobody else on the machine uses."""

    def __init__(self, name: str) -> None:
        self._name = name.replace("%", "%25").replace("/", "%2f")

    def make(self, *, memory: int | None, processes: int | None) -> list[str]:
        """Make them anew, with limits (bytes, processes and threads); the directories to join. Raises ``OSError``."""
        made = []
        for controller, hierarchy in _hierarchies():
            limit = memory if controller == "memory" else processes
            if limit is None:
                continue
            directory = self._directory(hierarchy)
            if hierarchy.version == 2:
                _hand_down(place(hierarchy), controller)
                directory.parent.mkdir(exist_ok=True)
                _hand_down(directory.parent, controller)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _LIMITS[controller, hierarchy.version]).write_text(str(limit))
            if controller == "memory":
                _forbid_swap(directory, hierarchy.version, limit)
            made.append(str(directory))
        return list(dict.fromkeys(made))

    def remove(self) -> None:
        """Away with them; one that still holds a process stays."""
        for _, hierarchy in _hierarchies():
            with contextlib.suppress(OSError):
                self._directory(hierarchy).rmdir()

    def members(self) -> list[tuple[int, int]]:
        """The processes in them, by number and start time."""
        pids = set()
        for _, hierarchy in _hierarchies():
            with contextlib.suppress(OSError):
                pids |= set((self._directory(hierarchy) / "cgroup.procs").read_text().split())
        return [stat.identity for pid in pids if (stat := proc.stat(int(pid))) is not None and stat.is_alive]

    def memory(self) -> tuple[int, int] | None:
        """How many processes the kernel has killed in it for want of memory, and the most it used, in bytes.

        None where its memory is not limited.
        """
        for controller, hierarchy in _hierarchies():
            directory = self._directory(hierarchy)
            if controller == "memory" and directory.is_dir():
                kills = cgroups.oom_kills_of(hierarchy.version, directory)
                return kills or 0, cgroups.memory_peak(hierarchy.version, directory) or 0
        return None

    def _directory(self, hierarchy: cgroups.Hierarchy) -> Path:
        return place(hierarchy) / "agent_shim" / self._name


@functools.cache
def _hierarchies() -> tuple[tuple[str, cgroups.Hierarchy], ...]:
    """Where the agent is accounted does not change while it runs."""
    ours = cgroups.find()
    found = (("memory", ours.memory), ("pids", ours.pids))
    return tuple((name, hierarchy) for name, hierarchy in found if hierarchy is not None)


def _hand_down(directory: Path, controller: str) -> None:
    """Have the cgroups below a directory use a controller (version 2)."""
    control = directory / "cgroup.subtree_control"
    if controller not in control.read_text().split():
        control.write_text(f"+{controller}")


def _forbid_swap(directory: Path, version: int, limit: int) -> None:
    """What is limited cannot go to swap either; kernels that do not count swap have no such file."""
    name, value = ("memory.swap.max", 0) if version == 2 else ("memory.memsw.limit_in_bytes", limit)
    with contextlib.suppress(OSError):
        (directory / name).write_text(str(value))
    if version == 2:
        # A job whose process lost a helper half-way is worse than one that starts anew.
        with contextlib.suppress(OSError):
            (directory / "memory.oom.group").write_text("1")
