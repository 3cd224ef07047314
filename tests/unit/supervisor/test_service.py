"""Decisions of a service alone: the wait before a restart, the dependants that restart with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent_shim.core.errors import HostError
from agent_shim.supervisor import service as services
from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.event_kinds import RESOURCE, Complaint
from agent_shim.supervisor.launch_queue import LaunchQueue
from agent_shim.supervisor.monit.ast import ALERT, Limit, Rule
from agent_shim.supervisor.ownership import Left
from agent_shim.supervisor.plan import BpmCall, ProcessSpec, Program, Reaction, RestartLimit
from agent_shim.supervisor.process_finder import LateError, Timing
from agent_shim.supervisor.process_record import ProcessRecord
from agent_shim.supervisor.service import Event, Record, Service, ServiceContext, StopRequest
from agent_shim.supervisor.state import Effect, State, Trigger
from agent_shim.supervisor.supervisor import SCHEMA, read_saved

CTL = Program(("ctl",))

bugs: list[BaseException] = []
"""Those of lives; a callback that raises fails no test."""


@pytest.fixture(autouse=True)
def _no_life_has_a_bug() -> Iterator[None]:
    yield
    found = [repr(bug) for bug in bugs]
    bugs.clear()
    assert found == []


@pytest.mark.parametrize(
    ("failures", "delay_s", "eager_s"),
    [(1, 0.0, 0.0), (2, 0.5, 0.5), (3, 1.0, 1.0), (4, 2.0, 1.0), (6, 8.0, 1.0), (7, 10.0, 1.0), (99999, 10.0, 1.0)],
)
async def test_the_first_restart_comes_at_once_and_each_next_after_twice_the_time(
    failures: int, delay_s: float, eager_s: float
) -> None:
    """Half a second before the second; ten at most, and one in the minute after a requested start."""
    service = made("web")
    service.record.failures = failures

    assert service._delay() == delay_s
    service._asked_at = time.monotonic() - Timing().eager + 30
    assert service._delay() == eager_s
    service._asked_at = time.monotonic() - Timing().eager
    assert service._delay() == delay_s


@pytest.mark.parametrize(
    ("state", "start", "is_void"),
    [
        (State.RUNNING, CTL, True),
        (State.SETTLING, CTL, False),
        (State.UNMONITORED, CTL, False),
        (State.RUNNING, Program(("bpm",), bpm=BpmCall("start", "web", "web")), False),
    ],
)
def test_only_a_running_process_misses_its_number_in_a_pidfile_that_is_not_ours(
    tmp_path: Path, state: State, start: Program, is_void: bool
) -> None:
    service = made("web")
    service.take_spec(msgspec.structs.replace(service.spec, start=start, pidfile=str(tmp_path / "pid")))
    service._finder.process = cast("Any", SimpleNamespace(is_alive=True, is_over=False))
    service.record.state = state

    assert service.is_void() is is_void


def test_a_process_that_stays_up_is_running_within_a_cycle_of_the_first_minute() -> None:
    """Then monit, which looks each cycle, is never earlier."""
    timing = Timing()

    assert timing.eager_limit + timing.settle < timing.cycle
    assert timing.backoff_limit <= timing.cycle


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.STOPPED, State.STOPPED),
        (State.UNMONITORED, State.UNMONITORED),
        (State.RUNNING, State.BOUNCING),
    ],
)
async def test_a_restart_takes_along_only_dependants_that_are_up(state: State, after: State) -> None:
    """One that was stopped stays so."""
    service, dependant = made("web"), made("needs-web")
    service.dependants = [dependant]
    service.record.state, dependant.record.state = State.RUNNING, state

    service.bounce()

    assert (service.state, dependant.state) == (State.BOUNCING, after)


def test_a_restart_saved_by_the_first_release_goes_on(tmp_path: Path) -> None:
    """Version 0.2.0 saved it as a stop with a mark."""
    services = {
        "bounced": {"state": "stopping", "is_start_due": True},
        "stopped": {"state": "stopping", "is_start_due": False},
        "running": {"state": "running", "is_start_due": True},
    }
    document = {"schema": SCHEMA, "incarnation": "", "is_wanted": True, "files": [], "services": services}
    (tmp_path / "supervisor.json").write_bytes(msgspec.json.encode(document))

    saved = read_saved(tmp_path / "supervisor.json")

    assert saved is not None
    bounced = saved.services["bounced"]
    states = [each.state for each in saved.services.values()]
    assert states == [State.BOUNCING, State.STOPPING, State.RUNNING]
    assert b'"is_start_due":false' in msgspec.json.encode(bounced)


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.STOPPED, State.STOPPED),
        (State.UNMONITORED, State.UNMONITORED),
        (State.RUNNING, State.BOUNCING),
    ],
)
async def test_an_exit_takes_along_only_dependants_that_are_up(state: State, after: State) -> None:
    """As a restart does; those of a service that is not restarted go on."""
    service, dependant, for_good, untouched = (made(name) for name in ("web", "needs-web", "once", "needs-once"))
    for each in (service, for_good):
        each.record.state = State.RUNNING
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))
    service.dependants, for_good.dependants = [dependant], [untouched]
    dependant.record.state = untouched.record.state = state

    await service._lost("exit code 1")
    await for_good._lost("exit code 1")

    assert (service.state, dependant.state) == (State.RESTARTING, after)
    assert untouched.state is state
    assert service.record.reason == "the process ended by itself: exit code 1 (disk full)"
    assert for_good.record.reason.endswith("; it is not restarted: it has no start program")


@pytest.mark.parametrize(
    ("how", "was_oom", "kills", "told"),
    [
        ("exit code 1", True, 0, "exit code 1"),
        ("SIGKILL", False, 0, "SIGKILL"),
        ("SIGKILL", True, 1, "SIGKILL, out of memory"),
    ],
)
async def test_a_kill_for_want_of_memory_is_counted(how: str, was_oom: bool, kills: int, told: str) -> None:
    """Only a SIGKILL can be one. Each exit is counted by its kind; the first after a long life begins a row."""
    events: list[Event] = []
    service = made("web", was_oom=was_oom, notify=events.append)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))
    service.record.state, service.record.failures = State.RUNNING, 5
    service._finder.up_at = time.monotonic() - Timing().backoff_limit - 1

    await service._lost(how)

    assert (service.record.oom_kills, service.record.last_exit, service.record.failures) == (kills, told, 1)
    assert list(service.record.exits.values()) == [1]
    assert [("out of memory" in event.description) for event in events] == [kills == 1]
    service.record.state = State.RUNNING
    service._finder.up_at = time.monotonic()
    await service._lost(how)
    assert (service.record.oom_kills, service.record.failures) == (2 * kills, 2)
    assert list(service.record.exits.values()) == [2]


async def test_patience_with_a_late_start_ends_with_the_next_restart() -> None:
    """A start that failed by its timeout waits a cycle for the process. The restart after it does not."""
    service = made("web")
    service._patience = 600.0

    service._take_effect(Effect.COUNT)

    assert service._patience == 0.0


async def test_a_stopped_service_remembers_no_process() -> None:
    """Nor the stop program: the next start begins with an empty record."""
    service = made("web")
    service.record.state, service.record.traces = State.STOPPING, ProcessRecord(known=(1, 1))
    service._has_lived, service._stopper = True, cast("Any", object())
    released: list[object] = []
    service._finder.process = cast("Any", SimpleNamespace(release=lambda: released.append(1)))

    service.on(Trigger.EMPTIED)

    assert (service.process, released) == (None, [1])

    assert (service.state, service._has_lived, service._stopper) == (State.STOPPED, False, None)
    assert service.record.traces == ProcessRecord()


@pytest.mark.parametrize(("state", "is_stopped"), [(State.RUNNING, True), (State.STOPPED, False), (None, False)])
async def test_only_a_service_that_was_started_is_stopped_by_its_program(state: State | None, is_stopped: bool) -> None:
    """Also one that an earlier agent started, and whose process is gone. Its cgroup is removed in any case."""
    calls: list[str] = []
    service = made("web", calls=calls)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))

    if state is not None:
        service.resume(Record(state=state), same_world=True)
    await service._end()

    assert calls == [*(["run Stopped"] if is_stopped else []), "dismiss"]


async def test_the_deadline_of_a_stop_is_none_of_a_later_restart() -> None:
    """Its processes would be killed at once."""
    service = made("web")
    service.record.state = State.RUNNING
    service.stop(StopRequest(time.monotonic() - 1))
    assert service._within(5.0) == 0.0
    service.record.state = State.RUNNING

    service.bounce()

    assert service._within(5.0) == 5.0


@pytest.mark.parametrize(
    ("trigger", "are_kept"), [(Trigger.DIED, False), (Trigger.UNMONITOR_ASKED, False), (Trigger.RESTART_ASKED, True)]
)
async def test_complaints_end_with_the_process_unless_it_is_restarted(trigger: Trigger, are_kept: bool) -> None:
    """Over a restart they stand until their checks pass."""
    service = made("web")
    service.record.state = State.RUNNING
    service.complaints[0] = Complaint(RESOURCE, "too much")

    service.on(trigger)

    assert bool(service.complaints) is are_kept


async def test_a_service_with_an_unusable_file_resumes_as_broken() -> None:
    """The record of an earlier agent does not count."""
    service = made("web")
    service.spec = msgspec.structs.replace(service.spec, error="cannot use web/monit")

    service.resume(Record(state=State.RUNNING), same_world=True)

    assert (service.state, service.record.reason) == (State.BROKEN, "cannot use web/monit")


async def test_the_kernel_is_named_as_the_cause_of_an_exit() -> None:
    service = made("web", was_oom=True)
    service.record.state = State.RUNNING

    await service._lost("SIGKILL")

    assert service.record.reason.startswith("the kernel killed the process: out of memory (SIGKILL)")


async def test_a_failed_start_counts_as_two_exits_in_a_row() -> None:
    """A restart at once would fail again."""
    events: list[Event] = []
    service = made("web", notify=events.append)
    for failures in (2, 3):
        service.record.state = State.STARTING
        await service._failed("no process")
        assert service.record.failures == failures

    assert service.record.reason == "cannot start: no process (disk full)"
    assert [(event.event, event.action) for event in events] == [("Execution failed", "alert")]  # once, as in monit


async def test_a_restart_waits_for_the_cycles_of_the_file() -> None:
    service = made("web")
    service.take_spec(msgspec.structs.replace(service.spec, absence_cycles=3))
    service.record.failures = 1

    assert service._delay() == 2 * Timing().cycle


@pytest.mark.parametrize(
    ("changes", "state", "after"),
    [
        ({}, State.RUNNING, State.BOUNCING),
        ({}, State.SETTLING, State.BOUNCING),
        ({}, State.STARTING, State.STARTING),
        ({"stop": None}, State.RUNNING, State.RUNNING),
        ({"start": None}, State.RUNNING, State.RUNNING),
        ({"mode": "passive"}, State.RUNNING, State.RUNNING),
    ],
)
async def test_a_rule_restarts_what_is_up_and_has_both_programs(
    changes: dict[str, Any], state: State, after: State
) -> None:
    """As monit does. The restart counts."""
    service = made("web")
    service.take_spec(msgspec.structs.replace(service.spec, **{"start": CTL, "stop": CTL} | changes))
    service.record.state = state

    await service.react(Reaction("restart"), "Timeout", "too often")

    assert service.state is after
    assert service.record.restarts == service._is_counted == (after is State.BOUNCING)


async def test_a_program_that_cannot_run_is_reported() -> None:
    """That of a rule, and a stop program, after which the process is ended without it."""
    events: list[Event] = []
    service = made("web", notify=events.append, calls=NoCalls())
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))
    service.record.state = State.RUNNING

    await service.react(Reaction("exec", CTL), "Timeout", "too often")
    await service._run_stop()

    assert [(event.event, event.action, event.description) for event in events] == [
        ("Execution failed", "alert", "cannot run Timeout"),
        ("Execution failed", "alert", "cannot run Stopped"),
    ]


async def test_after_a_stop_program_the_process_is_waited_for() -> None:
    """It may need its time; a TERM at once would interrupt its work."""
    service, ended = made("web"), asyncio.Event()
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))
    service._finder.process = cast("Any", SimpleNamespace(wait=ended.wait, pid=7))

    stopping = asyncio.create_task(service._run_stop())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    assert service._stopper is not None  # a start waits for it, though the file breaks meanwhile
    ended.set()
    await stopping


async def test_a_start_request_takes_nothing_along() -> None:
    """A service that was stopped with a prerequisite, then started by itself, is no longer the other's matter."""
    service = made("web")
    service.record.was_taken_along = True

    service.start()

    assert (service.state, service.record.was_taken_along) == (State.STARTING, False)


