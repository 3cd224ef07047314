"""Checks that the protocol page describes every action as implemented, and that every numbered fact has a test."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from agent_shim.actions.dispatch import ACTIONS, Mode
from agent_shim.daemon import main  # noqa: F401 - importing registers the actions
from tests.support import protocol
from tests.support.protocol import Section
from tests.support.protocol_facts import FACTS

TESTS = Path(__file__).parents[1]


def test_protocol_page_lists_every_action_once() -> None:
    written = Counter(section.method for section in protocol.sections())

    assert written == Counter(ACTIONS.keys()), "docs/protocol.md needs one section `### `METHOD`` for each action"


@pytest.mark.parametrize("section", protocol.sections(), ids=lambda section: section.method)
def test_protocol_page_describes_each_action_correctly(section: Section) -> None:
    action, first = ACTIONS[section.method], section.text.strip().splitlines()[0]

    assert first.startswith("Task" if action.mode is Mode.TASK else "Answered immediately")
    assert ("can be cancelled" in first) is (asyncio.Event in action.injected.values())
    assert ("otherwise answered immediately" in first) is (action.task_from_protocol > 0)
    for part in ("Errors: ", "Go agent: "):
        assert len(re.findall(f"^{part}", section.text, re.MULTILINE)) == 1
    asked = [line for example in section.examples for mark, line in example.lines if mark == ">"]
    assert any(f'"method": "{section.method}"' in line for line in asked)


def _named() -> Counter[str]:
    """Return the fact numbers that occur in test names, and how many tests name each fact."""
    found: Counter[str] = Counter()
    for path in TESTS.rglob("test_*.py"):
        found.update(re.findall(r"^(?:async )?def test_([a-z]\d+)_", path.read_text(), re.MULTILINE))
    return found


def test_every_protocol_fact_has_a_test_named_after_it() -> None:
    assert set(_named()) == set(FACTS)
