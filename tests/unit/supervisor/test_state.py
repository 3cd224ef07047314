"""Tests a service's transition for every event in every state."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.state import (
    ACTIVE,
    ENDING,
    MONITORED,
    NEXT,
    UNDERWAY,
    WORK,
    State,
    Trigger,
    Work,
    job_state,
    reported,
)
from tools.pages import mermaid

# Each column is an event, in the order of ``Trigger``: the requests start, stop, restart, unmonitor; appeared, failed,
# died, retried, settled, emptied, stuck; file unusable, file usable, rebooted. A dot means that the event is ignored.
TABLE = """
stopped      starting   stopping bouncing .           .        .    .    .          .       .        .     broken .       .
starting     starting   stopping bouncing unmonitored running  down .    .          .       .        .     broken .       starting
running      .          stopping bouncing unmonitored .        .    down .          .       .        .     broken .       starting
down         restarting stopping bouncing unmonitored settling .    .    restarting .       .        .     broken .       starting
restarting   restarting stopping bouncing unmonitored settling down .    .          .       .        .     broken .       starting
settling     .          stopping bouncing unmonitored .        .    down .          running .        .     broken .       starting
stopping     bouncing   stopping bouncing stopping    .        .    .    .          .       stopped  stuck broken .       stopped
bouncing     .          stopping .        stopping    .        .    .    .          .       starting stuck broken .       starting
unmonitored  starting   stopping bouncing .           .        .    .    .          .       .        .     broken .       .
stuck        starting   stopping bouncing .           .        .    .    .          .       .        .     broken .       unmonitored
broken       .          .        .        .           .        .    .    .          .       .        .     .      stopped .
"""  # noqa: E501 - a table
EXPECTED = [
    (State(name), trigger, None if target == "." else State(target))
    for name, *targets in (line.split() for line in TABLE.strip().splitlines())
    for trigger, target in zip(Trigger, targets, strict=True)
]


@pytest.mark.parametrize(("state", "trigger", "target"), EXPECTED)
def test_state_transition_matches_the_table(state: State, trigger: Trigger, target: State | None) -> None:
    move = NEXT[state].get(trigger)

    assert (move.to if move else None) is target


def test_state_table_is_complete() -> None:
    assert {(state, trigger) for state, trigger, _ in EXPECTED} == {(s, t) for s in State for t in Trigger}
    assert set(NEXT) == set(WORK) == set(State)
    assert {trigger for moves in NEXT.values() for trigger in moves} == set(Trigger)
    assert set(WORK.values()) == set(Work)


def test_state_sets_match_the_work_table() -> None:
    assert {state for state in State if WORK[state] in (Work.LAUNCH, Work.END)} == UNDERWAY
    assert {state for state in State if WORK[state] is Work.END} == ENDING
    assert {state for state in State if WORK[state] in (Work.LAUNCH, Work.WATCH, Work.SETTLE)} == ACTIVE


def test_state_names_shown_to_operators_have_not_changed_since_the_first_release() -> None:
    """States that were added later are shown under older names. For example, an ongoing restart is shown as a stop."""
    shown = {state: state.shown for state in State if state.shown != state.value}

    assert shown == {State.BOUNCING: "stopping", State.STUCK: "unmonitored"}


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
        (State.BOUNCING, "unknown"),
        (State.UNMONITORED, "unknown"),
        (State.STUCK, "unknown"),
        (State.BROKEN, "failing"),
    ],
)
def test_each_state_maps_to_a_process_state_that_the_director_knows(state: State, text: str) -> None:
    """monit's flags can express only four process states."""
    assert reported(state) == text
    assert (text == "unknown") is (state not in MONITORED)


def test_running_process_with_a_failed_check_is_failing() -> None:
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
def test_job_state_combines_process_states_like_the_go_agent(processes: list[str], text: str) -> None:
    """The expected states are those of the Go agent (jobsupervisor/monit_job_supervisor.go)."""
    assert job_state(processes, is_stopped=False) == text
    assert job_state(processes, is_stopped=True) == "stopped"


def test_state_diagram_shows_every_transition() -> None:
    lines = mermaid().splitlines()
    events: dict[tuple[str, str], str] = {}
    for line in lines:
        arrow, _, names = line.strip().partition(": ")
        source, _, target = arrow.partition(" --> ")
        events |= {(source, name): target for name in names.split(", ") if name}

    assert lines[0] == "stateDiagram-v2"
    assert "        down --> restarting: start asked, retried" in lines
    assert "    wanted --> stopping: stop asked" in lines
    for state, moves in NEXT.items():
        for trigger, move in moves.items():
            places = [state.value, *(["wanted"] if state in ACTIVE or state is State.DOWN else []), "[*]"]
            drawn = next((events[at, trigger.value] for at in places if (at, trigger.value) in events), state.value)
            assert drawn == move.to.value, f"{state} {trigger}"
