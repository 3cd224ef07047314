"""Checks that generated files and the generated parts of pages in ``docs/`` are up to date."""

from __future__ import annotations

import pytest
import yaml

from tests.support.source import ROOT, Module
from tools.pages import (
    FILES,
    GENERATED,
    PAGES,
    PROMETHEUS,
    prometheus_rule,
    purpose,
    regenerated,
)


@pytest.mark.parametrize("page", sorted({page for page, _ in GENERATED}))
def test_generated_parts_of_pages_are_up_to_date(page: str) -> None:
    text = (PAGES / page).read_text()

    assert regenerated(page, text) == text, "stale: ./dev run python -m tools.pages"


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_up_to_date(name: str) -> None:
    assert FILES[name]() == (ROOT / name).read_text(), "stale: ./dev run python -m tools.pages"


def test_prometheus_rule_object_equals_the_rules_file() -> None:
    """The plain rules file is used outside Kubernetes. Its rules must equal those in the Kubernetes object."""
    rule = yaml.safe_load(prometheus_rule())

    assert rule["spec"] == yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())


def test_missing_marker_for_a_generated_part_is_an_error() -> None:
    """Without this error, a page could lose a generated part without anybody noticing."""
    with pytest.raises(ValueError, match="no place for states"):
        regenerated("architecture.md", "<!-- floors -->\n<!-- /floors -->\ntext\n<!-- states -->\n")


def test_module_purpose_is_the_first_docstring_sentence() -> None:
    """The sentence becomes a table cell, so line breaks must become spaces and vertical bars must be escaped."""
    module = Module("host.files", '"""Read ``a|b`` and\nwrite it. Pure.\n\nMore.\n"""')

    assert purpose(module) == r"Read `a\|b` and write it"


def test_error_for_a_module_without_docstring_names_the_module() -> None:
    with pytest.raises(ValueError, match=r"agent_shim\.host\.files has no docstring"):
        purpose(Module("host.files", "import os"))
