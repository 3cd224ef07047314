"""The life of one service: start, watch, restart, stop.

One coroutine is the life. Each state has a step that ends with a move to another; what is asked from outside moves the
state and cancels the step. Cancelling is not killing: who cancels the life leaves the process alone.

Durations are seconds, ``*_at`` is monotonic time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.host import watchdog
from agent_shim.host.process import Process
from agent_shim.supervisor import process_record
from agent_shim.supervisor.bpm.runner import Bpm
from agent_shim.supervisor.ctl_programs import Programs, TokenBucket
from agent_shim.supervisor.event_kinds import Complaint
from agent_shim.supervisor.ownership import Left, left
from agent_shim.supervisor.plan import ProcessSpec, Program, Reaction
from agent_shim.supervisor.process_finder import LateError, ProcessFinder, Timing, kind_of
from agent_shim.supervisor.process_record import Identity, ProcessRecord
from agent_shim.supervisor.state import (
    ACTIVE,
    UP,
    State,
    Trigger,
    after,
    reported,
)

logger = logging.getLogger(__name__)

MOST_RESTARTS: Final = 64
"""That are remembered, for the limits of restarts."""


@dataclass(frozen=True, slots=True)
class Event:
    """What an operator is told, in monit's words (monit 5.2.5 event.c); ``action`` is what was done about it."""

    service: str
    event: str
    action: str
    description: str


