"""Every trigger in every state."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.state import (
    MONITORED,
    MOVES,
    NEXT,
    State,
    Trigger,
    after,
    job_state,
    mermaid,
    reported,
)

# A column for each trigger in the order of the class: start, appeared, failed, died, retried, settled, stop, emptied,
# stuck, unmonitor. A dot is a trigger that changes nothing.
TABLE = """
stopped      starting   .        .    .    .          .       stopping .       .           .
starting     .          running  down .    .          .       stopping .       .           unmonitored
running      .          .        .    down .          .       stopping .       .           unmonitored
down         restarting settling .    .    restarting .       stopping .       .           unmonitored
restarting   .          settling down .    .          .       stopping .       .           unmonitored
settling     .          .        .    down .          running stopping .       .           unmonitored
stopping     .          .        .    .    .          .       .        stopped unmonitored .
unmonitored  starting   .        .    .    .          .       stopping .       .           .
broken       .          .        .    .    .          .       .        .       .           .
"""
EXPECTED = [
    (State(name), trigger, State(name if target == "." else target))
    for name, *targets in (line.split() for line in TABLE.strip().splitlines())
    for trigger, target in zip(Trigger, targets, strict=True)
]


@pytest.mark.parametrize(("state", "trigger", "target"), EXPECTED)
def test_where_a_trigger_leads(state: State, trigger: Trigger, target: State) -> None:
    """The table above, cell by cell."""
    assert after(state, trigger) is target


def test_table_is_complete() -> None:
    """Every state and every trigger is in it, in both directions."""
    assert {(state, trigger) for state, trigger, _ in EXPECTED} == {(s, t) for s in State for t in Trigger}
    assert set(NEXT) == set(MOVES) == set(State)
    assert {trigger for moves in NEXT.values() for trigger in moves} == set(Trigger)


def test_every_state_can_be_reached() -> None:
    """From a stopped service; a broken one is made, not reached."""
    reached = {State.STOPPED}
    while more := {target for state in reached for target in MOVES[state]} - reached:
        reached |= more

    assert reached == set(State) - {State.BROKEN}


def test_every_state_leads_back_to_stopped() -> None:
    """Stop means stopped, from wherever it is asked."""
    for state in set(State) - {State.BROKEN}:
        assert after(after(state, Trigger.STOP_ASKED), Trigger.EMPTIED) is State.STOPPED


def test_way_to_running_after_a_death_leads_through_settling() -> None:
    """A restart in milliseconds does not hide a crash loop."""
    assert {state for state in State if State.RUNNING in MOVES[state]} == {State.STARTING, State.SETTLING}
    assert {state for state in State if State.STARTING in MOVES[state]} == {State.STOPPED, State.UNMONITORED}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (State.STOPPED, "unknown"),
        (State.STARTING, "starting"),
        (State.RUNNING, "running"),
        (State.DOWN, "failing"),
        (State.RESTARTING, "failing"),
        (State.SETTLING, "starting"),
        (State.STOPPING, "unknown"),
        (State.UNMONITORED, "unknown"),
        (State.BROKEN, "failing"),
    ],
)
def test_what_is_reported(state: State, text: str) -> None:
    """Only the four words that monit's flags can make."""
    assert reported(state) == text
    assert (text == "unknown") is (state not in MONITORED)


def test_failed_check_makes_a_running_process_failing() -> None:
    """And changes nothing of what is said of the others."""
    assert reported(State.RUNNING, fails_a_check=True) == "failing"
    assert reported(State.STARTING, fails_a_check=True) == "starting"
    assert reported(State.UNMONITORED, fails_a_check=True) == "unknown"


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([], "running"),
        (["running", "running"], "running"),
        (["running", "failing"], "failing"),
        (["failing", "starting"], "starting"),
        (["starting", "unknown"], "starting"),
        (["unknown", "running"], "failing"),
    ],
)
def test_job_state(processes: list[str], text: str) -> None:
    """As the Go agent folds them (jobsupervisor/monit_job_supervisor.go)."""
    assert job_state(processes, is_stopped=False) == text
    assert job_state(processes, is_stopped=True) == "stopped"


def test_diagram_shows_every_move() -> None:
    """One line for each, readable by mermaid."""
    lines = mermaid().splitlines()

    assert lines[0] == "stateDiagram-v2"
    assert "    down --> settling: appeared" in lines
    assert len(lines) == 3 + sum(len(moves) for moves in NEXT.values())
