"""Checks a model of the state table: no sequence of events, however long, violates an invariant.

A situation in the model consists of a service and its machine. The service's record contains at most one process and
one start program, but other processes that the record has lost may still be running. The model is finite, so all
sequences are tested once every reachable situation has been visited. The model also simulates what the service does in
each state (``WORK``), whereas ``test_walk`` runs long sequences against the real service.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import pytest

from agent_shim.supervisor.state import NEXT, WORK, Effect, Move, State, Trigger, Work

Table: TypeAlias = Mapping[State, Mapping[Trigger, Move]]

ASKED: Final = {
    Trigger.START_ASKED: "up",
    Trigger.RESTART_ASKED: "up",
    Trigger.STOP_ASKED: "down",
    Trigger.UNMONITOR_ASKED: "left alone",
    Trigger.FILE_BROKE: "",
}
OUTSIDE: Final = (*ASKED, Trigger.FILE_MENDED, Trigger.REBOOTED)
"""Events that come from outside. All others result from what the service does in a state (``WORK``)."""

TWO: Final = "two processes"
STOP: Final = "a stop does not win"
UNASKED: Final = "started without a request"
NO_WAY: Final = "no way out"


class Violation(Exception):  # noqa: N818 - a finding, not an error
    pass


@dataclass(frozen=True)
class ModelledService:
    """A situation in the model: the state of a service and of its processes on the machine."""

    state: State = State.STOPPED
    asked: str = "down"
    """What the last request asked for, or "" if the monit file has become invalid since then."""
    process: bool = False
    """Whether the process in the record is alive."""
    starter: bool = False
    """Whether the start program in the record is running, so that it may still start the process."""
    lost: int = 0
    """Number of processes and start programs that the record has lost."""

    def on(self, trigger: Trigger, table: Table) -> ModelledService:
        """Return the situation after an event, with the same effects as ``Service.on``."""
        move = table[self.state].get(trigger)
        if move is None:
            return self
        one = replace(self, state=move.to)
        if Effect.RELEASE_PROGRAM in move.effect:
            # A start program that has already started the process will not start another, so it does not count as lost.
            one = replace(one, starter=False, lost=one.lost + (one.starter and not one.process))
        if Effect.FORGET_PROCESSES in move.effect:
            one = replace(one, process=False, starter=False, lost=one.lost + one.process + one.starter)
        if one.state is State.STOPPED and one.asked == "down" and (one.process or one.starter or one.lost):
            raise Violation(STOP)
        # A failed stop is reported as an error to whoever requested it. After that, no request is pending.
        return replace(one, asked="left alone") if one.state is State.STUCK else one

    def after_requests(self, table: Table) -> Iterator[ModelledService]:
        """Yield the situation after each request, after each change to the monit file, and after a reboot."""
        for trigger in OUTSIDE:
            one = self
            if trigger in ASKED and self.state is not State.BROKEN:
                one = replace(self, asked=ASKED[trigger])
            if trigger is Trigger.REBOOTED:
                one = replace(self, process=False, starter=False, lost=0)
            yield one.on(trigger, table)

    def after_internal_events(self, table: Table) -> Iterator[ModelledService]:
        """Yield every state that the service can reach next through an internal event, such as a process exit."""
        if self.process:
            yield replace(self, process=False)
        if self.starter:
            yield replace(self, starter=False)
            yield replace(self, starter=False, process=True)
        match WORK[self.state]:
            case Work.LAUNCH if self.process:
                yield self.on(Trigger.APPEARED, table)
            case Work.LAUNCH:
                yield replace(self, starter=False).on(Trigger.FAILED, table)
                if not self.starter:
                    yield self.started()
            case Work.WATCH if not self.process:
                yield self.on(Trigger.DIED, table)
            case Work.SETTLE:
                yield self.on(Trigger.SETTLED if self.process else Trigger.DIED, table)
            case Work.WAIT:
                yield self.on(Trigger.APPEARED if self.process else Trigger.RETRIED, table)
            case Work.END:
                yield replace(self, process=False, starter=False).on(Trigger.EMPTIED, table)
                if self.process:
                    yield self.on(Trigger.STUCK, table)

    def started(self) -> ModelledService:
        if self.asked != "up":
            raise Violation(STOP if self.asked == "down" else UNASKED)
        if self.lost:
            raise Violation(TWO)
        return replace(self, starter=True)


def violations(table: Table) -> set[str]:
    """Return the invariants that some sequence of events violates."""
    found = {
        NO_WAY
        for state, moves in table.items()
        for trigger in WORK[state].value
        if trigger not in moves or moves[trigger].to is state
    }
    alone: dict[ModelledService, set[ModelledService]] = {}
    all_next: dict[ModelledService, set[ModelledService]] = {}
    ahead = [ModelledService()]
    for world in ahead:
        if world in alone:
            continue
        alone[world], all_next[world] = set(), set()
        for events, leads in ((world.after_internal_events(table), alone), (world.after_requests(table), all_next)):
            while True:
                try:
                    leads[world].add(next(events))
                except StopIteration:
                    break
                except Violation as violation:
                    found.add(str(violation))
                    break
        all_next[world] |= alone[world]
        ahead.extend(all_next[world])
    assert {world.state for world in alone} <= set(State)
    if not all(reaching(all_next, state) == set(alone) for state in State):
        found.add(NO_WAY)
    ended = reaching(alone, State.STOPPED) | reaching(alone, State.STUCK)
    if any(world.asked == "down" and world not in ended for world in alone):
        found.add(STOP)
    runs = reaching(alone, State.RUNNING) | reaching(alone, State.STUCK)
    if any(world.asked == "up" and world not in runs for world in alone):
        found.add(NO_WAY)
    return found


def reaching(leads: Mapping[ModelledService, Iterable[ModelledService]], state: State) -> set[ModelledService]:
    """Return the situations from which some sequence of events leads to ``state``."""
    sources: dict[ModelledService, set[ModelledService]] = {}
    for world, targets in leads.items():
        for target in targets:
            sources.setdefault(target, set()).add(world)
    ahead = [world for world in leads if world.state is state]
    found = set(ahead)
    for world in ahead:
        new = sources.get(world, set()) - found
        found |= new
        ahead.extend(new)
    return found


def test_state_table_violates_no_invariant_in_any_sequence_of_events() -> None:
    """No second process starts, a stop always takes effect, nothing starts without a request, and no state is a dead
    end.
    """
    assert violations(NEXT) == set()


@pytest.mark.parametrize(
    ("state", "trigger", "move", "violation"),
    [
        (State.RUNNING, Trigger.UNMONITOR_ASKED, Move(State.UNMONITORED, Effect.FORGET_PROCESSES), TWO),
        (State.STARTING, Trigger.UNMONITOR_ASKED, Move(State.UNMONITORED, Effect.RELEASE_PROGRAM), TWO),
        (State.STUCK, Trigger.STOP_ASKED, Move(State.STOPPED, Effect.FORGET_PROCESSES), STOP),
        (State.RUNNING, Trigger.STOP_ASKED, Move(State.STOPPED), STOP),
        (State.STOPPING, Trigger.EMPTIED, Move(State.STARTING), STOP),
        (State.BOUNCING, Trigger.STOP_ASKED, None, STOP),
        (State.RESTARTING, Trigger.STOP_ASKED, Move(State.UNMONITORED), STOP),
        (State.BOUNCING, Trigger.UNMONITOR_ASKED, None, UNASKED),
        (State.BROKEN, Trigger.FILE_MENDED, Move(State.STARTING), UNASKED),
        (State.STUCK, Trigger.REBOOTED, Move(State.STARTING), UNASKED),
        (State.STARTING, Trigger.FAILED, None, NO_WAY),
        (State.STUCK, Trigger.START_ASKED, None, NO_WAY),
        (State.BROKEN, Trigger.FILE_MENDED, None, NO_WAY),
        (State.SETTLING, Trigger.DIED, Move(State.STOPPED), NO_WAY),
    ],
)
def test_model_check_detects_a_single_wrong_transition(
    state: State, trigger: Trigger, move: Move | None, violation: str
) -> None:
    moves = {known: to for known, to in NEXT[state].items() if known is not trigger}
    wrong = {**NEXT, state: moves | ({trigger: move} if move is not None else {})}

    assert violation in violations(wrong)
