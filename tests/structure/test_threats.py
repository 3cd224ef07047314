"""Checks that the ``attack`` markers on tests cover every known attacker and every attack that once succeeded, and that
``docs/security.md`` names existing tests and all fuzz targets.
"""

from __future__ import annotations

import re

import pytest

from tests.support.attacks_page import ATTACKERS, attacker, attacks, marks_in
from tests.support.source import ROOT
from tools.chaos import fuzz

PAGE = (ROOT / "docs/security.md").read_text()

ONCE_SUCCESSFUL = (
    "a job replaces its error log with a link to the settings or with a FIFO",
    "a job writes the pid of a root process or of another job's process into its pidfile",
    "a job hides a process so that stopping the job misses it",
    "a job forks faster than its processes can be killed",
    "a job passes a setuid program to whoever unpacks its logs",
    "a job gives its logs names that are not UTF-8",
    "a bpm process replaces its directory or volume with a link before the agent mounts it",
    "a bpm process types into the operator's terminal, or survives the end of `bpm shell`",
    "a neighbour sends malformed or endless requests to an open port",
    "another agent forges a reply_to",
    "text from a job sends control sequences to an operator's terminal",
    "a request contains no disk cid",
    "a request contains certificates or keys that the agent cannot use",
)
"""Attacks that succeeded against an earlier version. Each of them must have a test."""


def test_each_attack_marker_begins_with_a_known_attacker() -> None:
    assert [attack for attack in attacks() if not attacker(attack)] == []


def test_every_known_attacker_has_an_attack() -> None:
    assert {attacker(attack) for attack in attacks()} == set(ATTACKERS)


@pytest.mark.parametrize("attack", ONCE_SUCCESSFUL)
def test_every_attack_that_once_succeeded_has_a_test(attack: str) -> None:
    assert attack in attacks()


def test_attack_markers_on_tests_and_chaos_cases_are_found() -> None:
    source = """
@pytest.mark.root
@pytest.mark.attack("a job x")
@pytest.mark.attack("a job y")
async def test_both(): ...

@case("S-01", "fault", attack="a job z")
async def play(stand): ...
"""
    assert list(marks_in(source)) == [("test_both", "a job x"), ("test_both", "a job y"), ("S-01", "a job z")]


def test_attack_marker_that_is_not_a_literal_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be written out"):
        list(marks_in("@pytest.mark.attack(NAME)\ndef test_x(): ..."))


def test_tests_named_on_the_security_page_exist() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - there == set()


def test_security_page_lists_every_fuzz_target() -> None:
    targets = PAGE.partition("**Targets**: ")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`\s\(", targets) == sorted(fuzz.TARGETS)
