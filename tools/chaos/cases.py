"""All cases by number, with the expected outcome. Modules of cases add theirs when they are imported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tools.chaos.stand import Stand

Play = Callable[[Stand], Awaitable[str]]


@dataclass(frozen=True)
class Case:
    """A case: ``play`` injects the fault and returns the figures or raises ``NotHeldError``.

    ``scale`` names reductions.
    """

    id: str
    fault: str
    play: Play
    scale: str = ""
    has_full: bool = False
    """Reduced, unless played with ``--full``."""
    is_long: bool = False
    """Longer than ten seconds: not in the daily tests."""
    guest: bool = False
    """Played in the virtual machine of ``tests.support.guest``: clocks, cgroup v2, device mapper, netem."""
    attack: str = ""
    """The attack of docs/attacks.md that it performs, if any, like the marker ``attack`` of a test."""


CASES: Final[dict[str, Case]] = {}

NOT_INJECTED: Final[dict[str, tuple[str, str]]] = {}
"""Cases of the scorecard that are not played, by number: the fault, and the reason."""


def case(
    number: str,
    fault: str,
    *,
    scale: str = "",
    has_full: bool = False,
    is_long: bool = False,
    guest: bool = False,
    attack: str = "",
) -> Callable[[Play], Play]:
    """Enter a case."""

    def entered(play: Play) -> Play:
        told = ", ".join(filter(None, (scale, "in a virtual machine" if guest else "")))
        CASES[number] = Case(number, fault, play, told, has_full, is_long or guest, guest, attack)
        return play

    return entered
