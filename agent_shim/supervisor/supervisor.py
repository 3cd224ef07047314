"""Supervises all services of this instance. Handles requests from the Director and operators, and reports to them.

Each change is saved, so that the next agent can continue even if this agent is killed. The ``service`` module restarts
failed processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.events import is_set_within
from agent_shim.core.keep_running import run_forever
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files, proc
from agent_shim.host.process import Process
from agent_shim.supervisor import plan
from agent_shim.supervisor.bpm.calls import bpm_label
from agent_shim.supervisor.bpm_runner import Bpm
from agent_shim.supervisor.ctl_programs import Programs, TokenBucket
from agent_shim.supervisor.history import Happening
from agent_shim.supervisor.monit.ast import JobFile
from agent_shim.supervisor.oom import Kills
from agent_shim.supervisor.ownership import process_record
from agent_shim.supervisor.ownership.keepers import Keepers, Left
from agent_shim.supervisor.ownership.process_finder import Named, Timing
from agent_shim.supervisor.ownership.tie import was_written_after
from agent_shim.supervisor.process_stats import ProcessInfo, ProcessStats, ServiceInfo
from agent_shim.supervisor.rule_engine import RuleEngine
from agent_shim.supervisor.service import Event, Service, ServiceContext, ServiceRecord, StopRequest
from agent_shim.supervisor.state import ENDING, MONITORED, TO_RUN, UNDERWAY, State, Trigger, job_state

__all__ = ["Event", "JobFile", "ProcessInfo", "ServiceInfo", "Supervisor", "Timing"]

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
"""Version of the saved state. A state with another version is ignored."""
SAVE_DELAY_S: Final = 0.02
"""How long to wait for further changes before writing all of them together."""
SAVE_RETRY_S: Final = 10.0
"""How long to wait after a failed write before the next attempt."""
STOP_TIMEOUT_S: Final = 300.0
"""Timeout for a stop, as in the Go agent (jobsupervisor/monit_job_supervisor.go). The Director does not wait longer."""
KILL_SHARE: Final = 0.9
"""Fraction of the timeout after which remaining processes are killed."""
KILL_RESERVE_S: Final = 1.5
"""Time reserved after the kill for exits and final checks, but at most half of the timeout."""
RESTART_BURST: Final = 500
RESTARTS_PER_SECOND: Final = 20.0
TRIM_PERIOD_S: Final = 10.0
MEMORY_PERIOD_S: Final = 1.0
"""Interval between checks of processes that have a memory limit in bpm.yml."""
MEMORY_SHARE: Final = 0.02
"""Maximum share of one CPU that memory limit checks may use."""


class Saved(msgspec.Struct):
    """Content of ``supervisor.json``."""

    schema: int
    incarnation: str
    is_wanted: bool
    files: list[JobFile]
    services: dict[str, ServiceRecord]


class Supervisor:
    """Keeps all jobs' processes in the requested state. The processes keep running when the supervisor's ``async with``
    block ends.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        notify: Callable[[Event], None],
        timing: Timing = Timing(),  # noqa: B008 - the struct is frozen
        is_strict: bool = False,
        settling: Callable[[], float] = lambda: 0.0,
        has_bpm: bool = True,
        acted_on: frozenset[str] = frozenset(),
        on_saved: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Create a supervisor without services. If ``is_strict`` is set, a bpm process that requests more than the
        container can provide is not started. If ``has_bpm`` is set, the agent runs bpm processes itself; otherwise, the
        release's own bpm is used. The instance is reported as ``starting`` for ``settling()`` seconds after ``start``.
        ``acted_on`` names the statements outside of checks that the caller carries out, so that they are not listed as
        unsupported (see ``plan.plan``). ``on_saved`` is called in a thread with each saved state (``Saved`` as JSON).
        The monit replacement uses it to write monit's own state file.
        """
        self._has_bpm, self._acted_on = has_bpm, acted_on
        self._on_saved = on_saved
        self._settling = settling
        self._settled_at = float("-inf")
        """Monotonic time at which ``settling`` ends. Until then, a running instance is reported as starting."""
        self._paths = paths
        self._readings = ProcessStats()
        self._kills = Kills()
        self._checks = RuleEngine(self._all, lambda: self._readings.memory_total(), timing.cycle)  # noqa: PLW0108 - this attribute may be replaced later
        self._programs = Programs(paths)
        self._programs.keepers.on_loss = self._handle_lost_keeper
        user = "vcap" if paths.is_system else None
        self.bpm = Bpm(paths, self._programs, user=user, is_strict=is_strict)
        restarts = TokenBucket(RESTART_BURST, RESTARTS_PER_SECOND)
        may_start = asyncio.Event()
        may_start.set()
        self._shared = ServiceContext(
            programs=self._programs,
            bpm=self.bpm,
            restarts=restarts,
            timing=timing,
            notify=notify,
            changed=self._changed,
            was_oom=self._kills.claim,
            may_start=may_start,
        )
        self._obstacle = ""
        """Why the services are held (see ``hold``), or ""."""
        self._services: dict[str, Service] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        """The task that runs ``Service.run``, by service name."""
        self._bug: BaseException | None = None
        """The error of the first service task that failed. ``run`` raises it once ``_has_bug`` is set."""
        self._has_bug = asyncio.Event()
        self._files: Sequence[JobFile] = ()
        self._planned: Sequence[plan.ProcessSpec] = ()
        """The specs that ``plan`` has derived from ``_files``."""
        self._memory: dict[str, ServiceRecord] = {}
        """Records of services that are not in the current plan. They are kept because an apply forgets all services and
        then configures them again.
        """
        self._is_wanted = False
        """True if the jobs should run. The value is part of the saved state."""
        self._starting: Sequence[Service] = ()
        """Services that a request is about to start. They keep their previous state until the request is saved."""
        self._incarnation = proc.incarnation()
        self._is_dirty = False
        """True if there are changes that have not been saved yet."""
        self._is_closed = asyncio.Event()
        """Set by ``close``, so that ``_save_changes`` does not wait any longer."""
        self._marker_keeps_jobs_stopped = True
        """True if the last saved state and the "stopped" marker together are enough to keep the next agent from
        starting one of the Director's jobs.
        """
        self._unsaved = ""
        """Why the last write of the state failed, or "" if it succeeded."""
        self._is_sealed = False
        """True once the state must no longer be saved (see ``seal`` and ``disown``)."""
        self.leaves_processes = False
        """True once ``close`` has released living processes. In that case, the daemon keeps the leases on their
        volumes.
        """
        self._saving: asyncio.Task[None] | None = None
        """The task that saves the state soon after a change (``_save_changes``), if any."""
        self._writing = asyncio.Lock()
        """Held while the state is being written."""
        self._planning = asyncio.Lock()
        """Held while the plan is being replaced."""

    async def __aenter__(self) -> Self:
        """Connect to an earlier agent's keepers. ``recover`` or ``configure`` then creates the services."""
        await self._programs.keepers.find()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self) -> None:
        """Run the supervisor's background tasks alongside the services. If a service fails because of a bug, raise its
        error.

        The daemon then exits, and the next agent takes over the processes and determines the state of the service.
        """
        cycle = self._shared.timing.cycle
        works: dict[str, Callable[[], Coroutine[Any, Any, NoReturn]]] = {
            "memory of bpm processes": self._watch_memory,
            "rules": self._checks.run,
            "pidfiles": partial(_each_beat, cycle, self.check_pidfiles),
            "output of programs": partial(_each_beat, TRIM_PERIOD_S, self._trim_and_count_kills),
        }
        tasks = [asyncio.create_task(run_forever(name, run), name=name) for name, run in works.items()]
        try:
            await self._has_bug.wait()
            assert self._bug is not None
            raise self._bug
        finally:
            for task in tasks:
                task.cancel()

    async def _trim_and_count_kills(self) -> None:
        """Truncate large output files, and count new OOM kills. Kills have to be counted regularly, because a kill's
        age is measured from the moment when the kill was counted.
        """
        with contextlib.suppress(OSError):
            await self._programs.trim()
        self._kills.count()

    async def check_pidfiles(self) -> None:
        """Restart services whose pidfile does not name a process in two successive checks. One check is not enough,
        because a daemon may empty its pidfile before it writes the pid.

        Also follow pidfiles that name another process.
        """
        doubtful = []
        for service in self._all():
            match service.compare_with_pidfile():
                case Named.NONE:
                    doubtful.append(service)
                case Named.OTHER:
                    service.look_again()
            await asyncio.sleep(0)  # each check reads files, so let other tasks run in between
        if doubtful:
            await asyncio.sleep(self._shared.timing.look)
        for service in doubtful:
            if service.compare_with_pidfile() is Named.NONE:
                service.doubt()

    async def _watch_memory(self) -> NoReturn:
        """Kill processes that exceed their memory limit in bpm.yml. The processes are then restarted as after any other
        exit.
        """
        await self.bpm.used()  # on an instance without bpm processes, this waits forever
        while True:
            begun_at = time.monotonic()
            for kill in await asyncio.to_thread(self.bpm.kill_hogs):
                label = bpm_label(kill.job, kill.process)
                names = [service.name for service in self._services.values() if label in service.spec.labels]
                used, limit = (f"{size / (1 << 20):.1f} MiB" for size in (kill.used, kill.limit))
                what = f"process {kill.process} of job {kill.job}"
                text = f"out of memory: {what} used {used}, its limit is {limit}: it was killed"
                # A process started by a script belongs to no service, so use the process's own name.
                self._shared.notify(
                    Event(names[0] if names else kill.process, "Resource limit matched", "restart", text)
                )
            took = time.monotonic() - begun_at
            # Limit the CPU time that the checks take, because a job may permanently have thousands of processes.
            await asyncio.sleep(max(clock.until_beat(MEMORY_PERIOD_S), took / MEMORY_SHARE))

    async def close(self) -> None:
        """Leave all processes running, and save the state for the next agent."""
        self.leaves_processes = any(service.pid for service in self.services())
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for service in self._services.values():
            service.release()
        self._programs.keepers.close()
        self._is_closed.set()
        if self._saving is not None:
            await self._saving
        await self._save()

    # --- plan ---------------------------------------------------------------------------------------------------------

    async def recover(self, *, root_is_new: bool = False) -> bool:
        """Resume from the saved state: watch running processes again, and restart exited ones.

        Return False if there is no valid saved state. ``root_is_new`` means that the container is new, even if it
        shares the pid namespace of its predecessor.

        For all of the Director's jobs, the "stopped" marker takes precedence over the saved state. If the marker exists
        although the saved state says that the jobs should run, the state is outdated, because the last stop could not
        be saved in it.
        """
        saved = await asyncio.to_thread(read_saved, self._paths.supervisor_state)
        if saved is None:
            # Without the saved state, the agent cannot tell whether this is still the same container. In a new
            # container, unrelated processes could be mistaken for orphans of the killed keepers.
            self._programs.keepers.forget_lost()
            return False
        is_same_container = saved.incarnation == self._incarnation != "" and not root_is_new
        if not is_same_container:
            self._programs.keepers.forget_lost()
        is_outdated = saved.is_wanted and await asyncio.to_thread(self._paths.stopped_marker.exists)
        self._is_wanted = saved.is_wanted and not is_outdated
        self._memory = saved.services
        async with self._planning:
            if root_is_new:
                await asyncio.to_thread(_write_for_operators, self._paths.monit_job, saved.files)
            await self._apply_plan(saved.files, is_same_container=is_same_container)
            if is_outdated:
                logger.warning("%s is older than the last stop: the jobs stay stopped", self._paths.supervisor_state)
                for service in self._concerned():
                    service.stop()
                    if not is_same_container:  # the processes are gone, so no stop program has to run
                        service.on(Trigger.REBOOTED)
        return True

    @property
    def keepers(self) -> Keepers:
        return self._programs.keepers

    @property
    def spawn_script(self) -> Callable[..., Awaitable[Process]]:
        """The function that runs a job script under a keeper (``Programs.spawn_script``)."""
        return self._programs.spawn_script

    @property
    def is_wanted(self) -> bool:
        """True if there are jobs and they should run."""
        return self._is_wanted and bool(self._services)

    @property
    def is_held(self) -> bool:
        """True between ``hold`` and ``end_hold``."""
        return not self._shared.may_start.is_set()

    def hold(self, obstacle: str = "") -> None:
        """Do not start programs until ``end_hold`` is called. Until then, the jobs are reported as starting or, if
        there is an ``obstacle``, as failing.
        """
        self._shared.may_start.clear()
        self._obstacle = obstacle

    def end_hold(self) -> None:
        """Start the services that ``hold`` has held back."""
        self._obstacle = ""
        self._shared.may_start.set()

    async def configure(self, job_files: Sequence[JobFile], *, are_written: bool = True) -> None:
        """Supervise the services in ``job_files``. A service that is already supervised under the same name keeps its
        state.

        A job with invalid files becomes one failing service named after the job. If ``are_written`` is set, the files
        are also written to the directory where operators expect them.
        """
        async with self._planning:  # the last request must win, not the one that is parsed fastest
            if are_written:
                await asyncio.to_thread(_write_for_operators, self._paths.monit_job, job_files)
            await self._apply_plan(job_files, is_same_container=True)

    async def forget(self) -> None:
        """Stop supervising all services. Processes keep running, and ``configure`` recognizes them again."""
        async with self._planning:
            await asyncio.to_thread(files.remove_tree, self._paths.monit_job)
            await self._apply_plan((), is_same_container=True)

    async def _apply_plan(self, job_files: Sequence[JobFile], *, is_same_container: bool) -> None:
        """Make the services match ``job_files``: update the services that remain, create new ones, and stop supervising
        the others. ``is_same_container`` is explained in ``Service.resume``.
        """
        if job_files != self._files:
            planned = partial(plan.plan, job_files, has_bpm=self._has_bpm, acted_on=self._acted_on)
            self._planned = await asyncio.to_thread(planned) if job_files else ()
        # Do not await below, so that no other task sees a partial change.
        specs = {spec.name.lower(): spec for spec in self._planned}
        needed = {key: [name.lower() for name in spec.depends] for key, spec in specs.items()}
        known = self._memory | {key: service.record for key, service in self._services.items()}
        reported_errors = {key: record.reason for key, record in known.items() if record.state is State.BROKEN}
        self._files = job_files
        before, self._services = self._services, {}
        for key, old in before.items():
            if key not in specs:
                self._running.pop(key).cancel()
                self._memory[key] = old.record
                old.release()
        for key, spec in specs.items():
            if key in before:
                service = before[key]
                service.take_spec(spec)
            else:
                service = Service(spec, self._shared)
                if spec.unsupported:
                    logger.info("%s: not acted on: %s", spec.name, ", ".join(spec.unsupported))
                if record := self._memory.pop(key, None):
                    service.resume(record, is_same_container=is_same_container)
            self._services[key] = service
        for key, service in self._services.items():
            service.prerequisites = [self._services[name] for name in needed[key] if name in self._services]
            service.dependants = [other for name, other in self._services.items() if key in needed[name]]
            if service.record.state is State.BROKEN and reported_errors.get(key) != service.record.reason:
                service.notify("Execution failed", "alert", service.record.reason)
            if key not in before:
                self._running[key] = asyncio.create_task(service.run(), name=f"service {key}")
                self._running[key].add_done_callback(self._record_bug)
        self._programs.keepers.settle()
        self._checks.plan_changed.set()
        self._changed()

    def _handle_lost_keeper(self, label: str, orphans: Sequence[Left]) -> None:
        """Notify the services to which a killed keeper belonged."""
        for service in self._services.values():
            if label in service.spec.labels:
                service.lose_keeper(orphans)

    def _record_bug(self, service: asyncio.Task[None]) -> None:
        """If a service's task has failed, make ``run`` raise the error."""
        if not service.cancelled() and (bug := service.exception()):
            logger.critical("%s failed: no longer supervised", service.get_name(), exc_info=bug)
            self._bug = self._bug or bug
            self._has_bug.set()

    # --- requests to all services -------------------------------------------------------------------------------------

    async def start(self, *, is_asked: bool = True) -> None:
        """Start all jobs, without waiting until they are running. Like monit on a reload, also start services outside
        the vcap group, except those in manual mode.

        Raises ``HostError`` and starts nothing if the "stopped" marker cannot be removed. A start that the Director has
        requested (``is_asked``) also fails if it cannot be saved for the next agent.
        """
        was_wanted, self._is_wanted = self._is_wanted, True
        self._starting = [each for each in self._services.values() if each.spec.is_vcap or each.spec.mode != "manual"]
        try:
            # Save the state before starting anything. If this agent is killed partway through, the next agent must know
            # about every process that may have been started. The next agent leaves the jobs stopped until the marker is
            # removed.
            if is_asked:
                await self._require_saved()
            else:
                await self._save()
            with files.attempting(f"remove {self._paths.stopped_marker}"):
                await asyncio.to_thread(self._paths.stopped_marker.unlink, missing_ok=True)
        except BaseException:
            self._is_wanted, self._starting = was_wanted, ()
            self._changed()
            raise
        wanted, self._starting = self._starting, ()  # the services now change their own state
        self._settled_at = time.monotonic() + self._settling()
        for service in wanted:
            service.start()

    async def seal(self) -> None:
        """Save the state and then stop saving it, because the container is about to stop. The saved state does not
        include that stop, so the next agent starts the jobs again if they are running now.
        """
        await self._save()
        self._is_sealed = True

    def disown(self) -> None:
        """Stop saving the state, because another agent continues from the saved state."""
        self._is_sealed = True

    async def stop(self, *, wait: bool, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop all jobs and, unless sealed, write the "stopped" marker. If ``wait`` is set, return only once all their
        processes have exited, including those that job scripts have left running. A sealed supervisor also stops
        services that the Director does not know about.

        Raises ``ActionError`` with the Go agent's message (jobsupervisor/monit_job_supervisor.go), in which the
        Director looks for "Timed out waiting for service". Raises ``HostError`` if the stop could not be saved, because
        the next agent would then start the jobs again.
        """
        self._is_wanted = self._is_sealed and self._is_wanted  # after ``seal``, keep the saved value
        kill_after = min(timeout * KILL_SHARE, timeout - min(KILL_RESERVE_S, timeout / 2))
        concerned = self._concerned()
        recorded = asyncio.Event()  # until this is set, the services do not terminate any process
        for service in concerned:
            service.stop(StopRequest(time.monotonic() + kill_after, recorded))
        try:
            unsaved = await self._record_stop()
        finally:
            recorded.set()
        if wait:
            await _stopped(concerned, timeout)
            # Save the state now, because otherwise the next request would have to wait for the save. A save that is
            # already in progress might not include the last exit.
            if self._is_dirty or self._writing.locked():
                await self._save()
            others = [each.process for each in self._all() if each not in concerned]
            spared = [each.identity for each in others if each is not None]
            left = await self._programs.end_left_by_scripts(self._shared.timing.grace, spared)
            if left:
                raise ActionError(f"Stopping services errored: {', '.join(map(str, left))} cannot be ended")
        if unsaved is not None:
            raise unsaved

    async def _record_stop(self) -> HostError | None:
        """Save a stop and write the "stopped" marker. Return an error if the next agent might nevertheless start the
        jobs again.
        """
        is_saved = await self._save()
        # Do not write the marker if a request has started the jobs in the meantime. Do not write it after ``seal``
        # either, because the next agent has to start the jobs.
        if self._is_sealed or self._is_wanted:
            return None
        try:
            await asyncio.to_thread(files.write_atomic, self._paths.stopped_marker, b"")
        except HostError as exc:
            return exc
        return None if is_saved or self._marker_keeps_jobs_stopped else HostError(self._unsaved)

    @property
    def killed(self) -> list[str]:
        """Names of the services whose processes have been killed since the last call to ``forget_killed``, because they
        did not exit in time during a stop. A graceful shutdown that had to kill processes is reported as not clean.
        """
        killed = self._programs.keepers.killed
        return sorted({each.name for each in self._services.values() if not killed.isdisjoint(each.spec.labels)})

    def forget_killed(self) -> None:
        """Forget earlier kills, so that ``killed`` covers only the stop that begins now."""
        self._programs.keepers.killed.clear()

    async def unmonitor(self) -> None:
        """Stop monitoring all jobs before they are drained, so that a process that exits in the meantime is not
        restarted.
        """
        for service in self._concerned():
            service.unmonitor()

    def _concerned(self) -> list[Service]:
        """Return the services to which a request for all jobs applies. These are the services in the vcap group or,
        while the container is being stopped, all services.
        """
        return [service for service in self._services.values() if self._is_sealed or service.spec.is_vcap]

    # --- requests to one service --------------------------------------------------------------------------------------

    async def start_one(self, name: str) -> None:
        """Start a service after its prerequisites. If it was not running, its running dependents are restarted.
        Dependents that were stopped together with it are started again.
        """
        service = self._named(name)
        for needed in _closure([service], lambda node: node.prerequisites):
            needed.start(is_leading=needed is service)  # leave out the prerequisites' dependents
        for dependant in _closure([service], lambda node: node.dependants):
            if dependant.record.was_taken_along:
                dependant.start()

    async def stop_one(self, name: str) -> None:
        """Stop a service after its dependents."""
        service = self._named(name)
        for dependant in _closure([service], lambda node: node.dependants):
            dependant.record.was_taken_along = dependant is not service and dependant.state in MONITORED
        service.stop()

    async def restart_one(self, name: str) -> None:
        """Restart a service and its running dependents."""
        self._named(name).bounce()

    async def monitor_one(self, name: str) -> None:
        """Monitor a service and its prerequisites. Those that are not running are started, and their dependents are
        restarted.
        """
        for needed in _closure([self._named(name)], lambda node: node.prerequisites):
            needed.start(is_leading=True)

    def trust_pidfile(self, name: str) -> None:
        """Trust the pidfile and watch the process that it names, as monit did before the agent replaced it.

        The usual checks would reject such a process, because it is not a descendant of a keeper, and it may run a
        program that does not belong to a job.
        """
        service = self._named(name)
        named = process_record.read(service.spec.pidfile)
        found = proc.stat(named.pid) if named is not None else None
        if named is None or found is None or not found.is_alive or self.keepers.owner(found.identity):
            return  # the process does not exist, or its keeper already shows which service it belongs to
        if was_written_after(named, found):  # otherwise, the pid may have been reused
            processes = service.record.processes
            processes.known, processes.named_by, processes.is_only_named = found.identity, named, True
            service.resume(service.record, is_same_container=True)  # watch the process that was just recorded

    async def unmonitor_one(self, name: str) -> None:
        """Stop monitoring a service and its dependents."""
        self._named(name).unmonitor()

    async def finished(self, name: str) -> ServiceInfo:
        """Wait until the service ``name`` is neither starting nor stopping, then describe the service."""
        service = self._named(name)
        await service.wait_to_leave(UNDERWAY)
        return self._readings.describe([service])[0]

    def _named(self, name: str) -> Service:
        """Return the service called ``name``, ignoring case. Raises ``ActionError`` if there is none."""
        service = self._services.get(name.lower())
        if service is None:
            raise ActionError(f"There is no service by that name: {name}")
        return service

    # --- reports ------------------------------------------------------------------------------------------------------

    def job_state(self) -> str:
        """Return the state of the instance: running, starting, failing or stopped
        (jobsupervisor/monit_job_supervisor.go).

        Services outside the vcap group do not count, with one exception: after ``seal``, the instance is stopped only
        once these services are stopped too. Services that a request is about to start count as starting.
        """
        states = [service.reported for service in self._services.values() if service.spec.is_vcap]
        states += ["starting" for each in self._starting if each.spec.is_vcap and each.state not in MONITORED]
        is_ended = self._is_sealed and all(service.state is State.STOPPED for service in self._services.values())
        is_stopped = is_ended or self._paths.stopped_marker.exists()
        if self._obstacle and not is_stopped:
            return "failing"
        state = job_state(states, is_stopped=is_stopped)
        return "starting" if state == "running" and time.monotonic() < self._settled_at else state

    def processes(self) -> list[ProcessInfo]:
        """Return the processes as reported to the Director, in the order of the monit files."""
        vcap = [service for service in self._services.values() if service.spec.is_vcap]
        return [info.process for info in self._readings.describe(vcap)]

    def count(self) -> int:
        """Number of processes that are reported to the Director."""
        return sum(service.spec.is_vcap for service in self._services.values())

    def _all(self) -> Iterable[Service]:
        """Return a copy of the list of services, because the original may change while the caller waits."""
        return list(self._services.values())

    def services(self) -> list[ServiceInfo]:
        """Describe all services, in the order of the monit files."""
        return self._readings.describe(self._services.values())

    def events(self, name: str) -> list[Happening]:
        """The last events of a service since the agent started, oldest first."""
        return self._shared.history.of(name)

    # --- persistent state ---------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Schedule a save of the state. Called after each change to the state."""
        self._is_dirty = True
        if self._saving is None:
            self._saving = asyncio.create_task(self._save_changes(), name="save the supervisor's state")

    async def _save_changes(self) -> None:
        """Save the state until there are no unsaved changes. After a failure, wait longer before the next attempt."""
        pause = SAVE_DELAY_S
        while self._is_dirty and not self._is_closed.is_set():
            await is_set_within(pause, self._is_closed)
            if self._is_dirty:
                pause = SAVE_DELAY_S if await self._save() else SAVE_RETRY_S
        self._saving = None

    async def saved(self) -> None:
        """Wait until all changes made so far are saved, including those that a save in progress is still writing.
        Raises ``HostError``.
        """
        if self._is_dirty or self._writing.locked():
            await self._require_saved()

    async def _require_saved(self) -> None:
        """Save the state. Raises ``HostError`` if that fails."""
        if not await self._save():
            raise HostError(self._unsaved)

    async def _save(self) -> bool:
        """Save the current state, unless sealed. If that fails, log each new error once and return False."""
        if self._is_sealed:
            self._is_dirty = False
            return True
        async with self._writing:
            self._is_dirty = False
            services = self._memory | {key: service.record for key, service in self._services.items()}
            for service in self._starting:  # ``start`` starts them once this state is saved
                if service.record.state not in MONITORED:
                    services[service.spec.name.lower()] = msgspec.structs.replace(service.record, state=State.STARTING)
            self._incarnation = self._incarnation or proc.incarnation()  # empty if the kernel does not reveal it
            saved = Saved(SCHEMA, self._incarnation, self._is_wanted, list(self._files), services)
            raw = msgspec.json.encode(saved)
            # If the saved state says that the jobs should run but the "stopped" marker exists, ``recover`` leaves them
            # stopped.
            marker_keeps_jobs_stopped = self._is_wanted or not any(each.state in TO_RUN for each in self._concerned())

            def write() -> None:
                files.write_atomic(self._paths.supervisor_state, raw, mode=0o600)
                self._on_saved(raw)

            try:
                await asyncio.to_thread(write)
            except HostError as exc:
                self._is_dirty = True
                if str(exc) != self._unsaved:
                    self._unsaved = str(exc)
                    logger.warning("a restarted agent would not know the present state of the jobs: %s", exc)
                return False
            self._unsaved, self._marker_keeps_jobs_stopped = "", marker_keeps_jobs_stopped
            return True


async def _each_beat(period: float, work: Callable[[], Awaitable[None]]) -> NoReturn:
    """Call ``work`` every ``period`` seconds, forever."""
    while True:
        await asyncio.sleep(clock.until_beat(period))
        await work()


def read_saved(path: Path) -> Saved | None:
    """Read the state that the last supervisor saved. Return None if it is missing, invalid or from another version."""
    try:
        saved = wire.decode(files.read(path, is_own=True), Saved)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        logger.warning("cannot read %s: %s; running jobs are recognized by their keepers alone", path, exc)
        return None
    if saved.schema != SCHEMA:
        return None
    for record in saved.services.values():
        if record.is_start_due and record.state is State.STOPPING:  # written by version 0.2.0
            record.state = State.BOUNCING
        record.is_start_due = False
    return saved


async def _stopped(services: Sequence[Service], timeout: float) -> None:
    """Wait until no service is stopping, for at most ``timeout`` seconds. Raises ``ActionError`` with the names of the
    services that did not stop in time or whose processes could not be terminated.
    """
    try:
        async with asyncio.timeout(timeout):
            for service in services:
                await service.wait_to_leave(ENDING)
    except TimeoutError:
        names = ", ".join(service.name for service in services if service.state in ENDING)
        raise ActionError(f"Timed out waiting for services '{names}' to stop after {timeout / 60:g} minutes") from None
    stuck = {service.name: service.record.reason for service in services if service.state is State.STUCK}
    if stuck:
        why = "; ".join(f"{name}: {reason}" for name, reason in stuck.items())
        raise ActionError(f"Stopping services '[{' '.join(stuck)}]' errored: {why}")


def _closure(services: Iterable[Service], neighbours: Callable[[Service], Iterable[Service]]) -> list[Service]:
    """Return ``services`` and all services that can be reached from them through ``neighbours``. Each service occurs
    once, and the nearest come first.
    """
    found: dict[str, Service] = {}
    ahead = list(services)
    for service in ahead:
        if service.name not in found:
            found[service.name] = service
            ahead.extend(neighbours(service))
    return list(found.values())


def write_monit_files(directory: Path, job_files: Sequence[JobFile], *, is_synced: bool) -> None:
    """Write the monit files under the names that the Go agent gives them. Raises ``OSError``.

    The files are numbered from the last job to the first (applier/jobs/rendered_job_applier.go).
    """
    jobs = list(dict.fromkeys(job_file.job for job_file in job_files))
    directory.mkdir(parents=True, exist_ok=True)
    for job_file in job_files:
        number = len(jobs) - 1 - jobs.index(job_file.job)
        label = f"_{job_file.name}" if job_file.name else ""
        path = directory / f"{number:04}_{job_file.job}{label}.monitrc"
        content = job_file.text.encode("utf-8", "surrogateescape")
        files.write_atomic(path, content, is_synced=is_synced, if_changed=True)


def _write_for_operators(directory: Path, job_files: Sequence[JobFile]) -> None:
    """Write the monit files where operators and scripts expect them. Errors are only logged, and the files are not
    synced, because the agent itself does not read them and writes them again when the Director starts the jobs.
    """
    try:
        write_monit_files(directory, job_files, is_synced=False)
    except OSError as exc:
        logger.warning("cannot write monit files for operators: %s", exc)
