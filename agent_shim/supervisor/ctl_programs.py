"""Start and stop programs of services, and the processes they leave behind."""

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
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from agent_shim.core.errors import HostError
from agent_shim.host import clock, guarded, job_cgroups, proc, process, reaper
from agent_shim.host.process import Process
from agent_shim.supervisor import ownership, process_record
from agent_shim.supervisor.monit.ast import Program
from agent_shim.supervisor.ownership import Left, Look, Members, Ownership, Records, Unproven, Verdict, left, look
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_record import Identity, ProcessRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DESCRIPTION_CHARS: Final = 236
"""Length of the text of an event in the environment of a program, as in monit."""
MAX_CONCURRENT_SPAWNS: Final = 3
"""Each takes a thread, a processor and turns of the event loop."""
KILL_ROUNDS: Final = 3
"""Rounds of KILL: a process forked during one round is found in the next."""
MAX_PROOF_PASSES: Final = 40
"""Passes tried for one during which no process of the service ends."""
QUICK_PROOF_PASSES: Final = 10
"""Passes without a pause between them; PROOF_PAUSE_S precedes each of the others."""
PROOF_PAUSE_S: Final = 0.05
MAX_REAPING_TURNS: Final = 100
"""Turns of the event loop that reap orphans after a pass; more can exit at the same time."""
EXIT_WAIT_S: Final = 0.25
"""Seconds that remaining processes of an exited process have before they are signalled."""
MAX_OUTPUT_BYTES: Final = 256 * 1024
"""Approximate size of a service's output file; see ``trim``."""
BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``."""
MAX_LAST_BYTES: Final = 400
"""Length of the last output line in the report of a failure."""
MAX_TAIL_BYTES: Final = 4096
"""Length of output searched for that line."""
NAMELESS: Final = Left(0, 0, "processes that exit before they can be listed")
_UNCAGED: Final = "%s: cannot use a cgroup, tracking its processes by descent: %s"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TRACE: Final = re.compile(r"\++ ")
"""Prefix of commands traced by ``set -x``."""
_LIMIT_REFUSED: Final = re.compile(r".*\bulimit: .*(cannot modify limit|error setting limit).*")
"""Message of bash and dash for a limit above the container's."""