async def test_each_change_is_saved() -> None:
    changes: list[State] = []
    service = made("web", changed=lambda: changes.append(service.state))

    service.on(Trigger.START_ASKED)
    service.on(Trigger.SETTLED)  # means nothing to it

    assert changes == [State.STARTING]


async def test_a_process_that_has_just_ended_makes_its_service_fail() -> None:
    """Before any step has seen it."""
    service = made("web")
    service.record.state = State.RUNNING
    for is_over, told in ((False, "running"), (True, "failing")):
        service._finder.process = cast("Any", SimpleNamespace(is_over=is_over))
        assert service.reported == told


async def test_a_request_to_start_forgives_and_one_to_stop_is_no_restart() -> None:
    service = made("web")
    service.record.failures, service._is_counted = 5, True
    service.on(Trigger.START_ASKED)
    assert (service.record.failures, service._is_counted) == (0, True)
    service.on(Trigger.STOP_ASKED)
    assert not service._is_counted


@pytest.mark.parametrize(("trigger", "is_kept"), [(Trigger.APPEARED, False), (Trigger.FAILED, True)])
async def test_the_start_program_is_watched_until_the_process_appears(trigger: Trigger, is_kept: bool) -> None:
    """A start that takes too long may still bring it."""
    service, released = made("web"), list[object]()
    program: Any = SimpleNamespace(release=lambda: released.append(1))
    service.record.state, service._finder.program = State.STARTING, program

    service.on(trigger)

    assert (service._finder.program, released) == ((program, []) if is_kept else (None, [1]))


