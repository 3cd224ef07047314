"""Tests ``monit`` and ``agent-shim start|stop|…`` with a running agent."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from agent_shim.host import proc, process
from tests.support.instance import AGENT, RunningAgent
from tests.support.waiting import TIMEOUT_S, until


@pytest.fixture(autouse=True)
async def _running(instance: RunningAgent) -> None:
    await instance.deploy(2)


async def monit(instance: RunningAgent, line: str) -> tuple[int | None, str]:
    """Run ``monit`` against this agent with the arguments in ``line``. Return its exit code and output."""
    return await instance.execute(*line.split(), module="cli.monit")


async def until_summary(instance: RunningAgent, *lines: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            _, text = await monit(instance, "summary")
            if all(re.search(line, text, re.MULTILINE) for line in lines):
                return


async def test_monit_command_stops_starts_and_restarts_named_services(instance: RunningAgent) -> None:
    before = instance.pids()
    assert (await monit(instance, "stop job0")) == (0, "")
    await until_summary(instance, r"^Process 'job0' {22}not monitored$", r"^Process 'job1' {22}running$")
    assert not Path(f"/proc/{before['job0']}").exists()

    assert (await monit(instance, "start JOB0")) == (0, "")
    await until_summary(instance, r"^Process 'job0' {22}running$")

    assert (await monit(instance, "restart job1")) == (0, "")
    await until(lambda: instance.pids().get("job1", before["job1"]) != before["job1"])
    await until_summary(instance, r"^Process 'job1' {22}running$")
    _, text = await monit(instance, "status")
    assert f"  pid                               {instance.pids()['job1']}\n" in text
    parents = re.findall(r"^  parent pid +(\d+)$", text, re.MULTILINE)
    assert [proc.name(int(pid)) for pid in parents] == ["keeper"] * 2
    _, text = await instance.execute("status", "--json")
    job1 = next(one for one in json.loads(text)["processes"] if one["name"] == "job1")
    assert (job1["phase"], job1["pid"], job1["children"]) == ("running", instance.pids()["job1"], 0)
    assert 0 < job1["own_mem_kb"] <= job1["mem_kb"]

    status, text = await monit(instance, "stop nothing")
    assert status == 1
    assert text.endswith(": action failed -- There is no service by that name\n")


async def test_monit_command_unmonitors_and_monitors_groups_and_all_services(
    instance: RunningAgent,
) -> None:
    """``monit quit`` prints the same message as the original command, but only unmonitors the services."""
    assert (await monit(instance, "unmonitor -g nobody")) == (0, "")
    await until_summary(instance, "'job0'.* running$", "'job1'.* running$")

    assert (await monit(instance, "unmonitor -g vcap")) == (0, "")
    await until_summary(instance, "'job0'.* not monitored$", "'job1'.* not monitored$")

    assert (await monit(instance, "monitor all")) == (0, "")
    await until_summary(instance, "'job0'.* running$", "'job1'.* running$")
    assert all(len(starts) == 1 for starts in instance.starts().values())

    assert await monit(instance, "quit") == (0, f"monit daemon with pid [{instance.pid}] killed\n")
    await until_summary(instance, "'job0'.* not monitored$", "'job1'.* not monitored$")
    assert all(Path(f"/proc/{pid}").exists() for pid in instance.pids().values())
    assert await instance.director.value(AGENT, "ping") == "pong"


async def test_agent_shim_action_with_wait_returns_when_it_is_done_or_has_failed(instance: RunningAgent) -> None:
    assert await instance.execute("stop", "job0", "job1", "--wait") == (0, "")
    assert instance.pids() == {}

    assert await instance.execute("start", "all", "--wait") == (0, "")
    assert sorted(instance.pids()) == ["job0", "job1"]
    assert (await instance.director.value(AGENT, "get_state"))["job_state"] == "running"

    ctl = instance.base / "jobs/job0/bin/ctl"
    ctl.unlink()
    assert await instance.execute("unmonitor", "job0") == (0, "")
    survivor = process.adopt(instance.pids()["job0"])
    assert survivor is not None
    await survivor.terminate(1)
    status, text = await instance.execute("start", "job0", "--wait")
    assert status == 1
    assert "cannot start job0: it is down: cannot start: " in text

    status, text = await instance.execute("restart", "nothing", "job1")
    assert status == 66
    assert text.startswith("agent-shim: cannot restart nothing: ")
    assert "job0, job1" in text


async def test_monit_command_starts_nothing_while_the_agent_exits(instance: RunningAgent) -> None:
    assert (await instance.execute("drain"))[0] == 0

    for action in ("start", "restart", "monitor"):
        status, text = await monit(instance, f"{action} all")
        assert (status, f"cannot {action} anything: the container ends" in text) == (1, True)
    assert await monit(instance, "unmonitor all") == (0, "")
    assert instance.pids() == {}
