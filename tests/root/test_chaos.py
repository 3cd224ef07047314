"""The cases of the scorecard that are short; `./dev chaos` plays all of them."""

from __future__ import annotations

import pytest

from benchmarks.world import COMMAND
from chaos.__main__ import play
from chaos.cases import CASES, Case

pytestmark = pytest.mark.root

SHORT = sorted((case for case in CASES.values() if not case.is_long), key=lambda case: case.id)


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.id)
async def test_it_holds(case: Case) -> None:
    """With all invariants afterwards."""
    row = await play(case, COMMAND)
    assert row.verdict == "held", row.figures