@pytest.mark.parametrize(
    ("state", "trigger", "is_interrupted"),
    [
        (State.STARTING, Trigger.APPEARED, False),
        (State.STARTING, Trigger.START_ASKED, False),
        (State.STARTING, Trigger.STOP_ASKED, True),
        (State.RUNNING, Trigger.DIED, False),
        (State.RUNNING, Trigger.UNMONITOR_ASKED, True),
        (State.STOPPING, Trigger.RESTART_ASKED, False),
    ],
)
async def test_only_an_event_from_outside_interrupts_work(state: State, trigger: Trigger, is_interrupted: bool) -> None:
    """Work that brings an event itself has more to do; a stop that becomes a restart is the same work."""
    service, cancelled = made("web"), list[object]()
    service.record.state = state
    service._life = cast("Any", SimpleNamespace(cancel=lambda: cancelled.append(1)))

    service.on(trigger)

    assert bool(cancelled) is is_interrupted


async def test_complaints_are_of_the_rules_of_the_file() -> None:
    """Other rules begin without any; another file with the same rules changes nothing."""
    service = made("web")
    service.record.state = State.RUNNING
    service.complaints[0] = Complaint(RESOURCE, "too much")

    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    assert list(service.complaints) == [0]
    service.take_spec(msgspec.structs.replace(service.spec, rules=(Rule(Limit("memory", ">", 5), ALERT),)))
    assert service.complaints == {}


