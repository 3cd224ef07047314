"""Processes that services leave behind: ended, with proof that none is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import clock, job_cgroups, proc, process, reaper
from agent_shim.supervisor.ownership.evidence import (
    Left,
    Look,
    Members,
    Ownership,
    Records,
    Unproven,
    Verdict,
    is_job_user,
    kinship,
    left,
)
from agent_shim.supervisor.ownership.process_record import Identity, ProcessRecord
from agent_shim.supervisor.plan import ProcessSpec

logger = logging.getLogger(__name__)

KILL_ROUNDS: Final = 3
"""Rounds of KILL: a process forked during one round is found in the next."""
MAX_PROOF_PASSES: Final = 40
"""Passes tried for one during which no process of the service ends."""
QUICK_PROOF_PASSES: Final = 10
"""Passes without a pause between them. PROOF_PAUSE_S precedes each of the others."""
PROOF_PAUSE_S: Final = 0.05
MAX_REAPING_TURNS: Final = 100
"""Turns of the event loop that reap orphans after a pass. More can exit at the same time."""
EXIT_WAIT_S: Final = 0.25
"""Seconds that remaining processes of an exited process have before they are signalled."""
NAMELESS: Final = Left(0, 0, "processes that exit before they can be listed")


class Remains:
    """Searches all processes of the machine for the services that ``ownership`` knows."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self.killed: set[str] = set()
        """Labels of services with processes that had to be killed, since the caller last cleared it."""
        self._pass: asyncio.Future[Look] | None = None
        self._passing = asyncio.Lock()
        self._ended: Counter[Verdict] = Counter()
        """Exited orphans by owner."""
        self._counts_since = 0
        """First tick of the count."""
        self._attentive = 0
        """Blocks of ``_attending`` at work."""
        self._ending: set[Verdict] = set()
        """Owners whose process groups are killed when an orphan of theirs exits."""

    def count(self, records: Callable[[], Records]) -> None:
        """Track the services of ``records``, whose orphans come to this process from now on."""
        self.ownership.records = records
        self._counts_since = clock.boot_ticks()

    # --- finding ----------------------------------------------------------------------------------------------------

    async def look(self) -> Look:
        """Take a pass over all processes that starts after this call. Concurrent callers share one."""

        async def take() -> Look:
            async with self._passing:
                self._pass = None  # Later callers need a later pass.
                return await asyncio.to_thread(self.ownership.look)

        if self._pass is None:
            self._pass = asyncio.ensure_future(take())
        return await asyncio.shield(self._pass)

    async def record_descendants(self) -> None:
        """Record the processes proven to belong to services now: their proof may exit."""
        records = [(label, traces) for label, traces in self.ownership.records() if not traces.is_in_cgroup]
        if any(traces.known or traces.descendants for _, traces in records):
            before = {label: set(each.descendants) for label, each in records}
            living = await asyncio.to_thread(_living, await self.look(), list(self.ownership.records()))
            for label, traces in records:
                # A process that was replaced during the pass may be younger than the pass.
                traces.record_descendants([*living[label], *(set(traces.descendants) - before[label])])

    async def members(self, label: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> list[Identity]:
        """List living processes of the service, including ``known`` and their descendants."""
        return (await self._members(label, traces, known)).identities

    async def _members(self, label: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> Members:
        found = await asyncio.to_thread(self.ownership.members, await self.look(), label, traces, list(known))
        for each in found.leads:
            traces.widen(each)
        return found

    async def strays(self, since: int) -> list[Left]:
        """List orphans of an unknown job since the tick ``since``. An empty list is proven as in ``sweep``."""

        async def find() -> Members:
            return await asyncio.to_thread(self.ownership.strays, await self.look(), since)

        return await self._proven(find, since, [Unproven.ORPHAN])

    async def doubtful(self, since: int) -> str:
        """Describe orphans of root and of operators since the tick ``since``. "" without any.

        Without a cgroup a job's process that forked twice in a new session and wiped its environment is one of these.
        """
        found = await asyncio.to_thread(self.ownership.strays, await self.look(), since, of_jobs=False)
        named = await asyncio.to_thread(left, found.identities)
        return f"stopped, but may have started {', '.join(map(str, named))}" if named else ""

    # --- ending -----------------------------------------------------------------------------------------------------

    async def clear(self, label: str, traces: ProcessRecord, grace: float) -> None:
        """End remaining processes of the service's last run: they may hold a port or lock that the next run needs.

        Raises ``HostError`` if some survive.
        """
        cgroup = self.ownership.cgroup(label)
        give_up_at = time.monotonic() + EXIT_WAIT_S
        while True:
            in_cgroup = await asyncio.to_thread(cgroup.members)
            if not (in_cgroup if traces.is_in_cgroup else await self.members(label, traces, in_cgroup)):
                return
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(process.POLL_S)
        if alive := await self.sweep(label, traces, in_cgroup, grace, is_usual=True):
            raise HostError(f"cannot end remaining processes of the last run: {', '.join(map(str, alive))}")

    async def sweep(
        self, label: str, traces: ProcessRecord, known: Iterable[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Left]:
        """Send TERM, and KILL after ``grace`` seconds, to all processes of the service. Returns the survivors.

        An empty result is proven by a pass that no process can outrun. ``is_usual`` keeps a kill out of ``killed``.
        """
        cgroup = self.ownership.cgroup(label)
        ahead = await self.members(label, traces, known)
        for sig, timeout in _rounds(grace):
            if not ahead:
                if not await self._left_over(label, traces, cgroup):
                    return []
                ahead = await self.members(label, traces)
            pids = ", ".join(str(pid) for pid, _ in ahead) or NAMELESS.name
            logger.info("%s: sending %s to remaining processes: %s", label, sig.name, pids)
            is_kill = sig is signal.SIGKILL
            with self._attending(label) if is_kill and not traces.is_in_cgroup else contextlib.nullcontext():
                if is_kill:
                    if not is_usual:
                        self.killed.add(label)
                    await asyncio.to_thread(cgroup.kill)
                await process.send_all(ahead, sig, timeout)
                ahead = await self.members(label, traces, ahead)
        alive = await asyncio.to_thread(left, ahead)
        return alive or await self._left_over(label, traces, cgroup)

    async def sweep_strays(self, since: int, grace: float) -> list[Left]:
        """End orphans of unknown jobs like ``sweep`` once all jobs are stopped. Returns the survivors."""
        strays = await self.strays(since)
        for sig, timeout in _rounds(grace):
            if not strays:
                break
            logger.warning("sending %s to orphans of jobs: %s", sig.name, ", ".join(map(str, strays)))
            with self._attending(Unproven.ORPHAN) if sig is signal.SIGKILL else contextlib.nullcontext():
                await process.send_all([stray.identity for stray in strays if stray is not NAMELESS], sig, timeout)
                strays = await self.strays(since)
        return strays

    async def dismiss(self, spec: ProcessSpec) -> None:
        """Remove the cgroup of a stopped service. The cgroup of a bpm process stays until its counters are read."""
        if spec.start is not None and spec.start_call is None:
            await asyncio.to_thread(self.ownership.cgroup(spec.label).remove)

    # --- proof ------------------------------------------------------------------------------------------------------

    async def _left_over(self, label: str, traces: ProcessRecord, cgroup: job_cgroups.JobCgroup) -> list[Left]:
        """Return the remaining processes of a service after a pass found none. An empty list is proof.

        The kernel answers for a cgroup.
        """
        give_up_at = time.monotonic() + process.KILL_TIMEOUT_S / KILL_ROUNDS
        while not await asyncio.to_thread(cgroup.is_empty):
            if (in_cgroup := await asyncio.to_thread(cgroup.members)) or time.monotonic() > give_up_at:
                return await asyncio.to_thread(left, in_cgroup) or [NAMELESS]
            await asyncio.sleep(process.POLL_S / 4)
        if traces.is_in_cgroup or not traces.begun:
            return []
        return await self._proven(partial(self._members, label, traces), traces.begun, (label, Unproven.ORPHAN))

    async def _proven(
        self, find: Callable[[], Awaitable[Members]], since: int, owners: Collection[Verdict]
    ) -> list[Left]:
        """Return what ``find`` finds of the processes of ``owners`` since the tick ``since``. An empty list is proof.

        A process that escapes a pass must start and exit during it. So a pass that finds none counts if it has read all
        that lived at its end, if it could read every process that it listed, or if meanwhile no orphan of ``owners``
        has exited or begun to. The last holds only for orphans that come to this agent: those of services that an
        earlier agent started may go elsewhere.
        """
        is_counted = process.takes_orphans and since >= self._counts_since
        leaving: Collection[Identity] = ()
        seen: frozenset[int] = frozenset()
        for number in range(MAX_PROOF_PASSES):
            if number >= QUICK_PROOF_PASSES:  # on a busy machine orphans exit in bursts: let them pass
                await asyncio.sleep(PROOF_PAUSE_S)
            with self._attending():
                before = [self._ended[owner] for owner in owners]
                found, _, leaving, unread = await find()
                if found:
                    return await asyncio.to_thread(left, found)
                is_quiet = await _reap_all() and before == [self._ended[owner] for owner in owners]
            # A process whose exit takes long has lost its memory, so it forks no more.
            is_complete = unread is not None and unread <= seen
            if not leaving and (is_complete or (is_counted and is_quiet)):
                return []
            seen = unread or frozenset()
        return await asyncio.to_thread(left, leaving) or [NAMELESS]

    @contextlib.contextmanager
    def _attending(self, *ending: Verdict) -> Iterator[None]:
        """Count the orphans that exit during the block, and kill the groups of orphans of ``ending`` owners.

        At other times an orphan costs only its reaping: a job can leave thousands a second.
        """
        self._ending.update(ending)
        if not self._attentive:
            reaper.heirs.append(self._has_ended)
        self._attentive += 1
        try:
            yield
        finally:
            self._attentive -= 1
            if not self._attentive:
                reaper.heirs.remove(self._has_ended)
            self._ending.difference_update(ending)

    def _has_ended(self, orphan: proc.Stat) -> None:
        verdict = self.ownership.attribute(orphan, self._ending)
        self._ended[verdict] += 1
        if verdict in self._ending and (verdict is not Unproven.ORPHAN or is_job_user(proc.user(orphan.pid))):
            process.kill_group_of(orphan)


def _living(seen: Look, records: Records) -> defaultdict[Verdict, list[Identity]]:
    """Return the living processes of a pass by their owners. Blocks."""
    found: defaultdict[Verdict, list[Identity]] = defaultdict(list)
    for pid, owner in kinship(seen.processes, records, seen.in_cgroup).items():
        if seen.processes[pid].is_alive:
            found[owner].append(seen.processes[pid].identity)
    return found


def _rounds(grace: float) -> list[tuple[signal.Signals, float]]:
    """Return the signals to remaining processes, each with the seconds for its effect."""
    return [(signal.SIGTERM, grace), *[(signal.SIGKILL, process.KILL_TIMEOUT_S / KILL_ROUNDS)] * KILL_ROUNDS]


async def _reap_all() -> bool:
    """Reap the orphans that have exited: each counts. False if they exit without end."""
    for _ in range(MAX_REAPING_TURNS):
        if not reaper.reap_some():
            return True
        await asyncio.sleep(0)
    return False
