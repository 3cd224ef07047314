"""Checks that every test belongs to a ring, which is a group of tests that a task runs."""

from __future__ import annotations

import re

from tests.support.source import ROOT

UNMARKED = ("integration", "contract", "cpi", "structure", "unit")
"""Directories whose tests need no mark, because ``./dev test`` runs them anyway."""
MARK = re.compile(
    r"pytest\.mark\.(root|slow|image|kubernetes|arm64|lxd|vm|releases|go_agent|chaos|sabotage)\b|^@case\(", re.MULTILINE
)


def test_test_files_outside_the_daily_tests_have_a_ring_mark() -> None:
    """Test tasks other than ``./dev test`` select tests by a mark, so none of them would run a file without a mark."""
    files = [path for path in (ROOT / "tests").glob("*/test_*.py") if path.parent.name not in UNMARKED]

    assert len(files) > 50
    assert [path.name for path in files if not MARK.search(path.read_text())] == []


def test_daily_task_lists_every_test_directory_that_needs_no_mark() -> None:
    assert f'ring "{" ".join(f"tests/{name}" for name in UNMARKED)}" 300 "$DAILY"' in (ROOT / "dev").read_text()
