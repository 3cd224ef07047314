"""Tests the agent's log when its standard error goes to svlogd, as on stemcells with runit."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("holder", ["svlogd", "nobody"])
def test_log_line_is_written_once_under_svlogd(tmp_path: Path, holder: str) -> None:
    """svlogd writes its standard input to a file in the directory that it has locked (runit, svlogd.c). The agent must
    write the line only to stderr, and not to the same file.
    """
    code = (
        "import logging, sys; from pathlib import Path; from agent_shim.core import log\n"
        "log.setup(file=Path(sys.argv[1], 'current')); logging.warning('one line')"
    )
    lock = (tmp_path / "lock").open("w")
    if holder == "svlogd":
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, timeout=60, check=True
        )

    assert done.stderr.count(b"one line") == 1
    assert (tmp_path / "current").exists() == (holder == "nobody")


@pytest.mark.parametrize("end", ["return", "raise ValueError", "sys.exit(3)"])
def test_last_request_is_logged_however_the_process_exits(tmp_path: Path, end: str) -> None:
    """Log lines are normally written in the next event loop iteration, but a process that exits has no further
    iteration.
    """
    code = (
        "import asyncio, logging, sys; from pathlib import Path; from agent_shim.core import log\n"
        "log.setup(file=Path(sys.argv[1], 'current'))\n"
        "async def last():\n"
        f"    logging.getLogger('agent_shim.audit').info('request'); {end}\n"
        "asyncio.run(last())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, timeout=60, check=False)

    assert done.stderr.count(b'"request"') == 1
    assert (tmp_path / "current").read_text().count('"request"') == 1
