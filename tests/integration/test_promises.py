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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.edges import control_client
from agent_shim.host import mounts, process
from agent_shim_demo.release import archive
from benchmarks.world import AGENT, COMMAND, World
from tests.support import jobs
from tests.support.waiting import until

FIRST_PROCESS = Path("tests/support/programs/first_process.py").resolve()


def members(instance: World, result: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a blob that an action has made, after a look at its digest."""
    content = (instance.store / result["blobstore_id"]).read_bytes()
    assert hashlib.sha1(content).hexdigest() in result["sha1"].split(";")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {Path(member.name).as_posix(): tar.extractfile(member) for member in tar if member.isreg()}
        return {name: file.read() for name, file in files.items() if file is not None}


async def test_a_package_is_compiled_with_its_dependency(instance: World) -> None:
    await instance.start_agent()
    needed = instance.blob("needed", archive({"tool": "a tool\n"}))
    script = (
        f"cat tail {instance.base}/packages/tool/tool >$BOSH_INSTALL_TARGET/$BOSH_PACKAGE_NAME-$BOSH_PACKAGE_VERSION\n"
    )
    source = instance.blob("source", archive({"packaging": script, "tail": "its source\n"}))
    dependency = {"tool": {"name": "tool", "version": "3", **needed}}

    done = await instance.director.run(
        AGENT, "compile_package", source["blobstore_id"], source["sha1"], "made", "7", dependency
    )

    assert members(instance, done["result"]) == {"made-7": b"its source\na tool\n"}
    assert list((instance.base / "data/compile").iterdir()) == []


async def test_logs_of_jobs_are_fetched_whole(instance: World) -> None:
    await instance.deploy()
    log = instance.base / "data/sys/log/job0/a.log"
    log.write_bytes(b"line\n" * 100_000)
    (log.parent / "passwd.log").symlink_to("/etc/passwd")

    told = await instance.director.run(AGENT, "fetch_logs", "job", ["job0/*.log"])

    found = members(instance, told)
    assert found["job0/a.log"] == log.read_bytes()
    assert "job0/passwd.log" not in found


async def test_a_process_of_bpm_yml_runs_with_its_environment_and_ends_with_stop(instance: World) -> None:
    program = ["-c", "echo $GREETING; exec sleep 100000"]
    config = {"name": "web", "executable": "/bin/sh", "args": program, "env": {"GREETING": "hello"}}
    web = jobs.of_bpm(Paths(instance.base), "web", json.dumps({"processes": [config]}))
    running = process.adopt((await instance.deploy(more={"web": web}))["web"])
    assert running is not None
    assert running.is_alive
    said = instance.base / "data/sys/log/web/web.stdout.log"
    await until(lambda: said.read_text() == "hello\n")
    asked = {"command": "bpm", "verb": "pid", "job": "web", "process": "web"}
    answer = await asyncio.to_thread(control_client.ask, Paths(instance.base).control_socket, asked, timeout=60)
    assert answer == {"value": running.pid}

    await instance.run("stop")
    assert not running.is_alive


@pytest.mark.parametrize("signals", [1, 2])
async def test_the_end_of_a_container_drains_and_stops_the_jobs_and_a_second_signal_hurries(
    instance: World, signals: int
) -> None:
    """Without the second signal the drain is waited for."""
    instance.command = shlex.join([sys.executable, str(FIRST_PROCESS), *shlex.split(COMMAND)[3:]])
    instance.write_settings()
    options = json.loads(instance.config.read_text())
    options["AgentShim"]["grace"] = 1000  # its end cuts no drain short here
    instance.config.write_text(json.dumps(options))
    begun, may_end = instance.base / "data/begun", instance.scratch / "may-end"
    drain = f"#!/bin/sh\ntouch {begun}\nuntil test -e {may_end}; do sleep 0.05; done\ntouch {begun}.ended\necho 0\n"
    await instance.deploy(more={"slow": {"monit": "", "bin/drain": drain}})
    job, agent = process.adopt(instance.pids()["job0"]), instance.agent
    assert job is not None
    assert agent is not None

    agent.send(signal.SIGTERM)
    await until(begun.exists)
    assert instance.pids()["job0"] == job.pid
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
    instance.agent = None


async def test_handback_leaves_the_processes_to_monit_and_says_which(instance: World) -> None:
    await instance.deploy()
    pid = instance.pids()["job0"]
    await instance.stop_agent()
    out = instance.scratch / "handback.out"
    argv = [*shlex.split(COMMAND)[:3], "handback", "-b", str(instance.base)]

    assert await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait() == 0

    assert f"job0 runs on as {pid}" in out.read_text()
    assert instance.pids()["job0"] == pid
    monit = (instance.base / "monit/job/0000_job0.monitrc").read_text()
    assert monit == (instance.base / "jobs/job0/monit").read_text()
    assert not (instance.base / "data/sys/run/agent_shim").exists()


async def test_a_disk_is_on_the_store_after_a_restart_and_gone_after_its_unmount(instance: World) -> None:
    """By a mount or, without that right, by a link."""
    volume = instance.scratch / "volume"
    volume.mkdir()
    instance.write_settings()
    document = json.loads(instance.source.read_text())
    document["disks"] = {"persistent": {"disk-1": {"path": str(volume)}}}
    instance.source.write_text(json.dumps(document))
    await instance.start_agent()
    store = instance.base / "store"
    await instance.run("mount_disk", "disk-1")
    try:
        (store / "data").write_text("of a job")
        await instance.kill_agent()
        await instance.start_agent()

        assert await instance.director.run(AGENT, "list_disk") == ["disk-1"]
        assert ((volume / "data").read_text(), (store / "data").read_text()) == ("of a job",) * 2
    finally:
        await instance.run("unmount_disk", "disk-1")
    assert await instance.director.run(AGENT, "list_disk") == []
    assert not (store / "data").exists()
    assert not mounts.is_mount_point(store)