async def test_processes_of_another_boot_are_not_looked_at() -> None:
    for same_world in (False, True):
        service = made("web")
        resumed: list[ProcessRecord] = []
        service._finder = cast("Any", SimpleNamespace(resume=resumed.append))
        record = Record(state=State.RUNNING, traces=ProcessRecord(known=(7, 70)))

        service.resume(record, same_world=same_world)

        assert resumed == [ProcessRecord(known=(7, 70))] * same_world
        assert record.traces == (resumed[0] if same_world else ProcessRecord())
        assert service.state is (State.RUNNING if same_world else State.STARTING)


async def test_a_life_ends_after_its_work() -> None:
    """The state is saved then, and the handles are released."""
    service, ended = made("web"), list[object]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(1)

    service.record.state = State.STARTING
    service._launch = work  # type: ignore[method-assign]
    service.begin()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    life = service.retire()
    assert life is not None
    await asyncio.wait([life])

    assert ended == [1]
    assert life.cancelled()
    service.start()
    assert service.retire() is None


async def test_two_interruptions_at_once_end_the_work_and_leave_the_life() -> None:
    service, begun = made("web"), list[State]()

    async def work() -> None:
        begun.append(service.state)
        await asyncio.get_running_loop().create_future()

    service.record.state = State.STARTING
    service._launch = service._end = work  # type: ignore[method-assign]
    service.begin()
    await asyncio.sleep(0)
    life = service._life
    assert life is not None
    service.unmonitor()
    service.stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert begun == [State.STARTING, State.STOPPING]
    assert not life.cancelling()

    service.on(Trigger.FILE_BROKE)
    assert service.retire() is life
    await asyncio.wait([life])
    assert life.cancelled()


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_an_event_between_the_last_work_and_its_end_is_acted_on(is_interrupted: bool) -> None:
    """Also by work that interrupts itself at its end; and the next one is cancelled as any other."""
    service, is_ending = made("web"), asyncio.Event()
    service._finder.process = cast("Any", SimpleNamespace(is_over=False, is_alive=True))

    async def launch() -> None:
        asyncio.get_running_loop().call_soon(service.stop)
        if is_interrupted:
            service.unmonitor()
        else:
            service.on(Trigger.APPEARED)

    async def end() -> None:
        is_ending.set()
        await asyncio.get_running_loop().create_future()

    service.record.state = State.STARTING
    service._launch, service._end = launch, end  # type: ignore[method-assign]
    service.begin()
    async with asyncio.timeout(30):
        await is_ending.wait()
        life = service.retire()
        assert life is not None
        await asyncio.wait([life])
    assert life.cancelled()


async def test_a_life_that_ended_with_a_bug_does_not_begin_again() -> None:
    """The agent ends, and the next one continues from the saved state."""

    async def launch() -> None:
        raise RuntimeError("a bug")

    service = made("web")
    service._launch = launch  # type: ignore[method-assign]
    service.begin()
    service.start()
    async with asyncio.timeout(30):
        while not bugs:
            await asyncio.sleep(0)
    service.stop()

    assert service._life is None
    assert [str(bug) for bug in bugs] == ["a bug"]
    bugs.clear()


