"""An agent whose event loop is held: reported, ended, followed by one that leaves alone what held it."""

from __future__ import annotations

import asyncio
import json
import os
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


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


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


def processes(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {process["name"]: process for process in status["processes"]}


async def status(world: World) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(world.base / "data/sys/run/agent_shim/control.sock")
    writer.write(b'{"command": "status"}\n')
    try:
        found: dict[str, Any] = json.loads(await reader.readline())
        return found
    finally:
        writer.close()


ENDS = {"blocked": 70, "computing": 70, "holding": 128 + signal.SIGVTALRM}


@pytest.mark.parametrize("mode", ENDS)
async def test_a_held_agent_is_ended_and_the_next_one_leaves_alone_what_held_it(world: World, mode: str) -> None:
    world.command = naive(mode)
    pids = await with_jobs(world)
    pidfile = poison(world, pids)
    assert world.agent is not None

    async with asyncio.timeout(60):
        assert await world.agent.wait() == ENDS[mode]

    await world.start_agent()
    told = logged(world, "is blocked by reading its pidfile") or logged(world, "its interpreter was blocked")
    assert "frozen_agent.py" in told[0]["stack"]
    found = processes(await status(world))
    assert found["job0"]["state"] == "failing"
    assert "blocked the agent before" in found["job0"]["reason"]
    assert found["job1"]["state"] == "running"
    assert found["job1"]["pid"] == pids["job1"]
    assert await world.director.value(AGENT, "ping") == "pong"

    pidfile.unlink()
    await world.run("start")
    await world.until_running()
    assert not (world.base / "data/bosh/held.json").exists()


async def test_what_held_the_agent_is_left_alone_over_further_restarts(world: World) -> None:
    pids = await with_jobs(world)
    poison(world, pids)
    assert world.agent is not None
    await world.agent.wait()

    for _ in range(2):
        await world.start_agent()
        assert processes(await status(world))["job0"]["state"] == "failing"
        await world.stop_agent()


async def test_a_loop_that_turns_again_is_no_reason_to_end_or_to_distrust(world: World) -> None:
    world.command = naive("slow")
    pids = await with_jobs(world)
    pidfile = poison(world, pids)

    await until(lambda: logged(world, "the event loop runs again"))
    pidfile.unlink()
    await until(lambda: not (world.base / "data/bosh/held.json").exists())
    assert world.agent is not None
    assert not world.agent.is_over
    await world.until_running()


async def test_an_agent_that_was_stopped_by_a_signal_was_not_held(world: World) -> None:
    """Neither a frozen container nor a suspended machine is a reason to end."""
    world.command = naive("patient")
    await world.start_agent()
    assert world.agent is not None
    world.agent.send(signal.SIGSTOP)
    await asyncio.sleep(6)  # twice the time after which a held agent ends
    world.agent.send(signal.SIGCONT)

    assert await world.director.value(AGENT, "ping", timeout=10) == "pong"
    await asyncio.sleep(0.5)
    assert not world.agent.is_over
    assert logged(world, "event loop") == []


async def test_systemd_hears_of_a_held_agent_until_that_ends_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert await world.agent.wait() == 70
