"""Manages one supervisor's keepers, which determine the service that a process belongs to, and terminate all of a
service's processes.

Each program runs under a separate keeper (``host.keeper``). The keeper's label names the owner: a service, a bpm.yml
process (``bpm.calls.bpm_label``), or a job's scripts or rules. All descendants of a keeper belong to its label. They
cannot escape from the keeper, so nothing else is needed to find the owner of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.host import guarded, job_cgroups, keeper, proc, process
from agent_shim.host.descriptors import closing
from agent_shim.host.keeper import Keeper
from agent_shim.host.process import Process
from agent_shim.supervisor.ownership.process_record import Identity

logger = logging.getLogger(__name__)

EXIT_WAIT_S: Final = 0.25
"""Seconds that a service's other processes may still run after its main process has exited, before they are
signalled.
"""
KILL_ROUNDS: Final = 3
"""How many times KILL is sent to a process tree that is not under the service's keepers. If it forks processes during
one round, they are found in the next.
"""

_SCRIPTS: Final = "scripts of job "
_RULES: Final = "rules of job "


def script_label(job: str) -> str:
    """Return the label of the keepers that run a job's scripts (pre-start, post-start, drain …)."""
    return f"{_SCRIPTS}{job}"


def rule_label(job: str) -> str:
    """Return the label of the keepers that run the programs in a job's rules (``then exec``)."""
    return f"{_RULES}{job}"


def is_rule_label(label: str) -> bool:
    return label.startswith(_RULES)


class Left(NamedTuple):
    """A process that survived a stop, or an orphan of a killed keeper."""

    pid: int
    start: int
    """Start time in ticks since boot."""
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


class _Lost(NamedTuple):
    """A keeper that was killed while it had descendants."""

    start: int
    """The earliest time at which one of the keeper's processes can have started, in ticks since boot."""
    parent: int
    """The pid of the process that inherited the keeper's processes. 0 means PID 1 or this process."""
    pid: int = 0
    """Pid of the keeper, or 0 if it was killed before this agent started."""

    @property
    def identity(self) -> Identity:
        return self.pid, self.start


def with_names(identities: Iterable[Identity]) -> list[Left]:
    """Return a ``Left`` for each process, with the process name from the kernel. Blocks for about 10 microseconds per
    process.
    """
    return [Left(pid, start, proc.name(pid)) for pid, start in identities]


