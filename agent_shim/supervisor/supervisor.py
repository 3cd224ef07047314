"""All services of this instance: what the Director and operators ask of them, and what is told of them.

The whole is saved after each change, so that the next agent goes on where this one ended, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.keep_running import run_forever
from agent_shim.core.paths import Paths
from agent_shim.host import files, proc, watchdog
from agent_shim.supervisor import plan
from agent_shim.supervisor.bpm.runner import Bpm, MemoryKill
from agent_shim.supervisor.ctl_programs import Programs, TokenBucket
from agent_shim.supervisor.oom import Kills
from agent_shim.supervisor.plan import JobFile
from agent_shim.supervisor.process_finder import Timing
from agent_shim.supervisor.process_record import ProcessRecord
from agent_shim.supervisor.process_stats import ProcessInfo, ProcessStats, ServiceInfo
from agent_shim.supervisor.rule_engine import RuleEngine
from agent_shim.supervisor.service import Event, Record, Service, ServiceContext
from agent_shim.supervisor.state import ACTIVE, MONITORED, State, job_state

__all__ = ["Event", "JobFile", "ProcessInfo", "ServiceInfo", "Supervisor", "Timing"]

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
"""Of the saved state; another one is not read."""
SAVE_DELAY: Final = 0.02
"""Seconds in which changes are gathered into one write."""
STOP_BUDGET: Final = 300.0
"""Seconds that the Go agent gives a stop (jobsupervisor/monit_job_supervisor.go); the Director waits no longer."""
KILL_SHARE: Final = 0.9
"""The part of it after which what has not ended is killed."""
KILL_RESERVE_S: Final = 1.5
"""Seconds, half of a short stop at most, that are left after that for the ends and for the looks that follow."""
BURST: Final = 500
RESTARTS_PER_SECOND: Final = 20.0
TRIM_PERIOD: Final = 10.0
MEMORY_PERIOD: Final = 1.0
"""Seconds between looks at processes whose memory bpm.yml limits."""
SELDOM: Final = 5
"""Of these periods one look where bpm was never used: most instances never use it."""


class Saved(msgspec.Struct):
    """The file ``supervisor.json``."""

    schema: int
    incarnation: str
    is_wanted: bool
    files: list[JobFile]
    services: dict[str, Record]


class Supervisor:
    """Keeps the processes of all jobs as they are wanted. Leaving its ``async with`` block leaves them alone."""

    def __init__(
        self,
        paths: Paths,
        *,
        on_event: Callable[[Event], None],
        memory_total: Callable[[], int] | None = None,
        timing: Timing = Timing(),  # noqa: B008 - frozen
        is_strict: bool = False,
        settling: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``memory_total`` tells the bytes that percentages are of, the container's without it.

        With ``is_strict`` a process of bpm.yml that asks for what the container cannot give is not started. For
        ``settling()`` seconds after ``start`` the instance is ``starting`` and not yet ``running``.
        """
        self._settling = settling
        self._settled_at = float("-inf")
        self._paths = paths
        self._readings = ProcessStats(memory_total)
        self._kills = Kills()
        self._checks = RuleEngine(self._all, lambda: self._readings.memory_total(), timing.cycle)  # noqa: PLW0108 - it may change
        self._programs = Programs(paths.base, paths.shim_run / "output")
        user = "vcap" if paths.is_system else None
        self.bpm = Bpm(paths, self._programs, user=user, is_strict=is_strict)
        restarts = TokenBucket(BURST, RESTARTS_PER_SECOND)
        may_start = asyncio.Event()
        may_start.set()
        self._shared = ServiceContext(
            paths.base,
            self._programs,
            self.bpm,
            restarts,
            timing,
            on_event,
            self._changed,
            self._kills.claim,
            may_start,
        )
        self._obstacle = ""
        self._counting = contextlib.ExitStack()
        self._services: dict[str, Service] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._has_bug = asyncio.Event()
        self._files: Sequence[JobFile] = ()
        self._memory: dict[str, Record] = {}
        """Of services that are in no plan now: an apply forgets and configures anew."""
        self._held: dict[str, str] = {}
        """By key, what of a service held an agent before this one (``host.watchdog``)."""
        self._is_wanted = False
        self._is_dirty = False
        self._is_sealed = False
        self._saving: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._counting.enter_context(self._programs.counting(self._records))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        self._counting.close()

    def _records(self) -> list[tuple[str, ProcessRecord]]:
        return [(service.spec.label, service.record.traces) for service in self._services.values()]

    async def run(self) -> None:
        """Endless work beside the services; a service that a bug has ended ends it, with the same error.

        The daemon then ends, and the next agent takes the processes over: it finds out what is true of the service.
        """
        beside = [
            asyncio.create_task(run_forever(name, run), name=name)
            for name, run in {
                "memory of bpm processes": self._watch_memory,
                "rules": self._checks.run,
                "what descends from processes": self._see_kin,
            }.items()
        ]
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRIM_PERIOD):
                        await self._has_bug.wait()
                for life in self._lives.values():
                    if life.done() and not life.cancelled():
                        life.result()
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(self._programs.trim)
                self._kills.count()
        finally:
            for task in beside:
                task.cancel()

    async def _see_kin(self) -> None:
        """Once a cycle: the kernel forgets whose child a process was when its parent ends."""
        while True:
            await asyncio.sleep(self._shared.timing.cycle)
            await self._programs.see_kin()

    async def _watch_memory(self) -> None:
        """Kill processes that use more memory than their bpm.yml allows; they are restarted as after any death."""
        while True:
            is_in_use = self.bpm.is_in_use
            for hog in await asyncio.to_thread(self.bpm.kill_hogs) if is_in_use else ():
                self._shared.tell(self._event_of(hog))
            await asyncio.sleep(MEMORY_PERIOD * (1 if is_in_use else SELDOM))

    def _event_of(self, hog: MemoryKill) -> Event:
        label = plan.bpm_label(hog.job, hog.process)
        names = [service.name for service in self._services.values() if service.spec.label == label]
        used, limit = (f"{size / (1 << 20):.1f} MiB" for size in (hog.used, hog.limit))
        what = f"process {hog.process} of job {hog.job}"
        text = f"out of memory: {what} used {used}, its limit is {limit}: it was killed"
        return Event(names[0] if names else hog.process, "Resource limit matched", "restart", text)

    async def close(self) -> None:
        """Let everything go, alive, and leave for the next agent what it needs to know."""
        lives = list(self._lives.values())
        for life in lives:
            life.cancel()
        if lives:
            await asyncio.wait(lives)
        self._lives.clear()
        for service in self._services.values():
            service.release()
        if self._saving is not None:
            await self._saving
        await self._save()

    # --- what is supervised -----------------------------------------------------------------------------------------

    async def recover(self, *, root_is_new: bool = False) -> bool:
        """Go on where the last agent ended: what runs is watched again, what has ended is started again.

        False when nothing is known of an agent before this one. ``root_is_new`` says that the container is another
        one, even where it has the process numbers of its predecessor.
        """
        saved = await asyncio.to_thread(read_saved, self._paths.supervisor_state)
        if saved is None:
            return False
        self._held = await asyncio.to_thread(watchdog.read_marks, self._held_marks)
        same_world = saved.incarnation == proc.incarnation() != "" and not root_is_new
        self._is_wanted = saved.is_wanted
        self._memory = saved.services
        if root_is_new:
            await asyncio.to_thread(write_monit_files, self._paths.monit_job, saved.files)
        self._take_plan(saved.files, same_world=same_world)
        return True

    @property
    def is_wanted(self) -> bool:
        """Whether jobs shall run, and there are any."""
        return self._is_wanted and bool(self._services)

    @property
    def is_held(self) -> bool:
        return not self._shared.may_start.is_set()

    def hold(self, obstacle: str = "") -> None:
        """Start no program until ``go_on``. With an ``obstacle`` the jobs are failing, not starting, until then."""
        self._shared.may_start.clear()
        self._obstacle = obstacle

    def go_on(self) -> None:
        """Start what waits."""
        self._obstacle = ""
        self._shared.may_start.set()

    async def configure(self, job_files: Sequence[JobFile]) -> None:
        """Supervise what these files say; a service that was there before goes on under its name.

        A job whose files cannot be used becomes one failing service named after it.
        """
        await asyncio.to_thread(write_monit_files, self._paths.monit_job, job_files)
        self._take_plan(job_files, same_world=True)

    async def forget(self) -> None:
        """Supervise nothing; processes go on and are known again when ``configure`` names them again."""
        await asyncio.to_thread(files.remove_tree, self._paths.monit_job)
        self._take_plan((), same_world=True)

    def _take_plan(self, job_files: Sequence[JobFile], *, same_world: bool) -> None:
        specs = {spec.name.lower(): spec for spec in plan.plan(job_files)}
        known = self._memory | {key: service.record for key, service in self._services.items()}
        told = {key: record.reason for key, record in known.items() if record.state is State.BROKEN}
        self._files = job_files
        before, self._services = self._services, {}
        for key, old in before.items():
            if key not in specs:
                self._let_go(key, old)
        for key, spec in specs.items():
            if key in self._lives:
                service = before[key]
                service.take_spec(spec)
            else:
                service = Service(spec, self._shared, self._held.get(key, ""))
                if record := self._memory.pop(key, None):
                    service.resume(record, same_world=same_world)
            self._services[key] = service
        for service in self._services.values():
            needed = [name.lower() for name in service.spec.depends]
            service.prerequisites = [self._services[name] for name in needed if name in self._services]
            service.dependants = [
                other
                for other in self._services.values()
                if service.name.lower() in (name.lower() for name in other.spec.depends)
            ]
        for key, service in self._services.items():
            if service.state is State.BROKEN and told.get(key) != service.record.reason:
                service.tell("Execution failed", "alert", service.record.reason)
            if key not in self._lives:
                self._lives[key] = asyncio.create_task(service.live(), name=f"service {service.name}")
                self._lives[key].add_done_callback(self._life_ended)
        self._checks.plan_changed()
        self._changed()

    def _let_go(self, key: str, service: Service) -> None:
        self._lives.pop(key).cancel()
        self._memory[key] = service.record
        service.release()

    # --- what may be asked of all -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Have all jobs run; returns at once. Services of other groups go along as monit starts them at a reload."""
        self._is_wanted = True
        self._settled_at = time.monotonic() + self._settling()
        await self._trust(self._services.values())
        wanted = [each for each in self._services.values() if each.spec.is_vcap or each.spec.mode != "manual"]
        await asyncio.to_thread(self._paths.stopped_marker.unlink, missing_ok=True)
        # Before anything is started: an agent that ends on the way leaves no process that the next one does not know.
        await self._save(starting=wanted)
        for service in wanted:
            service.start()

    async def seal(self) -> None:
        """Leave to the next agent what is wanted now: the container ends, and its jobs come back with it."""
        await self._save()
        self._is_sealed = True

    def disown(self) -> None:
        """Write nothing any more: another agent goes on with what was saved."""
        self._is_sealed = True

    async def stop(self, *, wait: bool, timeout: float = STOP_BUDGET) -> None:
        """Stop all jobs and, unless sealed, leave the marker; with ``wait``, return when nothing of them is left.

        Raises ``ActionError`` in the words of the Go agent (jobsupervisor/monit_job_supervisor.go), of which the
        Director knows "Timed out waiting for service".
        """
        self._is_wanted = self._is_sealed and self._is_wanted
        kill_after = min(timeout * KILL_SHARE, timeout - min(KILL_RESERVE_S, timeout / 2))
        vcap = [service for service in self._services.values() if service.spec.is_vcap]
        await self._trust(vcap)
        begun = min((each.record.traces.begun for each in vcap if each.record.traces.begun), default=0)
        is_uncaged = any(each.record.traces.begun and not each.record.traces.is_caged for each in vcap)
        for service in vcap:
            service.stop(time.monotonic() + kill_after, is_one_of_all=True)
        await self._save()
        if not (self._is_sealed or self._is_wanted):  # a start may have come meanwhile
            await files.save(self._paths.stopped_marker, b"")
        if wait:
            await _stopped(vcap, timeout)
            # What no service can be proven to have left is of one of those that are stopped now.
            if is_uncaged and all(each.state not in ACTIVE for each in self._services.values()):
                left = await self._programs.sweep_strays(begun, self._shared.timing.grace)
                if left:
                    raise ActionError(f"Stopping services errored: {', '.join(map(str, left))} cannot be ended")

    @property
    def killed(self) -> list[str]:
        """Services of which something did not end when asked, and was killed, since the last ``forget_killed``."""
        return sorted({each.name for each in self._services.values() if each.spec.label in self._programs.killed})

    def forget_killed(self) -> None:
        """Begin anew to note what has to be killed."""
        self._programs.killed.clear()

    async def unmonitor(self) -> None:
        """Leave all jobs to themselves, as the Director asks before it drains them."""
        for service in self._services.values():
            if service.spec.is_vcap:
                service.unmonitor()

    # --- what may be asked of one -----------------------------------------------------------------------------------

    async def start_one(self, name: str) -> None:
        """Have a service run, and what it depends on before it, and what was stopped along with it after it."""
        service = await self._ordered(name)
        for each in _closure([service], lambda it: it.prerequisites):
            each.start()
        for each in _closure([service], lambda it: it.dependants):
            if each.record.was_taken_along:
                each.start()

    async def stop_one(self, name: str) -> None:
        """Stop a service, and what depends on it before it."""
        service = await self._ordered(name)
        for each in _closure([service], lambda it: it.dependants):
            each.record.was_taken_along = each is not service and each.state in MONITORED
        service.stop()

    async def restart_one(self, name: str) -> None:
        """Stop a service, start it again; likewise what depends on it and runs."""
        (await self._ordered(name)).bounce()

    async def monitor_one(self, name: str) -> None:
        """Watch a service, which starts it when it does not run; what it depends on as well."""
        service = await self._ordered(name)
        for each in _closure([service], lambda it: it.prerequisites):
            each.start()

    async def unmonitor_one(self, name: str) -> None:
        """Leave a service, and what depends on it, to themselves."""
        self._named(name).unmonitor()

    async def finished(self, name: str) -> ServiceInfo:
        """Wait until no start or stop of a service goes on; how it is then."""
        service = self._named(name)
        await service.reach(lambda it: not it.is_underway)
        return self._readings.describe([service])[0]

    async def _ordered(self, name: str) -> Service:
        """A service that an order names, which is read from now on even if it held an agent before."""
        service = self._named(name)
        await self._trust([service])
        return service

    async def _trust(self, services: Iterable[Service]) -> None:
        keys = {service.name.lower() for service in services} & self._held.keys()
        if not keys:
            return
        self._held = {key: what for key, what in self._held.items() if key not in keys}
        # The mark goes first: an agent that hangs once more leaves a new one.
        await asyncio.to_thread(watchdog.write_marks, self._held_marks, self._held)
        for key in keys:
            self._services[key].trust()

    @property
    def _held_marks(self) -> Path:
        return self._paths.mirror / watchdog.MARKS

    def _named(self, name: str) -> Service:
        service = self._services.get(name.lower())
        if service is None:
            raise ActionError(f"There is no service by that name: {name}")
        return service

    # --- what is told -----------------------------------------------------------------------------------------------

    def job_state(self) -> str:
        """The state of the instance (jobsupervisor/monit_job_supervisor.go)."""
        states = [service.reported for service in self._services.values() if service.spec.is_vcap]
        is_stopped = self._paths.stopped_marker.exists()
        if self._obstacle and not is_stopped:
            return "failing"
        state = job_state(states, is_stopped=is_stopped)
        return "starting" if state == "running" and time.monotonic() < self._settled_at else state

    def processes(self) -> list[ProcessInfo]:
        """What the Director is told, in the order of the files."""
        vcap = [service for service in self._services.values() if service.spec.is_vcap]
        return [info.process for info in self._readings.describe(vcap)]

    def count(self) -> int:
        """Processes that the Director knows of."""
        return sum(service.spec.is_vcap for service in self._services.values())

    def _all(self) -> Iterable[Service]:
        return list(self._services.values())

    def services(self) -> list[ServiceInfo]:
        """All services, in the order of the files."""
        return self._readings.describe(self._services.values())

    # --- what outlives the agent ------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._is_dirty = True
        if self._saving is None:
            self._saving = asyncio.create_task(self._save_changes(), name="save the supervisor's state")

    async def _save_changes(self) -> None:
        while self._is_dirty:
            await asyncio.sleep(SAVE_DELAY)
            self._is_dirty = False
            await self._save()
        self._saving = None

    async def _save(self, *, starting: Sequence[Service] = ()) -> None:
        """``starting`` are said to be so already."""
        if self._is_sealed:
            return
        async with self._writing:
            services = self._memory | {key: service.record for key, service in self._services.items()}
            for service in starting:
                if service.state not in MONITORED:
                    services[service.name.lower()] = msgspec.structs.replace(service.record, state=State.STARTING)
            saved = Saved(SCHEMA, proc.incarnation(), self._is_wanted, list(self._files), services)
            try:
                await files.save(self._paths.supervisor_state, msgspec.json.encode(saved), mode=0o600)
            except HostError as exc:
                logger.warning("an agent that starts now would not know the jobs: %s", exc)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and (bug := life.exception()):
            logger.critical("%s is not supervised any more", life.get_name(), exc_info=bug)
            self._has_bug.set()


