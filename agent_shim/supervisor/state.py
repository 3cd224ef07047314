"""Defines a service's state machine as a table with the next state and the effect for each state and event. Does no
I/O.

``Service.on`` handles the events. The diagram in the documentation is generated from the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class State(enum.Enum):
    """A service's state. Values are part of the saved state."""

    STOPPED = "stopped"
    """No process is running, and none should be."""
    STARTING = "starting"
    """A start is in progress, and it is not yet known whether the service runs."""
    RUNNING = "running"
    DOWN = "down"
    """The process exited or failed to start, and a retry is due."""
    RESTARTING = "restarting"
    SETTLING = "settling"
    """The process is running again, but not yet considered stable."""
    STOPPING = "stopping"
    BOUNCING = "bouncing"
    """The service is being stopped, and will be started again."""
    UNMONITORED = "unmonitored"
    """The process is not monitored, whether it is alive or not."""
    STUCK = "stuck"
    """The service is not monitored, because processes survived a stop."""
    BROKEN = "broken"
    """The service's monit file is invalid."""

    @property
    def shown(self) -> str:
        """The name shown to operators."""
        return _SHOWN.get(self, self.value)


class Trigger(enum.Enum):
    """A service event. Values appear in the log."""

    START_ASKED = "start asked"
    STOP_ASKED = "stop asked"
    RESTART_ASKED = "restart asked"
    UNMONITOR_ASKED = "unmonitor asked"
    APPEARED = "appeared"
    """The process is alive, and the start program has finished."""
    FAILED = "failed"
    """The start program did not start a process."""
    DIED = "died"
    """The process exited although no stop was requested."""
    RETRIED = "retried"
    """The next start is due."""
    SETTLED = "settled"
    EMPTIED = "emptied"
    """None of the service's processes remains."""
    STUCK = "stuck"
    """One of the service's processes survived the stop."""
    FILE_BROKE = "file unusable"
    FILE_MENDED = "file usable"
    REBOOTED = "rebooted"
    """All processes are gone, because the machine or the container was restarted."""


class Effect(enum.Flag):
    """Changes to a service that accompany a transition."""

    NONE = 0
    FORGIVE = enum.auto()
    """Reset the number of consecutive failures, so that they no longer lengthen the delay."""
    CLEAR_REASON = enum.auto()
    CLEAR_COMPLAINTS = enum.auto()
    COUNT = enum.auto()
    """The next start counts towards the restart limits."""
    UNCOUNT = enum.auto()
    """Undo ``COUNT``, because the restart was replaced by a stop."""
    RELEASE_PROGRAM = enum.auto()
    """Stop watching the start program."""
    FORGET_PROCESSES = enum.auto()


class Work(enum.Enum):
    """The work that a service does in a state. The value of each member is the set of events that complete the work.
    Requests interrupt the work.
    """

    REST = frozenset[Trigger]()
    LAUNCH = frozenset({Trigger.APPEARED, Trigger.FAILED})
    """Adopt the process or, if there is none, run the start program."""
    WATCH = frozenset({Trigger.DIED})
    SETTLE = frozenset({Trigger.DIED, Trigger.SETTLED})
    """Watch the process for the settling time."""
    WAIT = frozenset({Trigger.APPEARED, Trigger.RETRIED})
    """Wait until the back-off is over, or adopt a process that appears in the meantime."""
    END = frozenset({Trigger.EMPTIED, Trigger.STUCK})
    """Run the stop program and terminate every process of the service."""


class Move(NamedTuple):
    """A transition: the next state and the effect."""

    to: State
    effect: Effect = Effect.NONE


_START: Final = Move(State.STARTING, Effect.FORGIVE)
_STOP: Final = Move(State.STOPPING, Effect.UNCOUNT)
_RESTART: Final = Move(State.BOUNCING)
_BREAK: Final = Move(State.BROKEN)
_APPEAR: Final = Move(State.SETTLING, Effect.RELEASE_PROGRAM)
_DIE: Final = Move(State.DOWN, Effect.CLEAR_COMPLAINTS)
_EMPTY: Final = Effect.FORGIVE | Effect.CLEAR_REASON | Effect.FORGET_PROCESSES
_WANTED: Final = {
    Trigger.STOP_ASKED: _STOP,
    Trigger.RESTART_ASKED: _RESTART,
    Trigger.UNMONITOR_ASKED: Move(State.UNMONITORED, Effect.CLEAR_COMPLAINTS | Effect.UNCOUNT),
    Trigger.FILE_BROKE: _BREAK,
    Trigger.REBOOTED: Move(State.STARTING),
}
"""Transitions that are common to all states in which the service should run."""
_LEFT_ALONE: Final = {
    Trigger.START_ASKED: _START,
    Trigger.STOP_ASKED: _STOP,
    Trigger.RESTART_ASKED: _RESTART,
    Trigger.FILE_BROKE: _BREAK,
}
_ENDING: Final = {
    Trigger.STOP_ASKED: _STOP,
    Trigger.UNMONITOR_ASKED: Move(State.STOPPING, Effect.CLEAR_COMPLAINTS | Effect.UNCOUNT),
    Trigger.STUCK: Move(State.STUCK, Effect.FORGIVE | Effect.CLEAR_COMPLAINTS),
    Trigger.FILE_BROKE: _BREAK,
}

