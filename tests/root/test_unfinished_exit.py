"""A process whose exit has begun and does not end: alive to the kernel, without memory and environment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_shim.host import proc, process, reaper
from agent_shim.supervisor.ownership.evidence import Ownership
from agent_shim.supervisor.ownership.process_record import MARK, ProcessRecord, mark
from tests.support.waiting import until

pytestmark = pytest.mark.root

CENSUS_OF_LEAVING = """
import json, os
from agent_shim.host import proc
proc.variables = lambda pids, mark, more: ({}, list(pids))
proc.is_leaving = lambda pid: True
proc.last_number = lambda: None
print(json.dumps([os.getsid(0), os.getpid(), list(proc.census("MARK").unread)]))
"""


def test_exiting_process_with_a_session_outside_its_pid_namespace_is_unread() -> None:
    """The kernel shows its session as 0, as it shows that of its own threads."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", CENSUS_OF_LEAVING]

    session, pid, unread = json.loads(subprocess.run(inside, stdout=subprocess.PIPE, check=True).stdout)

    assert session == 0
    assert pid in unread


@pytest.mark.attack("a job outruns its stop by forking")
async def test_orphan_that_lost_its_mark_while_exiting_is_reported_as_leaving(tmp_path: Path) -> None:
    """The init of a pid namespace waits in its exit for a process whose parent, outside, does not reap it."""
    ownership, traces = Ownership(tmp_path), ProcessRecord()
    ownership.records = lambda: [("web", traces)]
    env = {"PATH": "/usr/bin:/bin", MARK: mark("web", tmp_path)}
    with reaper.reaping():
        maker = process.spawn(["unshare", "--pid", "--fork", "setsid", "sleep", "600"], env=env)
        first = await until(lambda: next(iter(proc.children(proc.table()).get(maker.pid, ())), 0))
        await until(lambda: proc.name(first) == "sleep")
        orphan = process.adopt(first)
        assert orphan is not None
        guest = process.spawn(["nsenter", f"--target={first}", "--pid", "sleep", "600"], env={"PATH": "/usr/bin:/bin"})
        try:
            await until(lambda: proc.children(proc.table()).get(guest.pid))
            await maker.terminate(0)
            seen = ownership.members(ownership.look(), "web", traces)
            assert [pid for pid, _ in seen.identities] == [first]
            assert seen.leaving == []

            guest.send(signal.SIGSTOP)
            await until(lambda: (stat := proc.stat(guest.pid)) is not None and stat.state == "T")
            orphan.send(signal.SIGKILL)
            await until(lambda: proc.is_leaving(first))

            found = proc.stat(first)
            assert found is not None
            assert found.is_alive
            seen = ownership.members(ownership.look(), "web", traces)
            assert (seen.identities, seen.leaving) == ([], [found.identity])
        finally:
            guest.send(signal.SIGKILL)
            orphan.send(signal.SIGKILL)
        await orphan.wait()
        await guest.wait()
