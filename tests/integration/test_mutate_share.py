"""Runs the unit tests for the edges, services, actions and daemon folders against a fixed sample of mutants."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source import ROOT

FOLDERS = ("services", "edges", "actions", "daemon")
TESTS = tuple(f"tests/unit/{folder}" for folder in FOLDERS)


@pytest.mark.early
@pytest.mark.root
def test_unit_tests_detect_most_of_the_mutants_that_they_reach(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # the run may take longer than pytest's faulthandler_timeout
    argv = [sys.executable, "-m", "tools.chaos.mutate", *FOLDERS, "--share", "60", "--stages", "1", "--tests", *TESTS]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    environment = {**outside, "SHIM_MUTATE_STORE": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    [line] = [line for line in done.stdout.splitlines() if line.startswith("| `all` | chosen |")]
    total, noticed, survived, unreached, not_tried = (int(cell) for cell in line.split("|")[3:8])
    assert noticed + survived >= 10, done.stderr[-2000:]
    assert noticed > survived, done.stdout
    assert total == noticed + survived + unreached + not_tried
    assert all(f"{folder}/" in done.stdout for folder in FOLDERS)
