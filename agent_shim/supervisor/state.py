"""State machine of a service, as data. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final


class State(enum.Enum):
    """State of a service; the value is shown to operators."""

    STOPPED = "stopped"
    """No process runs or should run."""
    STARTING = "starting"
    """Started, and not yet known to run."""
    RUNNING = "running"
    DOWN = "down"
    """Exited or failed to start; due for a retry."""
    RESTARTING = "restarting"
    SETTLING = "settling"
    """Running again, and not yet considered stable."""
    STOPPING = "stopping"
    UNMONITORED = "unmonitored"
    """Ignored, dead or alive."""
    BROKEN = "broken"
    """Its monit file is unusable."""


class Trigger(enum.Enum):
    """An event of a service; the value appears in the log."""

    START_ASKED = "start asked"
    APPEARED = "appeared"
    """The process is alive, and the start program has finished."""
    FAILED = "failed"
    """The start program produced no process."""
    DIED = "died"
    """The process exited without a request."""
    RETRIED = "retried"
    """The next start is due."""
    SETTLED = "settled"
    STOP_ASKED = "stop asked"
    EMPTIED = "emptied"
    """No process of the service is left."""
    STUCK = "stuck"
    """A process of the service cannot be ended."""
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
"""Transitions by trigger; an unlisted trigger has no effect."""

MOVES: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {state: frozenset(moves.values()) for state, moves in NEXT.items()}
)
"""Possible successors of each state."""

MONITORED: Final = frozenset(State) - {State.STOPPED, State.STOPPING, State.UNMONITORED}
"""States with a non-zero monitor flag in monit."""
UP: Final = frozenset({State.RUNNING, State.SETTLING})
"""The process is alive and watched."""

ACTIVE: Final = UP | {State.STARTING, State.RESTARTING}
"""Up or starting."""

_REPORTED: Final = {
    State.STARTING: "starting",
    State.SETTLING: "starting",
    State.RUNNING: "running",
    State.DOWN: "failing",
    State.RESTARTING: "failing",
    State.BROKEN: "failing",
}


def after(state: State, trigger: Trigger) -> State:
    """Return the next state after ``trigger``."""
    return NEXT[state].get(trigger, state)


def reported(state: State, *, fails_a_check: bool = False) -> str:
    """Return the Director's process state (jobsupervisor/monit/status.go): starting, running, failing, unknown."""
    if state is State.RUNNING and fails_a_check:
        return "failing"
    return _REPORTED.get(state, "unknown")


def job_state(processes: Iterable[str], *, is_stopped: bool) -> str:
    """Derive the instance state from its process states (jobsupervisor/monit_job_supervisor.go).

    A starting process takes precedence over a failing one; an instance without processes is running.
    """
    if is_stopped:
        return "stopped"
    found = set(processes)
    if "starting" in found:
        return "starting"
    return "running" if found <= {"running"} else "failing"


def mermaid() -> str:
    """Render the transitions as a diagram for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STOPPED.value}"]
    for state, moves in NEXT.items():
        lines += [f"    {state.value} --> {target.value}: {trigger.value}" for trigger, target in moves.items()]
    lines.append(f"    [*] --> {State.BROKEN.value}: its file cannot be used")
    return "\n".join(lines) + "\n"
