"""Tests mutants, which are small changes that alter a module's behaviour but leave it valid Python."""

from __future__ import annotations

import ast
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from tests.support.source import ROOT
from tools.chaos import mutate
from tools.chaos.mutate import mutants

MODULE = '''"""A docstring with 1 number."""
import logging
from typing import Final

logger = logging.getLogger(__name__)
LIMIT: Final = 3


class Queue:
    def put(self, item: int, *, at_once: bool = False) -> bool:
        """Put ä 5."""
        if item > LIMIT and at_once:
            self.size = "ä" if item else 2
            logger.info("put %d", 4)
            self.notify()
        return self.size != 0
'''


def test_mutants_include_all_kinds_of_changes() -> None:
    assert [(one.line, one.kind, one.after) for one in mutants("x.py", MODULE)] == [
        (6, "number", "(3 * 2 + 1)"),
        (10, "constant", "True"),
        (12, "comparison", "(item >= LIMIT)"),
        (12, "condition negated", "(not (item > LIMIT and at_once))"),
        (12, "only the first of and", "(item > LIMIT)"),
        (13, "statement removed", "pass"),
        (13, "condition negated", "(not (item))"),
        (13, "number", "(2 * 2 + 1)"),
        (15, "statement removed", "pass"),
        (16, "returns None", "None"),
        (16, "comparison", "(self.size == 0)"),
        (16, "number", "(0 * 2 + 1)"),
    ]


@pytest.mark.parametrize(
    "path", ["agent_shim/actions/tasks.py", "agent_shim/supervisor/service.py", "agent_shim/actions/dispatch.py"]
)
def test_mutated_module_is_valid_python(path: str) -> None:
    text = (ROOT / path).read_text()
    found = list(mutants(path, text))

    assert len(found) > 50
    for one in found[::10]:  # Try only a sample, because checking a mutant means parsing the whole module.
        changed = one.applied(text)
        assert changed != text
        ast.parse(changed)


def test_mutation_of_a_line_executed_at_import_is_marked() -> None:
    assert [one.line for one in mutants("x.py", MODULE) if one.is_import_time] == [6, 10]


def test_mutation_table_counts_by_module_and_stage() -> None:
    unit, integration, _ = mutate.STAGES
    ones = list(mutants("x.py", MODULE))[:5]
    outcomes = ["noticed", "survived", "unreached", "not tried"]
    results: mutate.Results = {
        one.key: {unit.name: {"outcome": outcome, "tests": 1, "by": ""}}
        for one, outcome in zip(ones, outcomes, strict=False)
    }
    results[ones[1].key][integration.name] = {"outcome": "noticed", "tests": 1, "by": "x"}

    lines = mutate.table(results, ones, (unit, integration)).splitlines()

    assert lines[2:4] == ["| `x.py` | unit | 5 | 1 | 1 | 1 | 2 |", "| `x.py` | integration | 4 | 1 | 0 | 0 | 3 |"]
    assert lines[4:6] == ["| `all` | unit | 5 | 1 | 1 | 1 | 2 |", "| `all` | integration | 4 | 1 | 0 | 0 | 3 |"]
    assert [line.partition(": ")[0] for line in lines[7:]] == ["x.py:12", "x.py:12", "x.py:12"]


def test_mutation_stage_runs_only_surviving_mutants_not_yet_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, integration, _ = mutate.STAGES
    ones = list(mutants("x.py", MODULE))
    at_import, noticed, tried, unreached, *rest = ones
    monkeypatch.setattr(mutate, "reaching", lambda _: {"x.py": {12: ["t"], 13: ["t", "u"], 15: ["t"], 16: ["t"]}})
    results: mutate.Results = {
        noticed.key: {unit.name: {"outcome": "noticed", "tests": 1, "by": ""}},
        tried.key: {integration.name: {"outcome": "survived", "tests": 1, "by": ""}},
    }

    tasks = mutate.left(ones, results, integration)

    assert {one.key for one, _ in tasks} == {one.key for one in (unreached, *rest)}
    assert results[at_import.key][integration.name]["outcome"] == "unreached"


def test_mutant_with_only_slow_tests_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = mutate.STAGES[0]
    ones = [one for one in mutants("x.py", MODULE) if one.line in {13, 15}]
    monkeypatch.setattr(mutate, "reaching", lambda _: {"x.py": {13: ["t"], 15: []}})
    results: mutate.Results = {}

    tasks = mutate.left(ones, results, unit)

    assert {one.line for one, _ in tasks} == {13}
    assert [row[unit.name]["outcome"] for row in results.values()] == ["not tried"]


def test_mutation_stage_runs_tests_of_the_same_module_first_within_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = mutate.Stage("some", (), 3.0)
    durations = {"tests/test_b.py::fast": 0.1, "tests/test_a.py::slow": 2.0, "tests/test_a.py::quick": 0.5}
    durations |= {"tests/test_a.py::endless": 9.0, "tests/test_b.py::slow": 1.0}
    place = tmp_path / stage.name
    place.mkdir()
    (place / "durations.json").write_text(json.dumps(durations))
    with contextlib.closing(sqlite3.connect(place / "coverage")) as database, database:
        database.execute("create table file (id, path)")
        database.execute("create table context (id, context)")
        database.execute("create table line_bits (file_id, context_id, numbits)")
        database.execute("insert into file values (1, '/copy/agent_shim/a.py')")
        for number, test in enumerate([*durations, "tests/test_a.py::failed"]):
            database.execute("insert into context values (?, ?)", (number, f"{test}|run"))
            database.execute("insert into line_bits values (1, ?, ?)", (number, bytes([0b100, 0b1])))
    monkeypatch.setattr(mutate, "STORE", tmp_path)

    found = mutate.reaching(stage)

    nearest = ["tests/test_a.py::quick", "tests/test_a.py::slow", "tests/test_b.py::fast"]
    assert found == {"agent_shim/a.py": {2: nearest, 8: nearest}}
