"""Cgroups of jobs in each hierarchy of this machine's kernel."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.host import cgroups, job_cgroups, proc, process
from tests.support.waiting import until

pytestmark = pytest.mark.root

FORKING = """
import os, sys, time
counter = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    try:
        if os.fork() == 0:
            os.write(counter, b".")
            os._exit(0)
        os.wait()
    except BlockingIOError:
        time.sleep(0.001)
"""


@pytest.fixture(params=["", "freezer", "pids"])
def cage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[job_cgroups.JobCgroup]:
    """A job's cgroup that the kernel cannot kill at once, with what it has instead."""
    tree = next((each for each in cgroups.trees() if each.controller == request.param), None)
    if tree is None:
        pytest.skip("this machine has no such hierarchy for us")
    monkeypatch.setattr(job_cgroups, "tracker", lambda: tree)
    made = job_cgroups.JobCgroup(f"test-{uuid.uuid4()}")
    made.make()
    yield made
    made.kill()
    made.remove()


async def test_frozen_cgroup_forks_no_child_and_continues_afterwards(
    cage: job_cgroups.JobCgroup, tmp_path: Path
) -> None:
    """A process that forks endlessly is killed, too."""
    counter = tmp_path / "counter"
    [place] = map(Path, cage.make())

    def count() -> int:
        return counter.stat().st_size if counter.exists() else 0

    def stands_still() -> bool:
        before = count()
        for _ in range(20):
            proc.table()
            time.sleep(0)
        return count() == before

    forking = process.spawn([sys.executable, "-I", "-S", "-c", FORKING, str(counter)], env={})
    try:
        (place / "cgroup.procs").write_text(str(forking.pid))
        await until(lambda: count() > 20)
        with job_cgroups.held_still(place):
            assert any(stands_still() for _ in range(5))
        at = count()
        await until(lambda: count() > at)
        cage.kill()
        await forking.wait()
        await until(cage.is_empty)
    finally:
        forking.send(signal.SIGKILL)
        await forking.wait()


def test_cgroup_probe_leaves_no_cgroup_behind() -> None:
    """The next probe of this process would fail."""
    job_cgroups.tracker.__wrapped__()
    job_cgroups.offered()

    hierarchies = [each.hierarchy for each in cgroups.trees()] + [each for _, each in job_cgroups.hierarchies()]
    assert [path for each in hierarchies for path in job_cgroups.place(each).glob("probe-*")] == []
