"""Tests that a signal for a job never reaches an unrelated process. The test makes the kernel reuse pids as fast as
possible.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

ROUNDS = int(os.environ.get("SHIM_PID_REUSE_ROUNDS", "30"))
"""Number of rounds. Ten thousand take about half an hour."""


@pytest.mark.attack("a job exits so that its process id is reused between the check and the signal")
def test_process_with_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    """In each round, a job's process is killed, and an unrelated process gets the pid of that process or of the job's
    start program. Then the job is stopped or restarted, or the next supervisor adopts it.
    """
    seed = os.environ.get("SHIM_PID_REUSE_SEED", "6")
    program = [sys.executable, "-m", "tests.support.programs.reuse", str(tmp_path / "world"), str(ROUNDS), seed]
    # The shell is PID 1, so other programs' orphans become children of the shell instead of the test program.
    inside = ["sh", "-c", '"$@"; exit $?', "sh", *program]
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--", *inside],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60 + 2 * ROUNDS,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    assert told["signalled"] == []
    assert told["taken"] > 0.8 * told["rounds"]
