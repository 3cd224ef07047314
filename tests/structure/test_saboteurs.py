"""Each row of the scorecard has a saboteur, and the text that it changes is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.source import ROOT
from tools.chaos import __main__ as _played  # noqa: F401 - importing it enters all cases
from tools.chaos.cases import CASES
from tools.chaos.sabotage import INVARIANTS, WITNESSED, Saboteur, is_caught
from tools.chaos.saboteurs import GENERAL, SABOTEURS
from tools.chaos.scorecard import Row


def test_every_chaos_case_and_invariant_has_a_saboteur() -> None:
    assert {one.row for one in SABOTEURS} == {*CASES, *INVARIANTS}
    assert [name for name in WITNESSED if not any(name in one.shows for one in GENERAL)] == []


@pytest.mark.parametrize("saboteur", [*SABOTEURS, *GENERAL], ids=lambda one: one.row)
def test_change_of_each_saboteur_can_be_applied(saboteur: Saboteur) -> None:
    """The text to replace occurs once, the result is Python, and the expected failure is a pattern."""
    changed = saboteur.applied((ROOT / saboteur.path).read_text())

    assert changed != (ROOT / saboteur.path).read_text()
    ast.parse(changed)
    re.compile(saboteur.shows)
    assert saboteur in GENERAL or saboteur.played in CASES


def test_row_that_fails_for_another_reason_does_not_catch_its_saboteur() -> None:
    saboteur = Saboteur("N-02", "is deaf", "x", "a", "b", "dead link")

    assert is_caught(saboteur, Row("N-02", "", "not held", "dead link noticed: not within 16 s"))
    assert not is_caught(saboteur, Row("N-02", "", "not held", "I4: 3 threads after 1"))
    assert not is_caught(saboteur, Row("N-02", "", "held", "dead link noticed"))