NEXT: Final[Mapping[State, Mapping[Trigger, Move]]] = MappingProxyType(
    {
        State.STOPPED: _LEFT_ALONE,
        State.STARTING: _WANTED
        | {
            Trigger.START_ASKED: _START,
            Trigger.APPEARED: Move(State.RUNNING, Effect.RELEASE_PROGRAM | Effect.CLEAR_REASON),
            Trigger.FAILED: Move(State.DOWN),
        },
        State.RUNNING: _WANTED | {Trigger.DIED: _DIE},
        State.DOWN: _WANTED
        | {
            Trigger.START_ASKED: Move(State.RESTARTING, Effect.FORGIVE),
            Trigger.RETRIED: Move(State.RESTARTING, Effect.COUNT),
            Trigger.APPEARED: _APPEAR,
        },
        State.RESTARTING: _WANTED
        | {
            Trigger.START_ASKED: Move(State.RESTARTING, Effect.FORGIVE),
            Trigger.APPEARED: _APPEAR,
            Trigger.FAILED: Move(State.DOWN),
        },
        State.SETTLING: _WANTED | {Trigger.SETTLED: Move(State.RUNNING, Effect.CLEAR_REASON), Trigger.DIED: _DIE},
        State.STOPPING: _ENDING
        | {
            Trigger.START_ASKED: _RESTART,
            Trigger.RESTART_ASKED: _RESTART,
            Trigger.EMPTIED: Move(State.STOPPED, _EMPTY | Effect.CLEAR_COMPLAINTS),
            Trigger.REBOOTED: Move(State.STOPPED),
        },
        # A restart does not clear complaints, because a failed rule remains failed until it passes.
        State.BOUNCING: _ENDING
        | {Trigger.EMPTIED: Move(State.STARTING, _EMPTY), Trigger.REBOOTED: Move(State.STARTING)},
        State.UNMONITORED: _LEFT_ALONE,
        State.STUCK: _LEFT_ALONE | {Trigger.REBOOTED: Move(State.UNMONITORED)},
        State.BROKEN: {Trigger.FILE_MENDED: Move(State.STOPPED, Effect.CLEAR_REASON)},
    }
)
"""Transitions by state and event. An event that is not listed for a state has no effect."""

WORK: Final[Mapping[State, Work]] = MappingProxyType(
    {
        State.STOPPED: Work.REST,
        State.STARTING: Work.LAUNCH,
        State.RUNNING: Work.WATCH,
        State.DOWN: Work.WAIT,
        State.RESTARTING: Work.LAUNCH,
        State.SETTLING: Work.SETTLE,
        State.STOPPING: Work.END,
        State.BOUNCING: Work.END,
        State.UNMONITORED: Work.REST,
        State.STUCK: Work.REST,
        State.BROKEN: Work.REST,
    }
)

UP: Final = frozenset({State.RUNNING, State.SETTLING})
"""States in which the process is alive and watched."""
ENDING: Final = frozenset({State.STOPPING, State.BOUNCING})
UNDERWAY: Final = ENDING | {State.STARTING, State.RESTARTING}
"""States in which a start or stop is in progress."""
ACTIVE: Final = UP | {State.STARTING, State.RESTARTING}
"""States in which the service is up or starting."""
FOLLOWING: Final = ACTIVE | {State.UNMONITORED}
"""States in which a service restarts together with its prerequisite."""
MONITORED: Final = frozenset(State) - ENDING - {State.STOPPED, State.UNMONITORED, State.STUCK}
"""States in which monit's monitor flag is not zero."""
TO_RUN: Final = ACTIVE | {State.DOWN, State.BOUNCING}
"""States in which the next agent starts the process if it has exited."""

_SHOWN: Final = {State.BOUNCING: "stopping", State.STUCK: "unmonitored"}
_REPORTED: Final = {
    State.STARTING: "starting",
    State.SETTLING: "starting",
    State.RUNNING: "running",
    State.DOWN: "failing",
    State.RESTARTING: "failing",
    State.BROKEN: "failing",
}


def reported(state: State, *, fails_a_check: bool = False) -> str:
    """Return the process state as reported to the Director (jobsupervisor/monit/status.go): starting, running, failing
    or unknown. A running process is ``failing`` if ``fails_a_check`` is set.
    """
    if state is State.RUNNING and fails_a_check:
        return "failing"
    return _REPORTED.get(state, "unknown")


def job_state(processes: Iterable[str], *, is_stopped: bool) -> str:
    """Derive the instance state from the process states (jobsupervisor/monit_job_supervisor.go).

    The state is ``stopped`` if the jobs were stopped on purpose. Otherwise, it is ``starting`` if any process is
    starting, and ``failing`` if any is failing or unknown. An instance without processes is ``running``.
    """
    if is_stopped:
        return "stopped"
    found = set(processes)
    if "starting" in found:
        return "starting"
    return "running" if found <= {"running"} else "failing"
