"""Tests that jobs keep running during upgrades from the last revision that started jobs without a keeper process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from agent_shim.host import job_cgroups, process
from tests.support.programs import is_alive, number_in
from tests.support.programs.jobs import LASTING, JobTree, in_state, info
from tests.support.source import ROOT
from tests.support.waiting import until

FORMER: Final = "d2b51961"


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the last revision without keepers, and return the directory with its sources."""
    tree = tmp_path_factory.mktemp("former")
    archive = subprocess.run(["git", "-C", ROOT, "archive", FORMER], stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        pytest.skip(f"this clone lacks the revision {FORMER}")
    subprocess.run(["tar", "-C", tree, "-x"], input=archive.stdout, check=True)
    return tree


@pytest.fixture
async def left(world: JobTree, former: Path) -> tuple[int, int]:
    """Start a job with an agent from the last revision without keepers, then kill the agent.

    Return the pids of the job's process and its child.
    """
    child = world.base / "child"
    jobs = [world.job("web", f"sleep 600 & echo $! >{child}; echo $$ >$pidfile; {LASTING}", "exit 0", timeout=1)]
    (world.base / "files.json").write_bytes(msgspec.json.encode(jobs))
    command = [sys.executable, "-m", "tests.support.programs.agent", str(world.base)]
    env = {"PYTHONPATH": str(former), "PATH": os.environ["PATH"], "TEST_OF": str(world.base)}
    agent = process.spawn(command, env=env, cwd=former, stdout=world.base / "out", stderr=world.base / "out")
    pids = await until(
        lambda: None if None in (pids := [number_in(world.pidfile("web")), number_in(child)]) else pids,
        "jobs of the former agent",
    )
    await until(
        lambda: b'"running"' in state.read_bytes() if (state := world.paths.supervisor_state).exists() else False
    )
    agent.send(signal.SIGKILL)
    await agent.wait()
    return pids[0] or 0, pids[1] or 0


async def test_jobs_from_an_agent_without_keepers_keep_running_and_can_be_stopped(
    world: JobTree, left: tuple[int, int]
) -> None:
    async with world.supervisor() as supervisor:
        assert await supervisor.recover()
        assert (await in_state(supervisor, "web", "running")).pid == left[0]
        await supervisor.stop(wait=True)

    assert not any(map(is_alive, left))


async def test_job_from_an_agent_without_keepers_gets_a_keeper_at_its_next_start(
    world: JobTree, left: tuple[int, int]
) -> None:
    async with world.supervisor() as supervisor:
        assert await supervisor.recover()
        await in_state(supervisor, "web", "running")
        assert supervisor.keepers.of(["web"]) == []
        await supervisor.restart_one("web")
        await until(lambda: info(supervisor, "web").pid not in (0, left[0]))

        found = await in_state(supervisor, "web", "running")
        (kept,) = supervisor.keepers.of(["web"])
        assert kept.state.program == found.pid
        assert not any(map(is_alive, left))
        await supervisor.stop(wait=True)


@pytest.mark.root
async def test_detached_daemon_started_by_an_agent_without_keepers_is_stopped(world: JobTree, former: Path) -> None:
    """The daemon has left its session and cleared its environment, and its parent has exited. The new agent can find
    the daemon only through the cgroup in which the old agent placed the job.
    """
    if not job_cgroups.hierarchies():
        pytest.skip("no cgroups here")
    child = world.base / "child"
    hidden = f"(setsid sh -c 'echo $$ >{child}.new; mv {child}.new {child}; exec env -i sleep 600' &)"
    jobs = [world.job("web", f"{hidden}; echo $$ >$pidfile; {LASTING}")]
    (world.base / "files.json").write_bytes(msgspec.json.encode(jobs))
    command = [sys.executable, "-m", "tests.support.programs.agent", str(world.base)]
    env = {"PYTHONPATH": str(former), "PATH": os.environ["PATH"], "TEST_OF": str(world.base)}
    agent = process.spawn(command, env=env, cwd=former)
    pid = await until(lambda: number_in(child))
    await until(
        lambda: b'"running"' in state.read_bytes() if (state := world.paths.supervisor_state).exists() else False
    )
    agent.send(signal.SIGKILL)
    await agent.wait()

    async with world.supervisor() as supervisor:
        assert await supervisor.recover()
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)

    assert not is_alive(pid)
