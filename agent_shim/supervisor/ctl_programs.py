"""What services share: how their programs are run, and how what is left of them is found and ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from agent_shim.core.errors import HostError
from agent_shim.host import (
    clock,
    guarded,
    job_cgroups,
    proc,
    process,
    reaper,
)
from agent_shim.host.process import Process
from agent_shim.supervisor import process_record
from agent_shim.supervisor.ownership import (
    Left,
    Look,
    Ownership,
    Records,
    Unproven,
    Verdict,
    is_job_user,
    kinship,
    left,
    look,
)
from agent_shim.supervisor.plan import ProcessSpec, Program
from agent_shim.supervisor.process_record import Identity, ProcessRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

PORTION: Final = 50
"""Processes that are held, signalled or released in one turn of the event loop."""
SPAWNS_AT_ONCE: Final = 3
"""Each holds the event loop for some milliseconds."""
KILLS: Final = 3
"""Rounds of KILL: what forks while it is looked for is found in the next."""
LOOKS: Final = 40
"""For one during which nothing of a service has ended."""
PARTING_S: Final = 0.25
"""For what is left of a process that has ended to end as well, before it is asked to."""
MAX_OUTPUT: Final = 256 * 1024
"""Bytes of output that are left of a service's programs, about; see ``trim``."""
MAX_LAST_BYTES: Final = 400
"""Of its last line that are told when a service fails."""
MAX_TAIL_BYTES: Final = 4096
"""Of output that are looked through for that line."""
_TRACE: Final = re.compile(r"\++ ")
"""What ``set -x`` puts before each command."""
_LIMIT_REFUSED: Final = re.compile(r".*\bulimit: .*(cannot modify limit|error setting limit).*")
"""What bash and dash say of a limit beyond the container's."""


