"""A fixed share of the mutants of edges, services, actions, the daemon and the CPI, against the quick tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.source import ROOT

FOLDERS = ("services", "edges", "actions", "daemon", "kubernetes_cpi")
TESTS = ("tests/unit", "tests/cpi/test_vms.py", "tests/cpi/test_disks.py")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mutants run confined, which takes root")
def test_quick_tests_notice_most_of_the_mutants_that_they_reach(tmp_path: Path) -> None:
    """The table also counts the lines that they do not reach, which the later stages of ``./dev mutate`` try."""
    argv = [sys.executable, "-m", "chaos.mutate", *FOLDERS, "--share", "60", "--minutes", "3", "--tests", *TESTS]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "SHIM_MUTATE_STORE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    [line] = [line for line in done.stdout.splitlines() if line.startswith("| `all` | chosen |")]
    total, noticed, survived, unreached, not_tried = (int(cell) for cell in line.split("|")[3:8])
    assert noticed + survived >= 20, done.stderr[-2000:]
    assert noticed > survived, done.stdout
    assert total == noticed + survived + unreached + not_tried
    assert all(f"{folder}/" in done.stdout for folder in FOLDERS)
