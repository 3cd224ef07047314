"""When a test hangs, only that test fails. Its report shows where it was waiting, and the programs that it started are
killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import is_alive
from tests.support.source import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TESTS = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
import pytest

PIDS = Path(__file__).with_name("pids")

def start(tmp_path):
    process = subprocess.Popen(["sleep", "600"], env={"OF": f"{tmp_path}/x"}, start_new_session=True)
    process.returncode = 0  # prevent a warning, because no code waits for the process
    with PIDS.open("a") as file:
        file.write(f"{process.pid}\\n")

@pytest.mark.timeout(2)
async def test_waits():
    await asyncio.Event().wait()

@pytest.mark.timeout(2)
def test_sleeps(tmp_path):
    start(tmp_path)
    time.sleep(600)

def test_kills_its_worker(tmp_path):
    start(tmp_path)
    os.kill(os.getpid(), 9)

def test_passes():
    pass
"""


async def test_hanging_test_does_not_fail_other_tests_and_its_programs_are_killed(tmp_path: Path) -> None:
    file = tmp_path / "test_them.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "tests.conftest"]
    options = ["-c", str(ROOT / "pyproject.toml"), f"--basetemp={tmp_path}/base", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    done = await asyncio.to_thread(
        subprocess.run, [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )

    assert "3 failed, 1 passed" in done.stdout
    assert re.search(r"-- waiting --.*test_them.py\", line \d+, in test_waits", done.stdout, re.DOTALL)
    assert "::test_sleeps - Failed: Timeout" in done.stdout
    assert "crashed while running" in done.stdout
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    await until(lambda: not any(map(is_alive, pids)))
