"""Tests a service's decisions over minutes of simulated time.

``integration/test_supervisor_service.py`` runs real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest
from msgspec.structs import replace

from agent_shim.core.errors import HostError
from agent_shim.supervisor.bpm.calls import BpmCall
from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.event_kinds import RESOURCE, Complaint
from agent_shim.supervisor.monit.ast import ALERT, Action, Connection, Limit, MonitProgram, Rule
from agent_shim.supervisor.ownership.ending import Code, Ending, Signal
from agent_shim.supervisor.ownership.keepers import Left
from agent_shim.supervisor.ownership.process_finder import Named
from agent_shim.supervisor.plan import ProcessSpec, RestartLimit
from agent_shim.supervisor.service import Event, Service, ServiceRecord, StopRequest
from agent_shim.supervisor.state import State, Trigger
from tests.support.played import SPEC, START_TAKES, TIMING, PlayedPrograms, SimulatedMachine, played, service_on

CTL: Final = MonitProgram(("ctl",))
CALL: Final = BpmCall("start", "web", "web")
STOP_S: Final = 30
"""Timeout of the stop program."""


@contextlib.asynccontextmanager
async def running(*services: Service) -> AsyncIterator[None]:
    """Run the services for the duration of the block."""
    tasks = [asyncio.create_task(service.run()) for service in services]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start_and_wait(*services: Service) -> None:
    """Start the services and wait until they are running."""
    for service in services:
        service.start()
        await service.wait_to_leave(frozenset(State) - {State.RUNNING})


@contextlib.asynccontextmanager
async def started(machine: SimulatedMachine, spec: ProcessSpec = SPEC, **members: Any) -> AsyncIterator[Service]:
    """Run a service for the duration of the block, which begins once the service is up."""
    service = service_on(machine, spec, **members)
    async with running(service):
        await start_and_wait(service)
        yield service


def gaps(times: list[float], took: float = 0.0) -> list[float]:
    return [round(later - earlier - took, 3) for earlier, later in itertools.pairwise(times)]


# --- delays -----------------------------------------------------------------------------------------------------------


@played
async def test_restart_delay_is_at_most_a_second_in_the_minute_after_a_start_request() -> None:
    machine = SimulatedMachine(how_starts="not")
    service = service_on(machine)
    async with running(service):
        service.start()
        await asyncio.sleep(TIMING.eager)
        found = gaps(machine.starts, START_TAKES["not"])
        await asyncio.sleep(60)

    assert found[:4] == [0.5, 1.0, 1.0, 1.0]
    assert set(found[4:]) == {1.0}
    assert gaps(machine.starts, START_TAKES["not"])[-1] == TIMING.backoff_limit


@played
async def test_first_restart_is_immediate_and_later_delays_double_up_to_a_limit() -> None:
    async with started(machine := SimulatedMachine()):
        await asyncio.sleep(TIMING.eager)
        machine.how_starts = "not"
        died_at = asyncio.get_running_loop().time()
        machine.end()
        await asyncio.sleep(60)

    assert machine.starts[1] == died_at
    assert gaps(machine.starts[1:], START_TAKES["not"])[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@played
async def test_consecutive_crashes_lengthen_the_restart_delay() -> None:
    async with started(machine := SimulatedMachine()):
        for _ in range(4):
            machine.end()
            await asyncio.sleep(1.001)
        await asyncio.sleep(TIMING.backoff_limit + 10)
        machine.end()  # This counts as a first failure, because the service ran for a long time.
        await asyncio.sleep(0)
        died_at = asyncio.get_running_loop().time()
        await asyncio.sleep(1)

    assert [round(at, 3) for at in machine.starts[:4]] == [0.0, 0.0, 1.501, 3.002]
    assert machine.starts[-1] == died_at


@played
async def test_process_that_appears_after_the_start_timeout_is_adopted() -> None:
    """The start program takes 45 seconds, but its timeout is 30 seconds. The service fails at the timeout, and counts
    as running once the process appears. No second start program runs.
    """
    machine = SimulatedMachine(how_starts="late")
    service = service_on(machine)
    async with running(service):
        service.start()
        await asyncio.sleep(44)
        assert (service.state, service.retry_at) == (State.DOWN, None)
        await asyncio.sleep(START_TAKES["late"] - 44 + TIMING.look)
        assert service.state is State.SETTLING
        await asyncio.sleep(60)

    assert machine.starts == [0.0]


@played
async def test_restart_waits_a_cycle_after_a_start_program_that_exceeded_its_timeout() -> None:
    """If a start program exits after its timeout, its daemon may still appear during the next cycle."""
    machine = SimulatedMachine(how_starts="late")
    service = service_on(machine)
    async with running(service):
        service.start()
        await asyncio.sleep(40.5)
        machine.how_starts = "not"
        assert machine.starter is not None
        machine.starter.end()
        await asyncio.sleep(15)

    first, second = gaps(machine.starts)[:2]
    assert 40.5 + TIMING.cycle - TIMING.look <= first <= 40.5 + TIMING.cycle + TIMING.look
    assert second == START_TAKES["not"] + 1.0


@pytest.mark.parametrize(("is_restarted", "seconds"), [(True, 0.5), (False, None)])
@played
async def test_retry_time_is_reported_only_while_a_restart_is_pending(
    is_restarted: bool, seconds: float | None
) -> None:
    machine = SimulatedMachine(how_starts="not")
    service = service_on(machine, replace(SPEC, stop=SPEC.stop if is_restarted else None))
    async with running(service):
        service.start()
        assert service.retry_at is None
        await service.wait_to_leave(frozenset({State.STARTING}))
        await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time()
        assert service.retry_at == (None if seconds is None else pytest.approx(now - 0.1 + seconds))


@played
async def test_all_services_share_a_restart_budget() -> None:
    async with started(machine := SimulatedMachine(), restarts=TokenBucket(1, 1 / 100)):
        for _ in range(2):
            await asyncio.sleep(TIMING.backoff_limit + 1)
            machine.end()
        await asyncio.sleep(100)

    assert len(machine.starts) == 3
    assert machine.starts[1] == 11
    assert machine.starts[2] > 100


@pytest.mark.parametrize(
    ("count", "life", "state"),
    [
        pytest.param(2, TIMING.cycle + 1, State.UNMONITORED, id="limit reached"),
        pytest.param(3, TIMING.cycle + 1, State.SETTLING, id="requested start is not counted"),
        pytest.param(2, TIMING.cycle - 1, State.SETTLING, id="two restarts in one cycle count once"),
        pytest.param(2, TIMING.cycle * 11, State.SETTLING, id="older restarts are not counted"),
    ],
)
@played
async def test_restart_limit_counts_restarts_in_different_cycles(count: int, life: float, state: State) -> None:
    """Several restarts within one cycle count once, because monit restarts at most once per cycle."""
    events: list[Event] = []
    spec = replace(SPEC, limits=(RestartLimit(count, 10, Action("unmonitor")),))
    async with started(machine := SimulatedMachine(), spec, notify=events.append) as service:
        for _ in range(2):
            await asyncio.sleep(life)
            machine.end()
        await asyncio.sleep(1)
        assert service.state is state

    told = [(each.event, each.action) for each in events if each.event == "Timeout"]
    assert told == [("Timeout", "unmonitor")] * (state is State.UNMONITORED)


def test_settling_times_are_shorter_than_a_monit_cycle() -> None:
    """A restarted service must be reported as running no later than with monit, which checks once per cycle."""
    assert TIMING.eager_limit + TIMING.settle < TIMING.cycle
    assert TIMING.backoff_limit <= TIMING.cycle


# --- exits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "was_oom", "by_limit", "killer"),
    [
        (Code(1), True, False, ""),
        (Signal(signal.SIGKILL), False, False, ""),
        (Signal(signal.SIGKILL), True, False, "by the kernel because memory ran out"),
        (Signal(signal.SIGKILL), False, True, "because it exceeded its memory limit"),
    ],
)
@played
async def test_out_of_memory_kill_is_counted_and_reported_as_the_exit_reason(
    how: Ending, was_oom: bool, by_limit: bool, killer: str
) -> None:
    events: list[Event] = []
    bpm: Any = SimpleNamespace(was_killed_for_memory=lambda _: by_limit, start=None, last_output=no_output)
    spec = replace(SPEC, start_call=CALL)
    service = service_on(
        machine := SimulatedMachine(how_ends=how), spec, was_oom=lambda: was_oom, notify=events.append, bpm=bpm
    )
    machine.appear()
    async with running(service):
        await start_and_wait(service)
        bpm.start = never
        machine.end()
        await service.wait_to_leave(frozenset({State.RUNNING}))

    record = service.record
    assert (record.oom_kills, sum(record.exits.values())) == (bool(killer), 1)
    assert record.last_exit == (f"{how}, out of memory" if killer else str(how))
    killed = f"the process was killed {killer} ({how})"
    assert record.reason == (killed if killer else f"the process exited unexpectedly: {how}")
    assert [event.description.partition(": ")[2] for event in events] == [f"killed {killer}" if killer else ""]


async def no_output(_: BpmCall) -> str:
    return ""


async def never(_: BpmCall) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("is_restarted", "before", "starts"),
    [(True, "up", 2), (True, "stopped", 1), (True, "unmonitored", 2), (False, "up", 1)],
)
@pytest.mark.parametrize("by", ["death", "request"])
@played
async def test_dependents_restart_with_their_service_unless_they_are_stopped(
    is_restarted: bool, before: str, starts: int, by: str
) -> None:
    service = service_on(machine := SimulatedMachine(), SPEC if is_restarted else replace(SPEC, stop=None))
    dependant = service_on(other := SimulatedMachine())
    service.dependants, dependant.prerequisites = [dependant], [service]
    async with running(service, dependant):
        await start_and_wait(service, dependant)
        {"stopped": dependant.stop, "unmonitored": dependant.unmonitor}.get(before, lambda: None)()
        await asyncio.sleep(1)
        if by == "death":
            machine.end()
        elif is_restarted:
            service.bounce()
        await asyncio.sleep(30)

    assert len(other.starts) == starts
    assert service.state is (State.RUNNING if is_restarted or by == "request" else State.DOWN)


@played
async def test_service_is_failing_as_soon_as_its_process_exits() -> None:
    async with started(machine := SimulatedMachine()) as service:
        assert service.reported == "running"
        machine.end()
        assert service.reported == "failing"


@pytest.mark.parametrize(
    ("trigger", "are_kept"), [(Trigger.DIED, False), (Trigger.UNMONITOR_ASKED, False), (Trigger.RESTART_ASKED, True)]
)
@played
async def test_rule_failures_are_cleared_by_an_exit_but_kept_during_a_requested_restart(
    trigger: Trigger, are_kept: bool
) -> None:
    async with started(SimulatedMachine()) as service:
        service.complaints[0] = Complaint(RESOURCE, "too much")
        service.on(trigger)
        assert bool(service.complaints) is are_kept


@played
async def test_rule_failures_are_cleared_when_the_monit_file_changes_its_rules() -> None:
    async with started(SimulatedMachine()) as service:
        service.complaints[0] = Complaint(RESOURCE, "too much")
        service.take_spec(replace(SPEC, every=2))
        assert (list(service.complaints), service.spec.every) == ([0], 2)
        service.take_spec(replace(SPEC, rules=(Rule(Limit("memory", ">", 5), ALERT),)))
        assert service.complaints == {}


# --- requests and reactions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "after"),
    [({}, 2), ({"stop": None}, 1), ({"start": None}, 0), ({"mode": "passive"}, 1)],
)
@played
async def test_rules_restart_only_active_services_with_start_and_stop_programs(
    changes: dict[str, Any], after: int
) -> None:
    """As in monit, a rule's ``restart`` action has no effect if the service lacks a start or stop program or is in
    passive mode.
    """
    service = service_on(machine := SimulatedMachine(), replace(SPEC, **changes))
    if not service.spec.start:
        machine.appear()
    async with running(service):
        await start_and_wait(service)
        machine.how_stops = "well"
        await service.react(Action("restart"), "Timeout", "too often")
        await asyncio.sleep(1)

    assert len(machine.starts) == after
    assert service.record.restarts == (after == 2)


@pytest.mark.parametrize("event", ["Timeout", "Stopped"])
@played
async def test_program_that_cannot_run_is_reported(event: str) -> None:
    events: list[Event] = []
    async with started(machine := SimulatedMachine(refuses=event), notify=events.append) as service:
        await service.react(Action("exec", CTL), "Timeout", "too often")
        service.stop()
        await service.wait_to_leave(frozenset({State.STOPPING}))

    assert [(each.event, each.action, each.description) for each in events] == [
        ("Execution failed", "alert", f"cannot run {event}")
    ]
    assert not machine.is_there


@pytest.mark.parametrize(("kind", "starts"), [("file", 2), ("process", 1)])
@played
async def test_rule_start_action_runs_the_start_program_only_for_a_path(
    kind: Literal["file", "process"], starts: int
) -> None:
    async with started(machine := SimulatedMachine(), replace(SPEC, kind=kind)) as service:
        process, machine.process = machine.process, None
        await service.react(Action("start"), "Timeout", "too often")
        machine.process = process

    assert len(machine.starts) == starts


@played
async def test_limit_that_the_container_refused_is_reported_after_a_restart_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlayedPrograms, "refused_limit", lambda *_: asyncio.sleep(0, "ulimit: cannot modify limit"))
    async with started(machine := SimulatedMachine()) as service:
        await asyncio.sleep(1)
        before = service.record.reason
        machine.end()
        await service.wait_to_leave(frozenset({State.RUNNING}))
        await start_and_wait(service)
        await asyncio.sleep(1)

        assert service.record.reason == before
        assert before.endswith("ulimit: cannot modify limit")


@played
async def test_path_without_programs_is_monitored_and_restarts_its_dependents() -> None:
    service = service_on(machine := SimulatedMachine(), replace(SPEC, kind="file", start=None, stop=None))
    dependant = service_on(other := SimulatedMachine())
    service.dependants, dependant.prerequisites = [dependant], [service]
    async with running(service, dependant):
        service.start()
        await asyncio.sleep(1)
        assert (service.state, service.record.reason) == (
            State.DOWN,
            "file doesn't exist: it has no start program (disk full)",
        )
        machine.appear()
        await start_and_wait(dependant)
        await asyncio.sleep(TIMING.settle + 2)
        assert (service.state, service.record.reason) == (State.RUNNING, "")
        await service.react(Action("restart"), "Size failed", "too large")
        await asyncio.sleep(1)

    assert len(other.starts) == 2


@pytest.mark.parametrize(("is_checked", "reported"), [(False, "starting"), (True, "running")])
@played
async def test_path_with_rules_is_reported_as_starting_until_first_checked(is_checked: bool, reported: str) -> None:
    rule = Rule(Limit("size", ">", 5), ALERT)
    service = service_on(machine := SimulatedMachine(), replace(SPEC, kind="file", start=None, rules=(rule,)))
    machine.appear()
    async with running(service):
        await start_and_wait(service)
        service.is_checked = is_checked
        assert service.reported == reported


@pytest.mark.parametrize("is_checked", [False, True])
@played
async def test_new_process_with_a_port_rule_is_reported_as_starting_until_first_checked(is_checked: bool) -> None:
    """After two cycles without a check, the process counts as running, because it may have been started by an earlier
    agent.
    """
    service = service_on(machine := SimulatedMachine(), replace(SPEC, rules=(Rule(Connection(port=1), ALERT),)))
    machine.appear()
    async with running(service):
        await start_and_wait(service)
        service.is_checked = is_checked
        assert service.reported == ("running" if is_checked else "starting")
        await asyncio.sleep(2 * TIMING.cycle)
        assert service.reported == "running"


@pytest.mark.parametrize("is_resumed", [False, True])
@played
async def test_stop_program_runs_once_and_only_if_the_service_was_started(is_resumed: bool) -> None:
    for state, programs in ((State.STOPPED, 0), (State.RUNNING, 1), (State.UNMONITORED, 1)):
        service = service_on(machine := SimulatedMachine(how_starts="not"))
        if is_resumed:
            service.resume(ServiceRecord(state=state), is_same_container=True)
        elif programs:
            service.start()
        async with running(service):
            await asyncio.sleep(0.2)
            for _ in range(2):  # The second stop finds nothing to stop.
                service.stop()
                await asyncio.sleep(3)
        assert service.state is State.STOPPED
        assert [event for _, event in machine.ran if event == "Stopped"] == ["Stopped"] * programs


@played
async def test_process_without_a_stop_program_receives_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_on(machine := SimulatedMachine(), replace(SPEC, stop=None))
    sent: list[int] = []
    async with running(service):
        await start_and_wait(service)
        assert machine.process is not None
        monkeypatch.setattr(machine.process, "send", sent.append)
        service.stop()
        await asyncio.sleep(TIMING.stop + 1)

    assert (service.state, sent) == (State.STOPPED, [signal.SIGTERM])


@played
async def test_path_whose_start_program_cannot_run_is_reported_as_missing() -> None:
    events: list[Event] = []
    service = service_on(SimulatedMachine(refuses="Started"), replace(SPEC, kind="file"), notify=events.append)
    async with running(service):
        service.start()
        await service.wait_to_leave(frozenset({State.STARTING}))

    assert service.record.reason == "file doesn't exist: cannot run Started (disk full)"
    assert [each.event for each in events] == ["Does not exist"]


@pytest.mark.parametrize(("changes", "named"), [({}, Named.NONE), ({"start_call": CALL}, Named.WATCHED)])
@played
async def test_running_service_is_treated_as_missing_if_its_pidfile_names_no_process(
    changes: dict[str, Any], named: Named
) -> None:
    """monit does the same, although the process is running. A bpm process's pidfile is not checked, because the agent
    writes the file itself.
    """
    service = service_on(machine := SimulatedMachine(), replace(SPEC, **changes))
    machine.appear()
    async with running(service):
        await start_and_wait(service)
        assert service.compare_with_pidfile() is named
        service.unmonitor()
        assert service.compare_with_pidfile() is Named.WATCHED


@pytest.mark.parametrize("ask", ["stop", "restart"])
@played
async def test_stop_and_restart_fail_if_processes_of_a_killed_keeper_may_remain(ask: str) -> None:
    """Without the keeper, nothing proves which service the remaining processes belong to.

    They are therefore listed but not signalled. A restart fails as well, because it could start a second instance.
    """
    async with started(SimulatedMachine(orphans=[Left(8, 80, "orphan")])) as service:
        if ask == "stop":
            service.stop()
        else:
            service.bounce()
        await asyncio.sleep(1)

    assert service.state is State.STUCK
    assert service.record.reason == "cannot end 8 (orphan)"


@played
async def test_service_whose_keeper_was_killed_is_reported_as_failing_with_the_reason() -> None:
    """The reason and an alert list the processes that may belong to the service."""
    orphans, told = [Left(8, 80, "orphan")], list[Event]()
    async with started(SimulatedMachine(orphans=orphans), notify=told.append) as service:
        service.lose_keeper(orphans)

        why = "the keeper of its processes was killed, these may be its processes: 8 (orphan)"
        assert (service.reported, [each.text for each in service.complaints.values()]) == ("failing", [why])
        assert why in [each.description for each in told]


@played
async def test_stop_deadline_does_not_apply_to_later_restarts() -> None:
    """If the expired deadline still applied, a later restart would kill the processes without a grace period."""
    async with started(machine := SimulatedMachine()) as service:
        service.stop(StopRequest(by=asyncio.get_running_loop().time()))
        await asyncio.sleep(1)
        await start_and_wait(service)
        service.bounce()
        await asyncio.sleep(1)

    assert machine.graces == [0.0, TIMING.grace]


@played
async def test_start_waits_until_a_hanging_stop_program_is_terminated() -> None:
    """If the service started before the stop program had exited, the stop program would stop the new process."""
    async with started(machine := SimulatedMachine(how_stops="hangs")) as service:
        service.stop()
        await asyncio.sleep(1)
        service.take_spec(ProcessSpec(name="web", job="web", error="line 1"))
        machine.end()
        service.take_spec(SPEC)
        service.start()
        await asyncio.sleep(STOP_S + 1)

    assert service.state is State.RUNNING
    assert gaps(machine.starts) == [1 + STOP_S]


@played
async def test_exit_in_the_same_event_loop_iteration_as_a_stop_is_not_reported() -> None:
    events: list[Event] = []
    async with started(machine := SimulatedMachine(), notify=events.append) as service:
        machine.end()
        service.stop()
        await asyncio.sleep(1)

    assert (service.state, service.record.exits, events) == (State.STOPPED, {}, [])


@pytest.mark.parametrize("by", [5.0, float("inf")])
@played
async def test_bpm_stop_uses_the_earlier_of_the_request_and_monit_file_deadlines(by: float) -> None:
    asked: list[float] = []

    async def stop(_: BpmCall, by: float) -> None:
        asked.append(by)
        raise HostError("cannot stop")

    bpm = SimpleNamespace(stop=stop)
    events: list[Event] = []
    service = service_on(machine := SimulatedMachine(), replace(SPEC, stop_call=CALL), bpm=bpm, notify=events.append)
    machine.appear()
    async with running(service):
        await start_and_wait(service)
        service.stop(StopRequest(by))
        await asyncio.sleep(1)

    assert asked == [min(by, STOP_S)]
    assert [each.description for each in events] == ["cannot stop"]
    assert not machine.is_there


@played
async def test_explicit_start_clears_the_record_that_the_service_was_stopped_with_its_dependency() -> None:
    """Otherwise, a later start of the service on which it depends would also start this service."""
    service = service_on(SimulatedMachine())
    service.record.was_taken_along = True
    service.start()

    assert not service.record.was_taken_along
