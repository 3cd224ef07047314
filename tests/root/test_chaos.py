"""Tests the short cases of ``./dev chaos``."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.chaos.cases import CASES
from tests.chaos.scorecard import earlier
from tests.support import kills
from tests.support.source import ROOT

pytestmark = pytest.mark.root

SHORT = sorted(case.id for case in CASES.values() if not case.is_long)


@pytest.mark.parametrize("case", SHORT)
def test_chaos_case_keeps_all_invariants(case: str, tmp_path: Path) -> None:
    """Each case runs in its own PID namespace so that a misdirected signal cannot reach the host."""
    into = tmp_path / "rows"
    argv = [sys.executable, "-m", "tests.chaos", case, "--into", str(into)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    assert into.exists(), said
    row = earlier(into.read_text())[case]
    assert row.verdict == "held", f"{row.figures}\n{said[-3000:]}"


def test_chaos_kill_is_reported_even_if_the_victim_finished_first(tmp_path: Path) -> None:
    """The victim can finish its work between the kill and the tracer's report. If the report were then lost, the
    case would wait for a reply from a dead agent.
    """
    program = "import sys; sys.stdin.readline(); open(sys.argv[1], 'w')"
    argv = [sys.executable, "-c", program, str(tmp_path / "state.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as victim:
        stand: Any = SimpleNamespace(pid=victim.pid, expected_ends=0, ends=[-9], answers=AsyncMock())

        async def work() -> None:
            """Block the loop until the victim is dead. The work then ends before the tracer's report is read."""
            victim.communicate(b"\n", timeout=30)

        told = asyncio.run(kills.killed(stand, 1, "root", [tmp_path], work))

    assert told["killed"] == [victim.pid]
    assert stand.expected_ends == 1


def test_tracer_simulates_a_full_disk_starting_at_a_given_system_call(tmp_path: Path) -> None:
    """Calls that need space fail with ENOSPC, but files can still be deleted."""
    program = """import os, sys
sys.stdin.readline()
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for change in (lambda: os.write(file, b"text"), lambda: os.fsync(file), lambda: os.unlink(sys.argv[1])):
    try:
        change()
        print("done")
    except OSError as exc:
        print(exc.errno)"""
    argv = [sys.executable, "-c", program, str(tmp_path / "state.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:

        async def play() -> tuple[bytes, bytes]:
            async with kills.tracing(victim.pid, 2, "ENOSPC", [tmp_path]) as lines:
                said, _ = await asyncio.to_thread(victim.communicate, b"\n", timeout=60)
                return said, await lines.readline()

        said, told = asyncio.run(play())

    assert said.split() == [b"28", b"28", b"done"]
    assert json.loads(told)["call"] == "write"
