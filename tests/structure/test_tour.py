"""Checks that each step in docs/tour.md names a function or class that exists in the linked file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.source import ROOT

PAGE = ROOT / "docs/tour.md"
STEP = re.compile(r"^\d+\. (.*)$", re.MULTILINE)
LINK = re.compile(r"\[([\w.]+)\]\(([\w./]+\.py)\)")


def walks(page: str) -> dict[str, list[str]]:
    """Return the steps of each walk in the tour, keyed by the walk's heading."""
    return {
        heading.strip(): STEP.findall(text)
        for heading, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", page, re.MULTILINE)
    }


def defined(body: list[ast.stmt], before: str = "") -> Iterator[str]:
    """Yield the names of the functions and classes in a file. Methods are named ``Class.method``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield before + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{node.name}.")


def lost(page: str, directory: Path) -> list[str]:
    """Return the links on a page that name a function or class missing from the linked file."""
    return [
        f"{name} in {file}"
        for name, file in LINK.findall(page)
        if not (path := directory / file).is_file() or name not in defined(ast.parse(path.read_text()).body)
    ]


def test_each_function_in_the_tour_is_in_its_linked_file() -> None:
    assert lost(PAGE.read_text(), PAGE.parent) == []


def test_tour_has_five_walks_of_five_to_ten_steps() -> None:
    found = walks(PAGE.read_text())

    assert len(found) == 5
    assert {heading: len(steps) for heading, steps in found.items() if not 5 <= len(steps) <= 10} == {}


def test_each_tour_step_begins_with_a_link_to_code() -> None:
    assert [step for steps in walks(PAGE.read_text()).values() for step in steps if not LINK.match(step)] == []


def test_missing_function_in_the_tour_is_detected(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    async def b(self): ...\n\ndef c(): ...\n")
    page = "[A](a.py) [A.b](a.py) [c](a.py) [b](a.py) [A.c](a.py) [c](none.py)"

    assert lost(page, tmp_path) == ["b in a.py", "A.c in a.py", "c in none.py"]
