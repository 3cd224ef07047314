"""Tests out-of-memory kills in a container with cgroup v2, where the kubelet has set memory.oom.group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.host import cgroups
from tests.support.source import ROOT

pytestmark = pytest.mark.vm

# Enter the container's cgroup as a container runtime does, so that this cgroup becomes the root of both the cgroup
# namespace and the cgroup mount.
ENTER = """
echo 0 >"$0/cgroup.procs"
exec unshare --cgroup --mount sh -c 'mount -t cgroup2 -o "$0" cgroup2 /sys/fs/cgroup && exec "$@"' "$@"
"""
PROGRAM = """
import subprocess
from agent_shim.host import cgroups
with subprocess.Popen(["sleep", "1000"]) as job:
    try:
        print("ended:", cgroups.end_oom_group(cgroups.find()), flush=True)
    except OSError as exc:
        print("refused:", exc.strerror, flush=True)
    subprocess.run(["sh", "-c", "head -c 400M /dev/zero | tail -c 400M >/dev/null"])
    print("job lives:", job.poll() is None)
    job.kill()
"""


@pytest.fixture
def container() -> Iterator[Path]:
    """Create a cgroup with a memory limit of 128 MiB.

    When this memory is used up, the kernel kills all processes in the cgroup together, because ``memory.oom.group`` is
    1.
    """
    top = Path("/sys/fs/cgroup")
    (top / "cgroup.subtree_control").write_text("+memory")
    made = top / f"container-{os.getpid()}"
    made.mkdir()
    for name, value in (("memory.max", "128M"), ("memory.swap.max", "0"), ("memory.oom.group", "1")):
        if (made / name).exists():
            (made / name).write_text(value)
    yield made
    made.rmdir()


def run(container: Path, options: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", ENTER, str(container), options, sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_oom_kill_in_a_privileged_container_kills_one_process(container: Path) -> None:
    done = run(container, "rw")

    assert done.stdout == "ended: True\njob lives: True\n", done.stderr
    assert cgroups.oom_kills_of(2, container) == 1


def test_oom_kill_with_a_read_only_cgroup_kills_all_processes(container: Path) -> None:
    """The agent cannot clear memory.oom.group if the cgroup is read-only, as in unprivileged pods. There, only the
    kubelet's singleProcessOOMKill setting keeps the other processes alive.
    """
    done = run(container, "ro")

    assert done.stdout == "refused: Read-only file system\n", done.stderr
    assert done.returncode == -signal.SIGKILL
