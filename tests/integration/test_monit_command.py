"""``monit`` and ``agent-shim start|stop|…`` against a running agent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.host import process
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made
from tests.support.waiting import until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """An agent with two running jobs."""
    async with made(COMMAND) as one:
        await one.start_agent()
        await one.director.run(AGENT, "apply", one.spec(2, 0))
        await one.run("start")
        await one.until_running()
        yield one


async def command(world: World, module: str, line: str) -> tuple[int | None, str]:
    """Run a command against this agent: exit code and output."""
    out = world.scratch / "command.out"
    out.unlink(missing_ok=True)
    argv = [sys.executable, "-m", f"agent_shim.{module}", *line.split(), "-b", str(world.base)]
    status = await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait()
    return status, out.read_text()


async def monit(world: World, line: str) -> tuple[int | None, str]:
    return await command(world, "cli.monit", line)


async def until_summary(world: World, *lines: str) -> None:
    async with asyncio.timeout(30):
        while True:
            _, text = await monit(world, "summary")
            if all(re.search(line, text, re.MULTILINE) for line in lines):
                return


async def test_scripts_stop_and_start_what_they_name(world: World) -> None:
    before = world.pids()
    assert (await monit(world, "stop job0")) == (0, "")
    await until_summary(world, r"^Process 'job0' {22}not monitored$", r"^Process 'job1' {22}running$")
    assert not Path(f"/proc/{before['job0']}").exists()

    assert (await monit(world, "start JOB0")) == (0, "")
    await until_summary(world, r"^Process 'job0' {22}running$")

    assert (await monit(world, "restart job1")) == (0, "")
    await until(lambda: world.pids().get("job1", before["job1"]) != before["job1"])
    await until_summary(world, r"^Process 'job1' {22}running$")
    _, text = await monit(world, "status")
    assert f"  pid                               {world.pids()['job1']}\n" in text
    assert (
        f"  parent pid                        {world.pid}\n" in text
        or "  parent pid                        1\n" in text
    )


async def test_groups_and_all(world: World) -> None:
    assert (await monit(world, "unmonitor -g nobody")) == (0, "")
    await until_summary(world, "'job0'.* running$", "'job1'.* running$")

    assert (await monit(world, "unmonitor -g vcap")) == (0, "")
    await until_summary(world, "'job0'.* not monitored$", "'job1'.* not monitored$")

    assert (await monit(world, "monitor all")) == (0, "")
    await until_summary(world, "'job0'.* running$", "'job1'.* running$")
    assert all(len(starts) == 1 for starts in world.starts().values())


async def test_a_name_that_is_not_there_ends_with_1(world: World) -> None:
    status, text = await monit(world, "stop nothing")

    assert status == 1
    assert text.endswith(": action failed -- There is no service by that name\n")


async def test_quit_leaves_the_jobs_and_the_agent(world: World) -> None:
    status, text = await monit(world, "quit")

    assert (status, text) == (0, f"monit daemon with pid [{world.pid}] killed\n")
    await until_summary(world, "'job0'.* not monitored$", "'job1'.* not monitored$")
    assert all(Path(f"/proc/{pid}").exists() for pid in world.pids().values())
    assert await world.director.value(AGENT, "ping") == "pong"


async def test_operators_wait_for_what_they_ask(world: World) -> None:
    assert await command(world, "cli", "stop job0 job1 --wait") == (0, "")
    assert world.pids() == {}

    assert await command(world, "cli", "start all --wait") == (0, "")
    assert sorted(world.pids()) == ["job0", "job1"]
    assert (await world.director.value(AGENT, "get_state"))["job_state"] == "running"

    ctl = world.base / "jobs/job0/bin/ctl"
    ctl.unlink()
    assert await command(world, "cli", "unmonitor job0") == (0, "")
    survivor = process.adopt(world.pids()["job0"])
    assert survivor is not None
    await survivor.terminate(1)
    status, text = await command(world, "cli", "start job0 --wait")
    assert status == 1
    assert "cannot start job0: it is down: cannot start: " in text

    status, text = await command(world, "cli", "restart nothing job1")
    assert status == 66
    assert text.startswith("agent-shim: cannot restart nothing: ")
    assert "job0, job1" in text


async def test_status_of_the_agent_tells_the_same(world: World) -> None:
    _, text = await command(world, "cli", "status --json")

    job0 = next(one for one in json.loads(text)["processes"] if one["name"] == "job0")
    assert (job0["phase"], job0["pid"], job0["children"]) == ("running", world.pids()["job0"], 0)
    assert 0 < job0["own_mem_kb"] <= job0["mem_kb"]


async def test_nothing_is_started_while_the_agent_ends(world: World) -> None:
    assert (await command(world, "cli", "drain"))[0] == 0

    for action in ("start", "restart", "monitor"):
        status, text = await monit(world, f"{action} all")
        assert (status, f"cannot {action} anything: the container ends" in text) == (1, True)
    assert await monit(world, "unmonitor all") == (0, "")
    assert world.pids() == {}
