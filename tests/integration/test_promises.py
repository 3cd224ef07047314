"""The main promise of each subject that only the slow and root rings examine closely, on the bus and in seconds."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shlex
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import mounts, process
from agent_shim_demo.release import archive
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made
from tests.support.waiting import until

FIRST_PROCESS = Path("tests/support/programs/first_process.py").resolve()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        yield one


async def deployed(world: World, more: Mapping[str, Mapping[str, str]]) -> None:
    """Start an agent with running jobs."""
    await world.start_agent()
    await world.run("apply", world.spec(1, 0, more=more))
    await world.run("start")
    await world.until_running()


def members(world: World, result: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a blob that an action has made, after a look at its digest."""
    content = (world.store / result["blobstore_id"]).read_bytes()
    assert hashlib.sha1(content).hexdigest() in result["sha1"].split(";")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {Path(member.name).as_posix(): tar.extractfile(member) for member in tar if member.isreg()}
        return {name: file.read() for name, file in files.items() if file is not None}


async def test_a_package_is_compiled_with_its_dependency(world: World) -> None:
    await world.start_agent()
    needed = world.blob("needed", archive({"tool": "a tool\n"}))
    script = (
        f"cat tail {world.base}/packages/tool/tool >$BOSH_INSTALL_TARGET/$BOSH_PACKAGE_NAME-$BOSH_PACKAGE_VERSION\n"
    )
    source = world.blob("source", archive({"packaging": script, "tail": "its source\n"}))
    dependency = {"tool": {"name": "tool", "version": "3", **needed}}

    done = await world.director.run(
        AGENT, "compile_package", source["blobstore_id"], source["sha1"], "made", "7", dependency
    )

    assert members(world, done["result"]) == {"made-7": b"its source\na tool\n"}
    assert list((world.base / "data/compile").iterdir()) == []


async def test_logs_of_jobs_are_fetched_whole(world: World) -> None:
    await deployed(world, {})
    log = world.base / "data/sys/log/job0/a.log"
    log.write_bytes(b"line\n" * 100_000)
    (log.parent / "passwd.log").symlink_to("/etc/passwd")

    told = await world.director.run(AGENT, "fetch_logs", "job", ["job0/*.log"])

    found = members(world, told)
    assert found["job0/a.log"] == log.read_bytes()
    assert "job0/passwd.log" not in found


async def test_a_process_of_bpm_yml_runs_with_its_environment_and_ends_with_stop(world: World) -> None:
    program = ["-c", "echo $GREETING; exec sleep 100000"]
    config = {"name": "web", "executable": "/bin/sh", "args": program, "env": {"GREETING": "hello"}}
    monit = f"""check process web
  with pidfile {world.base}/data/sys/run/bpm/web/web.pid
  start program "{world.base}/jobs/bpm/bin/bpm start web"
  stop program "{world.base}/jobs/bpm/bin/bpm stop web"
  group vcap
"""
    await deployed(world, {"web": {"monit": monit, "config/bpm.yml": json.dumps({"processes": [config]})}})

    pid = int((world.base / "data/sys/run/bpm/web/web.pid").read_text())
    running = process.adopt(pid)
    assert running is not None
    assert running.is_alive
    said = world.base / "data/sys/log/web/web.stdout.log"
    await until(lambda: said.read_text() == "hello\n")

    await world.run("stop")
    assert not running.is_alive


@pytest.mark.parametrize("signals", [1, 2])
async def test_the_end_of_a_container_drains_and_stops_the_jobs_and_a_second_signal_hurries(
    world: World, signals: int
) -> None:
    """Without the second signal the drain is waited for."""
    world.command = shlex.join([sys.executable, str(FIRST_PROCESS), *shlex.split(COMMAND)[3:]])
    world.write_settings()
    options = json.loads(world.config.read_text())
    options["AgentShim"]["grace"] = 1000  # its end cuts no drain short here
    world.config.write_text(json.dumps(options))
    begun, may_end = world.base / "data/begun", world.scratch / "may-end"
    drain = f"#!/bin/sh\ntouch {begun}\nuntil test -e {may_end}; do sleep 0.05; done\ntouch {begun}.ended\necho 0\n"
    await deployed(world, {"slow": {"monit": "", "bin/drain": drain}})
    job, agent = process.adopt(world.pids()["job0"]), world.agent
    assert job is not None
    assert agent is not None

    agent.send(signal.SIGTERM)
    await until(begun.exists)
    assert world.pids()["job0"] == job.pid
    if signals == 2:
        agent.send(signal.SIGTERM)
    else:
        may_end.touch()

    try:
        async with asyncio.timeout(60):
            code = await agent.wait()
    finally:
        agent.send(signal.SIGKILL)
    assert not job.is_alive
    assert Path(f"{begun}.ended").exists() == (signals == 1)
    assert code == signals - 1
    world.agent = None


async def test_handback_leaves_the_processes_to_monit_and_says_which(world: World) -> None:
    await deployed(world, {})
    pid = world.pids()["job0"]
    await world.stop_agent()
    out = world.scratch / "handback.out"
    argv = [*shlex.split(COMMAND)[:3], "handback", "-b", str(world.base)]

    assert await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait() == 0

    assert f"job0 runs on as {pid}" in out.read_text()
    assert world.pids()["job0"] == pid
    monit = (world.base / "monit/job/0000_job0.monitrc").read_text()
    assert monit == (world.base / "jobs/job0/monit").read_text()
    assert not (world.base / "data/sys/run/agent_shim").exists()


async def test_a_disk_is_on_the_store_after_a_restart_and_gone_after_its_unmount(world: World) -> None:
    """By a mount or, without that right, by a link."""
    volume = world.scratch / "volume"
    volume.mkdir()
    world.write_settings()
    document = json.loads(world.source.read_text())
    document["disks"] = {"persistent": {"disk-1": {"path": str(volume)}}}
    world.source.write_text(json.dumps(document))
    await world.start_agent()
    store = world.base / "store"
    await world.run("mount_disk", "disk-1")
    try:
        (store / "data").write_text("of a job")
        await world.kill_agent()
        await world.start_agent()

        assert await world.director.run(AGENT, "list_disk") == ["disk-1"]
        assert ((volume / "data").read_text(), (store / "data").read_text()) == ("of a job",) * 2
    finally:
        await world.run("unmount_disk", "disk-1")
    assert await world.director.run(AGENT, "list_disk") == []
    assert not (store / "data").exists()
    assert not mounts.is_mount_point(store)
