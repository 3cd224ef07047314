"""The log beside a svlogd that reads standard error."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("holder", ["svlogd", "nobody"])
def test_under_a_svlogd_a_line_is_logged_once(tmp_path: Path, holder: str) -> None:
    """It locks its directory and writes the lines of its stdin there (runit, svlogd.c)."""
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
