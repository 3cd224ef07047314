"""The table of attacks in ``docs/security.md`` names modules, tests and cases that are there."""

from __future__ import annotations

import re

from chaos import crash, disks, messages, network, resources, supervision
from chaos.cases import CASES
from tests.structure.source import ROOT, modules

TABLE = (ROOT / "docs/security.md").read_text().partition("\n| who |")[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE.splitlines() if line.startswith("| ")]
"""Who, how, what is in the way, where, held by."""

PLAYED = (crash, disks, messages, network, resources, supervision)
"""Importing them enters their cases."""


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_attack_has_a_mitigation_somewhere_and_a_test() -> None:
    assert len(ROWS) > 15
    for row in ROWS:
        assert len(row) == 5, row
        assert all(row), row
        assert any(name.startswith("test_") for name in quoted(row[4])), row


def test_modules_of_mitigations_are_there() -> None:
    assert {name for row in ROWS for name in quoted(row[3])} - set(modules()) == set()


def test_tests_of_attacks_are_there() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert {name for row in ROWS for name in quoted(row[4]) if name != "./dev chaos"} - there == set()


def test_cases_of_attacks_are_there() -> None:
    assert {number for row in ROWS for number in re.findall(r"\b[CNSDRM]-\d\d\b", row[4])} - set(CASES) == set()