class Programs:
    """Runs start and stop programs as monit does (monit 5.2.5 spawn.c, env.c).

    Their environment has nothing but what monit gives and our mark, by which whatever they leave is found; ``base``
    makes it differ from the mark of another agent. What they print goes to a file for each service in ``output``.
    """

    def __init__(self, base: Path, output: Path) -> None:
        self._base = base
        self._output = output
        self.killed: set[str] = set()
        """Services, by their labels, of which something had to be killed since somebody emptied this."""
        self.ownership = Ownership(base)
        self._gate = asyncio.Semaphore(SPAWNS_AT_ONCE)
        self._pass: asyncio.Future[Look] | None = None
        self._passing = asyncio.Lock()
        self._ended: Counter[Verdict] = Counter()
        """Orphans that have ended, by whose they were."""
        self._counts_since = 0
        """The tick since which they are counted."""
        self._hunted: set[Verdict] = set()
        """Whose groups are killed when one of them ends."""

    async def run(
        self, name: str, program: Program, event: str, *, label: str = "", pid: int = 0, is_aside: bool = False
    ) -> Process:
        """Run a program for the service ``name``, whose process is ``pid``; raises ``HostError``.

        ``label`` is what marks it, by default the name. One that is aside (the exec of a rule) is no part of the
        service and survives its stop: it may be what stops it.
        """
        env = {
            "PATH": "/bin:/usr/bin:/sbin:/usr/sbin",
            "MONIT_DATE": clock.mail_date(),
            "MONIT_SERVICE": name,
            "MONIT_HOST": socket.gethostname(),
            "MONIT_EVENT": event,
            "MONIT_DESCRIPTION": event,
            "MONIT_PROCESS_PID": str(pid),
            "MONIT_PROCESS_MEMORY": "0",
            "MONIT_PROCESS_CHILDREN": "0",
            "MONIT_PROCESS_CPU_PERCENT": "0.0",
        }
        if "TZ" in os.environ:
            env["TZ"] = os.environ["TZ"]
        groups: list[str] = []
        if not is_aside:
            env[process_record.MARK] = process_record.mark(label or name, self._base)
            groups = await self._cgroups(label or name)
        async with self._gate:
            await asyncio.sleep(0)
            with contextlib.ExitStack() as opened:
                output = self._open(name, opened)

                def spawn(cgroups: Sequence[str]) -> Process:
                    return process.spawn(
                        program.argv,
                        env=env,
                        stdout=output,
                        stderr=output,
                        user=program.user,
                        group=program.group,
                        session=True,
                        cgroups=cgroups,
                    )

                try:
                    return spawn(groups)
                except HostError as exc:
                    if not groups or "cgroup" not in str(exc):
                        raise
                    logger.warning("%s: its processes are known by descent: %s", name, exc)
                    return spawn(())

    async def _cgroups(self, label: str) -> list[str]:
        try:
            return await asyncio.to_thread(self.ownership.cage(label).make)
        except OSError as exc:
            logger.warning("cannot make a cgroup for %s, its processes are known by descent: %s", label, exc)
            return []

    # --- what belongs to a service ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def counting(self, records: Callable[[], Records]) -> Iterator[None]:
        """For the length of the block know the services, and count the orphans that end."""
        self.ownership.records = records
        reaper.heirs.append(self._has_ended)
        self._counts_since = clock.boot_ticks()
        try:
            yield
        finally:
            reaper.heirs.remove(self._has_ended)

    def _has_ended(self, orphan: proc.Stat) -> None:
        verdict = self.ownership.attribute(orphan, self._hunted)
        self._ended[verdict] += 1
        if verdict in self._hunted and (verdict is not Unproven.ORPHAN or is_job_user(proc.user(orphan.pid))):
            process.kill_group_of(orphan)

    async def see_kin(self) -> None:
        """Remember what is proven to be of services now: once what proves it has ended, nothing else would."""
        records = [(label, traces) for label, traces in self.ownership.records() if not traces.is_caged]
        if any(traces.known or traces.kin for _, traces in records):
            seen = await self._look()
            found = kinship(seen.processes, self.ownership.records(), seen.caged)
            for label, traces in records:
                living = (seen.processes[pid] for pid in found.of(label))
                traces.see_kin(each.identity for each in living if each.is_alive)

    async def members(self, name: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> list[Identity]:
        """Everything alive that belongs to the service, ``known`` and what descends from that included."""
        return self.ownership.members(await self._look(), name, traces, known)

    async def clear(self, name: str, traces: ProcessRecord, grace: float) -> list[Left]:
        """End what is left of the service's last process; what could not be ended."""
        cage = self.ownership.cage(name)
        give_up_at = time.monotonic() + PARTING_S
        while True:
            caged = await asyncio.to_thread(cage.members)
            if not (caged if traces.is_caged else await self.members(name, traces, caged)):
                return []
            if time.monotonic() > give_up_at:
                return await self.sweep(name, traces, caged, grace, is_usual=True)
            await asyncio.sleep(process.POLL_S)

    async def sweep(
        self, name: str, traces: ProcessRecord, known: Iterable[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Left]:
        """Send TERM, and KILL after ``grace`` seconds, to all that belongs to the service; what is left after that.

        Nothing is left when a look that no process can outrun has found nothing. Where it ``is_usual`` that something
        is killed nobody is told.
        """
        cage = self.ownership.cage(name)
        kill = process.KILL_TIMEOUT_S / KILLS
        held: dict[Identity, Process] = {}
        try:
            ahead = await self._hold(name, traces, known, held)
            for sig, patience in ((signal.SIGTERM, grace), *[(signal.SIGKILL, kill)] * KILLS):
                if not ahead and await self._is_over(name, traces, cage):
                    return []
                logger.info("%s: %s to what is left: %s", name, sig.name, ", ".join(str(each.pid) for each in ahead))
                if sig is signal.SIGKILL:
                    if not is_usual:
                        self.killed.add(name)
                    self._hunted.add(name)
                    await asyncio.to_thread(cage.kill)
                async for each in _in_turns(ahead):
                    each.send(sig)
                await _all_gone(ahead, patience)
                ahead = await self._hold(name, traces, (), held)
            if not ahead and await self._is_over(name, traces, cage):
                return []
            return [left(each.identity) for each in ahead] or [Left(0, 0, "processes that end before they are seen")]
        finally:
            self._hunted.discard(name)
            _release(list(held.values()))

    async def _is_over(self, name: str, traces: ProcessRecord, cage: job_cgroups.JobCgroup) -> bool:
        """Whether nothing is left of a service of which the last look has found nothing.

        The kernel says so of a cgroup. Without one, a look is believed during which no orphan of the service, or of
        nobody knows which, has ended, or no process at all has begun: what is never seen has to begin and end. Of what
        an earlier agent has started orphans do not come to this one: there many looks have to do.
        """
        give_up_at = time.monotonic() + process.KILL_TIMEOUT_S / KILLS
        while not await asyncio.to_thread(cage.is_empty):
            if await asyncio.to_thread(cage.members) or time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(process.POLL_S / 4)
        if traces.is_caged or not traces.begun:
            return True
        is_counted = process.takes_orphans and traces.begun >= self._counts_since
        for _ in range(LOOKS):
            ended, last = self._count_of(name), proc.last_number()
            if await self.members(name, traces):
                return False
            reaper.reap_all()
            if (is_counted and self._count_of(name) == ended) or last == proc.last_number() is not None:
                return True
        return not is_counted

    def _count_of(self, name: str) -> int:
        return self._ended[name] + self._ended[Unproven.ORPHAN]

    async def dismiss(self, spec: ProcessSpec) -> None:
        """Remove the cgroup of a service that has been stopped; ``Bpm`` asks that of a bpm process what it counted."""
        if spec.start is not None and spec.start.bpm is None:
            await asyncio.to_thread(self.ownership.cage(spec.label).remove)

    async def strays(self, since: int) -> list[Left]:
        """Processes that some job has left since the tick ``since``, nobody knows which."""
        return [left(each) for each in self.ownership.strays(await self._look(), since)]

    async def sweep_strays(self, since: int, grace: float) -> list[Left]:
        """End them, as ``sweep`` does, when all jobs are stopped; what is left."""
        for sig, patience in ((signal.SIGTERM, grace), *[(signal.SIGKILL, process.KILL_TIMEOUT_S / KILLS)] * KILLS):
            strays = await self.strays(since)
            found = [each async for stray in _in_turns(strays) if (each := process.adopt(*stray.identity))]
            if not found:
                break
            logger.warning("%s to what jobs have left: %s", sig.name, ", ".join(str(each.pid) for each in found))
            self._hunted |= {Unproven.ORPHAN} if sig is signal.SIGKILL else set()
            async for each in _in_turns(found):
                each.send(sig)
            await _all_gone(found, patience)
            _release(found)
        self._hunted.discard(Unproven.ORPHAN)
        return await self.strays(since)

    async def _hold(
        self, name: str, traces: ProcessRecord, known: Iterable[Identity], held: dict[Identity, Process]
    ) -> list[Process]:
        """The members, each held since before the look that found it to be one: so its number is not another's by now.

        ``held`` is what is held already, and more afterwards.
        """
        living = [each async for each in _in_turns(list(held)) if held[each].is_alive]
        sure = [*known, *living]  # what is held only now has to be found once more for its own reasons
        found = await self.members(name, traces, sure)
        if new := [each for each in found if each not in held]:
            async for each in _in_turns(new):
                if holder := process.adopt(*each):
                    held[each] = holder
            found = await self.members(name, traces, sure)
        return [held[each] async for each in _in_turns(found) if each in held and held[each].is_alive]

    async def _look(self) -> Look:
        """All processes as they are after this call; those who ask at the same time share one pass."""
        if self._pass is None:
            self._pass = asyncio.ensure_future(self._count())
        return await asyncio.shield(self._pass)

    async def _count(self) -> Look:
        async with self._passing:
            self._pass = None  # Who asks from now on needs a later pass.
            return await asyncio.to_thread(look, self.ownership)

    # --- what programs print ----------------------------------------------------------------------------------------

    async def last_words(self, name: str) -> str:
        """The last line that the programs of a service have printed."""
        return await last_line(name, self._file(name), self._output)

    async def refused_limit(self, name: str) -> str:
        """What a shell has said last of a limit that a script could not set; "" if nothing."""
        lines = await _lines(name, self._file(name), self._output)
        return next((line[-MAX_LAST_BYTES:] for line in reversed(lines) if _LIMIT_REFUSED.match(line)), "")

    def trim(self) -> None:
        """Cut files that have grown to their end: a start program that became the daemon may print for ever."""
        for entry in os.scandir(self._output):
            if entry.name.endswith(".log") and entry.stat(follow_symlinks=False).st_size > MAX_OUTPUT:
                with Path(entry.path).open("r+b", buffering=0) as stream:
                    stream.seek(-MAX_OUTPUT // 2, os.SEEK_END)
                    end = stream.read(MAX_OUTPUT // 2)
                    # Writers append, so what they print meanwhile follows, or is lost.
                    stream.truncate(0)
                    stream.seek(0)
                    stream.write(end)

    def _open(self, name: str, opened: contextlib.ExitStack) -> int | None:
        """The output file; None where it cannot be had: a full disk is no reason not to start a job."""
        try:
            self._output.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = guarded.open_log(self._file(name), 0o640)
        except OSError as exc:
            logger.warning("what the programs of %s print is lost: %s", name, exc)
            return None
        opened.callback(os.close, output)
        return output

    def _file(self, name: str) -> Path:
        return self._output / f"{name.replace('/', '_')}.log"


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """``items``, with a turn of the event loop between portions: a job may have thousands of processes."""
    for number, each in enumerate(items, 1):
        yield each
        if number % PORTION == 0:
            await asyncio.sleep(0)


def _release(processes: list[Process]) -> None:
    """Release them in portions."""
    for each in processes[:PORTION]:
        each.release()
    if rest := processes[PORTION:]:
        asyncio.get_running_loop().call_soon(_release, rest)


async def last_line(whose: str, path: Path, root: Path) -> str:
    """The last line of a file below ``root`` that tells something; "" if it cannot be read.

    At most ``MAX_LAST_BYTES`` of it. Commands that ``set -x`` shows tell only what was done, unless nothing else is
    there. ``whose`` is the label of the service that may write there.
    """
    return telling(await _lines(whose, path, root))


async def _lines(whose: str, path: Path, root: Path) -> list[str]:
    try:
        text = await guarded.aside(whose, partial(guarded.tail, path, MAX_TAIL_BYTES, root))
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the last output of %s: %s", whose, exc)
        return []
    return [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]


def telling(lines: Sequence[str]) -> str:
    """The last of the lines that is no trace of ``set -x``, else the last; at most ``MAX_LAST_BYTES`` of its end."""
    words = [line for line in lines if not _TRACE.match(line)] or lines
    return words[-1][-MAX_LAST_BYTES:] if words else ""


class TokenBucket:
    """Lets ``burst`` pass at once and then ``rate`` a second, for all services together."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left = burst
        self._filled_at = time.monotonic()

    async def take(self) -> None:
        """Return when it is this caller's turn."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate) - 1
        self._filled_at = now
        if self._left < 0:
            try:
                await asyncio.sleep(-self._left / self._rate)
            except asyncio.CancelledError:
                self._left += 1  # for who comes next
                raise


async def _all_gone(left: Collection[Process], patience: float) -> None:
    """Return when none of them lives, or after ``patience`` seconds."""
    give_up_at = time.monotonic() + patience
    while time.monotonic() < give_up_at and any(each.is_alive for each in left):  # noqa: ASYNC110 - some of many
        await asyncio.sleep(process.POLL_S / 4)