class Programs:
    """Runs start and stop programs as monit does (monit 5.2.5 spawn.c, env.c).

    Their environment holds monit's variables and the agent's mark, which identifies their processes; ``base`` keeps it
    distinct from the mark of another agent. Their output goes to one file per service in ``output``.
    """

    def __init__(self, base: Path, output: Path) -> None:
        self._base = base
        self._output = output
        self.killed: set[str] = set()
        """Labels of services with processes that had to be killed, since the caller last cleared it."""
        self.ownership = Ownership(base)
        self.scripts: dict[str, ProcessRecord] = {}
        """Records of the processes that the scripts of each job start."""
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)
        self._pass: asyncio.Future[Look] | None = None
        self._passing = asyncio.Lock()
        self._ended: Counter[Verdict] = Counter()
        """Exited orphans by owner."""
        self._counts_since = 0
        """First tick of the count."""
        self._attentive = 0
        """Blocks of ``_attending`` at work."""
        self._hunted: set[Verdict] = set()
        """Owners whose process groups are killed when an orphan of theirs exits."""

    async def run(
        self,
        name: str,
        program: Program,
        event: str,
        *,
        description: str = "",
        label: str = "",
        pid: int = 0,
        is_aside: bool = False,
    ) -> Process:
        """Run a program for the service ``name``, whose process is ``pid``, after ``event``; raises ``HostError``.

        ``label`` is the mark, by default the name. With ``is_aside`` (the exec of a rule) the program is no part of the
        service and survives its stop, which it may itself request.
        """
        label = label or name
        async with self._gate:  # with nothing made yet: hundreds wait
            await asyncio.sleep(0)
            env = {
                "PATH": "/bin:/usr/bin:/sbin:/usr/sbin",
                "MONIT_DATE": time.strftime("%a, %d %b %Y %H:%M:%S %z"),
                "MONIT_SERVICE": name,
                "MONIT_HOST": socket.gethostname(),
                "MONIT_EVENT": event,
                "MONIT_DESCRIPTION": (description or event)[:MAX_DESCRIPTION_CHARS],
                "MONIT_PROCESS_PID": str(pid),
                "MONIT_PROCESS_MEMORY": "0",
                "MONIT_PROCESS_CHILDREN": "0",
                "MONIT_PROCESS_CPU_PERCENT": "0.0",
            }
            if "TZ" in os.environ:
                env["TZ"] = os.environ["TZ"]
            with contextlib.ExitStack() as opened:
                output = self._open(name, opened)
                if not is_aside:
                    env[process_record.MARK] = process_record.mark(label, self._base)
                enter = partial(_enter, None if is_aside else self.ownership.cage(label), label)
                user, group = program.uid or None, program.gid or None
                return await process.spawn_prepared(
                    enter, program.argv, env=env, stdout=output, stderr=output, user=user, group=group
                )

    async def run_script(self, job: str, argv: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Process:
        """Run a script of a job as ``process.spawn`` does: what it starts and leaves belongs to the job."""
        label = process_record.script_label(job)
        cage, record = self.ownership.cage(label), self.scripts.setdefault(job, ProcessRecord())
        env = {**env, process_record.MARK: process_record.mark(label, self._base)}
        if all(_VARIABLE.fullmatch(name) for name in env):
            script = await process.spawn_prepared(partial(_enter, cage, label), argv, env=env, **how)
        else:  # a Director's names, which a shell would not pass on
            script = process.spawn(argv, env=env, **how)
        record.begin(script.identity, None)
        record.is_caged = script.is_caged

        def end() -> None:
            record.ended(script.identity, script.session, script.seen_ticks)
            asyncio.get_running_loop().run_in_executor(None, cage.remove)

        script.on_end = end
        return script

    # --- processes of a service -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def counting(self, records: Callable[[], Records]) -> Iterator[None]:
        """Track the services of ``records``, whose orphans come to this process for the duration of the block."""
        self.ownership.records = records
        self._counts_since = clock.boot_ticks()
        yield

    @contextlib.contextmanager
    def _attending(self, *hunted: Verdict) -> Iterator[None]:
        """Count the orphans that exit during the block, and kill the groups of those of ``hunted`` owners.

        At other times an orphan costs only its reaping: a job can leave thousands a second.
        """
        self._hunted.update(hunted)
        if not self._attentive:
            reaper.heirs.append(self._has_ended)
        self._attentive += 1
        try:
            yield
        finally:
            self._attentive -= 1
            if not self._attentive:
                reaper.heirs.remove(self._has_ended)
            self._hunted.difference_update(hunted)

    def _has_ended(self, orphan: proc.Stat) -> None:
        verdict = self.ownership.attribute(orphan, self._hunted)
        self._ended[verdict] += 1
        if verdict in self._hunted and (verdict is not Unproven.ORPHAN or ownership.is_job_user(proc.user(orphan.pid))):
            process.kill_group_of(orphan)

    async def see_kin(self) -> None:
        """Record the processes proven to belong to services now: their proof may exit."""
        records = [(label, traces) for label, traces in self.ownership.records() if not traces.is_caged]
        if any(traces.known or traces.kin for _, traces in records):
            seen = await self._look()
            of_all = list(self.ownership.records())
            found = await asyncio.to_thread(ownership.kinship, seen.processes, of_all, seen.caged)
            for label, traces in records:
                living = (seen.processes[pid] for pid in found.of(label))
                traces.see_kin(each.identity for each in living if each.is_alive)

    async def members(self, name: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> list[Identity]:
        """List living processes of the service, including ``known`` and their descendants."""
        return (await self._members(name, traces, known)).identities

    async def _members(self, name: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> Members:
        seen = await self._look()
        found = await asyncio.to_thread(self.ownership.members, seen, name, traces, list(known))
        for each in found.leads:
            traces.widen(each)
        return found

    async def clear(self, name: str, traces: ProcessRecord, grace: float) -> None:
        """End remaining processes of the service's last run: they may hold a port or lock that the next run needs.

        Raises ``HostError`` if some survive.
        """
        cage = self.ownership.cage(name)
        give_up_at = time.monotonic() + EXIT_WAIT_S
        while True:
            caged = await asyncio.to_thread(cage.members)
            if not (caged if traces.is_caged else await self.members(name, traces, caged)):
                return
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(process.POLL_S)
        if alive := await self.sweep(name, traces, caged, grace, is_usual=True):
            raise HostError(f"cannot end remaining processes of the last run: {', '.join(map(str, alive))}")

    async def sweep(
        self, name: str, traces: ProcessRecord, known: Iterable[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Left]:
        """Send TERM, and KILL after ``grace`` seconds, to all processes of the service; returns the survivors.

        An empty result is proven by a pass that no process can outrun. ``is_usual`` keeps a kill out of ``killed``.
        """
        cage = self.ownership.cage(name)
        ahead = await self.members(name, traces, known)
        for sig, patience in _rounds(grace):
            if not ahead:
                if not await self._left_over(name, traces, cage):
                    return []
                ahead = await self.members(name, traces)
            pids = ", ".join(str(pid) for pid, _ in ahead) or NAMELESS.name
            logger.info("%s: sending %s to remaining processes: %s", name, sig.name, pids)
            is_kill = sig is signal.SIGKILL
            with self._attending(name) if is_kill and not traces.is_caged else contextlib.nullcontext():
                if is_kill:
                    if not is_usual:
                        self.killed.add(name)
                    await asyncio.to_thread(cage.kill)
                await _send(ahead, sig)
                await _all_gone(ahead, patience)
                ahead = await self.members(name, traces, ahead)
        alive = await asyncio.to_thread(left, ahead)
        return alive or await self._left_over(name, traces, cage)

    async def _left_over(self, name: str, traces: ProcessRecord, cage: job_cgroups.JobCgroup) -> list[Left]:
        """Return the remaining processes of a service after a pass found none; an empty list is proof.

        The kernel answers for a cgroup.
        """
        give_up_at = time.monotonic() + process.KILL_TIMEOUT_S / KILL_ROUNDS
        while not await asyncio.to_thread(cage.is_empty):
            if (caged := await asyncio.to_thread(cage.members)) or time.monotonic() > give_up_at:
                return await asyncio.to_thread(left, caged) or [NAMELESS]
            await asyncio.sleep(process.POLL_S / 4)
        if traces.is_caged or not traces.begun:
            return []
        return await self._proven(partial(self._members, name, traces), traces.begun, (name, Unproven.ORPHAN))

    async def _proven(
        self, find: Callable[[], Awaitable[Members]], since: int, owners: Collection[Verdict]
    ) -> list[Left]:
        """Return what ``find`` finds of the processes of ``owners`` since the tick ``since``; an empty list is proof.

        A process that escapes every pass must start and exit. So a pass that finds none counts if meanwhile no orphan
        of ``owners`` has exited or begun to, or no process at all has started. Orphans of an earlier agent do not come
        to this one, so for its processes many passes must suffice.
        """
        is_counted = process.takes_orphans and since >= self._counts_since
        leaving: Collection[Identity] = ()
        for number in range(MAX_PROOF_PASSES):
            if number >= QUICK_PROOF_PASSES:  # on a busy machine orphans exit in bursts: let them pass
                await asyncio.sleep(PROOF_PAUSE_S)
            last, readers = proc.last_number(), proc.readers
            with self._attending():
                ended = self._count_of(owners)
                found, _, leaving = await find()
                if found:
                    return await asyncio.to_thread(left, found)
                is_quiet = is_counted and not leaving and await self._none_ended(owners, ended)
            # The threads that read the processes are no sign of others.
            if is_quiet or (last is not None and proc.last_number() == last + proc.readers - readers):
                return []
        return (await asyncio.to_thread(left, leaving) or [NAMELESS]) if is_counted else []

    async def _none_ended(self, owners: Collection[Verdict], before: int) -> bool:
        """Return True if no orphan of ``owners`` has exited since ``_count_of`` them was ``before``, reaped or not."""
        for _ in range(MAX_REAPING_TURNS):
            if self._count_of(owners) != before:
                return False
            if not reaper.reap_some():
                return self._count_of(owners) == before
            await asyncio.sleep(0)
        return False

    def _count_of(self, owners: Iterable[Verdict]) -> int:
        return sum(self._ended[owner] for owner in owners)

    async def dismiss(self, spec: ProcessSpec) -> None:
        """Remove the cgroup of a stopped service; that of a bpm process stays until ``Bpm`` has read its counters."""
        if spec.start is not None and spec.start_call is None:
            await asyncio.to_thread(self.ownership.cage(spec.label).remove)

    async def strays(self, since: int) -> list[Left]:
        """List orphans of an unknown job since the tick ``since``; an empty list is proven as in ``sweep``."""

        async def find() -> Members:
            return await asyncio.to_thread(self.ownership.strays, await self._look(), since)

        return await self._proven(find, since, [Unproven.ORPHAN])

    async def doubtful(self, since: int) -> str:
        """Describe orphans of root and of operators since the tick ``since``; "" without any.

        Without a cgroup a job's process that forked twice in a new session and wiped its environment is one of these.
        """
        found = await asyncio.to_thread(self.ownership.strays, await self._look(), since, of_jobs=False)
        named = await asyncio.to_thread(left, found.identities)
        return f"stopped, but may have started {', '.join(map(str, named))}" if named else ""

    async def sweep_strays(self, since: int, grace: float) -> list[Left]:
        """End those orphans like ``sweep`` once all jobs are stopped; returns the survivors."""
        strays = await self.strays(since)
        for sig, patience in _rounds(grace):
            if not strays:
                break
            found = [stray.identity for stray in strays if stray is not NAMELESS]
            logger.warning("sending %s to orphans of jobs: %s", sig.name, ", ".join(map(str, strays)))
            with self._attending(Unproven.ORPHAN) if sig is signal.SIGKILL else contextlib.nullcontext():
                await _send(found, sig)
                await _all_gone(found, patience)
                strays = await self.strays(since)
        return strays

    async def _look(self) -> Look:
        """Take a pass over all processes that starts after this call; concurrent callers share one."""
        if self._pass is None:
            self._pass = asyncio.ensure_future(self._count())
        return await asyncio.shield(self._pass)

    async def _count(self) -> Look:
        async with self._passing:
            self._pass = None  # Later callers need a later pass.
            return await asyncio.to_thread(look, self.ownership)

    # --- program output ---------------------------------------------------------------------------------------------

    async def refused_limit(self, name: str) -> str:
        """Return the last shell message about a limit that a script could not set; "" without one."""
        lines = await self.printed(name)
        return next((line[-MAX_LAST_BYTES:] for line in reversed(lines) if _LIMIT_REFUSED.match(line)), "")

    async def printed(self, name: str) -> list[str]:
        """Return the last lines of a service's programs; most programs print nothing, and need no thread."""
        path = self._output / f"{name.replace('/', '_')}.log"
        with contextlib.suppress(OSError):
            if not path.stat(follow_symlinks=False).st_size:
                return []
        return await _lines(name, path, self._output)

    async def trim(self) -> None:
        """Truncate large output files to their end: a start program that became the daemon may print forever.

        A thread for the usual look would take longer than its calls of stat.
        """
        for entry in os.scandir(self._output):
            found = entry.stat(follow_symlinks=False)
            # A job can allocate blocks beyond the end; file systems do so too, to twice the size.
            taken = max(found.st_size, found.st_blocks * BLOCK_BYTES // 4)
            if entry.name.endswith(".log") and taken > MAX_OUTPUT_BYTES:
                await asyncio.to_thread(_cut, Path(entry.path), found.st_size)

    def _open(self, name: str, opened: contextlib.ExitStack) -> int | None:
        """Open the output file; None if that fails, because a full disk must not prevent a start."""
        try:
            self._output.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = guarded.open_log(self._output / f"{name.replace('/', '_')}.log", 0o640)
        except OSError as exc:
            logger.warning("cannot capture the output of %s: %s", name, exc)
            return None
        opened.callback(os.close, output)
        return output


def _enter(cage: job_cgroups.JobCgroup | None, label: str, program: Process) -> None:
    """Move a program that does not run yet into the cgroup of its service, if any, where that is possible."""
    try:
        if cage is not None:
            cage.take(program)
    except OSError as exc:
        logger.warning(_UNCAGED, label, exc)


def _rounds(grace: float) -> list[tuple[signal.Signals, float]]:
    """Return the signals to remaining processes, each with the seconds for its effect."""
    return [(signal.SIGTERM, grace), *[(signal.SIGKILL, process.KILL_TIMEOUT_S / KILL_ROUNDS)] * KILL_ROUNDS]


async def _send(processes: Collection[Identity], sig: signal.Signals) -> None:
    """Signal processes, each only if it still has its start time, in a thread: a job may have thousands."""

    def work() -> None:
        for each in processes:
            process.send(each, sig)

    await asyncio.to_thread(work)


async def last_line(whose: str, path: Path, root: Path) -> str:
    """Return the last meaningful line of a file below ``root``; "" if it cannot be read.

    ``whose`` is the label of the service that may write the file.
    """
    return last_word(await _lines(whose, path, root))


def last_word(lines: list[str]) -> str:
    """Return the end of the last line; commands traced by ``set -x`` count only if there is nothing else."""
    words = [line for line in lines if not _TRACE.match(line)] or lines
    return words[-1][-MAX_LAST_BYTES:] if words else ""


def _cut(path: Path, size: int) -> None:
    """Keep the end of an output file of ``size`` bytes."""
    with path.open("r+b", buffering=0) as stream:
        stream.seek(max(0, size - MAX_OUTPUT_BYTES // 2))
        end = stream.read(MAX_OUTPUT_BYTES // 2)
        # Writers append: output written meanwhile follows, or is lost.
        stream.truncate(0)
        stream.seek(0)
        stream.write(end)


async def _lines(whose: str, path: Path, root: Path) -> list[str]:
    try:
        text = await guarded.aside(whose, partial(guarded.tail, path, MAX_TAIL_BYTES, root))
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the last output of %s: %s", whose, exc)
        return []
    return [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]


class TokenBucket:
    """Rate limit shared by all services: a ``burst`` at once, then ``rate`` a second."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left = burst
        self._filled_at = time.monotonic()

    async def take(self) -> None:
        """Wait for a token."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate) - 1
        self._filled_at = now
        if self._left < 0:
            try:
                await asyncio.sleep(-self._left / self._rate)
            except asyncio.CancelledError:
                self._left += 1  # returned to the next caller
                raise


async def _all_gone(processes: Collection[Identity], patience: float) -> None:
    """Wait until all have exited, at most ``patience`` seconds."""
    begun_at = time.monotonic()

    def living() -> list[Identity]:
        found = (proc.stat(pid) for pid, _ in processes)
        return [one.identity for one in found if one is not None and one.is_alive and one.identity in processes]

    while processes := set(await asyncio.to_thread(living)):
        now = time.monotonic()
        if now > begun_at + patience:
            break
        await asyncio.sleep(process.POLL_S / 4)
