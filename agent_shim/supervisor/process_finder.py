"""Whether what a service stands for is there: its process, or the path that a check looks at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import clock, proc, process, watchdog
from agent_shim.host.daemon_thread import run_in_daemon_thread
from agent_shim.host.process import Process
from agent_shim.supervisor import process_record
from agent_shim.supervisor.ownership import Ownership, Tie
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_record import Pidfile, ProcessRecord

FIRST_LOOK: Final = 0.001
SLOWEST_LOOK: Final = 0.05
"""Between these the time from look to look grows while a start goes on."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds."""

    settle: float = 10.0
    """After an unexpected end a process is not called running before it has stayed up so long."""
    backoff_first: float = 0.5
    """Before the second restart in a row; the first comes at once."""
    backoff_limit: float = 30.0
    """The longest wait; who stays up longer than that begins anew with a restart at once."""
    stop: float = 30.0
    """For a process without a stop program to end after TERM."""
    grace: float = 5.0
    """Between TERM and KILL for what a stop program has left."""
    linger: float = 2.0
    """For the start program to end once the process lives, and for the process to come once a doubtful one has."""
    look: float = 1.0
    """Between looks at what no descriptor tells: something that comes late, a path."""
    cycle: float = 10.0
    """A check of monit: the unit of its rates."""


class LateError(HostError):
    """No process in time; it may come yet."""


