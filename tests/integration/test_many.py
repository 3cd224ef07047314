"""Tests one agent with a hundred processes. All processes are killed at the same time, and then the agent is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agent_shim.host import proc
from tests.support.instance import AGENT, COMMAND, RunningAgent, world
from tests.support.waiting import until

JOBS = 100

pytestmark = pytest.mark.slow


def are_up(w: RunningAgent, starts: int) -> bool:
    """Return True if each job has been started ``starts`` times and its latest process is running."""
    known = w.starts()
    if len(known) != JOBS or any(len(pids) != starts for pids in known.values()):
        return False
    last = [proc.stat(pids[-1]) for pids in known.values()]
    return all(stat is not None and stat.is_alive for stat in last)


async def test_many_killed_services_restart_and_are_adopted_by_the_next_agent() -> None:
    async with world(COMMAND) as w:
        await w.start_agent()
        await w.director.run(AGENT, "apply", w.spec(JOBS, 0))
        await w.run("start")
        await until(lambda: are_up(w, 1))
        await w.until_running()
        for pid in w.pids().values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: are_up(w, 2))
        await w.until_running()
        before = w.starts()

        await w.kill_agent()
        assert are_up(w, 2)
        await w.start_agent()
        await w.until_running()

        assert w.starts() == before
        assert all(Path(f"/proc/{pid}").exists() for pid in w.pids().values())
