"""The cases of the scorecard that are short. `./dev chaos` plays all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chaos import __main__ as _played  # noqa: F401 - importing it enters all cases
from chaos.cases import CASES
from chaos.scorecard import earlier
from tests.structure.source import ROOT

pytestmark = pytest.mark.root

SHORT = sorted(case.id for case in CASES.values() if not case.is_long)


@pytest.mark.parametrize("case", SHORT)
def test_it_holds(case: str, tmp_path: Path) -> None:
    """With all invariants afterwards, below a process 1 of its own."""
    into = tmp_path / "rows"
    argv = [sys.executable, "-m", "chaos", case, "--into", str(into)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stderr

    assert into.exists(), said
    row = earlier(into.read_text())[case]
    assert row.verdict == "held", f"{row.figures}\n{said[-3000:]}"
