"""Cgroups for jobs, one for each service: to identify, count, freeze, kill and limit all of its processes.

They are below or beside our own. This module makes the directories. ``host.process`` and ``host.sandbox_exec`` put a
process into them before its exec.

Membership is inherited, and a process without privileges cannot change it: it is evidence that a job cannot forge. One
hierarchy suffices for that (``tracker``). If its directory can be removed, no process is left.

Supports both versions, and uses a controller only if that takes no more than creating a directory: in version 2 the
kernel delegates a controller only while our own cgroup contains no process, and moving all processes of a container out
of it would break ``docker exec``. If our parent put us into a subgroup of a delegated cgroup (systemd with
``DelegateSubgroup=``), they are created beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from agent_shim.host import cgroups, proc, process

HOLD_TIMEOUT_S: Final = 1.0
"""For a cgroup to freeze. A process stuck in the kernel may prevent it."""
MAX_DEPTH: Final = 16
"""Levels of cgroups that a job creates below its own."""
_DIRECTORY: Final = "agent_shim"
_NO_LIMIT: Final = 1 << 62
"""Bytes. Version 1 reports a larger number without a limit."""

_LIMITS: Final = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}


_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Attributes by which systemd marks a delegated cgroup (its CGROUP_DELEGATION)."""


def offered() -> frozenset[str]:
    """Return the controllers (``memory``, ``pids``) for which a limited cgroup can be created. Found by trial."""
    found = set()
    for controller, hierarchy in hierarchies():
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
    """Return the best hierarchy in which we can create cgroups below our own, found by trial. None without one."""
    for tree in filter(lambda tree: cgroups.contains_this_process(tree.hierarchy), cgroups.trees()):
        probe = place(tree.hierarchy) / f"probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            probe.rmdir()
            return tree
    return None


def name_of(pid: int) -> str | None:
    """Return the name of the job cgroup that contains a process, directly or below. None without one."""
    tree = tracker()
    if tree is None:
        return None
    own = tree.path if place(tree.hierarchy) == tree.hierarchy.levels[0] else os.path.dirname(tree.path)  # noqa: PTH120 - text
    top = f"{own.rstrip('/')}/{_DIRECTORY}/"
    path = proc.groups(pid).get(tree.controller, "")
    return _plain(path.removeprefix(top).partition("/")[0]) if path.startswith(top) else None


def members(ending: str) -> dict[int, str]:
    """Map the pid of each process in a job cgroup to the name of that cgroup, for names with this ending.

    Names of other agents are skipped unread: a killed one leaves hundreds of directories.
    """
    tree = tracker()
    found: dict[int, str] = {}
    top = place(tree.hierarchy) / _DIRECTORY if tree is not None else Path("/nonexistent")
    with contextlib.suppress(OSError):
        for directory in (each for each in top.iterdir() if each.name.endswith(_escaped(ending))):
            for each in _below(directory):
                with contextlib.suppress(OSError):
                    pids = (each / "cgroup.procs").read_text().split()
                    found |= dict.fromkeys(map(int, pids), _plain(directory.name))
    return found


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2f")


def _plain(name: str) -> str:
    return name.replace("%2f", "/").replace("%25", "%")


@functools.cache
def place(hierarchy: cgroups.Hierarchy) -> Path:
    """Return the parent directory for job cgroups: in version 2 beside our own if the one above is delegated."""
    if hierarchy.version == 2 and len(hierarchy.levels) > 1:
        above = hierarchy.levels[1]
        for name in _DELEGATED:
            with contextlib.suppress(OSError):
                if os.getxattr(above, name) == b"1":
                    return above
    return hierarchy.levels[0]


