"""Decisions of a service alone: the wait before a restart, the dependants that restart with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent_shim.core.errors import HostError
from agent_shim.supervisor import service as services
from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.event_kinds import RESOURCE, Complaint
from agent_shim.supervisor.ownership import Left
from agent_shim.supervisor.plan import ProcessSpec, Program, Reaction
from agent_shim.supervisor.process_finder import Timing
from agent_shim.supervisor.process_record import ProcessRecord
from agent_shim.supervisor.service import Event, Record, Service, ServiceContext, StopRequest
from agent_shim.supervisor.state import Effect, State, Trigger
from agent_shim.supervisor.supervisor import SCHEMA, read_saved

CTL = Program(("ctl",))


@pytest.mark.parametrize(
    ("failures", "delay_s"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (7, 16.0), (8, 30.0), (99999, 30.0)]
)
async def test_the_first_restart_comes_at_once_and_each_next_after_twice_the_time(
    failures: int, delay_s: float
) -> None:
    """Half a second before the second, thirty at most."""
    service = made("web")
    service.record.failures = failures

    assert service._delay() == delay_s


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
    }
    document = {"schema": SCHEMA, "incarnation": "", "is_wanted": True, "files": [], "services": services}
    (tmp_path / "supervisor.json").write_bytes(msgspec.json.encode(document))

    saved = read_saved(tmp_path / "supervisor.json")

    assert saved is not None
    bounced = saved.services["bounced"]
    assert (bounced.state, saved.services["stopped"].state) == (State.BOUNCING, State.STOPPING)
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

    service.on(Trigger.EMPTIED)

    assert (service.state, service._has_lived, service._stopper) == (State.STOPPED, False, None)
    assert service.record.traces == ProcessRecord()


@pytest.mark.parametrize(("state", "is_stopped"), [(State.RUNNING, True), (State.STOPPED, False)])
async def test_only_a_service_that_was_started_is_stopped_by_its_program(state: State, is_stopped: bool) -> None:
    """Also one that an earlier agent started, and whose process is gone. Its cgroup is removed in any case."""
    calls: list[str] = []
    service = made("web", calls=calls)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))

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
    assert [(event.event, event.action) for event in events] == [("Execution failed", "alert")] * 2


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

    await service.react(Reaction("restart"))

    assert service.state is after
    assert service.record.restarts == (after is State.BOUNCING)


async def test_a_program_that_cannot_run_is_reported() -> None:
    """That of a rule, and a stop program, after which the process is ended without it."""
    events: list[Event] = []
    service = made("web", notify=events.append, calls=NoCalls())
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL, stop=CTL))
    service.record.state = State.RUNNING

    await service.react(Reaction("exec", CTL))
    await service._run_stop()

    assert [(event.event, event.action, event.description) for event in events] == [
        ("Execution failed", "alert", "cannot run Action done"),
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
    assert service.record.failures == 0
    service.on(Trigger.STOP_ASKED)
    assert not service._is_counted


class Finder:
    """Finds nothing unless ``found``; ``calls`` are those with an effect."""

    def __init__(self, calls: list[str], *, found: bool = False) -> None:
        self.process: Any = None
        self.program: Any = None
        self.pid, self.refused = 0, ""
        self._calls, self._found = calls, found

    async def look(self, *_: object) -> bool:
        return self._found

    async def look_at_path(self, _: ProcessSpec) -> bool:
        self._calls.append("look at the path")
        return False

    async def arrival(self, *_: object) -> None:
        self._calls.append("arrival")


@pytest.mark.parametrize(
    ("changes", "state", "begun", "calls"),
    [
        ({}, State.STARTING, 0, ["run Started", "arrival"]),
        ({}, State.RESTARTING, 50, ["clear", "run Started", "arrival"]),
        ({"kind": "file"}, State.STARTING, 50, ["look at the path", "run Started", "arrival"]),
        ({"kind": "file"}, State.RESTARTING, 50, ["look at the path", "run Stopped", "run Started", "arrival"]),
    ],
)
async def test_what_a_start_does_in_turn(changes: dict[str, Any], state: State, begun: int, calls: list[str]) -> None:
    """Remaining processes of the last run are ended first; monit runs the stop program of a check without a process."""
    found: list[str] = []
    service = made("web", calls=found)
    service.take_spec(msgspec.structs.replace(service.spec, **{"start": CTL, "stop": CTL} | changes))
    service.record.state, service.record.traces.begun = state, begun
    service._finder = cast("Any", Finder(found))
    service._shared.may_start.set()

    await service._bring_up()

    assert found == calls
    assert (service.record.traces.program, service.record.traces.begun) == ((7, 70), 70)
    assert not service.record.traces.is_caged


async def test_a_start_waits_while_programs_are_held_and_for_a_stop_program() -> None:
    found: list[str] = []
    service, stopped = made("web", calls=found), asyncio.Event()
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service._finder = cast("Any", Finder(found))
    service._stopper = cast("Any", SimpleNamespace(wait=stopped.wait))

    starting = asyncio.create_task(service._bring_up())
    steps: list[Callable[[], None]] = [lambda: None, stopped.set, service._shared.may_start.set]
    for ready in steps:
        assert found == []
        ready()
        for _ in range(10):
            await asyncio.sleep(0)
    await starting

    assert found == ["run Started", "arrival"]
    assert service._stopper is None


@pytest.mark.parametrize("is_there", [True, False])
async def test_nothing_is_started_beside_what_is_there(is_there: bool) -> None:
    """A process, or a start program that is still at work."""
    found: list[str] = []
    service = made("web", calls=found)
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    finder = Finder(found, found=is_there)
    finder.program = None if is_there else SimpleNamespace(is_alive=True)
    service._finder = cast("Any", finder)
    service._shared.may_start.set()

    await service._bring_up()

    assert found == ([] if is_there else ["arrival"])


async def test_a_stop_that_leaves_a_process_says_which() -> None:
    """The service is stuck then, and nothing is dismissed."""
    found: list[str] = []
    events: list[Event] = []
    service = made("web", calls=found, notify=events.append, left=[Left(9, 90, "web")])
    service.take_spec(msgspec.structs.replace(service.spec, start=CTL))
    service.record.state = State.STOPPING

    await service._end()

    assert (service.state, service.record.reason, found) == (State.STUCK, "cannot end 9 (web)", [])
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
    monkeypatch.setattr(services, "left", lambda identity: Left(identity[0], identity[1], "guest"))
    service.record.traces, service.record.state = traces, state
    service._stop = StopRequest(is_one_of_all=is_one_of_all)
    service._finder.process = cast("Any", SimpleNamespace(identity=(7, 70), is_alive=True))

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

    ownership = SimpleNamespace(label_of=lambda _: None)

    def __init__(self, calls: list[str], left: list[Left]) -> None:
        self._calls = calls
        self._left = left

    async def printed(self, _: str) -> list[str]:
        return ["disk full"]

    async def members(self, *_: object) -> list[Any]:
        return []

    async def sweep(self, *_: object) -> list[Left]:
        return self._left

    async def strays(self, _: int) -> list[Left]:
        return [Left(8, 80, "orphan")]

    async def clear(self, *_: object) -> None:
        self._calls.append("clear")

    async def dismiss(self, _: ProcessSpec) -> None:
        self._calls.append("dismiss")

    async def run(self, *called: object, **_: object) -> Any:
        self._calls.append(f"run {called[2]}")
        return SimpleNamespace(wait=self._exited, identity=(7, 70), pid=7, cgroups=[])

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
    )
    return Service(ProcessSpec(name=name, job=name), shared)
