"""Tests the ``bpm`` command's requests, sent to an agent with a real process that is configured in a bpm.yml."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY, AsyncMock

import pytest

from agent_shim.host import proc, sandbox
from agent_shim.supervisor import bpm_api
from agent_shim.supervisor.bpm.config import Volume
from agent_shim.supervisor.bpm_runner import Bpm
from tests.support.programs import is_alive
from tests.support.programs.jobs import JobTree
from tests.support.waiting import until


@pytest.fixture
async def bpm(world: JobTree) -> AsyncIterator[Bpm]:
    """Provide a bpm runner with a ``web`` job that has a ``web`` process and an ``errand`` process.

    The errand prints the ``NAME`` variable and exits with 7.
    """
    world.paths.log.mkdir(parents=True)
    world.paths.sys.symlink_to(world.paths.data_sys)
    script(world.paths.jobs / "web/bin/web", "sleep 600 & exec sleep 600")
    script(world.paths.jobs / "web/bin/errand", "echo $NAME; [ -z $WAITS ] || exec sleep 600; exit 7")
    config = world.paths.jobs / "web/config/bpm.yml"
    config.parent.mkdir()
    programs = world.paths.jobs / "web/bin"
    listed = ", ".join(f"{{name: {name}, executable: {programs}/{name}}}" for name in ("web", "errand"))
    config.write_text(f"processes: [{listed}]\n")
    async with world.supervising() as supervisor:
        yield supervisor.bpm


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


async def ask(bpm: Bpm, verb: str, process: str = "web", **members: Any) -> dict[str, Any]:
    return await bpm_api.answer(bpm, {"verb": verb, "job": "web", "process": process, **members})


async def test_bpm_process_is_started_listed_and_stopped(bpm: Bpm) -> None:
    stopped = [["web", 0, "stopped"], ["web.errand", 0, "stopped"]]
    assert await bpm_api.answer(bpm, {"verb": "list"}) == {"value": stopped, "complaints": []}
    assert [await ask(bpm, verb) for verb in ("pid", "tree")] == [{"value": 0}, {"value": []}]
    refused = await ask(bpm, "shell")
    assert refused == {"error": "process is not running or could not be found"}

    pid = (await ask(bpm, "start"))["value"]
    assert is_alive(pid)
    assert [await ask(bpm, verb) for verb in ("start", "pid")] == [{"value": pid}] * 2
    assert (await ask(bpm, "run")) == {"value": 0}
    assert (await ask(bpm, "list"))["value"][0] == ["web", pid, "running"]
    below = await until(lambda: sorted(proc.descent(proc.children(proc.table()), [pid]) - {pid}), "a child")
    tree = (await ask(bpm, "tree"))["value"]
    assert tree[0] == pid
    assert set(below) <= set(tree)
    shell = (await ask(bpm, "shell"))["value"]
    assert shell["launcher"] == sandbox.launcher()
    assert shell["order"]["enter"] in (pid, None)

    assert await ask(bpm, "stop") == {"value": None}
    assert not is_alive(pid)
    assert (await ask(bpm, "list"))["value"] == stopped


async def test_bpm_run_passes_variables_and_volumes_and_returns_the_exit_code(
    world: JobTree, bpm: Bpm, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, more = (str(world.paths.base / name) for name in ("extra", "more"))
    options = [f"{extra}:writable,allow_executions", more]

    assert await ask(bpm, "run", "errand", env=["NAME=a=b"], volumes=options) == {"value": 7}
    assert (world.paths.sys / "log/web/errand.stdout.log").read_text() == "a=b\n"
    assert Path(extra).is_dir()
    run = AsyncMock(return_value=0)
    monkeypatch.setattr(bpm, "run", run)
    await ask(bpm, "run", "errand", volumes=[f"{extra}:writable,shared", more])
    run.assert_awaited_once_with(ANY, [Volume(extra, writable=True, shared=True), Volume(more)], {})


async def test_running_bpm_errand_is_killed_on_request(world: JobTree, bpm: Bpm) -> None:
    log = world.paths.sys / "log/web/errand.stdout.log"
    running = asyncio.create_task(ask(bpm, "run", "errand", env=["NAME=up", "WAITS=yes"]))
    await until(lambda: log.exists() and log.read_text() == "up\n")

    assert await ask(bpm, "end run", "errand") == {"value": None}
    async with asyncio.timeout(20):
        assert (await running)["value"] not in (0, None)


@pytest.mark.parametrize(
    ("verb", "members", "error"),
    [
        ("start", {"job": "../web"}, "failed to get job: '../web' 'web' cannot be the names of a job and a process"),
        ("start", {"job": ".web"}, "failed to get job: '.web' 'web' cannot be"),
        ("stop", {"process": ""}, "failed to get job: 'web' '' cannot be"),
        ("start", {"job": "nothing"}, "failed to parse job configuration: cannot read "),
        ("run", {"job": "nothing"}, "failed to parse job configuration: cannot read "),
        ("start", {"process": "other"}, 'process "other" not present in job configuration ('),
        ("run", {"process": "other"}, 'process "other" not present in job configuration ('),
        ("run", {"env": ["NAME"]}, "invalid environment variable definition (format should be KEY=value): "),
        ("run", {"env": [1]}, "cannot read the request: env must be a list of strings"),
        ("run", {"volumes": "/x"}, "cannot read the request: volumes must be a list of strings"),
        ("run", {"volumes": ["/x:odd"]}, "invalid volume option: odd"),
        ("run", {"volumes": ["/x:"]}, "invalid volume option: "),
        ("run", {"volumes": ["/x:shared:writable"]}, "invalid volume definition (format: <path>[:<options>]): "),
        ("run", {"volumes": ["/etc"]}, "invalid volume path: /etc must be within "),
        ("frobnicate", {}, "unknown command 'frobnicate'"),
    ],
)
async def test_bpm_error_messages_match_the_original_bpm(
    bpm: Bpm, verb: str, members: dict[str, Any], error: str
) -> None:
    found = await bpm_api.answer(bpm, {"verb": verb, "job": "web", "process": "web", **members})

    assert found.keys() == {"error"}
    assert found["error"].startswith(error)
    assert await ask(bpm, "pid") == {"value": 0}


async def test_failed_bpm_start_is_reported(world: JobTree, bpm: Bpm) -> None:
    config = world.paths.jobs / "web/config/bpm.yml"
    config.write_text(config.read_text().replace("{name: web", "{hooks: {pre_start: /bin/false}, name: web"))

    for verb in ("start", "run"):
        why = f"failed to {verb} job-process: the pre_start hook /bin/false failed: exit 1"
        assert await ask(bpm, verb) == {"error": why}
