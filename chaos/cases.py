"""All cases by their number, with what they expect; modules of cases fill it when they are imported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from chaos.stand import Stand

Play = Callable[[Stand], Awaitable[str]]


@dataclass(frozen=True)
class Case:
    """``play`` injects the fault and returns the figures or raises ``NotHeldError``; ``scale`` is what was reduced."""

    id: str
    fault: str
    play: Play
    scale: str = ""
    is_long: bool = False
    """More than ten seconds: not in the daily tests."""


CASES: Final[dict[str, Case]] = {}

NOT_INJECTED: Final[dict[str, tuple[str, str]]] = {
    "N-06": (
        "1000 agents and a server that restarts",
        "no case yet",
    ),
    "N-07": (
        "certificates that expire while connected, clocks ahead",
        "no case yet; tests/integration hold parts of it",
    ),
    "N-10": (
        "every -ERR, a server that talks nonsense",
        "no case yet; tests/integration/test_bus_nats_wire.py holds it",
    ),
    "D-04": (
        "a disk that hangs",
        "no case yet: no device mapper here",
    ),
    "D-08": (
        "rotation of 5 000 logs, one of 50 GB",
        "no case yet",
    ),
    "D-09": (
        "disks that are busy, missing, half migrated",
        "no case yet; tests/root/test_disks_*.py hold it",
    ),
    "R-03": (
        "a job beyond its memory, a container beyond its own",
        "no case yet; the tests of bpm hold the first half",
    ),
}
"""Cases of the scorecard that are not played, by number: the fault, and why."""


def case(number: str, fault: str, *, scale: str = "", is_long: bool = False) -> Callable[[Play], Play]:
    """Enter a case."""

    def entered(play: Play) -> Play:
        CASES[number] = Case(number, fault, play, scale, is_long)
        return play

    return entered