class Keepers:
    """All of one supervisor's keepers."""

    def __init__(self, paths: Paths) -> None:
        self.killed: set[str] = set()
        """Labels of the keepers whose processes had to be killed in a stop. A graceful shutdown clears this set and
        then reports it.
        """
        self.on_loss: Callable[[str, list[Left]], None] | None = None
        """Called when a keeper was killed, with its label and the processes that may have been under it."""
        self._lost: dict[str, _Lost] = {}
        """Killed keepers by socket name.

        The socket of such a keeper is removed only when it is clear what became of its processes, so that the next
        agent notices the loss too.
        """
        self._directory = paths.keepers
        self.base: Final = paths.base
        """The agent's base directory, which is part of the names of job cgroups."""
        self._kept: tuple[Keeper, ...] = ()
        """The connected keepers. The tuple is replaced at each change, because threads read it."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def find(self) -> None:
        """Connect to an earlier agent's keepers. Keepers that cannot be reached are treated as killed. Call ``settle``
        afterwards.
        """
        found, ended = await keeper.find(self._directory)
        self._lost = {name: _Lost(since, 0) for name, since in ended.items()}
        self._kept = (*self._kept, *found)

    def forget_lost(self) -> None:
        """Forget the killed keepers, assuming that their processes did not outlive the previous container."""
        self._forget(set(self._lost))

    def _forget(self, names: Collection[str]) -> None:
        """Forget killed keepers, given by socket name, and remove their sockets."""
        for name in names:
            del self._lost[name]
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()

    def settle(self) -> None:
        """Start following an earlier agent's keepers, and release those without descendants. Call this after reading
        all exits that the keepers have recorded, because a release discards them.
        """
        for kept in self._kept:
            if kept.on_change is None:
                self._follow(kept)

    def close(self) -> None:
        """Disconnect from all keepers, and leave them running."""
        for kept in self._kept:
            kept.on_change = None
            kept.close()
        for task in self._tasks:
            task.cancel()

    async def spawn(
        self, label: str, program: keeper.Program, out: int | Path | None, err: int | Path | None
    ) -> Process:
        """Run a program under a new keeper. ``out`` and ``err`` are its output streams: descriptors, files to append
        to, or None for ``/dev/null``. On cancellation, the program is killed.

        The returned ``Process`` may already have exited. Raises ``HostError`` with the message "cannot run PROGRAM:
        why".
        """
        with contextlib.ExitStack() as opened:
            streams = [
                opened.enter_context(closing(guarded.open_log(stream, 0o640))) if isinstance(stream, Path) else stream
                for stream in (out, err)
            ]
            program = msgspec.structs.replace(program, stdout=streams[0], stderr=streams[1])
            created: list[Keeper] = []

            def keep(new: Keeper) -> None:
                created.append(new)
                self._kept = (*self._kept, new)

            try:
                # ``keep`` is called before the program runs, because the program may immediately write a pidfile.
                started = await keeper.spawn(self._directory, label, program, keep)
            except BaseException:
                for new in created:
                    # Follow a keeper that was killed or whose program hangs, because in both cases processes may still
                    # be running.
                    if not new.is_released:
                        self._follow(new)
                self._kept = tuple(kept for kept in self._kept if kept not in created or not kept.is_released)
                raise
        try:
            return await started.program_process()
        except asyncio.CancelledError:
            await started.abandon()
            raise
        finally:
            self._follow(started)

    def of(self, labels: Collection[str]) -> list[Keeper]:
        """Return the connected keepers with one of the ``labels``."""
        return [each for each in self._kept if each.label in labels]

    def of_scripts(self) -> list[str]:
        """Return the labels of jobs' scripts for which a keeper still has processes or was killed."""
        labels = {each.label for each in self._kept} | {keeper.label_of(name) for name in self._lost}
        return sorted(label for label in labels if label.startswith(_SCRIPTS))

    @property
    def pids(self) -> set[int]:
        """The pids of the connected keepers."""
        return {each.pid for each in self._kept}

    def _follow(self, kept: Keeper) -> None:
        """Handle the changes that a keeper has already reported and those that it reports later."""
        kept.on_change = lambda: self._changed(kept)
        self._changed(kept)

    def _changed(self, kept: Keeper) -> None:
        """Handle a change that a keeper reported. If the keeper was killed or no longer has descendants, stop following
        it.
        """
        if not (kept.state.is_childless or kept.is_lost):
            return
        kept.on_change = None
        self._kept = tuple(other for other in self._kept if other is not kept)
        if not kept.is_lost:
            kept.release()
            return
        logger.error("the keeper %d of %s was killed", kept.pid, kept.label)
        self._lost[kept.name] = _Lost(kept.since, kept.parent, kept.pid)
        task = asyncio.create_task(self._report_loss(kept.label), name=f"keeper of {kept.label} was killed")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_loss(self, label: str) -> None:
        """Find the orphans of the killed keepers that are labelled ``label``, and report them to ``on_loss``."""
        orphans = await self.orphans([label])
        if self.on_loss is not None:
            self.on_loss(label, orphans)

    # --- ownership of processes ---------------------------------------------------------------------------------------

    def above(self, identity: Identity) -> Keeper | None:
        """Return the keeper above a process, or None if there is none or the process is gone. For a keeper, return the
        keeper itself. Blocks for a moment while it reads /proc.
        """
        by_pid = {kept.pid: kept for kept in self._kept if kept.pid}  # a keeper that has not reported yet has pid 0
        pid = proc.nearest(identity, by_pid)
        return None if pid is None else by_pid[pid]

    def owner(self, identity: Identity) -> str:
        """Return the label of the keeper above a process, or "" if there is none. Blocks for a moment while it reads
        /proc.
        """
        found = self.above(identity)
        return found.label if found is not None else ""

    def adopt(self, identity: Identity) -> Process | None:
        """Watch a process. If it is under a keeper, the keeper reports how it exits. Return None if the process is
        gone.
        """
        above = self.above(identity)
        return process.adopt(*identity) if above is None else above.adopt(*identity)

    def ending_of(self, identity: Identity) -> keeper.Exit | None:
        """Return how a process exited if an earlier agent's keeper recorded the exit, otherwise None."""
        return next(filter(None, (each.exit_of(identity) for each in self._kept)), None)

    def of_former_agent(self, label: str) -> list[Identity]:
        """Return the processes in the cgroup that an agent without keepers (0.2.0) created for a service. Blocks."""
        return job_cgroups.members_of(f"{label}@{self.base}")

    async def orphans(self, labels: Collection[str]) -> list[Left]:
        """Return the processes that may have been under killed keepers with one of the ``labels``.

        A keeper also counts as killed if another program has connected to it. Such a keeper is still alive, so it is
        returned as well.
        """
        lost = [self._lost[name] for name in self._lost_keepers_of(labels)]
        if lost:
            # A keeper's connection closes just before its processes get a new parent, so wait until the keepers have
            # exited. Signal 0 sends nothing.
            await process.send_all({killed.identity for killed in lost}, 0, EXIT_WAIT_S)
        return await asyncio.to_thread(self._orphans, lost) if lost else []

    def _lost_keepers_of(self, labels: Collection[str]) -> list[str]:
        """Return the socket names of the killed keepers with one of the ``labels``."""
        return [name for name in self._lost if keeper.label_of(name) in labels]

    def _orphans(self, lost: Collection[_Lost]) -> list[Left]:
        """Return the living processes that may have been under the killed keepers, except those that the agent itself
        has started.
        """
        keepers = {killed.identity for killed in lost}
        # Read the pids of our own processes before the process table, because such a process may exit in between. The
        # agent itself is included, because it may be a child of PID 1.
        ours = {os.getpid()} | self.pids | process.spawned()
        living = [candidate for candidate in proc.table().values() if candidate.is_alive]
        return with_names(
            candidate.identity
            for candidate in living
            if candidate.identity in keepers
            or (candidate.pid not in ours and any(_may_have_been_below(candidate, killed) for killed in lost))
        )

    # --- termination --------------------------------------------------------------------------------------------------

    async def clear(self, labels: Collection[str], others: Collection[Identity], grace: float) -> None:
        """Terminate the remaining processes of the last run, because they may occupy a port or lock that the next run
        needs. KILL follows ``grace`` seconds after TERM.

        Raises ``HostError`` if any of them survive.
        """
        waits = [each.is_childless_within(EXIT_WAIT_S) for each in self.of(labels)]
        await asyncio.gather(*waits, return_exceptions=True)  # ``end`` handles killed keepers
        if alive := await self.end(labels, others, grace, is_usual=True):
            raise HostError(f"cannot end remaining processes of the last run: {', '.join(map(str, alive))}")

    async def end(
        self, labels: Collection[str], others: Collection[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Left]:
        """Terminate all processes under the keepers with one of the ``labels``, and also ``others`` and their
        descendants. KILL follows ``grace`` seconds after TERM.

        Return the survivors, and the orphans of killed keepers. Orphans are not signalled, because it is unknown which
        service they belong to. If any process had to be killed, the labels are added to ``killed``. Set ``is_usual`` if
        kills are expected and must not be reported.
        """
        kept = self.of(labels)
        # Terminate both groups at the same time, so that the grace period elapses only once.
        of_others = asyncio.ensure_future(_end_trees(await self.trees(labels, others), grace))
        under_keepers = await asyncio.gather(*(self._end(each, grace) for each in kept))
        alive, was_killed = await of_others
        if not is_usual and (was_killed or any(each.state.is_killing for each in kept)):
            self.killed.update(labels)
        for survivors in under_keepers:
            alive += survivors
        if orphans := await self.orphans(labels):
            return [*alive, *(each for each in orphans if each not in alive)]
        self._forget(self._lost_keepers_of(labels))
        return alive

    async def trees(self, labels: Collection[str], roots: Collection[Identity]) -> list[Identity]:
        """Return the living processes in the trees of ``roots``. A root under a keeper with one of the ``labels`` is
        left out together with its descendants, because ``end`` finds them through the keeper.
        """
        kept = self.of(labels)
        apart = [root for root in roots if self.above(root) not in kept]
        return await asyncio.to_thread(_trees, apart) if apart else []

    async def _end(self, kept: Keeper, grace: float) -> list[Left]:
        """Terminate all processes under one keeper, and return the survivors. KILL follows ``grace`` seconds after
        TERM. If the keeper was killed, return an empty list, because its processes are then orphans.
        """
        try:
            if await kept.end(grace):
                return []
        except HostError as exc:
            if not kept.is_lost:
                logger.error("%s", exc)
                return [Left(kept.pid, kept.since, f"the keeper of {kept.label}, which does not answer")]
        # Check ``is_lost`` for each process, because the keeper may be killed in the meantime and its pid reused.
        alive = await asyncio.to_thread(
            lambda: with_names(survivor.identity for survivor in kept.processes() if not kept.is_lost)
        )
        if not alive and not kept.is_lost and not kept.state.is_childless:
            # A killed process can remain a zombie, for example until its tracer has reaped it.
            alive = [Left(kept.pid, kept.since, f"the keeper of {kept.label}, which still has dead children")]
        return alive


def _may_have_been_below(candidate: proc.Stat, lost: _Lost) -> bool:
    """Return True if a process may have been below a killed keeper, judging by its start time and its parent."""
    parents = (lost.parent,) if lost.parent else (1, os.getpid())  # the parent is unknown, so consider both subreapers
    return candidate.start_ticks >= lost.start and candidate.parent in parents


async def _end_trees(remaining: Collection[Identity], grace: float) -> tuple[list[Left], bool]:
    """Send TERM to processes and their descendants, and KILL after ``grace`` seconds. KILL is repeated for
    processes that were forked in the meantime. Return the survivors, and whether KILL was sent.
    """
    rounds = [(signal.SIGTERM, grace), *[(signal.SIGKILL, process.KILL_TIMEOUT_S / KILL_ROUNDS)] * KILL_ROUNDS]
    was_killed = False
    for sig, timeout in rounds:
        if not remaining:
            break
        was_killed = sig is signal.SIGKILL
        await process.send_all(remaining, sig, timeout)
        remaining = await asyncio.to_thread(_trees, remaining)
    return with_names(remaining), was_killed


def _trees(roots: Collection[Identity]) -> list[Identity]:
    """Return the living processes among ``roots`` and their descendants. Blocks."""
    found: dict[int, proc.Stat] = {}
    for identity in roots:
        root = proc.stat(identity[0])
        if root is None or not root.is_alive or root.identity != identity:
            continue
        for member in (root, *proc.below(root.pid).values()):
            if member.is_alive:
                found[member.pid] = member
    return [member.identity for member in found.values()]
