"""Tests jobs that have no process and whose start program writes 1 into the pidfile. As under monit, such jobs are
reported as running.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.supervisor.ownership.process_finder import Timing
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import until

START = "echo start >>$log; echo 1 >>$pidfile"


@pytest.fixture(autouse=True)
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the processes and groups to which signals are sent. Signals to PID 1 are recorded but not sent."""
    meant: list[int] = []

    def note(send: Callable[[int, int], None], pid_of: Callable[[int], int]) -> Callable[[int, int], None]:
        def noted(target: int, sig: int) -> None:
            meant.append(pid := pid_of(target))
            if pid != 1:
                send(target, sig)

        return noted

    monkeypatch.setattr(os, "kill", note(os.kill, int))
    monkeypatch.setattr(os, "killpg", note(os.killpg, int))
    monkeypatch.setattr(signal, "pidfd_send_signal", note(signal.pidfd_send_signal, _pid_of))
    return meant


def _pid_of(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.removeprefix("Pid:")) for line in lines if line.startswith("Pid:"))


@pytest.mark.parametrize("stop", ["echo stop >>$log; rm $pidfile", "echo stop >>$log", None])
async def test_job_whose_pidfile_names_pid_1_can_be_started_and_stopped(
    world: JobTree, signalled: list[int], stop: str | None
) -> None:
    stops = ["stop"] if stop else []
    async with world.supervising(world.job("rules", START, stop)) as supervisor:
        found = await in_state(supervisor, "rules", "running")
        assert (found.pid, found.process.mem_kb, found.process.cpu_total, found.children) == (0, 0, 0, 0)
        await supervisor.stop(wait=True)
        assert info(supervisor, "rules").state == "stopped"
        assert world.lines() == ["start", *stops]

        await supervisor.start()
        await in_state(supervisor, "rules", "running")
        assert world.lines() == ["start", *stops, "start"]
        assert 1 not in signalled
        assert world.events == []
        await supervisor.stop(wait=True)


async def test_stopping_a_job_whose_pidfile_names_pid_1_waits_only_for_the_stop_program(world: JobTree) -> None:
    world.timing = replace(world.timing, stop=600.0)
    async with world.supervising(world.job("rules", START, "echo stop >>$log", timeout=600)) as supervisor:
        await in_state(supervisor, "rules", "running")
        await asyncio.wait_for(supervisor.stop(wait=True), Timing().stop)

        assert world.lines() == ["start", "stop"]


async def test_job_whose_pidfile_names_pid_1_restarts_when_the_pidfile_is_removed(
    world: JobTree, signalled: list[int]
) -> None:
    async with world.supervising(world.job("rules", START, "rm -f $pidfile")) as supervisor:
        await in_state(supervisor, "rules", "running")
        world.pidfile("rules").unlink()
        watching = asyncio.create_task(supervisor.run())
        await until(lambda: world.lines() == ["start"] * 2)
        await in_state(supervisor, "rules", "running")
        watching.cancel()

        assert 1 not in signalled
        await supervisor.stop(wait=True)


async def test_restarted_agent_reports_a_job_whose_pidfile_names_pid_1_as_running(world: JobTree) -> None:
    async with world.supervising(world.job("rules", START, "rm -f $pidfile")) as supervisor:
        await in_state(supervisor, "rules", "running")
        supervisor.hold()
    async with world.supervisor() as supervisor:
        assert await supervisor.recover()
        await in_state(supervisor, "rules", "running")

        assert world.lines() == ["start"]
        await supervisor.stop(wait=True)


async def test_stale_pidfile_that_names_pid_1_is_ignored(world: JobTree) -> None:
    """The file was written in an earlier container, in which PID 1 may have been one of the job's processes."""
    job = world.job("rules", "echo start >>$log; exit 1", None)
    world.pidfile("rules").parent.mkdir(parents=True, exist_ok=True)
    world.pidfile("rules").write_text("1\n")
    async with world.supervising(job) as supervisor:
        await in_state(supervisor, "rules", "down")

        assert world.lines()[0] == "start"
        await supervisor.stop(wait=True)