class JobCgroup:
    """The cgroups of one process of a job, with a ``name`` that is unique on the machine. Blocks."""

    def __init__(self, name: str) -> None:
        below, tree = f"{_DIRECTORY}/{_escaped(name)}", tracker()
        self._tracking = None if tree is None else place(tree.hierarchy) / below
        self._limited = [(*each, place(each[1]) / below) for each in hierarchies()]
        found = [self._tracking] if self._tracking is not None else []
        self._all = dict.fromkeys([*found, *(directory for _, _, directory in self._limited)])

    def make(self, *, memory: int | None = None, processes: int | None = None) -> list[str]:
        """Create them with limits (bytes; processes and threads); return the directories to join. Raises ``OSError``.

        Without limits only the directory for tracking its processes, or none where that is impossible.
        """
        made = []
        if self._tracking is not None:
            self._tracking.mkdir(parents=True, exist_ok=True)
            made.append(str(self._tracking))
        for controller, hierarchy, directory in self._limited:
            limit = memory if controller == "memory" else processes
            if limit is None:
                continue
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

    def take(self, member: process.Process) -> None:
        """Create the cgroup for tracking the processes of the job, and move a process into it. Raises ``OSError``."""
        member.is_in_cgroup = self.enter([member.pid])

    def enter(self, pids: Iterable[int]) -> bool:
        """Move processes as ``take`` does, but those that have ended. False where no cgroup can be created."""
        directories = self.make()
        for pid in pids:
            for directory in directories:
                with contextlib.suppress(ProcessLookupError), open(f"{directory}/cgroup.procs", "wb", buffering=0) as f:
                    f.write(b"%d" % pid)
        return bool(directories)

    def remove(self) -> None:
        """Remove them. One with a living process stays."""
        for directory in self._all:
            for each in reversed(_below(directory)):
                with contextlib.suppress(OSError):
                    each.rmdir()

    def is_empty(self) -> bool:
        """Return True if the kernel confirms that no process is left, however fast it forks."""
        tracking = self._tracking
        if tracking is None:
            return True
        events = tracking / "cgroup.events"
        with contextlib.suppress(FileNotFoundError):
            return "populated 1" not in events.read_text()
        # In version 1 the removal of the directory is the test.
        for each in reversed(_below(tracking)):
            with contextlib.suppress(OSError):
                each.rmdir()
        return not tracking.is_dir()

    def members(self) -> list[tuple[int, int]]:
        """Return the living processes in them and below, by pid and start time."""
        pids = set()
        for directory in self._all:
            for each in _below(directory):
                with contextlib.suppress(OSError):
                    pids |= set((each / "cgroup.procs").read_text().split())
        return [stat.identity for pid in pids if (stat := proc.stat(int(pid))) is not None and stat.is_alive]

    def kill(self) -> None:
        """Kill all of its processes, however fast they fork: atomically, or while they are frozen."""
        tracking = self._tracking
        if tracking is None or not tracking.is_dir():
            return
        with contextlib.suppress(OSError):  # before Linux 5.14, and in version 1, the file does not exist
            (tracking / "cgroup.kill").write_text("1")
            return
        with held_still(tracking):
            for member in self.members():
                process.send(member, signal.SIGKILL)

    def memory(self) -> tuple[int, int] | None:
        """Return the number of OOM kills in it and its peak memory in bytes. None if its memory is not limited."""
        for controller, hierarchy, directory in self._limited:
            limit = cgroups.memory_limit(hierarchy.version, directory) if controller == "memory" else None
            if limit is not None and limit < _NO_LIMIT:
                kills = cgroups.oom_kills_of(hierarchy.version, directory)
                return kills or 0, cgroups.memory_peak(hierarchy.version, directory) or 0
        return None


def _below(directory: Path) -> list[Path]:
    """Return a cgroup and all below it, parents first. Empty if it does not exist."""
    found = [directory] if directory.is_dir() else []
    for each in found:
        with contextlib.suppress(OSError), os.scandir(each) as entries:
            if len(each.parts) - len(directory.parts) < MAX_DEPTH:
                found += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


@contextlib.contextmanager
def held_still(directory: Path) -> Iterator[None]:
    """Freeze processes below ``directory`` for the block, if the kernel can. Killed ones end with the block."""
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
def hierarchies() -> tuple[tuple[str, cgroups.Hierarchy], ...]:
    """Return our hierarchies, cached: the agent's cgroup does not change while it runs."""
    ours = cgroups.find()
    found = (("memory", ours.memory), ("pids", ours.pids))
    return tuple((name, each) for name, each in found if each is not None and cgroups.contains_this_process(each))


def _hand_down(directory: Path, controller: str) -> None:
    """Enable a controller for the cgroups below a directory (version 2)."""
    control = directory / "cgroup.subtree_control"
    if controller not in control.read_text().split():
        control.write_text(f"+{controller}")


def _forbid_swap(directory: Path, version: int, limit: int) -> None:
    """Forbid swap for a limited cgroup. Kernels that do not account swap lack the file."""
    name, value = ("memory.swap.max", 0) if version == 2 else ("memory.memsw.limit_in_bytes", limit)
    with contextlib.suppress(OSError):
        (directory / name).write_text(str(value))
    if version == 2:
        # A job that lost only a helper process is worse than a restarted one.
        with contextlib.suppress(OSError):
            (directory / "memory.oom.group").write_text("1")
