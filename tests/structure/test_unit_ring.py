"""The unit ring is quick because its tests start no programs."""

from __future__ import annotations

import re

from tests.structure.source import ROOT

STARTS = re.compile(r"\bsys\.executable\b|\bon_terminal\(|\bimport subprocess\b")

COMPARED = {
    "tests/unit/bulk/test_archive.py": "with GNU tar",
    "tests/unit/bulk/test_packing.py": "with GNU tar and diff",
}
"""Files whose subject is compared with a short-lived program."""


def test_unit_tests_start_no_programs() -> None:
    """A test that does belongs in tests/integration."""
    found = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit").rglob("*.py") if STARTS.search(path.read_text())
    }

    assert found == set(COMPARED)
