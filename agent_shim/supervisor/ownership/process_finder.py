"""Finds and tracks a service's process or, for a check that has no process, its path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection
from enum import Enum, auto
from functools import partial
from typing import Final

import msgspec

from agent_shim.core.errors import HostError
from agent_shim.host import blocking, clock, proc, process, watchdog
from agent_shim.host.process import Process
from agent_shim.supervisor.ownership import ending, process_record
from agent_shim.supervisor.ownership.ending import Ending
from agent_shim.supervisor.ownership.keepers import Keepers
from agent_shim.supervisor.ownership.process_record import Identity, Pidfile, ProcessRecord
from agent_shim.supervisor.ownership.tie import Tie, match, tie
from agent_shim.supervisor.plan import ProcessSpec

MIN_POLL_S: Final = 0.001
MAX_POLL_S: Final = 0.05
"""Maximum poll interval during a start. The interval grows from ``MIN_POLL_S`` to this."""


class Timing(msgspec.Struct, frozen=True):
    """Timeouts and intervals in seconds."""

    settle: float = 8.0
    """How long a process that was restarted after an unexpected exit must stay up before it counts as running."""
    backoff_first: float = 0.5
    """Delay before the second restart in a row. The first restart is immediate."""
    backoff_limit: float = 10.0
    """Longest delay between restarts, which must not exceed a monit cycle. An uptime longer than this resets the
    back-off.
    """
    eager: float = 60.0
    """How long after a requested start the delays between restarts are shorter. During this time, the Director may be
    waiting for a process that keeps failing until another process is up.
    """
    eager_limit: float = 1.0
    """Longest delay between restarts during the ``eager`` period. The sum of this delay and ``settle`` is less than a
    cycle, so that a process is reported as running no later than under monit, which reports it after one cycle.
    """
    stop: float = 30.0
    """How long a process without a stop program may take to exit after TERM."""
    grace: float = 5.0
    """Time between TERM and KILL for processes that a stop program has left running."""
    linger: float = 2.0
    """Once the process is up, the start program gets this long to exit. Once the start program has exited, the process
    gets this long to appear. If a process forks a daemon and exits, the daemon is accepted in its place for at least
    this long after the start of that process.
    """
    look: float = 1.0
    """Poll interval for changes that no file descriptor reports, such as the late appearance of a process or a path."""
    cycle: float = 10.0
    """Length of a monit cycle. Rule rates are given in cycles."""


class Named(Enum):
    """The process that a pidfile names, compared with the watched one."""

    WATCHED = auto()
    """The watched process. Also the result if there is nothing to compare."""
    NONE = auto()
    """No existing process: the pidfile is missing, contains no pid, or names a process that has exited."""
    OTHER = auto()
    """Another existing process, perhaps a zombie."""


class LateError(HostError):
    """No process appeared in time, but it may still appear."""


class ProcessFinder:
    """Finds and tracks a service's process. ``program`` is the start program during a start.

    The methods take the service's process record as ``record``. ``changed`` is called after each change to the record.
    """

    def __init__(self, keepers: Keepers, timing: Timing, changed: Callable[[], None]) -> None:
        self.process: Process | None = None
        """The watched process."""
        self.program: Process | None = None
        self.doubted: Process | None = None
        """The process that was watched before, if it is alive although the pidfile no longer names a process."""
        self.up_at = 0.0
        """Monotonic start time of the process."""
        self._is_there = True
        """True if the path existed when it was last examined. Used only for a check that has no process."""
        self._keepers = keepers
        self.refused = ""
        """Why the process named by the pidfile is not accepted as the service's process, or ""."""
        self._refused: tuple[Pidfile, Identity] | None = None
        """The pidfile whose process was not accepted, and that process."""
        self._timing = timing
        self._changed = changed

    @property
    def pid(self) -> int:
        """The pid of the process, or 0 if there is none."""
        return self.process.pid if self.process is not None else 0

    async def look(self, spec: ProcessSpec, record: ProcessRecord) -> bool:
        """Return True if the process exists. If no process is watched yet, look for one to adopt: a process that
        another agent has started, that a late pidfile names, or that replaces the previous process. For a check that
        has no process, return the last result of ``look_at_path``.

        Processes that were found or have exited are recorded in ``record``. The handle of an exited process is
        released.
        """
        if not spec.is_process:
            return self._is_there
        with watchdog.reading(spec.name, "its pidfile and process"):
            if self.program is not None and not self.program.is_alive:
                record.ended(self.program.identity)
            if self.doubted is not None and not self.doubted.is_alive:
                record.ended(self.doubted.identity)
                self.doubted = None
            if self.process is not None and self.process.is_alive:
                return True
            if self.process is not None:
                record.ended(self.process.identity)
                if (last := process_record.read(spec.pidfile)) is not None and last.pid == self.process.pid:
                    # Remember the pidfile, even if it was rewritten, so that a later process with the same pid is not
                    # mistaken for this one.
                    record.named_by = last
                self.process = None
            self.refused, self._refused = "", None
            pidfile = process_record.read(spec.pidfile) if spec.pattern is None else None
        found = await self._find(spec, record, pidfile)
        if found is None:
            return False
        return self._adopt(record, pidfile, *found)

    @property
    def is_refused_process_alive(self) -> bool:
        """Return True if the pidfile named a process that was not adopted because it might not belong to the service,
        and that process is still alive.
        """
        return self._refused is not None and proc.is_there(self._refused[1])

    def compare_with_pidfile(self, spec: ProcessSpec) -> Named:
        """Compare the process that the pidfile names with the watched one. As in monit 5.2.5, a pidfile that is missing
        or contains no number names no process, and a zombie counts as an existing process.

        Return ``Named.WATCHED`` also if there is nothing to compare, because no pidfile is defined or no living process
        is watched, if the pidfile cannot be read (for example because no file descriptor is free), or if it still names
        a process that was rejected.
        """
        if spec.pidfile is None or self.process is None or not self.process.is_alive:
            return Named.WATCHED
        with watchdog.reading(spec.name, "its pidfile"):
            try:
                found = process_record.read_or_raise(spec.pidfile)
            except (FileNotFoundError, NotADirectoryError):
                return Named.NONE
            except OSError:
                return Named.WATCHED
        if found is not None and found.pid == self.process.pid:
            return Named.WATCHED
        if found is None or proc.stat(found.pid) is None:
            return Named.NONE
        return Named.WATCHED if self._refused and self._refused[0] == found else Named.OTHER

    async def follow(self, spec: ProcessSpec, record: ProcessRecord) -> bool:
        """Watch the process that the pidfile names now if it belongs to the service. Return True if it does.

        monit follows the pidfile in each cycle. After a reload, the old process may run until its connections are
        closed, and it still belongs to the service. A process whose only relation to the service is the pidfile is
        adopted only after the old process has exited.
        """
        before, pidfile = self.process, process_record.read(spec.pidfile)
        found = await self._find(spec, record, pidfile)
        if found is None or before is None or pidfile is None:
            return False
        candidate, relation = found
        if relation is Tie.NAMED:
            why = f"the service's process {before.pid} ({proc.name(before.pid)}) is still running"
            self._refuse(pidfile, candidate, why)
            return False
        if not self._adopt(record, pidfile, candidate, relation):
            return False
        before.release()
        return True

    def _adopt(self, record: ProcessRecord, pidfile: Pidfile | None, found: proc.Stat, relation: Tie) -> bool:
        """Watch and record a process. Return False if it has just exited."""
        if not self._watch(found.identity):
            return False
        record.known, record.named_by, record.is_only_named = found.identity, pidfile, relation is Tie.NAMED
        if relation is Tie.SHARED:  # its keeper is that of a script or rule, so the service has to record the process
            record.take_over([found.identity])
        self._changed()
        return True

    def _refuse(self, pidfile: Pidfile, found: proc.Stat, why: str) -> None:
        """Record that the process named by the pidfile is not accepted as the service's process."""
        self.refused = f"the pidfile names process {found.pid} ({proc.name(found.pid)}): {why}"
        self._refused = pidfile, found.identity

    def _watch(self, identity: Identity) -> bool:
        """Watch a process as the service's process. Return False if the process has exited. Otherwise, release the
        handle of the process that ``doubt`` has set aside.
        """
        program = self.program
        handle = program if program and program.identity == identity else self._keepers.adopt(identity)
        if handle is None:
            return False
        self.process = handle
        self._release_doubted()
        self.up_at = time.monotonic() - clock.uptime_of(identity[1])
        return True

    def doubt(self, record: ProcessRecord) -> None:
        """Stop watching the process until its pidfile names it again. It still belongs to the service."""
        self.doubted, self.process = self.process, None
        record.named_by = None  # no pidfile names the process any more

    async def gone(self, spec: ProcessSpec) -> Ending:
        """Wait until the process exits or the path disappears, and return what happened. Return at once if the pidfile
        no longer names the process (``doubt``), or if no process is watched.
        """
        if self.doubted is not None and self.process is None:
            return ending.NoPid()
        if spec.is_process:
            return ending.of_status(await self.process.wait() if self.process is not None else None)
        while await self.look_at_path(spec):  # noqa: ASYNC110 - no event reports a removed path
            await asyncio.sleep(self._timing.look)
        return ending.PathMissing(spec.path)

    async def look_at_path(self, spec: ProcessSpec) -> bool:
        """For a check that has no process, return True if its path exists. An unreadable path counts as missing.

        If the disk does not answer in time, or no thread is available, the last result is returned.
        """
        with contextlib.suppress(OSError):
            what = f"look for {spec.name}"
            self._is_there = spec.path is None or await blocking.call(what, partial(os.path.exists, spec.path))
        return self._is_there

    @property
    def is_starting(self) -> bool:
        """True while a start program is running and the process has not appeared yet."""
        return self.program is not None and self.program is not self.process and self.program.is_alive

    async def arrival(self, spec: ProcessSpec, record: ProcessRecord) -> None:
        """Wait for the process, and for the exit of the start program unless the program itself is the process.

        Raises ``HostError`` if no process can appear any more. Raises ``LateError`` if no process has appeared within
        the start program's timeout. A program that has not exited by then keeps running, as under monit (monit 5.2.5
        control.c, ``wait_start``).
        """
        program = self.program
        assert program is not None
        allowed = max(spec.start.timeout if spec.start else 0.0, self._timing.linger)
        begun_at = time.monotonic()
        appeared_at = ended_at = 0.0  # 0 until the process appears, or the start program exits
        pause = MIN_POLL_S
        while True:
            now = time.monotonic()
            ended_at = ended_at or (0.0 if program.is_alive else now)
            is_there = await self.look_at_path(spec) if not spec.is_process else await self.look(spec, record)
            if is_there:
                appeared_at = appeared_at or now
                # A start program that does not exit in time is left running.
                if ended_at or self.process is program or now - appeared_at > self._timing.linger:
                    return
            elif ended_at:
                is_late = now - ended_at > self._timing.linger
                self._require_possible_start(program, await program.wait(), spec, record, is_late=is_late)
            if not is_there and now - begun_at > allowed:
                still = f", and its start program ({program.pid}) still runs" if program.is_alive else ""
                raise LateError(f"no process after {allowed:g} seconds{still}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_POLL_S)

    def resume(self, labels: Collection[str], record: ProcessRecord) -> None:
        """Watch the processes that an earlier agent recorded, including a start program that is still running."""
        if record.was_in_cgroup:
            for label in labels:
                record.take_over(self._keepers.of_former_agent(label))
            record.was_in_cgroup = False
        if record.program is not None and record.program != record.known:  # the process may be its own start program
            self.program = self._keepers.adopt(record.program)
        if record.known is None or self._watch(record.known):
            return
        if seen := self._keepers.ending_of(record.known):  # the process may have exited while no agent was running
            self.process = process.ended(record.known, seen.status)  # ``gone`` then returns this exit

    def release_program(self) -> None:
        """Stop watching the start program. Its remaining processes keep running."""
        if self.program is not None and self.program is not self.process:
            self.program.release()
        self.program = None

    def release(self) -> None:
        """Stop watching all processes and leave them running."""
        self.release_program()
        self._release_doubted()
        if self.process is not None:
            self.process.release()
        self.process = None

    def _release_doubted(self) -> None:
        """Release the handle of the doubted process, which keeps running."""
        if self.doubted is not None:
            self.doubted.release()
        self.doubted = None

    async def _find(
        self, spec: ProcessSpec, record: ProcessRecord, pidfile: Pidfile | None
    ) -> tuple[proc.Stat, Tie] | None:
        """Return the living process that the pidfile names or the pattern matches, and its relation to the service. If
        the pidfile names a process that does not belong to the service, record why, and return None.
        """
        if spec.pattern is not None:
            return await asyncio.to_thread(match, self._keepers, spec, record)
        found = proc.stat(pidfile.pid) if pidfile else None
        # Never adopt the agent itself. If the agent is PID 1, let ``tie`` decide, because a job that has no process may
        # write 1 to its pidfile.
        if pidfile is None or found is None or not found.is_alive or (found.pid != 1 and found.pid == os.getpid()):
            return None
        if spec.start is None:
            return found, Tie.NAMED  # like monit, trust the pidfile if there is no start program
        relation, why = await asyncio.to_thread(tie, self._keepers, found, spec, record, pidfile)
        if relation is Tie.NONE:
            self._refuse(pidfile, found, why)
            return None
        return found, relation

    @staticmethod
    def _require_possible_start(
        program: Process, status: int | None, spec: ProcessSpec, record: ProcessRecord, *, is_late: bool
    ) -> None:
        """Raise ``HostError`` if no process can appear any more after the start program has exited with ``status``.
        ``is_late`` means that the program exited more than ``Timing.linger`` seconds ago. After exit code 0, a daemon
        may appear even later, unless the pidfile names a process that is already gone.
        """
        with watchdog.reading(spec.name, "its pidfile"):
            found = process_record.read(spec.pidfile)
        named = found.pid if found and record.is_fresh(found) else 0
        if named == program.pid:
            raise HostError(f"the process exited immediately: {ending.of_status(status)}")
        if is_late and status:
            raise HostError(f"the start program exited: {ending.of_status(status)}")
        if is_late and named and not ((stat := proc.stat(named)) and stat.is_alive):
            raise HostError(f"process {named} of the pidfile exited immediately")
