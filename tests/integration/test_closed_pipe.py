"""Tests commands whose output pipe is closed early by its reader, for example by ``head`` or ``grep -q``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(words: list[str], where: Path, *, is_buffered: bool = True) -> subprocess.CompletedProcess[str]:
    read, write = os.pipe()
    os.close(read)
    environ = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    argv = [sys.executable, "-m", *words]
    try:
        return subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, cwd=where, env=environ)
    finally:
        os.close(write)


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["agent_shim", "check", "web.monit"], 0),
        (["agent_shim.cli.monit", "-V"], 0),
        # SIGPIPE terminates the original bpm, which is written in Go, and must terminate this command as well.
        (["agent_shim.cli.bpm", "version"], -signal.SIGPIPE),
        (["agent_shim.cli.bpm", "--help"], -signal.SIGPIPE),
    ],
)
def test_command_with_a_closed_output_pipe_exits_silently(
    tmp_path: Path, words: list[str], code: int, *, is_buffered: bool
) -> None:
    (tmp_path / "web.monit").write_text("check process web with pidfile /web.pid group vcap\n")
    done = run(words, tmp_path, is_buffered=is_buffered)

    assert (done.returncode, done.stderr) == (code, "")


def test_failed_check_keeps_its_exit_code_when_the_output_pipe_is_closed(tmp_path: Path) -> None:
    (tmp_path / "wrong.monit").write_text("check\n")

    assert run(["agent_shim", "check", "--json", "wrong.monit"], tmp_path).returncode == 78