def _fail_to_launch(service: Service) -> None:
    async def fail() -> None:
        raise HostError("no such file")

    service._bring_up = fail  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda _: None, id="its program runs"),
        pytest.param(_fail_to_launch, id="its program cannot run"),
        pytest.param(Service.stop, id="it is stopped"),
        pytest.param(Service.retire, id="it is no longer supervised"),
    ],
)
async def test_a_turn_to_start_is_passed_on(end: Callable[[Service], object]) -> None:
    """However long the process takes to appear, or the next attempt."""

    async def arrival(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    service = made("web")
    service._shared = msgspec.structs.replace(service._shared, launches=LaunchQueue(1))
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service._shared.may_start.set()
    service._finder = finder = cast("Any", Finder([], found=False))
    finder.arrival = arrival
    retired, other = (
        Service(msgspec.structs.replace(service.spec, name=name), service._shared) for name in ("retired", "db")
    )
    for each in (service, retired, other):
        each.begin()
        each.start()
    assert (retired._life, retired.retire(), other._life) == (None, None, None)

    end(service)

    async with asyncio.timeout(30):
        while True:
            if other._life is not None:
                break
            await asyncio.sleep(0)
    assert retired._life is None
    for each in (service, other):
        each.retire()


@pytest.mark.parametrize("state", [State.STARTING, State.RESTARTING])
async def test_a_start_waits_for_prerequisites_and_a_restart_for_its_turn(state: State) -> None:
    """Each does only that."""
    calls: list[str] = []
    service, needed, turn = made("web", calls=calls), made("db"), asyncio.Event()
    needed.record.state = State.STARTING if state is State.STARTING else State.RUNNING
    service.prerequisites = [needed]
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service._shared = msgspec.structs.replace(service._shared, restarts=cast("Any", SimpleNamespace(take=turn.wait)))
    service._shared.may_start.set()
    service._finder, service.record.state = cast("Any", Finder(calls)), state

    launching = asyncio.create_task(service._launch())
    for _ in range(10):
        await asyncio.sleep(0)
    assert calls == []
    if state is State.STARTING:
        needed.on(Trigger.APPEARED)
    else:
        turn.set()
    async with asyncio.timeout(10):
        await launching

    assert calls == ["run Started", "arrival"]


@pytest.mark.parametrize(("error", "patience"), [(LateError("late"), Timing().cycle), (HostError("none"), 0.0)])
async def test_only_a_late_process_is_waited_for_before_the_next_start(error: HostError, patience: float) -> None:
    """It may still appear; another start would make two."""
    service = made("web")
    service.record.state = State.STARTING

    async def fail() -> None:
        raise error

    service._bring_up = fail  # type: ignore[method-assign]
    await service._launch()

    assert (service.state, service._patience) == (State.DOWN, patience)
    assert service._has_lived


async def test_a_check_without_a_process_whose_program_cannot_run_is_down() -> None:
    """With the reason; the agent continues."""
    service = made("web", calls=NoCalls())
    service.take_spec(msgspec.structs.replace(service.spec, kind="file", start=CTL))
    service.record.state = State.STARTING
    service._shared.may_start.set()

    await service._launch()

    assert (service.state, service.record.reason) == (
        State.DOWN,
        "file doesn't exist: cannot run Started (disk full)",
    )


async def test_a_stop_program_that_hangs_is_ended_before_a_start() -> None:
    """It would stop what the start program brings."""
    service, graces = made("web"), list[float]()

    async def terminate(grace: float) -> None:
        graces.append(grace)

    stopper: Any = SimpleNamespace(wait=asyncio.Event().wait, terminate=terminate)
    service.take_spec(msgspec.structs.replace(service.spec, stop=msgspec.structs.replace(CTL, timeout=0.0)))
    service._stopper = stopper

    await service._await_stopper(stopper)

    assert (graces, service._stopper) == ([Timing().grace], None)


async def test_the_loop_goes_on_while_a_process_is_missing() -> None:
    """Where nothing restarts it, it is looked for each second, and the agent works meanwhile."""
    service, finder = made("web"), Finder([])
    looks: list[object] = []

    async def look(*_: object) -> bool:
        looks.append(1)
        assert len(looks) < 100
        return finder.pid != 0

    finder.look = look  # type: ignore[method-assign]
    service._timing = Timing(look=0.001)
    service._finder, service.record.state = cast("Any", finder), State.DOWN
    waiting = asyncio.create_task(service._wait_for_others())
    while not looks:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(setattr, finder, "pid", 8)
    await waiting

    assert service.state is State.SETTLING


@pytest.mark.parametrize("why", ["", "cannot stop"])
async def test_bpm_stops_its_process_within_the_time_of_the_stop(why: str) -> None:
    """The time of the request or of the file; a failure is logged, and the process is ended without bpm."""
    asked: list[tuple[BpmCall, float]] = []
    events: list[Event] = []

    async def stop(call: BpmCall, by: float) -> None:
        asked.append((call, by))
        if why:
            raise HostError(why)

    service, call = made("web", notify=events.append), BpmCall("stop", "web", "web")
    service._shared = msgspec.structs.replace(service._shared, bpm=cast("Any", SimpleNamespace(stop=stop)))
    service.take_spec(msgspec.structs.replace(service.spec, stop=msgspec.structs.replace(CTL, bpm=call)))
    service._stop = StopRequest(1.0)

    await service._run_stop()

    assert asked == [(call, 1.0)]
    assert [event.description for event in events] == [why] * bool(why)


@pytest.mark.parametrize(("is_counted", "state"), [(True, State.UNMONITORED), (False, State.RUNNING)])
async def test_only_restarts_count_towards_a_limit(is_counted: bool, state: State) -> None:
    """A start on request does not."""
    events: list[Event] = []
    service = made("web", notify=events.append)
    service.take_spec(msgspec.structs.replace(service.spec, limits=(RestartLimit(1, 5, Reaction("unmonitor")),)))
    service._finder = cast("Any", Finder([], found=True))
    service.record.state, service._is_counted, service._restarted_at = State.STARTING, is_counted, (time.monotonic(),)

    await service._launch()

    assert service.state is state
    assert [(event.event, event.action) for event in events] == [("Timeout", "unmonitor")] * is_counted
    assert not service._is_counted


@pytest.mark.parametrize(
    ("change", "state"), [(Reaction("alert"), State.RUNNING), (Reaction("unmonitor"), State.UNMONITORED)]
)
async def test_another_process_is_told_and_the_rule_for_that_is_followed(change: Reaction, state: State) -> None:
    events: list[Event] = []
    service = made("web", notify=events.append)
    service.take_spec(msgspec.structs.replace(service.spec, change=change))
    service.record.state, finder = State.RUNNING, Finder([], found=True)
    finder.pid = 8
    service._finder = cast("Any", finder)

    await service._watch()

    assert service.state is state
    assert events == [Event("web", "PID changed", change.kind, "process PID changed to 8")]


@pytest.mark.parametrize(("was_killed", "kills"), [(True, 1), (False, 0)])
async def test_a_process_of_bpm_that_was_killed_at_its_limit_is_told(was_killed: bool, kills: int) -> None:
    """Other exits of it have other causes."""

    async def last_words(_: BpmCall) -> str:
        return ""

    bpm: Any = SimpleNamespace(was_killed_for_memory=lambda _: was_killed, last_words=last_words)
    service = made("web")
    service._shared = msgspec.structs.replace(service._shared, bpm=bpm)
    start = msgspec.structs.replace(CTL, bpm=BpmCall("start", "web", "web"))
    service.take_spec(msgspec.structs.replace(service.spec, start=start, stop=CTL))
    service.record.state = State.RUNNING

    await service._lost("SIGKILL")

    assert (service.record.oom_kills, "its limit of memory" in service.record.reason) == (kills, was_killed)


@pytest.mark.parametrize("start", [CTL, None])
async def test_a_stop_sweeps_with_what_was_seen_before_its_program(start: Program | None) -> None:
    """The processes of a check without a start program are not the agent's to end."""
    calls: list[str] = []
    service = made("web", calls=calls)
    programs: Any = service._shared.programs

    async def members(*_: object) -> list[Any]:
        calls.append("look")
        return [(9, 90)]

    async def sweep(_label: str, _traces: object, known: object, _grace: float) -> list[Left]:
        calls.append(f"sweep {known}")
        return []

    programs.members, programs.sweep = members, sweep
    service.take_spec(msgspec.structs.replace(service.spec, start=start, stop=CTL))
    service.record.state, service._has_lived = State.STOPPING, True

    await service._end()

    assert service.state is State.STOPPED
    assert calls == (["look", "run Stopped", "sweep [(9, 90)]", "dismiss"] if start else ["run Stopped", "dismiss"])


async def test_a_stop_program_that_hangs_is_told_and_ended() -> None:
    calls: list[str] = []
    events: list[Event] = []
    service = made("web", calls=calls, notify=events.append)

    async def run(*_: object, **__: object) -> Any:
        async def terminate(_: float) -> None:
            calls.append("terminate")

        return SimpleNamespace(wait=asyncio.Event().wait, terminate=terminate)

    cast("Any", service._shared.programs).run = run
    service.take_spec(msgspec.structs.replace(service.spec, stop=msgspec.structs.replace(CTL, timeout=0.0)))

    await service._run_stop()

    assert calls == ["terminate"]
    assert [(event.event, event.description) for event in events] == [("Execution failed", "failed to stop")]


class Finder:
    """Finds nothing unless ``found``; ``calls`` are those with an effect."""

    def __init__(self, calls: list[str], *, found: bool = False) -> None:
        self.process: Any = None
        self.program: Any = None
        self.doubted: Any = None
        self.pid, self.refused, self.up_at = 0, "", 0.0
        self._calls, self._found = calls, found

    async def look(self, *_: object) -> bool:
        return self._found

    async def look_at_path(self, _: ProcessSpec) -> bool:
        self._calls.append("look at the path")
        return False

    async def gone(self, _: ProcessSpec) -> str:
        return "exit 0"

    def release_program(self) -> None:
        """Nothing is held."""

    async def arrival(self, *_: object) -> None:
        self._calls.append("arrival")


@pytest.mark.parametrize(
    ("changes", "state", "begun", "calls"),
    [
        ({}, State.STARTING, 0, ["run Started"]),
        ({}, State.RESTARTING, 50, ["clear", "run Started"]),
        ({"kind": "file"}, State.STARTING, 50, ["look at the path", "run Started"]),
        ({"kind": "file"}, State.RESTARTING, 50, ["look at the path", "run Stopped", "run Started"]),
    ],
)
async def test_what_a_start_does_in_turn(changes: dict[str, Any], state: State, begun: int, calls: list[str]) -> None:
    """Remaining processes of the last run are ended first; monit runs the stop program of a check without a process,
    and the start program even if its path exists. The start program is saved before its process is waited for.
    """
    found: list[str] = []
    service = made("web", calls=found, changed=lambda: found.append("saved"))
    service.take_spec(msgspec.structs.replace(service.spec, **{"start": CTL, "stop": CTL} | changes))
    service.record.state, service.record.traces.begun = state, begun
    service._finder = cast("Any", Finder(found, found=not service.spec.is_process))
    service._shared.may_start.set()

    await service._bring_up()

    assert found == [*calls, "saved", "arrival"]
    assert (service.record.traces.program, service.record.traces.begun) == ((7, 70), 70)
    assert not service.record.traces.is_caged


@pytest.mark.parametrize(
    ("joined", "label", "is_caged"), [([], None, False), (["/c"], None, True), ([], "web", True), ([], "db", False)]
)
async def test_a_service_is_in_its_cgroup_if_its_start_program_is(
    joined: list[str], label: str | None, is_caged: bool
) -> None:
    """It was spawned there, or has entered it by itself."""
    service = made("web")
    programs: Any = service._shared.programs
    programs.joined, programs.ownership = joined, SimpleNamespace(label_of=lambda _: label)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service._finder = cast("Any", Finder([]))
    service._shared.may_start.set()

    await service._bring_up()

    assert service.record.traces.is_caged is is_caged


async def test_a_path_without_a_start_program_is_there_or_is_not() -> None:
    service = made("web")
    service.take_spec(msgspec.structs.replace(service.spec, kind="file"))

    service._finder = cast("Any", Finder([], found=True))
    await service._bring_up()
    service._finder = cast("Any", Finder([]))
    with pytest.raises(HostError, match="it has no start program"):
        await service._bring_up()


@pytest.mark.parametrize("is_stopped_first", [True, False])
async def test_a_start_waits_while_programs_are_held_and_for_a_stop_program(is_stopped_first: bool) -> None:
    found: list[str] = []
    service, stopped = made("web", calls=found), asyncio.Event()
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service._finder = cast("Any", Finder(found))
    service._stopper = cast("Any", SimpleNamespace(wait=stopped.wait))

    starting = asyncio.create_task(service._bring_up())
    steps: list[Callable[[], None]] = [stopped.set, service._shared.may_start.set]
    for ready in (lambda: None, *(steps if is_stopped_first else reversed(steps))):
        assert found == []
        ready()
        for _ in range(10):
            await asyncio.sleep(0)
    await starting

    assert found == ["run Started", "arrival"]
    assert service._stopper is None


@pytest.mark.parametrize(
    ("is_there", "is_at_work", "calls"),
    [(True, None, []), (False, True, ["arrival"]), (False, False, ["run Started", "arrival"])],
)
async def test_nothing_is_started_beside_what_is_there(
    is_there: bool, is_at_work: bool | None, calls: list[str]
) -> None:
    """A process, or a start program that is still at work."""
    found: list[str] = []
    service = made("web", calls=found)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    finder = Finder(found, found=is_there)
    finder.program = None if is_at_work is None else SimpleNamespace(is_alive=is_at_work)
    service._finder = cast("Any", finder)
    service._shared.may_start.set()

    await service._bring_up()

    assert found == calls


@pytest.mark.parametrize(("begun", "reason"), [(0, "cannot end 9 (web)"), (50, "cannot end 9 (web), 8 (orphan)")])
async def test_a_stop_that_leaves_a_process_says_which(begun: int, reason: str) -> None:
    """The service is stuck then, and nothing is dismissed."""
    found: list[str] = []
    events: list[Event] = []
    service = made("web", calls=found, notify=events.append, left=[Left(9, 90, "web")])
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service.record.state, service.record.traces.begun = State.STOPPING, begun

    await service._end()

    assert (service.state, service.record.reason, found) == (State.STUCK, reason, [])
    assert [(event.event, event.description) for event in events] == [("Execution failed", "failed to stop")]


@pytest.mark.parametrize(
    ("traces", "state", "is_one_of_all", "left"),
    [
        (ProcessRecord(begun=50), State.STOPPING, False, ["8 (orphan)"]),
        (ProcessRecord(begun=50), State.STOPPING, True, []),
        (ProcessRecord(begun=50), State.BOUNCING, False, []),
        (ProcessRecord(begun=50, is_caged=True), State.STOPPING, False, []),
        (ProcessRecord(), State.STOPPING, False, []),
        (ProcessRecord(is_guest=True), State.STOPPING, False, ["7 (guest)"]),
    ],
)
async def test_what_may_remain_of_a_service_without_proof(
    monkeypatch: pytest.MonkeyPatch, traces: ProcessRecord, state: State, is_one_of_all: bool, left: list[str]
) -> None:
    """A guest, and orphans of any job, which are ended once all jobs are stopped."""
    service = made("web")
    monkeypatch.setattr(services, "left", lambda found: [Left(pid, start, "guest") for pid, start in found])
    service.record.traces, service.record.state = traces, state
    service._stop = StopRequest(is_one_of_all=is_one_of_all)
    service._finder.process = cast("Any", SimpleNamespace(pid=7, identity=(7, 70), is_alive=True))

    assert [str(each) for each in await service._unproven_left()] == left


@pytest.mark.parametrize(
    ("changes", "is_guest", "sent"),
    [({"start": CTL}, False, ["SIGTERM"]), ({"start": CTL}, True, []), ({}, False, [])],
)
async def test_without_a_stop_program_a_process_of_ours_gets_a_signal(
    changes: dict[str, Any], is_guest: bool, sent: list[str]
) -> None:
    service, found = made("web"), list[str]()
    service.take_spec(msgspec.structs.replace(service.spec, **changes))
    service.record.traces.is_guest = is_guest
    ended = asyncio.Event()
    ended.set()
    service._finder.process = cast(
        "Any", SimpleNamespace(send=lambda sig: found.append(sig.name), wait=ended.wait, pid=7)
    )

    await service._run_stop()

    assert found == sent


@pytest.mark.parametrize("has_process", [True, False])
async def test_a_start_program_at_work_is_ended_by_a_stop(has_process: bool) -> None:
    """Where it has brought a process, that is stopped."""
    service, found = made("web"), list[str]()

    async def terminate(_: float) -> None:
        found.append("terminate")

    ended = asyncio.Event()
    ended.set()
    service._finder.program = cast("Any", SimpleNamespace(terminate=terminate))
    if has_process:
        service._finder.process = cast("Any", SimpleNamespace(wait=ended.wait, pid=7))

    await service._run_stop()

    assert found == ([] if has_process else ["terminate"])


class NoCalls(list[str]):
    """No program can run."""

    def append(self, called: str, /) -> None:
        if called.startswith("run "):
            raise HostError(f"cannot {called}")


class Programs:
    """Programs of services, none of which leaves a process; ``calls`` are those with an effect."""

    def __init__(self, calls: list[str], left: list[Left]) -> None:
        self._calls = calls
        self._left = left
        self.joined: list[str] = []
        self.ownership = SimpleNamespace(label_of=lambda _: None)

    async def refused_limit(self, _: str) -> str:
        return ""

    async def printed(self, _: str) -> list[str]:
        return ["disk full"]

    async def members(self, *_: object) -> list[Any]:
        return []

    async def sweep(self, *_: object) -> list[Left]:
        return self._left

    async def strays(self, _: int) -> list[Left]:
        return [Left(8, 80, "orphan")]

    async def doubtful(self, _: int) -> str:
        return ""

    async def clear(self, *_: object) -> None:
        self._calls.append("clear")

    async def dismiss(self, _: ProcessSpec) -> None:
        self._calls.append("dismiss")

    async def run(self, *called: object, **_: object) -> Any:
        self._calls.append(f"run {called[2]}")
        return SimpleNamespace(wait=self._exited, identity=(7, 70), pid=7, is_caged=bool(self.joined))

    async def _exited(self) -> int:
        return 0


def made(
    name: str,
    *,
    was_oom: bool = False,
    notify: Callable[[Event], None] = lambda _: None,
    calls: list[str] | None = None,
    changed: Callable[[], None] = lambda: None,
    left: list[Left] | None = None,
) -> Service:
    shared = ServiceContext(
        base=Path("/"),
        programs=cast("Any", Programs([] if calls is None else calls, left or [])),
        bpm=cast("Any", None),
        restarts=TokenBucket(1, 1),
        timing=Timing(),
        notify=notify,
        changed=changed,
        was_oom=lambda: was_oom,
        may_start=asyncio.Event(),
        launches=LaunchQueue(),
        failed=lambda _, bug: bugs.append(bug),
    )
    return Service(ProcessSpec(name=name, job=name), shared)
