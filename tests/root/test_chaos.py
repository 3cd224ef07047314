"""The cases of the scorecard that are short; `./dev chaos` plays all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos import __main__ as _played  # noqa: F401 - importing it enters all cases
from chaos.cases import CASES
from chaos.scorecard import earlier
from tests.structure.source import ROOT

pytestmark = pytest.mark.root

SHORT = sorted(case.id for case in CASES.values() if not case.is_long)
AT_ONCE = 4
"""Most of a case is the wait of its witness for a heartbeat."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, str]]]:
    """Play cases, several at once; return the rows and the output of one."""
    place = tmp_path_factory.mktemp("rows")

    def play(case: str) -> tuple[Path, str]:
        argv = [sys.executable, "-m", "chaos", case, "--into", str(place / case)]
        return place / case, subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stderr

    begun: dict[str, Future[tuple[Path, str]]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def of(case: str) -> tuple[Path, str]:
            for each in SHORT[SHORT.index(case) : SHORT.index(case) + AT_ONCE]:
                if each not in begun:
                    begun[each] = pool.submit(play, each)
            return begun[case].result()

        yield of


@pytest.mark.parametrize("case", SHORT)
def test_it_holds(case: str, played: Callable[[str], tuple[Path, str]]) -> None:
    """With all invariants afterwards, below a process 1 of its own."""
    into, said = played(case)

    assert into.exists(), said
    row = earlier(into.read_text())[case]
    assert row.verdict == "held", f"{row.figures}\n{said[-3000:]}"
