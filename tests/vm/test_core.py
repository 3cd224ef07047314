"""The agent's core dumps are never stored, even if the kernel pipes core dumps to a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm

PATTERN = Path("/proc/sys/kernel/core_pattern")
CRASH = """
import os, resource, sys
from agent_shim.host import process
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
if sys.argv[1] == "guarded":
    process.disable_core_dumps()
os.abort()
"""


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[Path]:
    """Install a program to which the kernel pipes core dumps. Return the directory with the dumps.

    Each dump is written to a file named after the crashed process's pid.
    """
    program, dumps = tmp_path / "handler", tmp_path / "dumps"
    dumps.mkdir()
    program.write_text(f"#!/bin/sh\ncat >{dumps}/$1\n")
    program.chmod(0o755)
    before = PATTERN.read_text()
    PATTERN.write_text(f"|{program} %P")
    yield dumps
    PATTERN.write_text(before)


def crash(how: str) -> int:
    with subprocess.Popen([sys.executable, "-c", CRASH, how]) as crashed:
        crashed.wait()  # before the process exits, the kernel writes its memory to the handler
        return crashed.pid


@pytest.mark.attack("a job reads the agent's memory or core file")
def test_disabled_core_dumps_do_not_reach_a_pipe_handler(handler: Path) -> None:
    with_limit, without = crash("guarded"), crash("unguarded")

    assert [path.name for path in handler.iterdir()] == [str(without)]
    assert with_limit != without
