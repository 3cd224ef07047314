"""Quick tests of two important promises: when a container is stopped, its jobs are drained first, and a disk stays
mounted until the Director unmounts it.

The slow and root tests check both promises in detail.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from pathlib import Path

import pytest

from agent_shim.host import mounts, process
from tests.support.instance import AGENT, COMMAND, RunningAgent
from tests.support.waiting import until

FIRST_PROCESS = Path("tests/support/programs/first_process.py").resolve()


@pytest.mark.parametrize("signals", [1, 2])
async def test_container_stop_drains_jobs_and_a_second_signal_shortens_the_drain(
    instance: RunningAgent, signals: int
) -> None:
    instance.command = shlex.join([sys.executable, str(FIRST_PROCESS), *shlex.split(COMMAND)[3:]])
    instance.write_settings()
    options = json.loads(instance.config.read_text())
    options["AgentShim"]["grace"] = 1000  # This is so long that only a second signal can cut the drain short.
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


async def test_disk_stays_on_the_store_across_a_restart_until_it_is_unmounted(instance: RunningAgent) -> None:
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
