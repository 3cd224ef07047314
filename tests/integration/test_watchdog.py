"""An agent whose event loop is blocked: reported, ended, followed by one that adopts the jobs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.world import AGENT, ROOT, World
from benchmarks.world import world as made
from tests.support.waiting import until

pytestmark = pytest.mark.loop_may_be_held

PIDFILE = "data/sys/run/job0/job0.pid"
PROGRAM = ROOT / "tests/support/programs/frozen_agent.py"


def naive(mode: str) -> str:
    return f"{shlex.quote(sys.executable)} {PROGRAM} {mode} run -C {{config}} -b {{base}} --log-format json"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(naive("blocked")) as one:
        yield one


def logged(world: World, text: str) -> list[dict[str, Any]]:
    lines = (world.scratch / "agent.log").read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if text in line["message"]]


async def with_jobs(world: World) -> dict[str, int]:
    """Two jobs run; their process numbers."""
    await world.start_agent()
    await world.director.run(AGENT, "apply", world.spec(2, 0))
    await world.run("start")
    await world.until_running()
    return world.pids()


def poison(world: World, pids: dict[str, int]) -> Path:
    """A pipe in the place of the first job's pidfile, and a death after which the pidfile is read."""
    pidfile = world.base / PIDFILE
    pidfile.unlink()
    os.mkfifo(pidfile)
    os.kill(pids["job0"], signal.SIGKILL)
    return pidfile


ENDS = {"blocked": 1, "computing": 1, "holding": 128 + signal.SIGVTALRM}


@pytest.mark.parametrize("mode", ENDS)
async def test_blocked_agent_reports_its_stack_and_exits_and_the_next_one_adopts_the_jobs(
    world: World, mode: str
) -> None:
    world.command = naive(mode)
    pids = await with_jobs(world)
    pidfile = poison(world, pids)
    assert world.agent is not None

    async with asyncio.timeout(300):
        assert await world.agent.wait() == ENDS[mode]

    if mode != "holding":
        assert "frozen_agent.py" in logged(world, "is blocked by reading its pidfile")[0]["stack"]
    assert re.search('File ".*frozen_agent.py", line [0-9]+ in naive', (world.scratch / "agent.log").read_text())
    pidfile.unlink()
    await world.start_agent()
    await world.until_running()
    assert world.pids()["job1"] == pids["job1"]


async def test_loop_that_runs_again_does_not_end_the_agent(world: World) -> None:
    world.command = naive("slow")
    pids = await with_jobs(world)
    pidfile = poison(world, pids)

    await until(lambda: logged(world, "the event loop runs again"))
    pidfile.unlink()
    await world.until_running()
    assert world.agent is not None
    assert not world.agent.is_over


async def test_stopped_agent_is_not_blocked(world: World) -> None:
    """Neither a frozen container nor a suspended machine is a reason to end."""
    world.command = naive("patient")
    await world.start_agent()
    assert world.agent is not None
    world.agent.send(signal.SIGSTOP)
    await asyncio.sleep(6)  # twice the time after which a blocked agent exits
    world.agent.send(signal.SIGCONT)

    assert await world.director.value(AGENT, "ping", timeout=10) == "pong"
    await asyncio.sleep(0.5)
    assert not world.agent.is_over
    assert logged(world, "event loop") == []


async def test_systemd_is_fed_until_a_blocked_agent_exits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(world.scratch / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(world.scratch / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "900000")
        pids = await with_jobs(world)
        assert world.agent is not None
        poison(world, pids)
        await until(lambda: logged(world, "is blocked by reading"))
        while True:
            try:
                systemd.recv(100)
            except BlockingIOError:
                break
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(systemd, 100), 10) == b"WATCHDOG=1"
        assert await world.agent.wait() == 1
