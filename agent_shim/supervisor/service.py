"""Starts, watches, restarts and stops one service's process.

``Service.on`` receives every event and changes the state according to the table in ``state``. ``Service.run`` is a
single coroutine that does the work of each state in turn. An event that the work does not expect cancels the work. If a
service is cancelled, its process keeps running.

Durations are in seconds, and ``*_at`` is monotonic time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Final, NamedTuple

import msgspec

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.host import guarded, proc, watchdog
from agent_shim.host.descriptors import closing
from agent_shim.host.process import Process
from agent_shim.supervisor import event_kinds
from agent_shim.supervisor.bpm_runner import Bpm
from agent_shim.supervisor.ctl_programs import Programs, TokenBucket
from agent_shim.supervisor.event_kinds import Complaint
from agent_shim.supervisor.history import History
from agent_shim.supervisor.launcher import BpmLauncher, CtlLauncher, Launcher
from agent_shim.supervisor.monit.ast import Action, Connection
from agent_shim.supervisor.ownership import process_record
from agent_shim.supervisor.ownership.ending import Code, Ending, Exit, NoPid, Signal
from agent_shim.supervisor.ownership.keepers import Left, rule_label, with_names
from agent_shim.supervisor.ownership.process_finder import MIN_POLL_S, LateError, Named, ProcessFinder, Timing
from agent_shim.supervisor.ownership.process_record import Identity, ProcessRecord
from agent_shim.supervisor.plan import ProcessSpec, RestartLimit
from agent_shim.supervisor.state import (
    ENDING,
    FOLLOWING,
    NEXT,
    UNDERWAY,
    UP,
    WORK,
    Effect,
    State,
    Trigger,
    Work,
    reported,
)

logger = logging.getLogger(__name__)

RECORD_TIMEOUT_S: Final = 5.0
"""How long a stop waits until it is saved. The time is limited, because a hung disk must not keep the jobs running."""
LOST_KEEPER: Final = -1
"""Key of the complaint about a killed keeper. All other complaint keys are rule numbers."""
MAX_RECORDED_RESTARTS: Final = 64
"""How many restart times are kept for ``if N restarts within M cycles``."""


class Event(msgspec.Struct, frozen=True):
    """An event for operators, described in monit's words (monit 5.2.5 event.c). ``action`` is the agent's reaction."""

    service: str
    event: str
    action: str
    description: str


class ServiceRecord(msgspec.Struct):
    """The persistent state of a service, which outlives the agent."""

    state: State = State.STOPPED
    processes: ProcessRecord = msgspec.field(default_factory=ProcessRecord, name="traces")
    restarts: int = 0
    failures: int = 0
    """Number of consecutive failures. Each of them lengthens the delay before the next restart."""
    last_exit: str = ""
    reason: str = ""
    """Why the service is not running although it should be."""
    exits: dict[str, int] = msgspec.field(default_factory=dict)
    """Unexpected exits by kind (``ending.KINDS``)."""
    oom_kills: int = 0
    """Number of unexpected exits caused by an OOM kill."""
    was_taken_along: bool = False
    """True if the service was stopped together with a prerequisite. In that case, it is also started together with the
    prerequisite.
    """
    is_start_due: bool = False
    """Set by version 0.2.0 if the stop in progress is to be followed by a start."""


class StopRequest(NamedTuple):
    """Parameters of a stop."""

    by: float = float("inf")
    """Monotonic time at which remaining processes get KILL."""
    recorded: asyncio.Event | None = None
    """Set once the stop is saved, or once it is clear that it cannot be saved. Processes are terminated only after
    that. If the agent terminated them and were then killed before the stop was saved, the next agent would assume that
    they had crashed, and restart them.
    """


class ServiceContext(msgspec.Struct, frozen=True):
    """State and callbacks shared by all services in a supervisor."""

    programs: Programs
    bpm: Bpm
    restarts: TokenBucket
    timing: Timing
    notify: Callable[[Event], None]
    changed: Callable[[], None]
    """Called after each change to persistent state."""
    was_oom: Callable[[], bool]
    """Attribute one of the kernel's recent OOM kills to the exit that was just seen. Returns False if there is none, or
    if all have already been attributed to other exits.
    """
    may_start: asyncio.Event
    """Cleared while no program may start. Services wait in their starting state."""
    history: History = msgspec.field(default_factory=History)


USUAL_STOP: Final = StopRequest()
"""A stop without a deadline, which does not wait until it is saved."""


class Scope:
    """Runs work that can be cancelled without cancelling the task, so that the task can continue with other work."""

    def __init__(self) -> None:
        self._block: asyncio.Timeout | None = None
        """A timeout around the work in progress, which has no deadline until ``end`` sets one. None if there is no
        work.
        """

    async def run(self, work: Coroutine[None, None, object]) -> None:
        """Await ``work``. If ``end`` is called, cancel the work and return early."""
        try:
            async with asyncio.timeout(None) as self._block:  # ``end`` sets the deadline to now
                await work
        except TimeoutError:
            if not (self._block and self._block.expired()):  # the work itself has raised the error
                raise
        finally:
            self._block = None

    def end(self) -> None:
        """Cancel the work in progress, if any. The cancellation takes effect when the event loop next runs the task."""
        if self._block is not None and not self._block.expired():  # an expired timeout cannot be rescheduled
            self._block.reschedule(0)  # a time in the past


class Service:
    """Keeps one of a job's processes in the requested state."""

    def __init__(self, spec: ProcessSpec, shared: ServiceContext) -> None:
        self.spec = spec
        self.record = ServiceRecord()
        self.prerequisites: Sequence[Service] = ()
        self.dependants: Sequence[Service] = ()
        self.complaints: dict[int, Complaint] = {}
        """Failed rules of the running service, by rule number. If there are any, the service is ``failing``."""
        self.is_checked = False
        """True once the rules have been tested or the ports have answered. Until then, ``reported`` may be
        ``starting``.
        """
        self.responses: dict[int, float] = {}
        """Duration of the last connection test in seconds, or -1 if it failed, by rule number."""
        self._shared = shared
        self._timing = shared.timing
        self._keepers = shared.programs.keepers
        self._finder = ProcessFinder(self._keepers, shared.timing, shared.changed)
        self._by_ctl = CtlLauncher(shared.programs, shared.timing)
        self._by_bpm = BpmLauncher(shared.bpm)
        self._work = Scope()
        self._moved = asyncio.Event()
        """Set briefly at each transition, to wake waiting tasks."""
        self._is_following = False
        """True while the service examines a changed pidfile. This may take longer than a cycle, and ``look_again`` must
        not interrupt it.
        """
        self._has_lived = False
        """True if the service may have processes, so a stop has to run the stop program."""
        self._stop = USUAL_STOP
        """The last stop request."""
        self._retry_at = 0.0
        """Monotonic time at which ``_wait`` ends its current delay."""
        self._least_delay = 0.0
        """Minimum seconds before the next start. After a start that timed out, this is one cycle, because its process
        may still appear.
        """
        self._restarted_at: tuple[float, ...] = ()
        """Monotonic times of the last restarts, at most one per cycle, for the restart limits."""
        self._asked_at = float("-inf")
        """Monotonic time of the last request to start. After it, delays are shorter for a while (``Timing.eager``)."""
        self._is_counted = False
        """True if the restart in progress counts towards the restart limits."""
        self._awaits_successor = False
        """True if the process has exited, but the start program is still running and may start another process.
        Meanwhile, the service is reported as failing.
        """
        self._is_leading = False
        """True if the dependents must be restarted when the next start finds that the service is not running."""
        self._is_failure_reported = False
        """True if the failed start has been reported to operators. Like monit, the agent does not report it again until
        the service has started successfully, was stopped or is no longer monitored.
        """
        self.take_spec(spec)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def process(self) -> Process | None:
        """The watched process. In states in which it is not watched, it may already have exited.

        The value is None if the pidfile contains pid 1. A job without a process may write that number, but PID 1 itself
        must be neither measured nor stopped.
        """
        return self._finder.process if self._finder.pid != 1 else None

    @property
    def up_at(self) -> float:
        """Monotonic start time of the process."""
        return self._finder.up_at

    @property
    def retry_at(self) -> float | None:
        """Monotonic time of the next start, or None if none is due, for example because a late start is still in
        progress.
        """
        is_due = self.state is State.DOWN and self.spec.is_restartable and not self._is_start_under_way
        return self._retry_at if is_due else None

    @property
    def _is_start_under_way(self) -> bool:
        """True while a start is in progress, even if it has exceeded its timeout."""
        return self._finder.is_starting or self._by_bpm.is_starting

    @property
    def _starter(self) -> Launcher:
        """The launcher that starts the process. It is not always the one that stops the process."""
        return self._by_bpm if self.spec.start_call else self._by_ctl

    @property
    def reported(self) -> str:
        """The state of the process as reported to the Director.

        A running service is reported as failing if a rule has failed or its process has exited, even if the exit has
        not been handled yet. Otherwise, it is reported as starting until its ports have answered or its path or host
        has been tested.
        """
        process = self._finder.process
        fails_a_check = bool(self.complaints) or self._awaits_successor or (process is not None and process.is_over)
        is_untested = self.awaits_answers if self.spec.is_process else self.spec.rules and not self.is_checked
        if self.record.state is State.RUNNING and is_untested and not fails_a_check:
            return reported(State.STARTING)
        return reported(self.record.state, fails_a_check=fails_a_check)

    @property
    def awaits_answers(self) -> bool:
        """True for a new process with port rules, until its ports answer or its rules have been tested once. Until
        then, the service is ``starting``, as in monit.
        """
        # The rules are first tested one cycle after the start. After two cycles, do not wait for a test that hangs.
        is_new = not self.is_checked and time.monotonic() - self.up_at < 2 * self._timing.cycle
        return is_new and self.spec.is_process and any(isinstance(rule.test, Connection) for rule in self.spec.rules)

    async def wait_to_leave(self, states: frozenset[State]) -> None:
        """Wait until the state is not one of ``states``."""
        while self.state in states:
            await self._moved.wait()

    # --- requests -----------------------------------------------------------------------------------------------------

    def take_spec(self, spec: ProcessSpec) -> None:
        """Apply the spec derived from the monit file. The spec may be unchanged, for example after ``resume``."""
        if spec.rules != self.spec.rules:
            self.complaints.clear()
            self.responses.clear()
            self.is_checked = False
        self.spec = spec
        if spec.error:
            self.on(Trigger.FILE_BROKE)
            self.record.reason = spec.error  # a file that was already invalid may now have a different error
        else:
            self.on(Trigger.FILE_MENDED)  # has an effect only if the file was invalid before

    def start(self, *, is_leading: bool = False) -> None:
        """Start the service. If it is being stopped, it is started once the stop is complete.

        If ``is_leading`` is set and the service is not running, its dependents are restarted too, as in monit.
        """
        self._is_leading = is_leading
        self.record.was_taken_along = False
        self._asked_at = time.monotonic()
        self.on(Trigger.START_ASKED)

    def stop(self, request: StopRequest = USUAL_STOP) -> None:
        """Ask the dependents and then the service to stop. ``_end`` waits until the dependents have stopped."""
        for dependant in self.dependants:
            if dependant.state is not State.STOPPED:  # a stopped service would run its stop program again
                dependant.stop(request)
        self._stop = request
        self.on(Trigger.STOP_ASKED)

    def bounce(self) -> None:
        """Restart the service and those dependents that restart together with it."""
        self._bounce_dependants()
        self._is_leading = False  # the next start does not have to restart the dependents again
        self._stop = USUAL_STOP
        self.on(Trigger.RESTART_ASKED)

    def _bounce_dependants(self, states: frozenset[State] = FOLLOWING) -> None:
        """Restart the dependents that are in one of ``states``."""
        for dependant in self.dependants:
            if dependant.state in states:
                dependant.bounce()

    def unmonitor(self) -> None:
        """Stop monitoring the service and its dependents."""
        for dependant in self.dependants:
            dependant.unmonitor()
        self.on(Trigger.UNMONITOR_ASKED)

    # --- events -------------------------------------------------------------------------------------------------------

    def on(self, trigger: Trigger) -> None:
        """Handle an event: change to the next state, apply the effect, and cancel work that does not expect the
        event.
        """
        before = self.record.state
        move = NEXT[before].get(trigger)
        if move is None:
            return
        self.record.state = move.to
        self._is_failure_reported &= move.to in (State.STARTING, State.RESTARTING, State.DOWN)
        self._take_effect(move.effect)
        if move.to is not before:
            is_failure = trigger in (Trigger.DIED, Trigger.FAILED, Trigger.STUCK)
            members = {
                "process": self.spec.name,
                "job": self.spec.job,
                "trigger": trigger.value,
                "state": move.to.value,
                # A doubted process has not exited, so ``last_exit`` describes an earlier exit.
                **({"exit": self.record.last_exit} if trigger is Trigger.DIED and not self._finder.doubted else {}),
            }
            why = f"{trigger.value}: {self.record.reason}" if is_failure else trigger.value
            level = logging.WARNING if is_failure else logging.INFO
            logger.log(level, "%s: %s, now %s", self.spec.name, why, move.to.value, extra={"members": members})
            self._shared.history.add(self.spec.name, f"{why}, now {move.to.value}")
            self._moved.set()
            self._moved.clear()
        # An event that completes the old work (``WORK[before].value``) comes from that work, which then ends by itself.
        if WORK[move.to] is not WORK[before] and trigger not in WORK[before].value:
            self._work.end()
        self._shared.changed()

    def _take_effect(self, effect: Effect) -> None:
        """Make the changes that accompany a transition."""
        record = self.record
        if Effect.FORGIVE in effect:
            record.failures = 0
        if Effect.CLEAR_REASON in effect:
            record.reason = ""
        if Effect.CLEAR_COMPLAINTS in effect:
            self.complaints.clear()
            self.is_checked = False
        if Effect.COUNT in effect:
            self._least_delay = 0.0  # the minimum applied only to the delay before this restart
            record.restarts += 1
            now = time.monotonic()
            # monit restarts at most once in a cycle, so several restarts within one cycle count as one.
            if not self._restarted_at or now - self._restarted_at[-1] >= self._timing.cycle:
                self._is_counted = True
                self._restarted_at = (*self._restarted_at[-MAX_RECORDED_RESTARTS + 1 :], now)
        if Effect.UNCOUNT in effect:
            self._is_counted = False
        if Effect.RELEASE_PROGRAM in effect:
            self._finder.release_program()
            self._by_bpm.forget_start()
        if Effect.FORGET_PROCESSES in effect:
            self.release()
            self._by_ctl.forget_stop()
            self._has_lived = False
            record.processes = ProcessRecord()

    def compare_with_pidfile(self) -> Named:
        """Like ``ProcessFinder.compare_with_pidfile``, but also return ``Named.WATCHED`` if the service is not running,
        if the agent itself wrote the pidfile, or if the pidfile names another process that is already being examined.
        """
        if self.state is not State.RUNNING or self._starter.writes_pidfile:
            return Named.WATCHED
        named = self._finder.compare_with_pidfile(self.spec)
        return Named.WATCHED if named is Named.OTHER and self._is_following else named

    def look_again(self) -> None:
        """Examine the pidfile again, because it may name a process that replaces the watched one."""
        self._work.end()  # ``run`` then calls ``_watch`` again, which begins with the pidfile

    def doubt(self) -> None:
        """Treat a living process as absent, as monit does if the pidfile contains no pid."""
        self._finder.doubt(self.record.processes)
        self._work.end()  # ``run`` then calls ``_watch`` again, which handles the loss

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    def resume(self, record: ServiceRecord, *, is_same_container: bool) -> None:
        """Resume from a record, which comes from an earlier agent or from this agent before an apply.

        ``is_same_container`` means that recorded pids are still valid, because there was no reboot and the container is
        the same.
        """
        self.record = record
        self._has_lived = record.state is not State.STOPPED
        self.take_spec(self.spec)  # the recorded state might not match the spec's ``error``
        if is_same_container:
            self._finder.resume(self.spec.labels, record.processes)
            return
        record.processes = ProcessRecord()
        self.on(Trigger.REBOOTED)

    async def run(self) -> None:
        """Do the work of each state until cancelled. Cancellation leaves the process running, but ends a bpm start that
        is still in progress.

        When the state changes, ``on`` cancels the work of the previous state, unless the work has caused the change.
        """
        works = {
            Work.LAUNCH: self._launch,
            Work.WATCH: self._watch,
            Work.SETTLE: self._watch,
            Work.WAIT: self._wait,
            Work.END: self._end,
            Work.REST: asyncio.Event().wait,
        }
        try:
            while True:
                try:
                    await self._work.run(works[WORK[self.record.state]]())
                except OSError as exc:  # the state of a process is unknown, because no descriptor or thread is free
                    logger.error("cannot watch the processes of %s: %s; trying again", self.spec.name, exc)
                    await asyncio.sleep(self._timing.look)
        finally:
            await self._by_bpm.end_start()

    def release(self) -> None:
        """Drop the process handles. The processes keep running."""
        self._finder.release()

    # --- start --------------------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """Start the process unless it is already running, and report the outcome. Then apply the restart limits if this
        is a restart.
        """
        self._has_lived = True
        if self.record.state is State.STARTING:
            for prerequisite in self.prerequisites:
                await prerequisite.wait_to_leave(UNDERWAY)
        else:  # many services may have failed at once, so restarts are rate-limited
            await self._shared.restarts.take()
        try:
            await self._bring_up()
        except (ConfigError, OSError) as exc:
            if isinstance(exc, LateError):
                # Do not retry early, because the process may still appear, and a retry could start a second one.
                self._least_delay = self._timing.cycle
            # Count a failed start as at least the second failure in a row, so that the next start is delayed.
            self.record.failures = max(self.record.failures + 1, 2)
            why_not = self._finder.refused or self._why_unreadable()
            why = f"{exc}; {why_not}" if why_not else str(exc)
            if self.spec.is_process:
                self.record.reason = await self._with_last_output(f"cannot start: {why}")
                alert = "Execution failed", "alert", self.record.reason
            else:  # like monit, do not wait for a path to appear
                self.record.reason = await self._with_last_output(f"{self.spec.absence_words}: {why}")
                alert = "Does not exist", self.spec.absence.kind, self.spec.absence_words
            if not self._is_failure_reported:
                self.notify(*alert)
                self._is_failure_reported = True
            self.on(Trigger.FAILED)
        else:
            self.on(Trigger.APPEARED)
            # A keeper may have been killed during an earlier run, or while no agent was running.
            self._complain_of_lost_keepers(await self._keepers.orphans(self.spec.labels))
            await self._show_refused_limit()
        if self._is_counted:
            self._is_counted = False
            for limit in self.spec.limits:
                await self._apply_limit(limit)

    async def _show_refused_limit(self) -> None:
        """Record a refused limit as the service's reason if the start program continued without the limit. Call this
        after ``on``, which clears the reason when the service begins to run.
        """
        is_ctl = self.spec.start is not None and self._starter is self._by_ctl
        if is_ctl and (message := await self._shared.programs.refused_limit(self.spec.name)):
            self.record.reason = f"running with a lower limit than its start program requested: {message}"

    def _why_unreadable(self) -> str:
        """Return the reason why the pidfile cannot be read, or "" if it is readable or missing. For example, a job may
        have replaced it with a link.
        """
        if self.spec.pidfile is None:
            return ""
        try:
            with watchdog.reading(self.spec.name, "its pidfile"), closing(guarded.open_file(self.spec.pidfile)):
                return ""
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as exc:
            return f"its pidfile cannot be read: {exc.strerror}"

    async def _apply_limit(self, limit: RestartLimit) -> None:
        """Carry out a restart limit's action if the limit has been reached."""
        since = time.monotonic() - limit.cycles * self._timing.cycle
        if sum(at >= since for at in self._restarted_at) >= limit.count:
            text = f"{limit.count} restarts within {limit.cycles} cycles"
            self.notify("Timeout", limit.reaction.kind, text)
            if limit.reaction.kind not in ("start", "restart"):  # a start or restart is already in progress
                await self.react(limit.reaction, "Timeout", text)

    async def _bring_up(self) -> None:
        """Find the process, or run the start program and wait for the process. Raises ``HostError`` or
        ``ConfigError``.
        """
        spec, finder, record = self.spec, self._finder, self.record
        doubted, is_only_named = finder.doubted, record.processes.is_only_named  # both change when a process is adopted
        await self._by_ctl.finish_stop(spec)  # a start program must not run at the same time as a stop program
        if finder.program is None or not finder.program.is_alive:  # otherwise, an earlier start is still in progress
            if not spec.is_process:  # ``look`` returns the result of ``look_at_path``
                await finder.look_at_path(spec)
            # For a check that has no process, monit runs the start program even if the path exists. In a restart, monit
            # runs the stop program first.
            if (spec.is_process or spec.start is None) and await finder.look(spec, record.processes):
                return
            if spec.start is None:
                raise HostError("it has no start program")
            await self._shared.may_start.wait()
            if self._is_leading:
                self._is_leading = False
                # Leave out dependents that are starting, because they are already waiting for this start.
                self._bounce_dependants(FOLLOWING - {State.STARTING})
                for dependant in self.dependants:
                    await dependant.wait_to_leave(UP | ENDING)
            if not spec.is_process and record.state is State.RESTARTING:
                await self._run_stop()
            # Do not kill a live process that the pidfile no longer names. Run the start program once, as monit does,
            # because the start program may write the pid of that process to the pidfile.
            if spec.is_process and self._starter is self._by_ctl and doubted is None:
                await self._keepers.clear(spec.labels, self._others(), self._timing.grace)
            with watchdog.reading(spec.name, "its pidfile"):
                before = process_record.read(spec.pidfile)
            finder.program = program = await self._starter.start(spec)
            record.processes.begin(program.identity, before)
            self._shared.changed()
        finder.doubted = None  # adopting a process would release the doubted one, which is still needed below
        await finder.arrival(spec, record.processes)
        if doubted is not None and not is_only_named and finder.process is not None:
            if finder.process.identity == doubted.identity:
                doubted.release()
            else:  # the start program has started another process
                await doubted.terminate(spec.stop.timeout if spec.stop else self._timing.stop)

    # --- watch --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for the process to exit. If another process replaces it, watch the new process instead.

        A restarted process counts as running once it has been up for the settling time.
        """
        finder, doubted = self._finder, self._finder.doubted
        is_settling = self.record.state is State.SETTLING
        if self.compare_with_pidfile() is Named.OTHER and await self._follow_pidfile():
            await self._report_pid_change()
        try:
            async with asyncio.timeout(self._timing.settle if is_settling else None):
                how = await finder.gone(self.spec)
        except TimeoutError:
            self.notify("Exists", "alert", f"process is running with pid {finder.pid}")
            self.on(Trigger.SETTLED)
            await self._show_refused_limit()
            return
        # Do not report a changed pid if the previous process was still settling, because it had not been reported yet,
        # or if it was younger than a cycle, because monit checks only once per cycle and would not have noticed it.
        is_young = time.monotonic() - finder.up_at < self._timing.cycle
        if not await self._find_successor(how):
            await self._handle_loss(how)
        elif not (is_settling or is_young) and (doubted is None or finder.pid != doubted.pid):
            await self._report_pid_change()

    async def _follow_pidfile(self) -> bool:
        """Switch to the process that the pidfile names now if it belongs to the service. Return True if it does."""
        self._is_following = True  # or else ``check_pidfiles`` would call ``look_again``, which cancels this
        try:
            return await self._finder.follow(self.spec, self.record.processes)
        finally:
            self._is_following = False

    async def _report_pid_change(self) -> None:
        """Report that the pid has changed, and carry out the action that the monit file defines for a changed pid."""
        text = f"process PID changed to {self._finder.pid}"
        self.notify("PID changed", self.spec.change.kind, text)
        await self.react(self.spec.change, "PID changed", text)

    async def _find_successor(self, how: Ending) -> bool:
        """Wait for a process that replaces the one that has exited, and return True if there is one. monit would look
        for a replacement only in its next cycle.

        Some start programs write their own pid and then become a daemon (``echo $$``, ``exec nginx``). They exit with 0
        before the daemon has written its pid. As long as processes of the service remain, the daemon therefore has
        until the end of the first cycle to write its pid.

        Other start programs start a daemon, configure it, stop it, and start the final daemon. A start program that is
        still running therefore gets one cycle to start the next process.
        """
        is_daemon = how == Code(0) and not self._starter.writes_pidfile
        has_processes = bool(self._keepers.of(self.spec.labels))
        patience = max(self._timing.linger, self._timing.cycle if has_processes else 0.0)
        give_up_at = self._finder.up_at + patience if is_daemon else 0.0  # 0 means after the first look
        next_check_at = time.monotonic() + self._timing.cycle
        pause, processes = MIN_POLL_S, self.record.processes
        try:
            while not await self._finder.look(self.spec, processes):
                now = time.monotonic()
                # After ``NoPid``, the process is still alive and may itself be the start program. If so, no other
                # process will appear.
                self._awaits_successor = (
                    not isinstance(how, NoPid) and processes.program is not None and proc.is_there(processes.program)
                )
                if now >= (next_check_at if self._awaits_successor else give_up_at):
                    return False
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._timing.look)
        finally:
            self._awaits_successor = False
        return True

    async def _handle_loss(self, how: Ending) -> None:
        """Record that the process has exited unexpectedly, that its pidfile names no process, or that a path is
        missing. If the service is to be restarted at once, request that too.
        """
        record = self.record
        is_exit = isinstance(how, Exit)
        reason = await self._with_last_output(f"the process exited unexpectedly: {how}") if is_exit else str(how)
        if Trigger.DIED not in NEXT[record.state]:  # a stop was requested in the same iteration of the event loop
            return
        if time.monotonic() - self._finder.up_at > self._timing.backoff_limit:
            record.failures = 0  # the process was up for long enough to reset the back-off
        record.failures += 1
        record.reason = reason
        if isinstance(how, Exit):
            record.exits[how.kind] = record.exits.get(how.kind, 0) + 1
            record.last_exit = str(how)
        text = self.spec.absence_words
        call = self.spec.start_call
        by_limit = call is not None and self._shared.bpm.was_killed_for_memory(call)
        # Call ``was_oom`` even if bpm's limit already explains the kill. The container's counter also counts kills in
        # nested cgroups, and ``was_oom`` marks this kill as accounted for. Otherwise the next process that gets SIGKILL
        # would be reported as out of memory.
        by_kernel = how == Signal(signal.SIGKILL) and self._shared.was_oom()
        if by_limit or by_kernel:
            by_whom = "because it exceeded its memory limit" if by_limit else "by the kernel because memory ran out"
            record.oom_kills += 1
            record.last_exit = f"{how}, out of memory"
            record.reason = f"the process was killed {by_whom} ({how})"
            text = f"{text}: killed {by_whom}"
        if why_not := self.spec.why_not_restarted:
            record.reason = f"{record.reason}; it is not restarted: {why_not}"
        self.notify("Does not exist", self.spec.absence.kind, text)
        self.on(Trigger.DIED)
        if not why_not:
            self._bounce_dependants()
            if not self._delay():
                self.on(Trigger.RETRIED)

    # --- restart ------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Restart the process after a growing delay, or adopt a process that appears in the meantime.

        If the start program has exceeded its timeout and is still running, the delay begins when it exits, because two
        start programs at the same time could start the job twice.

        If the service is not restarted, the action that its monit file defines for a missing process is carried out in
        each cycle, as in monit.
        """
        is_restarted, finder = self.spec.is_restartable, self._finder
        while True:
            if not is_restarted:
                await self.react(self.spec.absence, "Does not exist", self.spec.absence_words)
            self._retry_at = time.monotonic() + (self._delay() if is_restarted else self._timing.cycle)
            while (left := self._retry_at - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self._timing.look))
                if not self.spec.is_process:
                    await finder.look_at_path(self.spec)
                if await finder.look(self.spec, self.record.processes):
                    self.on(Trigger.APPEARED)
                    return
                if finder.refused and finder.refused not in self.record.reason:
                    self.record.reason = f"{self.record.reason}; {finder.refused}"
                if is_restarted and self._is_start_under_way:
                    self._retry_at = time.monotonic() + self._delay()
            if is_restarted:
                self.on(Trigger.RETRIED)
                return

    def _delay(self) -> float:
        """Return the seconds before the next restart. After a single failure, there is no delay unless a minimum
        applies. After the second failure in a row, the delay is ``backoff_first``. It doubles with each further failure
        up to a limit, which is lower for a while after a requested start (``Timing.eager``).
        """
        # The first cycle adds no delay, because monit acts in the cycle that detects the absence.
        least = max(self._least_delay, (self.spec.absence_cycles - 1) * self._timing.cycle)
        if self.record.failures <= 1:
            return least
        doublings = min(self.record.failures - 2, 32)  # more would only risk an overflow
        backoff = self._timing.backoff_first * 2.0**doublings
        is_eager = time.monotonic() - self._asked_at < self._timing.eager
        limit = min(self._timing.eager_limit, self._timing.backoff_limit) if is_eager else self._timing.backoff_limit
        return max(least, min(backoff, limit))

    async def react(self, reaction: Action, event: str, description: str) -> None:
        """Carry out a rule's action after an event. The caller reports the event.

        ``event`` is monit's name for the event. It is passed, together with ``description``, to any program that the
        action runs. If the action cancels the work that called this method, the method does not return.

        In passive mode, only ``exec`` and ``unmonitor`` take effect. As in monit, a process is restarted only if it has
        both a start and a stop program. For other checks, one of these programs or a dependent is enough.
        """
        spec, run = self.spec, self._shared.programs.spawn
        try:
            match reaction.kind:
                case "exec" if reaction.program is not None:
                    pid, label = self._finder.pid, rule_label(spec.job)
                    await run(spec.name, reaction.program, event, description=description, label=label, pid=pid)
                case "unmonitor":
                    self.unmonitor()
                case _ if spec.mode == "passive":
                    pass
                case "stop":
                    self.stop()
                case "restart" if self.state in UP:  # otherwise, the service is already down, starting or stopping
                    has = (spec.start is not None, spec.stop is not None)
                    is_possible = all(has) if spec.is_process else any(has) or bool(self.dependants)
                    if is_possible:
                        self._take_effect(Effect.COUNT)  # unlike a requested restart, this one counts
                        self.bounce()
                case "start" if spec.start is not None and not spec.is_process:  # ``_wait`` starts a missing process
                    await run(spec.name, spec.start, "Started")
        except HostError as exc:
            self.notify("Execution failed", "alert", str(exc))
        await asyncio.sleep(0)  # if the action has cancelled the caller's work, the cancellation is raised here

    # --- stop ---------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Stop the dependents, run the stop program, terminate what remains, and verify that nothing is left."""
        if self._stop.recorded is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    await self._stop.recorded.wait()
        for dependant in self.dependants:
            await dependant.wait_to_leave(UP | ENDING)
        await self._by_bpm.end_start()
        processes = self.record.processes
        left: list[Left] = []
        others: list[Identity] = []
        if await self._finder.look(self.spec, processes) or self._has_lived:
            # The pidfile may have changed since the last check.
            if not self._starter.writes_pidfile and self._finder.compare_with_pidfile(self.spec) is Named.OTHER:
                await self._finder.follow(self.spec, processes)
            # Find these processes now, because they can no longer be found once the stop program has terminated their
            # ancestor.
            others = await self._keepers.trees(self.spec.labels, self._others())
            await self._run_stop()
        if self.spec.start is not None:
            # Without a start program, the agent has started no process that it may terminate.
            left = await self._keepers.end(self.spec.labels, others, self._until_kill(self._timing.grace))
            running = self.process
            # A process that is known only from a pidfile or a pattern is never signalled, so it may still be alive.
            if running is not None and running.is_alive and processes.is_only_named:
                left += with_names([running.identity])
        if left:
            self.record.reason = f"cannot end {', '.join(map(str, left))}"
            self.notify("Execution failed", "alert", "failed to stop")
            self.on(Trigger.STUCK)
            return
        if self._finder.is_refused_process_alive:
            self.notify("Execution failed", "alert", f"stopped, but {self._finder.refused}; it still runs")
        self.on(Trigger.EMPTIED)

    def _others(self) -> list[Identity]:
        """Return the recorded processes that a stop has to terminate even if none of the service's keepers is above
        them. A process that is related to the service only by a pidfile or pattern is left out, because it must not be
        signalled.
        """
        processes = self.record.processes
        known = [] if processes.known is None or processes.is_only_named else [processes.known]
        return [*processes.others, *known]

    def lose_keeper(self, orphans: Sequence[Left]) -> None:
        """Record that one of this service's keepers was killed. ``orphans`` are its possible descendants."""
        self._complain_of_lost_keepers(orphans)
        self.notify("Execution failed", "alert", self._keeper_loss_text(orphans))

    def _complain_of_lost_keepers(self, orphans: Sequence[Left]) -> None:
        """Record the orphans of killed keepers as a complaint about the running service. If there are none, clear the
        complaint.
        """
        if orphans and self.state in UP:
            self.complaints[LOST_KEEPER] = Complaint(event_kinds.EXECUTION, self._keeper_loss_text(orphans))
        else:
            self.complaints.pop(LOST_KEEPER, None)

    async def _run_stop(self) -> None:
        """Run the stop program or, if there is none, send TERM. Wait until both the program and the process have
        exited, but not beyond the stop's deadline. If a start program is running and no process has appeared yet,
        terminate the start program first.
        """
        running, program = self.process, self._finder.program
        if program is not None and running is None:
            await program.terminate(self._until_kill(self._timing.grace))
        stopper: Launcher = self._by_bpm if self.spec.stop_call else self._by_ctl
        # A process that the agent did not start, or that only a pidfile connects with the service, is never signalled.
        may_signal = self.spec.start is not None and not self.record.processes.is_only_named
        try:
            await stopper.stop(self.spec, running, pid=self._finder.pid, may_signal=may_signal, by=self._stop.by)
        except TimeoutError:
            self.notify("Execution failed", "alert", "failed to stop")
        except OSError as exc:
            self.notify("Execution failed", "alert", str(exc))

    def _until_kill(self, wanted: float) -> float:
        """Return the seconds until the stop's deadline for KILL, at most ``wanted``."""
        return max(0.0, min(wanted, self._stop.by - time.monotonic()))

    @staticmethod
    def _keeper_loss_text(orphans: Sequence[Left]) -> str:
        rest = f"these may be its processes: {', '.join(map(str, orphans))}" if orphans else "no process is left"
        return f"the keeper of its processes was killed, {rest}"

    # --- helpers ------------------------------------------------------------------------------------------------------

    async def _with_last_output(self, why: str) -> str:
        """Return ``why``, followed by the last line that the process has printed, if any."""
        line = await self._starter.last_output(self.spec)
        return f"{why} ({line})" if line else why

    def notify(self, event: str, action: str, description: str) -> None:
        """Report an event to operators. If the service is passive, a start, stop or restart is reported as the action
        ``alert``, because the agent does not carry it out.
        """
        if self.spec.mode == "passive" and action in ("start", "stop", "restart"):
            action = "alert"
        if event not in ("Does not exist", "Exists"):  # these two are reported as state changes
            self._shared.history.add(self.spec.name, f"{event}, {action}: {description}")
        self._shared.notify(Event(self.spec.name, event, action, description))
