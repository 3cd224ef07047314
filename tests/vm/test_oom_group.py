"""Out-of-memory kills in a container with cgroup v2 for which the kubelet has set memory.oom.group."""

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

# Enter the container's cgroup as a runtime does: it becomes the root of the cgroup namespace and of the mount.
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
    """Create a cgroup that is limited to 128 MiB and whose processes are all killed together when memory runs out."""
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


def test_oom_kill_in_a_privileged_container_ends_one_process(container: Path) -> None:
    """The agent can clear memory.oom.group, so the other processes survive, as they do with cgroup v1."""
    done = run(container, "rw")

    assert done.stdout == "ended: True\njob lives: True\n", done.stderr
    assert cgroups.oom_kills_of(2, container) == 1


def test_oom_kill_with_a_read_only_cgroup_ends_all_processes(container: Path) -> None:
    """Unprivileged pods have such a cgroup, so there only the kubelet's singleProcessOOMKill prevents this."""
    done = run(container, "ro")

    assert done.stdout == "refused: Read-only file system\n", done.stderr
    assert done.returncode == -signal.SIGKILL
