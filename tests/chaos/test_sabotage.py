"""Checks the chaos cases themselves (``./dev sabotage``): each case in the scorecard in docs/reliability.md must fail
if the behaviour that it checks is deliberately broken in the agent.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.case import CASES
from tests.chaos.failures import alternatives, messages
from tests.chaos.sabotage import CAUGHT, INVARIANTS, WITNESSED, Saboteur, is_caught, report, tell
from tests.chaos.saboteurs import GENERAL, SABOTEURS
from tests.chaos.scorecard import Row, enter_general, enter_saboteur
from tests.support.source import ROOT

pytestmark = [pytest.mark.sabotage, pytest.mark.timeout(3600)]


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Path | None:
    """Return the page into which the dates are written, or None unless ``--into`` names an existing page."""
    into: Path | None = request.config.getoption("into", None)
    return into if into is not None and into.exists() else None


def test_every_case_and_invariant_has_a_saboteur() -> None:
    assert {one.row for one in SABOTEURS} == {*CASES, *INVARIANTS}
    assert [name for name in WITNESSED if not any(name in one.shows for one in GENERAL)] == []


@pytest.mark.parametrize("saboteur", [*SABOTEURS, *GENERAL], ids=lambda one: one.row)
def test_each_saboteur_change_can_be_applied(saboteur: Saboteur) -> None:
    changed = saboteur.applied((ROOT / saboteur.path).read_text())

    assert changed != (ROOT / saboteur.path).read_text()
    ast.parse(changed)
    re.compile(saboteur.shows)
    assert saboteur in GENERAL or saboteur.played in CASES


@pytest.mark.parametrize("saboteur", [*SABOTEURS, *GENERAL], ids=lambda one: one.row)
def test_each_saboteur_pattern_matches_a_message_from_its_case(saboteur: Saboteur) -> None:
    """If a message were changed but not the pattern, the saboteur would no longer be caught. General saboteurs run with
    every case, so for them any case counts.
    """
    cases = list(CASES) if saboteur in GENERAL else [saboteur.played]
    possible = set[str]().union(*map(messages, cases))

    patterns = [*alternatives(saboteur.shows), *([saboteur.mark] if saboteur.mark else [])]
    assert [one for one in patterns if not any(re.search(one, message) for message in possible)] == []


def test_case_failing_for_another_reason_does_not_count_as_catching_the_saboteur() -> None:
    saboteur = Saboteur("N-02", "is deaf", "x", "a", "b", "dead link")

    assert is_caught(saboteur, Row("N-02", "", "not held", "dead link noticed: not within 16 s"))
    assert not is_caught(saboteur, Row("N-02", "", "not held", "I4: 3 threads after 1"))
    assert not is_caught(saboteur, Row("N-02", "", "held", "dead link noticed"))


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda one: one.row)
def test_saboteur_is_caught(saboteur: Saboteur, page: Path | None) -> None:
    cell = report(saboteur)
    if cell and page is not None:
        enter_saboteur(page, saboteur.row, cell)

    assert cell.startswith(CAUGHT)


@pytest.mark.parametrize("case", sorted(number for number, case in CASES.items() if not case.guest))
def test_general_saboteurs_are_caught_by_a_case_that_runs_their_code(case: str, page: Path | None) -> None:
    def enter(saboteur: Saboteur, outcome: str) -> None:
        if page is not None:
            enter_general(page, saboteur.row, saboteur.case, outcome)

    assert tell([replace(one, case=case) for one in GENERAL], enter) == 0
