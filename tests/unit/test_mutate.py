"""Mutants: each is one change of a module that stays valid Python, and all of them change behaviour."""

from __future__ import annotations

import ast

import pytest

from chaos.mutate import mutants
from tests.structure.source import ROOT

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


def test_the_kinds_of_changes() -> None:
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
def test_what_a_change_leaves_is_python(path: str) -> None:
    text = (ROOT / path).read_text()
    found = list(mutants(path, text))

    assert len(found) > 50
    for one in found[::10]:  # each is parsed whole; ./dev mutate parses them all
        changed = one.applied(text)
        assert changed != text
        ast.parse(changed)


def test_a_line_at_import_is_known_as_such() -> None:
    assert [one.line for one in mutants("x.py", MODULE) if one.is_import_time] == [6, 10]
