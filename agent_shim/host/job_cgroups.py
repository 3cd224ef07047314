"""Cgroups of our own, below or beside the one we are in: one for each process of a job, by which its processes are
known, counted, held still and killed, and which limits their memory and number.

Membership is inherited, and a process without privileges cannot change it: it is evidence that a job cannot forge. One
hierarchy is enough for that (``tracker``); a directory that can be removed is the kernel's word that nothing is left.

Both versions; a controller is used only where that needs no more than making a directory: in version 2 the kernel
hands a controller down only while no process sits in our own cgroup, and moving all of a container away from there
would take ``docker exec`` from its users. Where whoever started us has put us into a subgroup of what is ours (systemd
with ``DelegateSubgroup=``), they are made beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent_shim.host import cgroups, proc, process

HOLD_TIMEOUT_S: Final = 1.0
"""For a cgroup to hold still; a process that hangs in the kernel may keep it from that."""
MAX_DEPTH: Final = 16
"""Of cgroups that a job makes below its own."""
_DIRECTORY: Final = "agent_shim"
_NO_LIMIT: Final = 1 << 62
"""Bytes; version 1 writes more where there is none."""

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


@functools.cache
def tracker() -> cgroups.Tree | None:
    """The best hierarchy in which we can make cgroups; found out by making one. None where there is no such."""
    for tree in cgroups.trees():
        probe = place(tree.hierarchy) / f"probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            probe.rmdir()
            return tree
    return None


def name_of(pid: int) -> str | None:
    """The name of the cage of ours that a process is in, or in a cgroup below it; None where it is in none."""
    tree = tracker()
    if tree is None:
        return None
    own = tree.path if place(tree.hierarchy) == tree.hierarchy.own else os.path.dirname(tree.path)  # noqa: PTH120 - text
    top = f"{own.rstrip('/')}/{_DIRECTORY}/"
    path = proc.groups(pid).get(tree.controller, "")
    return _plain(path.removeprefix(top).partition("/")[0]) if path.startswith(top) else None


def members() -> dict[int, str]:
    """The name of the cage of ours that a process is in, of all that are in one."""
    tree = tracker()
    found: dict[int, str] = {}
    top = place(tree.hierarchy) / _DIRECTORY if tree is not None else Path("/nonexistent")
    with contextlib.suppress(OSError):
        for directory in top.iterdir():
            for each in _below(directory):
                with contextlib.suppress(OSError):
                    found |= dict.fromkeys(
                        map(int, (each / "cgroup.procs").read_text().split()), _plain(directory.name)
                    )
    return found


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2f")


def _plain(name: str) -> str:
    return name.replace("%2f", "/").replace("%25", "%")


def place(hierarchy: cgroups.Hierarchy) -> Path:
    """Where cgroups of ours can be made: in version 2 beside our own, if the one above is marked as ours."""
    if hierarchy.version == 2 and len(hierarchy.levels) > 1:
        above = hierarchy.levels[1]
        for name in _DELEGATED:
            with contextlib.suppress(OSError):
                if os.getxattr(above, name) == b"1":
                    return above
    return hierarchy.own


class JobCgroup:
    """The cgroups of one process of a job, by a ``name`` that is unique on the machine. Blocks."""

    def __init__(self, name: str) -> None:
        self._name = _escaped(name)

    def make(self, *, memory: int | None = None, processes: int | None = None) -> list[str]:
        """Make them, with limits (bytes, processes and threads); the directories to join. Raises ``OSError``.

        Without limits the one by which its processes are known, or none where there can be none.
        """
        made = []
        if (tracking := self._tracking()) is not None:
            tracking.mkdir(parents=True, exist_ok=True)
            made.append(str(tracking))
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
        """Remove them; one that still holds a process stays."""
        for directory in self._all():
            for each in reversed(_below(directory)):
                with contextlib.suppress(OSError):
                    each.rmdir()

    def is_empty(self) -> bool:
        """Whether the kernel says that none of its processes is left, none that forks all the time either."""
        tracking = self._tracking()
        if tracking is None:
            return True
        events = tracking / "cgroup.events"
        with contextlib.suppress(FileNotFoundError):
            return "populated 1" not in events.read_text()
        # Version 1 says it by letting go of the directory.
        for each in reversed(_below(tracking)):
            with contextlib.suppress(OSError):
                each.rmdir()
        return not tracking.is_dir()

    def members(self) -> list[tuple[int, int]]:
        """The living processes in them and in what they have made below, by number and start time."""
        pids = set()
        for directory in self._all():
            for each in _below(directory):
                with contextlib.suppress(OSError):
                    pids |= set((each / "cgroup.procs").read_text().split())
        return [stat.identity for pid in pids if (stat := proc.stat(int(pid))) is not None and stat.is_alive]

    def kill(self) -> None:
        """Kill all of its processes, also one that forks without end: at once, or while none of them can go on."""
        tracking = self._tracking()
        if tracking is None or not tracking.is_dir():
            return
        with contextlib.suppress(OSError):  # before Linux 5.14, and in version 1, there is no such file
            (tracking / "cgroup.kill").write_text("1")
            return
        with _held_still(tracking):
            for member in self.members():
                process.send(member, signal.SIGKILL)

    def memory(self) -> tuple[int, int] | None:
        """How many processes the kernel has killed in it for want of memory, and the most it used, in bytes.

        None where its memory is not limited.
        """
        for controller, hierarchy in _hierarchies():
            directory = self._directory(hierarchy)
            limit = cgroups.memory_limit(hierarchy.version, directory) if controller == "memory" else None
            if limit is not None and limit < _NO_LIMIT:
                kills = cgroups.oom_kills_of(hierarchy.version, directory)
                return kills or 0, cgroups.memory_peak(hierarchy.version, directory) or 0
        return None

    def _tracking(self) -> Path | None:
        tree = tracker()
        return None if tree is None else self._directory(tree.hierarchy)

    def _all(self) -> list[Path]:
        found = [tracking] if (tracking := self._tracking()) is not None else []
        return list(dict.fromkeys([*found, *(self._directory(hierarchy) for _, hierarchy in _hierarchies())]))

    def _directory(self, hierarchy: cgroups.Hierarchy) -> Path:
        return place(hierarchy) / _DIRECTORY / self._name


def _below(directory: Path) -> list[Path]:
    """A cgroup and all below it, those above before those below; none where it is not there."""
    found = [directory] if directory.is_dir() else []
    for each in found:
        with contextlib.suppress(OSError), os.scandir(each) as entries:
            if len(each.parts) - len(directory.parts) < MAX_DEPTH:
                found += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


@contextlib.contextmanager
def _held_still(directory: Path) -> Iterator[None]:
    """For the length of the block no process below ``directory`` goes on, or makes another one, where that can be had.

    Killed meanwhile, they end with the block.
    """
    for name, held, free, told in (
        ("cgroup.freeze", "1", "0", ("cgroup.events", "frozen 1")),
        ("freezer.state", "FROZEN", "THAWED", ("freezer.state", "FROZEN")),
        ("pids.max", "0", "", None),
    ):
        path = directory / name
        if not path.exists():
            continue
        before = free or path.read_text()
        try:
            path.write_text(held)
            give_up_at = time.monotonic() + HOLD_TIMEOUT_S
            while told and told[1] not in (directory / told[0]).read_text() and time.monotonic() < give_up_at:
                time.sleep(0.002)
            yield
        finally:
            path.write_text(before)
        return
    yield


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
