"""The states of a service and the moves between them, as data. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final


class State(enum.Enum):
    """Where a service is; the value is what people are shown."""

    STOPPED = "stopped"
    """Nothing of it runs, and nothing shall."""
    STARTING = "starting"
    """Wanted, and not known to be there yet."""
    RUNNING = "running"
    DOWN = "down"
    """It ended by itself or could not be started, and shall be tried again."""
    RESTARTING = "restarting"
    SETTLING = "settling"
    """There again, and not trusted yet."""
    STOPPING = "stopping"
    UNMONITORED = "unmonitored"
    """Left to itself, dead or alive."""
    BROKEN = "broken"
    """Its file cannot be used."""


class Trigger(enum.Enum):
    """What happens to a service."""

    START_ASKED = "start asked"
    APPEARED = "appeared"
    """Its process is known to live, and the start program is through."""
    FAILED = "failed"
    """The start program has brought no process."""
    DIED = "died"
    """The process ended though nobody asked."""
    RETRIED = "retried"
    """It is time for another start."""
    SETTLED = "settled"
    STOP_ASKED = "stop asked"
    EMPTIED = "emptied"
    """Nothing of it lives any more."""
    STUCK = "stuck"
    """Something of it cannot be ended."""
    UNMONITOR_ASKED = "unmonitor asked"


_ENDED: Final = {Trigger.STOP_ASKED: State.STOPPING, Trigger.UNMONITOR_ASKED: State.UNMONITORED}

NEXT: Final[Mapping[State, Mapping[Trigger, State]]] = MappingProxyType(
    {
        State.STOPPED: {Trigger.START_ASKED: State.STARTING, Trigger.STOP_ASKED: State.STOPPING},
        State.STARTING: {Trigger.APPEARED: State.RUNNING, Trigger.FAILED: State.DOWN, **_ENDED},
        State.RUNNING: {Trigger.DIED: State.DOWN, **_ENDED},
        State.DOWN: {
            Trigger.RETRIED: State.RESTARTING,
            Trigger.START_ASKED: State.RESTARTING,
            Trigger.APPEARED: State.SETTLING,
            **_ENDED,
        },
        State.RESTARTING: {Trigger.APPEARED: State.SETTLING, Trigger.FAILED: State.DOWN, **_ENDED},
        State.SETTLING: {Trigger.SETTLED: State.RUNNING, Trigger.DIED: State.DOWN, **_ENDED},
        State.STOPPING: {Trigger.EMPTIED: State.STOPPED, Trigger.STUCK: State.UNMONITORED},
        State.UNMONITORED: {Trigger.START_ASKED: State.STARTING, Trigger.STOP_ASKED: State.STOPPING},
        State.BROKEN: {},
    }
)
"""Where each trigger leads; one that a state does not list is ignored there."""

MOVES: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {state: frozenset(moves.values()) for state, moves in NEXT.items()}
)
"""The states that can follow each state."""

MONITORED: Final = frozenset(State) - {State.STOPPED, State.STOPPING, State.UNMONITORED}
"""What monit would show with a monitor flag other than 0."""
UP: Final = frozenset({State.RUNNING, State.SETTLING})
"""Its process lives and is watched."""

ACTIVE: Final = UP | {State.STARTING, State.RESTARTING}
"""Up, or on its way up."""

_REPORTED: Final = {
    State.STARTING: "starting",
    State.SETTLING: "starting",
    State.RUNNING: "running",
    State.DOWN: "failing",
    State.RESTARTING: "failing",
    State.BROKEN: "failing",
}


def after(state: State, trigger: Trigger) -> State:
    """The state that ``trigger`` leads to."""
    return NEXT[state].get(trigger, state)


def reported(state: State, *, fails_a_check: bool = False) -> str:
    """What the Director is told of a process (jobsupervisor/monit/status.go): starting, running, failing, unknown."""
    if state is State.RUNNING and fails_a_check:
        return "failing"
    return _REPORTED.get(state, "unknown")


def job_state(processes: Iterable[str], *, is_stopped: bool) -> str:
    """The state of the instance from those of its processes, in order (jobsupervisor/monit_job_supervisor.go).

    One that starts outweighs one that fails; without processes all is well.
    """
    if is_stopped:
        return "stopped"
    found = set(processes)
    if "starting" in found:
        return "starting"
    return "running" if found <= {"running"} else "failing"


def mermaid() -> str:
    """The moves as a diagram for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STOPPED.value}"]
    for state, moves in NEXT.items():
        lines += [f"    {state.value} --> {target.value}: {trigger.value}" for trigger, target in moves.items()]
    lines.append(f"    [*] --> {State.BROKEN.value}: its file cannot be used")
    return "\n".join(lines) + "\n"