class Record(msgspec.Struct):
    """What of a service outlives the agent."""

    state: State = State.STOPPED
    traces: ProcessRecord = msgspec.field(default_factory=ProcessRecord)
    restarts: int = 0
    failures: int = 0
    """In a row; each makes the wait before the next restart longer."""
    last_exit: str = ""
    reason: str = ""
    """Why it is not running, when that is not what was wanted."""
    exits: dict[str, int] = msgspec.field(default_factory=dict)
    """How often it ended by itself, by kind (``presence.KINDS``)."""
    oom_kills: int = 0
    """How often that was for want of memory."""
    was_taken_along: bool = False
    """Stopped because something it depends on was: started together with that."""
    is_start_due: bool = False
    """A start is to follow the stop that goes on."""


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What the services of one supervisor have in common."""

    base: Path
    programs: Programs
    bpm: Bpm
    restarts: TokenBucket
    timing: Timing
    tell: Callable[[Event], None]
    changed: Callable[[], None]
    """Something that is saved has changed."""
    was_oom: Callable[[], bool]
    """Whether the kernel has killed something for want of memory that nobody has laid claim to yet."""
    may_start: asyncio.Event
    """Cleared while no program may be started: what shall run waits, as starting."""


HELD: Final = "not read, as {} held the agent before: it is left alone until it is started, stopped or monitored"


class Service:
    """A process of a job, kept as it is wanted."""

    def __init__(self, spec: ProcessSpec, shared: ServiceContext, held_by: str = "") -> None:
        """``held_by`` is what of it held an agent before this one: nothing of it is read until ``trust``."""
        self.spec = spec
        self.record = Record()
        self.held_by = held_by
        self.prerequisites: Sequence[Service] = ()
        self.dependants: Sequence[Service] = ()
        self.complaints: dict[int, Complaint] = {}
        """What checks find wrong while it runs, by the number of the rule; it is then reported as failing."""
        self.is_stuck = False
        """The last stop could not end everything."""
        self._shared = shared
        self._timing = shared.timing
        self._presence = ProcessFinder(shared.programs.ownership, shared.timing, shared.changed)
        self._step: asyncio.Task[None] | None = None
        self._moved: asyncio.Event | None = None
        """The next move; there is none while nobody waits for it."""
        self._stopper: Process | None = None
        """The last stop program; it may outlast its step when the file breaks meanwhile."""
        self._has_lived = False
        self._stop_by = float("inf")
        self._is_one_of_all = False
        """The stop that goes on is one of all jobs."""
        self._patience = 0.0
        self._restarted_at: list[float] = []
        """The last of them."""
        self._is_counted = False
        """A restart goes on that the limits of restarts count."""
        self.take_spec(spec)

    # --- what is known of it ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def process(self) -> Process | None:
        """The process that is watched; it may have ended meanwhile where nobody watches."""
        return self._presence.process

    @property
    def up_at(self) -> float:
        """When its process started, monotonic."""
        return self._presence.up_at

    @property
    def reported(self) -> str:
        """In the words of the Director; an end counts before its turn has come to be noted."""
        process = self._presence.process
        return reported(self.state, fails_a_check=bool(self.complaints) or (process is not None and process.is_over))

    @property
    def is_underway(self) -> bool:
        """A start or stop goes on, or a restart is due at once."""
        at_once = self.state is State.DOWN and self.spec.is_restartable and not self._delay()
        return at_once or self.state in (State.STARTING, State.RESTARTING, State.STOPPING)

    async def reach(self, fact: Callable[[Service], bool]) -> None:
        """Return once ``fact`` holds of it; asked after each move."""
        while not fact(self):
            self._moved = self._moved or asyncio.Event()
            await self._moved.wait()

    # --- what may be asked of it ------------------------------------------------------------------------------------

    def take_spec(self, spec: ProcessSpec) -> None:
        """Go by another file from now on."""
        if spec.rules != self.spec.rules:
            self.complaints.clear()
        self.spec = spec
        before = self.state
        if error := spec.error or (HELD.format(self.held_by) if self.held_by else ""):
            self.record.state, self.record.reason = State.BROKEN, error
        elif before is State.BROKEN:
            self.record.state, self.record.reason = State.STOPPED, ""
        if self.state is not before and self._step is not None:
            self._step.cancel()

    def trust(self) -> None:
        """Read again what held an agent before: an order has come that cannot be followed without."""
        if self.held_by:
            logger.warning("%s is read again, though %s held an agent before", self.name, self.held_by)
            self.held_by = ""
            self.take_spec(self.spec)

    def start(self) -> None:
        """Have it run; after a stop that goes on, if need be."""
        self.record.was_taken_along = False
        if self.state is State.STOPPING:
            self._follow_up(start=True)
        elif self.state not in UP:
            self.record.failures = 0
            self._ask(Trigger.START_ASKED)

    def stop(self, by: float = float("inf"), *, is_one_of_all: bool = False) -> None:
        """End it and all that belongs to it, with KILL where it is not gone at monotonic time ``by``.

        What depends on it is stopped first.
        """
        self._is_counted = False
        self._is_one_of_all = is_one_of_all
        for dependant in self.dependants:
            if dependant.state is not State.STOPPED:
                dependant.stop(by, is_one_of_all=is_one_of_all)
        self._ask_stop(by)

    def bounce(self) -> None:
        """Stop it, then start it, and with it what depends on it and is up."""
        for dependant in self.dependants:
            if dependant.state in ACTIVE:
                dependant.bounce()
        self._ask_stop()
        self._follow_up(start=self.state is State.STOPPING)

    def unmonitor(self) -> None:
        """Leave it to itself, and what depends on it."""
        for dependant in self.dependants:
            dependant.unmonitor()
        self._is_counted = False
        self.complaints.clear()
        self._follow_up(start=False)
        self._ask(Trigger.UNMONITOR_ASKED)

    def _follow_up(self, *, start: bool) -> None:
        """Whether a start follows the stop that goes on."""
        self.record.is_start_due = start
        self._shared.changed()

    def _ask_stop(self, by: float = float("inf")) -> None:
        self._follow_up(start=False)
        self._stop_by = by
        self._ask(Trigger.STOP_ASKED)

    def _ask(self, trigger: Trigger) -> None:
        before = self.state
        self._move(trigger)
        if self.state is not before and self._step is not None:
            self._step.cancel()

    def _move(self, trigger: Trigger) -> None:
        state = after(self.state, trigger)
        if state is self.state:
            return
        logger.info("%s: %s, now %s", self.name, trigger.value, state.value)
        self.record.state = state
        if self._moved is not None:
            self._moved.set()
            self._moved = None
        self._shared.changed()

    # --- its life ---------------------------------------------------------------------------------------------------

    def resume(self, record: Record, *, same_world: bool) -> None:
        """Take up where an agent (this one before an apply, or an earlier one) left it.

        ``same_world`` says that process numbers still mean the same: no reboot, no new container.
        """
        self.record = record
        self._has_lived = record.state is not State.STOPPED
        self.take_spec(self.spec)
        if same_world and not self.held_by:
            self._presence.resume(record.traces)
            return
        record.traces = ProcessRecord()
        if record.state is State.STOPPING and not record.is_start_due:
            record.state = State.STOPPED
        elif record.state not in (State.STOPPED, State.UNMONITORED, State.BROKEN):
            record.state = State.STARTING
        record.is_start_due = False

    async def live(self) -> None:
        """The life of the service; cancelled by who lets it go, its process goes on then."""
        steps = {
            State.STARTING: self._launch,
            State.RESTARTING: self._launch,
            State.RUNNING: self._watch,
            State.SETTLING: self._settle,
            State.DOWN: self._wait_and_retry,
            State.STOPPING: self._end,
        }
        while True:
            step = asyncio.create_task(steps.get(self.state, _rest)(), name=f"{self.name} {self.state.value}")
            self._step = step
            try:
                await asyncio.wait([step])
            finally:
                step.cancel()
                await asyncio.wait([step])
            if not step.cancelled():
                step.result()

    def release(self) -> None:
        """Let its processes go, alive."""
        self._presence.release()

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """Have the start program bring the process, unless it is there."""
        self._has_lived = True
        if self.state is State.STARTING:
            for prerequisite in self.prerequisites:
                await prerequisite.reach(lambda it: not it.is_underway)
        else:
            await self._shared.restarts.take()
        try:
            await self._bring_up()
        except LateError as exc:
            # It may come yet: a start too soon would make two of it.
            self._patience = self._timing.cycle
            await self._failed(self._with_refusal(str(exc)))
        except HostError as exc:
            await self._failed(self._with_refusal(str(exc)))
        else:
            self._appeared()
            await self._note_limits()
        if self._is_counted:
            self._is_counted = False
            await self._heed_limits()

    async def _bring_up(self) -> None:
        spec, presence = self.spec, self._presence
        await self._await_stopper()
        if presence.program is None or not presence.program.is_alive:
            if not spec.is_process:
                await presence.look_at_path(spec)
            # monit starts what is no process whether it is there or not, and stops it before it starts it again.
            if (spec.is_process or spec.start is None) and await self._look():
                return
            if spec.start is None:
                raise HostError("it has no start program")
            await self._shared.may_start.wait()
            if not spec.is_process and self.state is State.RESTARTING:
                await self._run_stop()
            await self._clear()
            with watchdog.reading(self.name, "its pidfile"):
                before = process_record.read(spec.pidfile) if spec.pidfile else None
            presence.program = await self._run_start(spec.start)
            self.record.traces.begin(presence.program.identity, before)
            self.record.traces.is_caged = self._shared.programs.ownership.is_caged(presence.program, spec.label)
            self._shared.changed()
        await presence.arrival(spec, self.record.traces)

    async def _clear(self) -> None:
        """End what is left of the last process: it may keep the port, or the lock, that the next one needs."""
        traces = self.record.traces
        if self.spec.is_process and traces.begun and not (self.spec.start and self.spec.start.bpm):
            left = await self._shared.programs.clear(self.spec.label, traces, self._timing.grace)
            if left:
                raise HostError(f"cannot end what is left of the last process: {', '.join(map(str, left))}")

    async def _await_stopper(self) -> None:
        """No start program runs beside a stop program."""
        if self._stopper is None:
            return
        try:
            async with asyncio.timeout(self.spec.stop.timeout if self.spec.stop else self._timing.stop):
                await self._stopper.wait()
        except TimeoutError:
            await self._stopper.terminate(self._timing.grace)
        self._stopper = None

    async def _run_start(self, start: Program) -> Process:
        if start.bpm is None:
            return await self._run(start, "Started")
        try:
            async with asyncio.timeout(start.timeout):
                return await self._shared.bpm.start(start.bpm)
        except TimeoutError:
            raise HostError(f"no process after {start.timeout:g} seconds") from None
        except (ConfigError, OSError) as exc:
            raise HostError(str(exc)) from exc

    async def _look(self) -> bool:
        return await self._presence.look(self.spec, self.record.traces)

    def _appeared(self) -> None:
        self._presence.let_program_go()
        if self.state is State.STARTING:
            self.record.reason = ""
        self._move(Trigger.APPEARED)

    async def _failed(self, why: str) -> None:
        self.record.failures = max(self.record.failures + 1, 2)
        self.record.reason = await self._with_last_words(f"cannot start: {why}")
        self.tell("Execution failed", "restart" if self.spec.is_restartable else "alert", self.record.reason)
        self._move(Trigger.FAILED)

    # --- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for the end of the process; another one that took its place is followed."""
        how = await self._presence.gone(self.spec)
        if await self._look():
            self.tell("PID changed", self.spec.change.kind, f"process PID changed to {self._presence.pid}")
            await self.react(self.spec.change)
        else:
            await self._lost(how)

    async def _settle(self) -> None:
        """After a restart: as ``_watch``, trusted when it has stayed up."""
        try:
            async with asyncio.timeout(self._timing.settle):
                how = await self._presence.gone(self.spec)
        except TimeoutError:
            self.record.reason = ""
            self.tell("Exists", "alert", f"process is running with pid {self._presence.pid}")
            self._move(Trigger.SETTLED)
        else:
            if not await self._look():
                await self._lost(how)

    async def _lost(self, how: str) -> None:
        """It ended and nobody asked for it."""
        record, reason = self.record, await self._with_last_words(f"the process ended by itself: {how}")
        if time.monotonic() - self._presence.up_at > self._timing.backoff_limit:
            record.failures = 0
        record.failures += 1
        kind = kind_of(how)
        record.exits[kind] = record.exits.get(kind, 0) + 1
        record.last_exit = how
        record.reason = reason
        self.complaints.clear()
        told = "process is not running"
        if killer := self._killer(how):
            record.oom_kills += 1
            record.last_exit = f"{how}, out of memory"
            record.reason = f"{killer} killed the process: out of memory ({how})"
            told = f"{told}: {killer} killed it, out of memory"
        if self.spec.why_not_restarted:
            record.reason = f"{record.reason}; it is not restarted: {self.spec.why_not_restarted}"
        self.tell("Does not exist", self.spec.absence.kind, told)
        self._move(Trigger.DIED)
        if self.spec.is_restartable:
            for dependant in self.dependants:
                if dependant.state in ACTIVE:
                    dependant.bounce()

    def _killer(self, how: str) -> str:
        """Who has killed it, or what it has started, for want of memory; empty when nobody has."""
        call = self.spec.start.bpm if self.spec.start else None
        by_limit = call is not None and self._shared.bpm.was_killed_for_memory(call)
        # Asked in any case: a cgroup below counts here too.
        by_kernel = how == signal.SIGKILL.name and self._shared.was_oom()
        return "its limit of memory" if by_limit else "the kernel" if by_kernel else ""

    async def _wait_and_retry(self) -> None:
        """Restart, at once or after a wait that grows; meanwhile it may come by itself."""
        if not self.spec.is_restartable:
            await self._wait_for_others()
            return
        try_at = time.monotonic() + self._delay()
        while (left := try_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._timing.look))
            if await self._look():
                self._appeared()
                return
        self._patience = 0.0
        self._count_restart()
        self._move(Trigger.RETRIED)

    async def _wait_for_others(self) -> None:
        """It is not ours to restart: do what the file says instead, each cycle as monit does, until it is there."""
        while True:
            await self.react(self.spec.absence)
            again_at = time.monotonic() + self._timing.cycle
            while time.monotonic() < again_at:
                await asyncio.sleep(self._timing.look)
                if await self._look():
                    self._appeared()
                    return

    def _count_restart(self) -> None:
        """One that nobody asked for begins."""
        self.record.restarts += 1
        self._restarted_at = [*self._restarted_at[-MOST_RESTARTS + 1 :], time.monotonic()]
        self._is_counted = True

    async def _heed_limits(self) -> None:
        """``if N restarts within M cycles then …``; called after each restart."""
        now = time.monotonic()
        for limit in self.spec.limits:
            recent = [at for at in self._restarted_at if at >= now - limit.cycles * self._timing.cycle]
            if len(recent) >= limit.count:
                self.tell("Timeout", limit.reaction.kind, f"{limit.count} restarts within {limit.cycles} cycles")
                if limit.reaction.kind not in ("start", "restart"):  # it is being done
                    await self.react(limit.reaction)

    def _delay(self) -> float:
        """Before the next restart: none after the first death in a row, then doubled each time."""
        patience = max(self._patience, (self.spec.absence_cycles - 1) * self._timing.cycle)
        if self.record.failures <= 1:
            return patience
        backoff = self._timing.backoff_first * 2.0 ** min(self.record.failures - 2, 32)
        return max(patience, min(backoff, self._timing.backoff_limit))

    async def react(self, reaction: Reaction) -> None:
        """Do what a rule says beyond telling; does not return when that ends the step that calls it.

        What is passive is only told of, and its programs are run; a restart takes a start and a stop program, as monit
        has it.
        """
        if reaction.kind == "exec" and reaction.program is not None:
            try:
                await self._run(reaction.program, "Action done", is_aside=True)
            except HostError as exc:
                self.tell("Execution failed", "alert", str(exc))
        elif reaction.kind == "unmonitor":
            self.unmonitor()
        elif self.spec.mode == "passive":
            pass
        elif reaction.kind == "stop":
            self.stop()
        elif reaction.kind == "restart" and self.state in UP and self.spec.start and self.spec.stop:
            self._count_restart()
            self.bounce()
        await asyncio.sleep(0)

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Dependants first, then the stop program, then TERM and KILL for what is left; then look that nothing is."""
        for dependant in self.dependants:
            await dependant.reach(lambda it: it.state not in UP and it.state is not State.STOPPING)
        programs, traces = self._shared.programs, self.record.traces
        known: list[Identity] = []
        left: list[Left] = []
        if await self._look() or self._has_lived:
            if self.spec.start is not None:
                # Now, while descent still shows what has left its session and wiped its environment.
                known = await programs.members(self.spec.label, traces)
            await self._run_stop()
        if self.spec.start is not None:
            left = await programs.sweep(self.spec.label, traces, known, self._within(self._timing.grace))
            left += await self._unproven_left()
        self.is_stuck = bool(left)
        if not self.record.is_start_due:
            # What a restart was to mend counts as broken until a check has seen it whole.
            self.complaints.clear()
        self.record.failures = 0
        self.record.reason = f"cannot end {', '.join(map(str, left))}" if left else ""
        if left:
            self.tell("Execution failed", "alert", "failed to stop")
            self._move(Trigger.STUCK)
            return
        await programs.dismiss(self.spec)
        self.release()
        self._stopper = None
        self._has_lived = False
        self.record.traces = ProcessRecord()
        self._move(Trigger.EMPTIED)
        if self.record.is_start_due:
            self._follow_up(start=False)
            self._move(Trigger.START_ASKED)

    async def _unproven_left(self) -> list[Left]:
        """What is left, though it is not proven to be of this service, and so was not signalled.

        The process that is only named; and where the service has no cgroup, what some job has left meanwhile. When all
        jobs are stopped, that is ended in the end (``Supervisor.stop``).
        """
        traces, running = self.record.traces, self._presence.process
        found = [left(running.identity)] if running is not None and running.is_alive and traces.is_guest else []
        if traces.begun and not (traces.is_caged or self._is_one_of_all or self.record.is_start_due):
            found += await self._shared.programs.strays(traces.begun)
        return found

    async def _run_stop(self) -> None:
        """Run the stop program, or send TERM without one, and wait until both it and the process are gone."""
        stop, stopper = self.spec.stop, None
        running, program = self._presence.process, self._presence.program
        if program is not None and running is None:
            await program.terminate(self._within(self._timing.grace))
        if stop is not None and stop.bpm is not None:
            try:
                await self._shared.bpm.stop(stop.bpm, min(self._stop_by, time.monotonic() + stop.timeout))
            except OSError as exc:
                self.tell("Execution failed", "alert", str(exc))
            return
        if stop is not None:
            try:
                stopper = self._stopper = await self._run(stop, "Stopped")
            except HostError as exc:
                self.tell("Execution failed", "alert", str(exc))
                return
        elif running is not None and self.spec.start is not None and not self.record.traces.is_guest:
            running.send(signal.SIGTERM)
        else:
            return
        try:
            async with asyncio.timeout(self._within(stop.timeout if stop else self._timing.stop)):
                if stopper is not None:
                    await stopper.wait()
                if running is not None:
                    await running.wait()
        except TimeoutError:
            self.tell("Execution failed", "alert", "failed to stop")
            if stopper is not None:
                await stopper.terminate(self._within(self._timing.grace))

    def _within(self, wanted: float) -> float:
        return max(0.0, min(wanted, self._stop_by - time.monotonic()))

    # --- small things -----------------------------------------------------------------------------------------------

    async def _run(self, program: Program, event: str, *, is_aside: bool = False) -> Process:
        return await self._shared.programs.run(
            self.name, program, event, label=self.spec.label, pid=self._presence.pid, is_aside=is_aside
        )

    async def _note_limits(self) -> None:
        """Say so where the start program asked for a limit beyond the container's, and runs on with less."""
        start = self.spec.start
        if start is not None and start.bpm is None and (said := await self._shared.programs.refused_limit(self.name)):
            self.record.reason = f"it runs with less than its start program asked for: {said}"

    def _with_refusal(self, why: str) -> str:
        return f"{why}; {self._presence.refused}" if self._presence.refused else why

    async def _with_last_words(self, why: str) -> str:
        start = self.spec.start
        call = start.bpm if start else None
        words = await (self._shared.bpm.last_words(call) if call else self._shared.programs.last_words(self.name))
        return f"{why} ({words})" if words else why

    def tell(self, event: str, action: str, description: str) -> None:
        """Let operators know of an event of monit."""
        self._shared.tell(Event(self.name, event, action, description))


async def _rest() -> None:
    """Nothing to do until something is asked."""
    await asyncio.Event().wait()
