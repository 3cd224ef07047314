"""The watchdog terminates an agent whose event loop is blocked, and the next agent adopts the jobs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.instance import AGENT, ROOT, RunningAgent
from tests.support.waiting import until

pytestmark = pytest.mark.loop_may_be_held

PIDFILE = "data/sys/run/job0/job0.pid"
PROGRAM = ROOT / "tests/support/programs/frozen_agent.py"


def frozen_command(mode: str) -> str:
    return f"{shlex.quote(sys.executable)} {PROGRAM} {mode} run -C {{config}} -b {{base}} --log-format json"


def logged(instance: RunningAgent, text: str) -> list[dict[str, Any]]:
    lines = instance.log_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if text in line["message"]]


def poison(instance: RunningAgent, pids: dict[str, int]) -> Path:
    """Replace the first job's pidfile with a FIFO, which blocks its reader.

    Then kill the job's process so that the agent reads the pidfile.
    """
    pidfile = instance.base / PIDFILE
    pidfile.unlink()
    os.mkfifo(pidfile)
    os.kill(pids["job0"], signal.SIGKILL)
    return pidfile


ENDS = {"blocked": 1, "computing": 1, "holding": 128 + signal.SIGVTALRM}


@pytest.mark.parametrize("mode", ENDS)
async def test_watchdog_logs_the_stack_of_a_blocked_agent_and_kills_it(instance: RunningAgent, mode: str) -> None:
    instance.command = frozen_command(mode)
    pids = await instance.deploy(2)
    pidfile = poison(instance, pids)
    assert instance.agent is not None

    async with asyncio.timeout(300):
        assert await instance.agent.wait() == ENDS[mode]

    if mode != "holding":
        assert "frozen_agent.py" in logged(instance, "is blocked by reading its pidfile")[0]["stack"]
    assert re.search('File ".*frozen_agent.py", line [0-9]+ in naive', instance.log_text())
    pidfile.unlink()
    await instance.start_agent()
    await instance.until_running()
    assert instance.pids()["job1"] == pids["job1"]


async def test_watchdog_does_not_kill_an_agent_whose_loop_runs_again(instance: RunningAgent) -> None:
    instance.command = frozen_command("slow")
    pids = await instance.deploy(2)
    pidfile = poison(instance, pids)

    await until(lambda: logged(instance, "the event loop runs again"))
    pidfile.unlink()
    await instance.until_running()
    assert instance.agent is not None
    assert not instance.agent.is_over


async def test_watchdog_does_not_kill_a_suspended_agent(instance: RunningAgent) -> None:
    """A container may be frozen or a machine suspended for longer than the limit."""
    instance.command = frozen_command("patient")
    await instance.start_agent()
    assert instance.agent is not None
    instance.agent.send(signal.SIGSTOP)
    await asyncio.sleep(6)  # This is twice the time after which a blocked agent exits.
    instance.agent.send(signal.SIGCONT)

    assert await instance.director.value(AGENT, "ping", timeout=10) == "pong"
    await asyncio.sleep(0.5)
    assert not instance.agent.is_over
    assert logged(instance, "event loop") == []


async def test_systemd_watchdog_is_notified_until_a_blocked_agent_exits(
    instance: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(instance.scratch / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(instance.scratch / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "900000")
        instance.command = frozen_command("blocked")
        pids = await instance.deploy(2)
        assert instance.agent is not None
        poison(instance, pids)
        await until(lambda: logged(instance, "is blocked by reading"))
        while True:
            try:
                systemd.recv(100)
            except BlockingIOError:
                break
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(systemd, 100), 10) == b"WATCHDOG=1"
        assert await instance.agent.wait() == 1
