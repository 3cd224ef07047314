"""Tests requests that operators make to a running agent, with commands and signals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import signal
import struct
import termios
from pathlib import Path

import pytest

from agent_shim.host import process
from tests.support.instance import COMMAND, RunningAgent
from tests.support.waiting import TIMEOUT_S, until


@pytest.fixture(autouse=True)
async def _running(instance: RunningAgent) -> None:
    instance.command = f"{COMMAND} --job-logs --log-format json"
    await instance.deploy(2)


def start_command(instance: RunningAgent, *words: str) -> tuple[process.Process, Path]:
    """Start an ``agent-shim`` command for this agent. Return the command's process and output file."""
    out = instance.scratch / f"{words[0]}.out"
    out.unlink(missing_ok=True)
    argv = [*shlex.split(COMMAND)[:3], *words, "-b", str(instance.base)]
    return process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out), out


async def test_status_and_probes_report_running_and_stopped_processes(instance: RunningAgent) -> None:
    code, page = await instance.execute("status")
    assert code == 0
    assert "\x1b" not in page
    assert page.count("  running  ") == 2
    assert "\nmachine    memory " in page
    code, text = await instance.execute("status", "--json")
    assert code == 0
    assert [one["state"] for one in json.loads(text)["processes"]] == ["running", "running"]
    name = json.loads(text)["processes"][0]["name"]
    code, page = await instance.execute("status", name)
    assert code == 0
    assert page.startswith(f"● {name} of job {name}\n")
    assert "\n      state  running since " in page
    assert await instance.execute("probe", "live") == (0, "alive\n")
    assert await instance.execute("probe", "ready") == (0, "jobs are running\n")

    await instance.execute("stop", name, "--wait")

    code, page = await instance.execute("status", name)
    assert code == 1
    assert "\n      state  stopped\n" in page
    assert f"{name}     stopped " in (await instance.execute("status"))[1]
    code, text = await instance.execute("status", "nonesuch")
    assert code == 66
    assert "cannot show nonesuch: there is no such process (there are " in text
    assert name in text
    code, reason = await instance.execute("probe", "ready")
    assert code == 1
    assert reason.startswith(f"jobs are failing: {name} (stopped")
    assert reason.count("(") == 1


async def test_option_job_logs_copies_job_log_lines_to_the_agent_output(instance: RunningAgent) -> None:
    log = instance.base / "sys/log/job0/own.log"
    log.write_text("said by a job\n")

    line = await until(lambda: [one for one in instance.log_text().splitlines() if "said by a job" in one])

    assert json.loads(line[0])["message"] == "said by a job"


async def test_status_watch_runs_until_interrupted_even_without_an_agent(instance: RunningAgent) -> None:
    for words, title in ((["job0"], "● job0"), ([], "PROCESS")):
        watching, out = start_command(instance, "status", *words, "--watch", "--every", "0.05")
        await until(lambda: out.exists() and out.read_text().count(title) > 1)  # noqa: B023
        if not words:
            await instance.stop_agent()
            await until(lambda: "cannot ask the agent" in out.read_text())  # noqa: B023

        watching.send(signal.SIGINT)
        async with asyncio.timeout(TIMEOUT_S):
            assert await watching.wait() == 0


async def test_status_watch_keeps_the_terminal_scrollback(instance: RunningAgent) -> None:
    master, slave = os.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 8, 40, 0, 0))
        # Unset LINES and COLUMNS with env, because readline may have set them in this process without changing
        # os.environ.
        argv = ["env", "-u", "LINES", "-u", "COLUMNS", *shlex.split(COMMAND)[:3]]
        argv += ["status", "--watch", "--every", "0.05", "-b", str(instance.base)]
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
        watching = process.spawn(argv, env=environment, stdout=slave, stderr=slave)
        os.set_blocking(master, False)
        drawn = bytearray()

        def more() -> bytearray:
            with contextlib.suppress(BlockingIOError):
                drawn.extend(os.read(master, 1 << 16))
            return drawn

        await until(lambda: more().count(b"more lines") > 1)
        watching.send(signal.SIGINT)
        async with asyncio.timeout(TIMEOUT_S):
            assert await watching.wait() == 0
        more()
    finally:
        os.close(master)
        os.close(slave)
    assert drawn.startswith(b"\x1b[?1049h")
    assert drawn.endswith(b"\x1b[?1049l")
    assert b"\x1b[3J" not in drawn
    assert max(page.count(b"\n") for page in drawn.split(b"\x1b[H")) == 7


async def test_logs_command_shows_job_logs_and_the_agent_log(instance: RunningAgent) -> None:
    """The agent's log is read from the same file that ``bosh logs`` fetches."""
    log = instance.base / "data/sys/log/job-0/web.stdout.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("begun\n")
    following, out = start_command(instance, "logs", "job-0", "--follow")
    await until(lambda: out.exists() and "begun" in out.read_text())
    with log.open("a") as file:
        file.write("served\n")

    await until(lambda: "job-0/web.stdout.log | served" in out.read_text())
    following.send(signal.SIGINT)
    async with asyncio.timeout(TIMEOUT_S):
        assert await following.wait() == 0
    await until(lambda: '"message": "served"' in instance.log_text())
    line = next(line for line in instance.log_text().splitlines() if '"served"' in line)
    assert json.loads(line) == {"logger": "job", "job": "job-0", "file": "web.stdout.log", "message": "served"}
    code, text = await instance.execute("logs", "nothing")
    assert code == 66
    assert "there are no logs of nothing (there are job-0, " in text

    code, text = await instance.execute("logs", "--agent", "-n", "1000")
    assert code == 0
    assert '"boot step directories: done' in text
    assert (instance.base / "bosh/log/current").read_text().startswith(text[:200])


async def test_sigusr1_and_sigusr2_change_the_log_level(instance: RunningAgent) -> None:
    assert instance.agent is not None
    for number, level in ((signal.SIGUSR1, "debug"), (signal.SIGUSR2, "info"), (signal.SIGUSR2, "warning")):
        instance.agent.send(number)
        await until(lambda: f"the level of the log is {level} now" in instance.log_text())  # noqa: B023
    assert await instance.execute("probe", "live") == (0, "alive\n")


async def test_operator_actions_are_audited_with_the_calling_process(instance: RunningAgent) -> None:
    orders = [("restart", "all"), ("call", "info"), ("stop", "nonexistent"), ("status",)]
    commands = [start_command(instance, *words)[0] for words in orders]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(command.wait() for command in commands))

    lines = [json.loads(line) for line in instance.log_text().splitlines() if '"agent_shim.audit"' in line]
    found = {line["reply_to"]: (line["method"], line["result"]) for line in lines if "operator" in line["reply_to"]}
    expected = [("restart all", "done"), ("info", "done"), ("stop nonexistent", "failed")]
    assert found == {
        f"operator.uid-{os.getuid()}.pid-{command.pid}": order
        for command, order in zip(commands, expected, strict=False)
    }
