"""Tests that keepers kill fork storms in a PID namespace that, like a container, has a process limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import ROOT

pytestmark = pytest.mark.root

USER = 54_321
"""The uid of a user that has no other processes. The limit applies to all of a user's processes together."""
PROCESSES = 120

KILL = """
import asyncio, resource, sys
from pathlib import Path
from agent_shim.host import keeper

async def main():
    storm, kind, sockets, user, most = *sys.argv[1:4], *map(int, sys.argv[4:])
    program = keeper.Program(
        [storm, kind], {}, user=keeper.User(user, user), limits={resource.RLIMIT_NPROC: (most, most)}
    )
    kept = await keeper.spawn(Path(sockets), "storm", program)
    while len(kept.processes()) < most // 2 and (await kept.request("state")).reaped < 2 * most:
        await asyncio.sleep(0.05)
    await kept.kill()
    await kept.until(lambda: kept.state.is_childless)
    assert kept.processes() == []
    kept.release()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def storm() -> Iterator[Path]:
    """Compile the program that forks, and provide its path. The program is in a directory that other users can enter,
    unlike pytest's directories.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        program = Path(directory, "storm")
        subprocess.run([compiler, "-O2", "-o", program, ROOT / "tests/support/storm.c"], check=True)
        yield program


@pytest.mark.parametrize(
    "kind", ["comet", "comet-session", "bomb", "bomb-session", "bomb-session-ignore", "mortal-session-ignore"]
)
def test_keeper_kills_all_processes_in_a_fork_storm(storm: Path, tmp_path: Path, kind: str) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", KILL]
    arguments = [str(storm), kind, str(tmp_path / "keepers"), str(USER), str(PROCESSES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=240)

    assert done.returncode == 0, done.stderr
