"""Bus, agent and a job killed while a deploy runs: it can be finished, and nothing is half done or done twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim_demo.director import RpcRemoteError, RpcTimeoutError
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made

pytestmark = pytest.mark.slow

MB = 1024 * 1024
SCRIPT = "#!/bin/sh\ntouch {base}/data/job0/in-pre-start\nsleep 0.5\n"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        await one.start_agent()
        yield one


async def deploy(world: World, spec: dict[str, Any]) -> None:
    """The calls of a Director from prepare to running; each is asked again while the agent or the bus is away."""
    for method, *arguments in (
        ("prepare", spec),
        ("stop",),
        ("apply", spec),
        ("run_script", "pre-start", {}),
        ("start",),
    ):
        await _insist(world, method, *arguments)
    async with asyncio.timeout(60):
        while (await _insist(world, "get_state"))["job_state"] != "running":
            await asyncio.sleep(0.05)


async def _insist(world: World, method: str, *arguments: Any) -> Any:
    """Run an action like a user who repeats a deploy that failed without an agent."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await world.director.run(AGENT, method, *arguments, timeout=5)
            except RpcTimeoutError:
                continue
            except RpcRemoteError as exc:
                if "could not be found" not in str(exc):  # the task died with the agent
                    raise


def nothing_is_half_done(world: World, spec: dict[str, Any]) -> None:
    """Every installed bundle is whole and linked; no temporary file is left."""
    for name in spec["packages"]:
        assert (world.base / "packages" / name / "content").stat().st_size == 8 * MB
    for directory in ("data/packages", "data/jobs", "data/tmp"):
        assert [str(path) for path in (world.base / directory).rglob(".*")] == []


def each_job_runs_once(world: World) -> None:
    for job, pid in world.pids().items():
        commands = [
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/environ")
            if f"AGENT_SHIM_SERVICE={job}".encode() in _read(path) and str(world.base).encode() in _read(path)
        ]
        assert [int(found) for found in commands] == [pid], f"{job} runs as {commands}, its pidfile says {pid}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("outage", [2.0, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_bus_killed_while_a_deploy_runs(world: World, outage: float) -> None:
    spec = world.spec(3, 3, 8 * MB)
    deploying = asyncio.create_task(deploy(world, spec))
    async with asyncio.timeout(30):
        while not list((world.base / "data/packages").glob("*/*")):
            await asyncio.sleep(0.002)

    await world.server.kill()
    await asyncio.sleep(outage)
    await world.server.start()

    await deploying
    nothing_is_half_done(world, spec)
    assert {job: len(pids) for job, pids in world.starts().items()} == {"job0": 1, "job1": 1, "job2": 1}


@pytest.mark.parametrize("moment", ["unpacking", "running"])
async def test_agent_killed_while_a_deploy_runs(world: World, moment: str) -> None:
    if moment == "running":
        await deploy(world, world.spec(3, 3, 8 * MB))
    before = world.pids()
    spec = world.spec(3, 3, 8 * MB, version="2")
    prepare = asyncio.create_task(world.director.call(AGENT, "prepare", spec, timeout=1))
    async with asyncio.timeout(30):
        while not list((world.base / "data/packages").glob("*/.*")):
            await asyncio.sleep(0.001)

    await world.kill_agent()
    await asyncio.gather(prepare, return_exceptions=True)
    await world.start_agent()

    assert world.pids() == before
    each_job_runs_once(world)
    await deploy(world, spec)
    nothing_is_half_done(world, spec)
    assert len(world.pids()) == 3
    each_job_runs_once(world)


async def test_agent_killed_restarts_no_job(world: World) -> None:
    await deploy(world, world.spec(3, 0))
    before = world.starts()

    for _ in range(3):
        await world.kill_agent()
        await world.start_agent()
        state = await world.director.value(AGENT, "get_state")
        assert [process["state"] for process in state["processes"]] == ["running"] * 3

    assert world.starts() == before


async def test_job_killed_while_a_deploy_runs(world: World) -> None:
    await deploy(world, world.spec(3, 0))
    victim = world.pids()["job1"]
    spec = world.spec(3, 3, 8 * MB, version="2")
    prepare = asyncio.create_task(_insist(world, "prepare", spec))

    os.kill(victim, signal.SIGKILL)

    async with asyncio.timeout(30):
        while world.pids().get("job1") in (None, victim):
            await asyncio.sleep(0.002)
        assert await prepare == "prepared"
    each_job_runs_once(world)
    await deploy(world, spec)
    nothing_is_half_done(world, spec)
    assert len(world.pids()) == 3
    each_job_runs_once(world)
