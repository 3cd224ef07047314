"""Commands that print job logs escape control characters on a terminal, because a job could otherwise control the
terminal. In a pipe, the logs are unchanged.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from tests.support.terminals import on_terminal

ORDERS = b"\x1b]0;owned\x07\xff\n"
"""Output of a job with a terminal control sequence and an invalid UTF-8 byte."""
HARMLESS = rb"\u001b]0;owned\u0007"


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
def test_bpm_logs_are_escaped_for_a_terminal_and_unchanged_for_a_pipe(tmp_path: Path) -> None:
    log_file = tmp_path / "web.stdout.log"
    log_file.write_bytes(ORDERS)
    program = (
        "import sys; from pathlib import Path; from agent_shim.cli import bpm_logs; "
        "one = bpm_logs.Log(Path(sys.argv[1]), Path(sys.argv[2])); one.open(); "
        "bpm_logs.show([one], 5, is_named=False, follows=False)"
    )
    argv = [sys.executable, "-c", program, str(log_file), str(tmp_path)]

    assert on_terminal(argv) == HARMLESS + rb"\udcff" + b"\r\n"
    assert subprocess.run(argv, capture_output=True, check=True).stdout == ORDERS


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("where", ["web", "--agent"])
def test_logs_are_escaped_for_a_terminal_and_unchanged_for_a_pipe(tmp_path: Path, where: str, follow: bool) -> None:
    paths = Paths(tmp_path)
    log_file = paths.agent_log / "current" if where == "--agent" else paths.log / "web/web.stdout.log"
    log_file.parent.mkdir(parents=True)
    log_file.write_bytes(ORDERS)
    argv = [sys.executable, "-m", "agent_shim.cli", "logs", where, "-b", str(tmp_path)]

    shown = on_terminal([*argv, *["-f"] * follow], lambda found: b"\n" in found)
    assert HARMLESS in shown
    assert b"\x1b]" not in shown
    assert b"\x07" not in shown
    piped = subprocess.run(argv, capture_output=True, check=True).stdout
    assert piped == (ORDERS if where == "--agent" else b"web/web.stdout.log | " + ORDERS)
