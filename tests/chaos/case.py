"""The registry of cases, keyed by id. Test modules register their cases when they are imported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import pytest

from tests.support.stand import Stand

Play = Callable[[Stand], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A chaos case: one row of the scorecard. ``scale`` says how an ordinary run is smaller than a full run."""

    id: str
    fault: str
    scale: str = ""
    has_full: bool = False
    """Whether the case is larger when it runs with ``--full``."""
    is_long: bool = False
    """Whether the case takes more than ten seconds. If so, the daily tests leave it out."""
    guest: bool = False
    """Whether the case has to run in the ``tests.support.guest`` virtual machine. This is necessary for cases that
    change clocks, or that need cgroup v2, the device mapper or netem.
    """


CASES: Final[dict[str, Case]] = {}


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
    """Register a test as a case. The test injects a fault, and fails unless the agent recovers and the invariants hold.

    ``attack`` is the attack in docs/attacks.md that the case performs, if any.
    """
    told = ", ".join(filter(None, (scale, "in a virtual machine" if guest else "")))
    entry = CASES[number] = Case(number, fault, told, has_full, is_long or guest, guest)

    def marked(play: Play) -> Play:
        marks = [pytest.mark.chaos(entry), pytest.mark.usefixtures("witness")]
        marks += [pytest.mark.guest] if guest else []
        marks += [pytest.mark.attack(attack)] if attack else []
        for mark in marks:
            play = mark(play)
        return play

    return marked