class ProcessFinder:
    """The process of a service; ``program`` is its start program while that is waited for.

    ``traces`` are those of the service's record; ``changed`` is called when they have changed.
    """

    def __init__(self, ownership: Ownership, timing: Timing, changed: Callable[[], None]) -> None:
        self.process: Process | None = None
        self.program: Process | None = None
        self._session = 0
        """That of the process when it was found."""
        self.up_at = 0.0
        """When the process started, monotonic."""
        self._is_there = True
        """Whether the path of a check that is no process was there when it was looked at last."""
        self._ownership = ownership
        self.refused = ""
        """Why the process that the pidfile names is not believed to be the service's."""
        self._timing = timing
        self._changed = changed

    @property
    def pid(self) -> int:
        """Of the process, 0 without one."""
        return self.process.pid if self.process is not None else 0

    async def look(self, spec: ProcessSpec, traces: ProcessRecord) -> bool:
        """Whether it is there now; what another agent, a late pidfile, a successor brings is taken up."""
        if not spec.is_process:
            return self._is_there
        with watchdog.reading(spec.name, "its pidfile and process"):
            self._take_note(spec, traces)
            if self.process is not None:
                return True
            self.refused = ""
            pidfile = _read(spec) if spec.pattern is None else None
        found = await self._find(spec, traces, pidfile)
        if found is None:
            return False
        one, tie = found
        leads_session = tie is Tie.OWNED and await asyncio.to_thread(self._ownership.leads_session, one, spec.label)
        if not self._take_up(one):
            return False
        traces.found(one, pidfile, is_guest=tie is not Tie.OWNED, leads_session=leads_session)
        self._changed()
        return True

    def _take_up(self, found: proc.Stat) -> bool:
        own = self.program
        self.process = own if own and own.identity == found.identity else process.adopt(*found.identity)
        if self.process is None:
            return False
        self.up_at = time.monotonic() - clock.uptime_of(found.start_ticks)
        self._session = found.session
        return True

    def _take_note(self, spec: ProcessSpec, traces: ProcessRecord) -> None:
        """Let the traces know what lives and what has ended; a process that has ended is no longer ours."""
        if self.program is not None and not self.program.is_alive:
            traces.ended(self.program.identity, self.program.pid, self.program.seen_ticks)
        if self.process is None:
            return
        if self.process.is_alive:
            traces.lives(self._session)
        else:
            traces.ended(self.process.identity, self._session, self.process.seen_ticks)
            if (last := _read(spec)) is not None and last.pid == self.process.pid:
                traces.heeded = last  # however often it was written: who has the number next is not meant
            self.process = None

    async def gone(self, spec: ProcessSpec) -> str:
        """How it ended, once it has."""
        if spec.is_process:
            return describe(await self.process.wait() if self.process is not None else None)
        while await self.look_at_path(spec):  # noqa: ASYNC110 - whoever removes it tells nobody
            await asyncio.sleep(self._timing.look)
        return f"{spec.path} is missing"

    async def look_at_path(self, spec: ProcessSpec) -> bool:
        """Whether the path of a check that is no process is there now; one that cannot be looked at is not.

        Where not even a thread can be had for the look, what was seen last holds.
        """
        with contextlib.suppress(OSError):
            self._is_there = spec.path is None or await run_in_daemon_thread(
                partial(_exists, spec.path), f"look for {spec.name}"
            )
        return self._is_there

    async def arrival(self, spec: ProcessSpec, traces: ProcessRecord) -> None:
        """Wait for it, and for the end of the start program unless that is the process.

        Raises ``HostError`` when none is to be expected any more, ``LateError`` when the start program has taken longer
        than it may; it is ended then.
        """
        program = self.program
        assert program is not None
        allowed = max(spec.start.timeout if spec.start else 0.0, self._timing.linger)
        begun_at = time.monotonic()
        appeared_at = ended_at = 0.0
        pause = FIRST_LOOK
        while True:
            now = time.monotonic()
            ended_at = ended_at or (0.0 if program.is_alive else now)
            is_there = await self.look_at_path(spec) if not spec.is_process else await self.look(spec, traces)
            if is_there:
                appeared_at = appeared_at or now
                if ended_at or self.process is program or now - appeared_at > self._timing.linger:
                    return
            elif ended_at:
                self._hope(program, await program.wait(), spec, traces, is_late=now - ended_at > self._timing.linger)
            if not is_there and now - begun_at > allowed:
                await program.terminate(self._timing.grace)
                raise LateError(f"no process after {allowed:g} seconds")
            await asyncio.sleep(pause)
            pause = min(pause * 2, SLOWEST_LOOK)

    def resume(self, traces: ProcessRecord) -> None:
        """Take up what another agent watched, the start program too if it still runs."""
        if traces.program is not None and traces.program != traces.known:
            self.program = process.adopt(*traces.program)
        if traces.known is not None and (known := proc.stat(traces.known[0])) and known.identity == traces.known:
            self._take_up(known)

    def let_program_go(self) -> None:
        """It has done its part; what stays of it beside the process goes on."""
        if self.program is not None and self.program is not self.process:
            self.program.release()
        self.program = None

    def release(self) -> None:
        """Let both go, alive."""
        self.let_program_go()
        if self.process is not None:
            self.process.release()
        self.process = None

    async def _find(
        self, spec: ProcessSpec, traces: ProcessRecord, pidfile: Pidfile | None
    ) -> tuple[proc.Stat, Tie] | None:
        """The living process that the pidfile, or the pattern, names, and what ties it to the service."""
        if spec.pattern is not None:
            return await asyncio.to_thread(self._ownership.match, spec.pattern, spec.label, traces)
        found = proc.stat(pidfile.pid) if pidfile else None
        if pidfile is None or found is None or not found.is_alive or found.pid in (1, os.getpid()):
            return None
        if spec.start is None:
            return found, Tie.NAMED  # believed as monit believes it
        tie, why = await asyncio.to_thread(self._ownership.tie, found, spec.label, traces, pidfile)
        if tie is Tie.NONE:
            self.refused = f"the pidfile names process {found.pid} ({proc.name(found.pid)}): {why}"
            return None
        return found, tie

    @staticmethod
    def _hope(program: Process, status: int | None, spec: ProcessSpec, traces: ProcessRecord, *, is_late: bool) -> None:
        """Raise ``HostError`` if after the end of the start program no process is to be expected."""
        with watchdog.reading(spec.name, "its pidfile"):
            found = _read(spec)
        named = found.pid if found and traces.is_fresh(found) else 0
        if named == program.pid:
            raise HostError(f"the process ended at once: {describe(status)}")
        if is_late and status:
            raise HostError(f"the start program ended: {describe(status)}")
        if is_late and named and not ((stat := proc.stat(named)) and stat.is_alive):
            raise HostError(f"process {named} of the pidfile ended at once")


KINDS: Final = ("success", "error", "signal", "unknown")
"""Of ends: exit code 0, another one, a signal, nobody saw it."""


def kind_of(how: str) -> str:
    """The kind of an end that ``describe`` has described; a path that is missing is an error."""
    if how == "unknown":
        return how
    return "success" if how == "exit 0" else "signal" if how.startswith("SIG") else "error"


def describe(status: int | None) -> str:
    """How a process ended, for people: ``exit 1``, ``SIGKILL``, ``unknown``."""
    if status is None:
        return "unknown"
    if status > 128 and status - 128 in set(signal.Signals):
        return signal.Signals(status - 128).name
    return f"exit {status}"


def _read(spec: ProcessSpec) -> Pidfile | None:
    return process_record.read(spec.pidfile) if spec.pidfile else None


def _exists(path: Path) -> bool:
    """A path that is too long, or on a volume whose server is gone, does not exist for us."""
    try:
        return path.exists()
    except OSError:
        return False
