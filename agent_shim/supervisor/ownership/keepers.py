"""One supervisor's keepers. They determine which service a process belongs to, and terminate all of a service's
processes.

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
"""Seconds that a service's other processes may still run after its main process has exited, before they are signalled.
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
    """A process that survived a stop."""

    pid: int
    start: int
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


def left(identities: Iterable[Identity]) -> list[Left]:
    """Return a ``Left`` for each process, with the process name from the kernel. Blocks for about 10 microseconds per
    process.
    """
    return [Left(pid, start, proc.name(pid)) for pid, start in identities]


class Keepers:
    """All of one supervisor's keepers."""

    def __init__(self, paths: Paths) -> None:
        self.killed: set[str] = set()
        """Labels of the keepers whose processes had to be killed. The caller clears this set."""
        self.on_loss: Callable[[str, list[Left]], None] | None = None
        """Called when a keeper was killed, with its label and the processes that may have been under it."""
        self._lost: dict[str, _Lost] = {}
        """Killed keepers by socket name.

        The socket of such a keeper is removed only when it is clear what became of its processes, so that the next
        agent notices the loss too.
        """
        self._directory = paths.keepers
        self.base: Final = paths.base
        self._kept: tuple[Keeper, ...] = ()
        """The connected keepers. The tuple is replaced at each change, because threads read it."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def find(self) -> None:
        """Connect to an earlier agent's keepers. Keepers that cannot be reached are treated as killed."""
        found, ended = await keeper.find(self._directory)
        self._lost = {name: _Lost(since, 0) for name, since in ended.items()}
        self._kept = (*self._kept, *found)

    def forget_lost(self) -> None:
        """Forget the killed keepers, assuming that their processes did not outlive the previous container."""
        self._forget(set(self._lost))

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            del self._lost[name]
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()

    def settle(self) -> None:
        """Start following an earlier agent's keepers, and release those without descendants. Call this after reading
        all exits that the keepers have recorded.
        """
        for each in self._kept:
            if each.on_change is None:
                self._follow(each)

    def close(self) -> None:
        """Disconnect from all keepers, and leave them running."""
        for each in self._kept:
            each.on_change = None
            each.close()
        for task in self._tasks:
            task.cancel()

    async def spawn(
        self, label: str, program: keeper.Program, out: int | Path | None, err: int | Path | None
    ) -> Process:
        """Run a program under a new keeper. Its streams are descriptors, files to append to, or None for ``/dev/null``.

        The returned ``Process`` may already have exited. Raises ``HostError`` with the text "cannot run PROGRAM: why".
        """
        with contextlib.ExitStack() as opened:
            streams = [
                opened.enter_context(closing(guarded.open_log(each, 0o640))) if isinstance(each, Path) else each
                for each in (out, err)
            ]
            program = msgspec.structs.replace(program, stdout=streams[0], stderr=streams[1])
            made: list[Keeper] = []

            def keep(
                each: Keeper,
            ) -> None:  # called before the program runs, because the program may immediately write a pidfile
                made.append(each)
                self._kept = (*self._kept, each)

            try:
                # ``keep`` is called before the program runs, because the program may immediately write a pidfile.
                started = await keeper.spawn(self._directory, label, program, keep)
            except BaseException:
                for each in made:
                    # Follow a keeper that was killed or whose program hangs, because in both cases processes may still
                    # be running.
                    if not each.is_released:
                        self._follow(each)
                self._kept = tuple(each for each in self._kept if each not in made or not each.is_released)
                raise
        try:
            return await started.program_process()
        except asyncio.CancelledError:
            await started.abandon()
            raise
        finally:
            self._follow(started)

    def of(self, labels: Collection[str]) -> list[Keeper]:
        """Return the keepers that have one of these labels."""
        return [each for each in self._kept if each.label in labels]

    def of_scripts(self) -> list[str]:
        """Return the script labels whose keepers still have processes."""
        labels = {each.label for each in self._kept} | {keeper.label_of(name) for name in self._lost}
        return sorted(label for label in labels if label.startswith(_SCRIPTS))

    @property
    def pids(self) -> set[int]:
        """The pids of the connected keepers."""
        return {each.pid for each in self._kept}

    def _follow(self, each: Keeper) -> None:
        each.on_change = lambda: self._changed(each)
        self._changed(each)

    def _changed(self, each: Keeper) -> None:
        """Handle a change that a keeper has reported. If the keeper has no descendants any more or was killed, stop
        following it.
        """
        if not (each.state.is_childless or each.is_lost):
            return
        each.on_change = None
        self._kept = tuple(one for one in self._kept if one is not each)
        if not each.is_lost:
            each.release()
            return
        logger.error("the keeper %d of %s was killed", each.pid, each.label)
        self._lost[each.name] = _Lost(each.since, each.parent, each.pid)
        task = asyncio.create_task(self._report_loss(each.label), name=f"keeper of {each.label} was killed")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_loss(self, label: str) -> None:
        orphans = await self.orphans([label])
        if self.on_loss is not None:
            self.on_loss(label, orphans)

    # --- ownership of processes ---------------------------------------------------------------------------------------

    def above(self, identity: Identity) -> Keeper | None:
        """Return the keeper above a process, or None if there is none or the process is gone. For a keeper, return the
        keeper itself. Blocks for a moment while it reads /proc.
        """
        by_pid = {each.pid: each for each in self._kept if each.pid}
        found = proc.nearest(identity, by_pid)
        return None if found is None else by_pid[found]

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
        """Return how a process exited if an earlier agent's keeper recorded that, otherwise None."""
        return next(filter(None, (each.exit_of(identity) for each in self._kept)), None)

    def of_former_agent(self, label: str) -> list[Identity]:
        """Return the processes in the cgroup that an agent without keepers (0.2.0) created for a service. Blocks."""
        return job_cgroups.members_of(f"{label}@{self.base}")

    async def orphans(self, labels: Collection[str]) -> list[Left]:
        """Return the processes that may have been under the killed keepers with these labels.

        A keeper also counts as killed if another program has connected to it. Such a keeper is still alive, so it is
        returned as well.
        """
        lost = [self._lost[name] for name in self._lost_keepers_of(labels)]
        if lost:  # wait a moment, because a keeper's connection closes just before its processes get a new parent
            await process.send_all({each.identity for each in lost}, 0, EXIT_WAIT_S)
        return await asyncio.to_thread(self._orphans, lost) if lost else []

    def _lost_keepers_of(self, labels: Collection[str]) -> list[str]:
        return [name for name in self._lost if keeper.label_of(name) in labels]

    def _orphans(self, lost: Collection[_Lost]) -> list[Left]:
        """Return the living processes that may have been under the killed keepers, except those that this process has
        started.
        """
        keepers = {each.identity for each in lost}
        # Read the pids of our own processes before the process table, because such a process may exit in between. The
        # agent itself is included, because it may be a child of PID 1.
        ours = {os.getpid()} | self.pids | process.spawned()
        return left(
            each.identity
            for each in proc.table().values()
            if (each.is_alive and each.identity in keepers)
            or (each.is_alive and each.pid not in ours and any(_may_have_been_below(each, one) for one in lost))
        )

    # --- termination --------------------------------------------------------------------------------------------------

    async def clear(self, labels: Collection[str], others: Collection[Identity], grace: float) -> None:
        """Terminate the remaining processes of the last run, because they may occupy a port or lock that the next run
        needs. KILL follows ``grace`` seconds after TERM.

        Raises ``HostError`` if some survive.
        """
        waits = [each.is_childless_within(EXIT_WAIT_S) for each in self.of(labels)]
        await asyncio.gather(*waits, return_exceptions=True)
        if alive := await self.end(labels, others, grace, is_usual=True):
            raise HostError(f"cannot end remaining processes of the last run: {', '.join(map(str, alive))}")

    async def end(
        self, labels: Collection[str], others: Collection[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Left]:
        """Send TERM, and KILL after ``grace`` seconds, to all processes under the keepers with these labels and to
        ``others``.

        The descendants of ``others`` are terminated too. Return the survivors, and the orphans of killed keepers.
        Orphans are not signalled, because it is unknown which service they belong to. If any process had to be killed,
        the labels are added to ``killed``, unless ``is_usual`` is set.
        """
        kept = self.of(labels)
        of_others = asyncio.ensure_future(_end_trees(await self.trees(labels, others), grace))
        found = await asyncio.gather(*(self._end(each, grace) for each in kept))
        alive, was_killed = await of_others
        if not is_usual and (was_killed or any(each.state.is_killing for each in kept)):
            self.killed.update(labels)
        alive += [one for each in found for one in each]
        if orphans := await self.orphans(labels):
            return [*alive, *(each for each in orphans if each not in alive)]
        self._forget(self._lost_keepers_of(labels))
        return alive

    async def trees(self, labels: Collection[str], roots: Collection[Identity]) -> list[Identity]:
        """Return the living processes in the trees of ``roots``. A root that is under a keeper with one of these labels
        is left out, with its descendants.
        """
        kept = self.of(labels)
        apart = [each for each in roots if self.above(each) not in kept]
        return await asyncio.to_thread(_trees, apart) if apart else []

    async def _end(self, each: Keeper, grace: float) -> list[Left]:
        """Send TERM, and KILL after ``grace`` seconds, to all processes under one keeper, and return the survivors. If
        the keeper was killed, return an empty list, because in that case its processes are orphans.
        """
        try:
            if await each.end(grace):
                return []
        except HostError as exc:
            if not each.is_lost:
                logger.error("%s", exc)
                return [Left(each.pid, each.since, f"the keeper of {each.label}, which does not answer")]
        alive = await asyncio.to_thread(lambda: left(one.identity for one in each.processes() if not each.is_lost))
        if not alive and not each.is_lost and not each.state.is_childless:
            # A killed process can remain a zombie, for example until its tracer has reaped it.
            alive = [Left(each.pid, each.since, f"the keeper of {each.label}, which still has dead children")]
        return alive


def _may_have_been_below(each: proc.Stat, lost: _Lost) -> bool:
    parents = (lost.parent,) if lost.parent else (1, os.getpid())
    return each.start_ticks >= lost.start and each.parent in parents


async def _end_trees(ahead: Collection[Identity], grace: float) -> tuple[list[Left], bool]:
    """Send TERM to processes and their descendants, and KILL after ``grace`` seconds. Return the survivors, and whether
    KILL was sent.
    """
    rounds = [(signal.SIGTERM, grace), *[(signal.SIGKILL, process.KILL_TIMEOUT_S / KILL_ROUNDS)] * KILL_ROUNDS]
    was_killed = False
    for sig, timeout in rounds:
        if not ahead:
            break
        was_killed = sig is signal.SIGKILL
        await process.send_all(ahead, sig, timeout)
        ahead = await asyncio.to_thread(_trees, ahead)
    return left(ahead), was_killed


def _trees(roots: Collection[Identity]) -> list[Identity]:
    """Return the living processes among ``roots`` and their descendants. Blocks."""
    living = [one for pid, start in roots if (one := proc.stat(pid)) and one.is_alive and one.start_ticks == start]
    found = {each.pid: each for root in living for each in (root, *proc.below(root.pid).values()) if each.is_alive}
    return [each.identity for each in found.values()]
