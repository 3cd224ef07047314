"""Generated parts of the pages in ``docs/`` are current."""

from __future__ import annotations

import pytest
import yaml

from tests.structure.source import FLOORS, Module, modules
from tests.support.drawn import GENERATED, OBJECTS, PAGES, PROMETHEUS, module_tables, purpose, regenerated


@pytest.mark.parametrize("page", sorted({page for page, _ in GENERATED}))
def test_page_is_current(page: str) -> None:
    """``./dev run python -m tests.support.drawn`` updates a stale page."""
    text = (PAGES / page).read_text()

    assert regenerated(page, text) == text, "stale: ./dev run python -m tests.support.drawn"


@pytest.mark.parametrize("name", OBJECTS)
def test_object_is_current(name: str) -> None:
    """Rules and dashboard have one source each, and the objects of a cluster say the same."""
    text = (PROMETHEUS / name).read_text()
    made, rules = yaml.safe_load(text), yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())
    board = (PROMETHEUS.parent / "grafana/agent-shim.json").read_text()

    assert OBJECTS[name]() == text, "stale: ./dev run python -m tests.support.drawn"
    assert (made.get("spec") or made["data"]) in (rules, {"agent-shim.json": board})


def test_missing_marker_is_an_error() -> None:
    """A page cannot lose a generated part unnoticed."""
    with pytest.raises(ValueError, match="no place for states"):
        regenerated("architecture.md", "<!-- floors -->\n<!-- /floors -->\ntext\n<!-- states -->\n")


def test_each_module_is_in_a_table() -> None:
    """Every module below a folder of FLOORS has one row; the folders themselves are in the table of floors."""
    rows = [line.split("`")[1] for line in module_tables().splitlines() if line.startswith("| `")]
    names = [name.partition(".")[2] for name in modules() if name not in FLOORS]

    assert sorted(rows) == sorted(names)


def test_purpose_is_the_first_sentence() -> None:
    """Line breaks become spaces, and a bar cannot split the cell."""
    module = Module("host.files", '"""Read ``a|b`` and\nwrite it. Pure.\n\nMore.\n"""')

    assert purpose(module) == r"Read `a\|b` and write it"


def test_module_without_docstring_is_named() -> None:
    """The error names the module to document."""
    with pytest.raises(ValueError, match=r"agent_shim\.host\.files has no docstring"):
        purpose(Module("host.files", "import os"))