def read_saved(path: Path) -> Saved | None:
    """What the last supervisor has saved; None if that cannot be used."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        logger.warning("cannot read %s: %s: jobs that still run are known by their marks alone", path, exc)
        return None
    return saved if saved.schema == SCHEMA else None


async def _stopped(services: Sequence[Service], timeout: float) -> None:
    """Wait until none of them is stopping; raises ``ActionError`` for those that could not be stopped."""
    try:
        async with asyncio.timeout(timeout):
            for service in services:
                await service.reach(lambda it: it.state is not State.STOPPING)
    except TimeoutError:
        names = ", ".join(service.name for service in services if service.state is State.STOPPING)
        raise ActionError(f"Timed out waiting for services '{names}' to stop after {timeout / 60:g} minutes") from None
    stuck = {service.name: service.record.reason for service in services if service.is_stuck}
    if stuck:
        why = "; ".join(f"{name}: {reason}" for name, reason in stuck.items())
        raise ActionError(f"Stopping services '[{' '.join(stuck)}]' errored: {why}")


def _closure(services: Iterable[Service], beyond: Callable[[Service], Iterable[Service]]) -> list[Service]:
    """The services and all that ``beyond`` leads to, each once, nearest first."""
    found: dict[str, Service] = {}
    ahead = list(services)
    for service in ahead:
        if service.name not in found:
            found[service.name] = service
            ahead.extend(beyond(service))
    return list(found.values())


def write_monit_files(directory: Path, job_files: Sequence[JobFile]) -> None:
    """Leave the files where people and scripts look for them, under the names of the Go agent.

    It counts from the last job to the first (applier/jobs/rendered_job_applier.go). Nothing here reads them.
    """
    jobs = list(dict.fromkeys(job_file.job for job_file in job_files))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for job_file in job_files:
            number = len(jobs) - 1 - jobs.index(job_file.job)
            label = f"_{job_file.name}" if job_file.name else ""
            path = directory / f"{number:04}_{job_file.job}{label}.monitrc"
            files.write_atomic(path, job_file.text.encode("utf-8", "surrogateescape"))
    except OSError as exc:
        logger.warning("cannot write monit files for others to read: %s", exc)
