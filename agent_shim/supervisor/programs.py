"""What services share: how their programs are run, and how what is left of them is found and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from agent_shim.host import clock, files, proc, process
from agent_shim.host.process import Process
from agent_shim.supervisor import identity
from agent_shim.supervisor.identity import Identity, Traces
from agent_shim.supervisor.plan import Program

logger = logging.getLogger(__name__)

SPAWNS_AT_ONCE: Final = 3
"""Each holds the event loop for some milliseconds."""
KILLS: Final = 3
"""Rounds of KILL: what forks while it is looked for is found in the next."""
MAX_OUTPUT: Final = 256 * 1024
"""Bytes of output that are left of a service's programs, about; see ``trim``."""
LAST_WORDS: Final = 400


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
        self._gate = asyncio.Semaphore(SPAWNS_AT_ONCE)
        self._pass: asyncio.Future[proc.Census] | None = None
        self._passing = asyncio.Lock()

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
        if not is_aside:
            env[identity.MARK] = identity.mark(label or name, self._base)
        async with self._gate:
            await asyncio.sleep(0)
            with contextlib.ExitStack() as opened:
                output = self._open(name, opened)
                return process.spawn(
                    program.argv,
                    env=env,
                    stdout=output,
                    stderr=output,
                    user=program.user,
                    group=program.group,
                    session=True,
                )

    async def members(self, name: str, traces: Traces, known: Iterable[Identity] = ()) -> list[Identity]:
        """Everything alive that belongs to the service, ``known`` and what descends from that included."""
        return traces.members(await self._census(), name, self._base, known)

    async def sweep(
        self, name: str, traces: Traces, known: Iterable[Identity], grace: float, *, is_usual: bool = False
    ) -> list[Identity]:
        """Send TERM, and KILL after ``grace`` seconds, to all that belongs to the service; what is left after that.

        Where it ``is_usual`` that something is killed nobody is told.
        """
        kill = process.KILL_PATIENCE / KILLS
        held: dict[Identity, Process] = {}
        try:
            left = await self._hold(name, traces, known, held)
            for sig, patience in ((signal.SIGTERM, grace), *[(signal.SIGKILL, kill)] * KILLS):
                if not left:
                    break
                logger.info("%s: %s to what is left: %s", name, sig.name, ", ".join(str(each.pid) for each in left))
                if sig is signal.SIGKILL and not is_usual:
                    self.killed.add(name)
                for each in left:
                    each.send(sig)
                await _all_gone(left, patience)
                left = await self._hold(name, traces, (), held)
            return [each.identity for each in left]
        finally:
            for each in held.values():
                each.release()

    async def _hold(
        self, name: str, traces: Traces, known: Iterable[Identity], held: dict[Identity, Process]
    ) -> list[Process]:
        """The members, each held since before the look that found it to be one: so its number is not another's by now.

        ``held`` is what is held already, and more afterwards.
        """
        sure = [*known, *_living(held)]  # what is held only now has to be found once more for its own reasons
        found = await self.members(name, traces, sure)
        if new := [each for each in found if each not in held]:
            held.update((each, holder) for each in new if (holder := process.adopt(*each)))
            found = await self.members(name, traces, sure)
        return [held[each] for each in found if each in held and held[each].is_alive]

    def last_words(self, name: str) -> str:
        """The last line that the programs of a service have printed."""
        return last_line(self._file(name))

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
            output = files.open_log(self._file(name), 0o640)
        except OSError as exc:
            logger.warning("what the programs of %s print is lost: %s", name, exc)
            return None
        opened.callback(os.close, output)
        return output

    def _file(self, name: str) -> Path:
        return self._output / f"{name.replace('/', '_')}.log"

    async def _census(self) -> proc.Census:
        """All processes as they are after this call; those who ask at the same time share one pass."""
        if self._pass is None:
            self._pass = asyncio.ensure_future(self._count())
        return await asyncio.shield(self._pass)

    async def _count(self) -> proc.Census:
        async with self._passing:
            self._pass = None  # Who asks from now on needs a later pass.
            return await asyncio.to_thread(proc.census, identity.MARK)


def last_line(path: Path) -> str:
    """The last line of a file with anything in it, at most ``LAST_WORDS`` bytes; empty when it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LAST_WORDS))
            lines = stream.read(LAST_WORDS).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Bucket:
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


def _living(held: Mapping[Identity, Process]) -> list[Identity]:
    return [each for each, holder in held.items() if holder.is_alive]


async def _all_gone(left: Collection[Process], patience: float) -> None:
    """Return when none of them lives, or after ``patience`` seconds."""
    give_up_at = time.monotonic() + patience
    while time.monotonic() < give_up_at and any(each.is_alive for each in left):  # noqa: ASYNC110 - some of many
        await asyncio.sleep(process.POLL / 4)
