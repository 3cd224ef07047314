"""Tests takeovers between the real Go agent with Debian's monit and this agent. Run with ``./dev test-go-agent
BINARY``.

The Go agent's test platform does not change the machine. It expects monit at 127.0.0.1:2822, so this port must be free
and no other test may run at the same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from tests.support import jobs, monitrc
from tests.support.go_agent import CTL, NAMES, alive, starts
from tests.support.pod import AGENT, PodInstance, end

pytestmark = pytest.mark.go_agent

START = "/usr/bin/monit -c /var/vcap/monit/monitrc"
KILL = "pid=$(cat /var/vcap/monit/monit.pid); kill -9 $pid; while [ -e /proc/$pid ]; do sleep 0.05; done"
RELOADS = "Waiting for monit to reload"
COMPARED = ("deployment", "job", "packages", "configuration_hash", "networks", "id", "name", "index", "az")
"""Keys of a reported state whose values come from the Director."""


@pytest.fixture
def pod(pod: PodInstance) -> PodInstance:
    pod.keeps_root = True
    pod.start_container()
    shutil.copy(os.environ["BOSH_AGENT"], pod.machine.root / "mnt/bosh-agent")
    place = pod.machine.vcap / "monit/monitrc"
    place.parent.mkdir()
    (place.parent / "job").mkdir()
    place.write_text(monitrc.control(cycle=1))
    place.chmod(0o600)
    wrapper = pod.machine.vcap / "bosh/bin/monit"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nexec /usr/bin/monit -c /var/vcap/monit/monitrc "$@"\n')
    wrapper.chmod(0o755)
    for name in NAMES:
        (pod.machine.vcap / "data" / name).mkdir()
    return pod


@contextmanager
def go_agent_and_monit(pod: PodInstance) -> Iterator[None]:
    """Run the Go agent and monit during the block. Jobs keep running afterwards."""
    pod.machine.run(START)
    search = "PATH=/var/vcap/bosh/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    options = ["-P", "dummy", "-M", "monit", "-C", "/var/vcap/bosh/agent.json"]
    with (pod.scratch / "go.log").open("ab") as log:
        go = pod.machine.popen(["env", search, "/mnt/bosh-agent", *options], cwd="/", stdout=log, stderr=log)
    try:
        yield
    finally:
        end(go)
        pod.machine.run(KILL)


@contextmanager
def this_agent(pod: PodInstance) -> Iterator[None]:
    """Run this agent during the block, then hand the instance back to the Go agent."""
    pod.exec_agent()
    try:
        yield
    finally:
        pod.end_agent()
        pod.machine.run(f"{sys.executable} -m agent_shim.cli handback")


async def ready(pod: PodInstance) -> None:
    await pod.director.wait_until_ready(AGENT, timeout=60)


async def deploy(pod: PodInstance) -> dict[str, Any]:
    """Deploy three jobs that record each of their starts, and wait until they are running. Return the reply to
    ``get_state``.
    """
    files = {name: {"monit": jobs.sleeper(Paths(), name)["monit"], "bin/ctl": CTL.format(name=name)} for name in NAMES}
    spec = jobs.spec(pod.scratch / "blobs", files, {"tool": {"bin/tool": "x"}})
    reloading = asyncio.create_task(reload_when_asked(pod))
    await pod.run("apply", spec)
    try:
        await pod.run("start")
    except RpcRemoteError as exc:  # The Go agent does not know the token that Debian's monit requires.
        assert "Invalid CSRF Token" in str(exc)
        pod.machine.run(f"{START} start all")
    reloading.cancel()
    return await running(pod, 120)


async def reload_when_asked(pod: PodInstance) -> None:
    """Restart monit whenever the Go agent asks for a reload. Normally a service manager restarts monit, but the Go
    agent's test platform has none.
    """
    log, seen = pod.scratch / "go.log", 0
    while True:
        await asyncio.sleep(0.1)
        asked = log.read_text(errors="replace").count(RELOADS) if log.exists() else 0
        if asked > seen:
            pod.machine.run(f"{KILL}; {START}")
        seen = asked


async def running(pod: PodInstance, seconds: float = 60) -> dict[str, Any]:
    """Wait until all jobs are running, which takes monit a few cycles. Return the reply to ``get_state``."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                state: dict[str, Any] = await pod.director.value(AGENT, "get_state", timeout=5)
            except RpcTimeoutError:
                continue
            if state["job_state"] == "running" and len(state.get("processes", NAMES)) == len(NAMES):
                return state
            await asyncio.sleep(0.2)


async def keep_credentials(pod: PodInstance) -> None:
    """Send update_settings as a Director does to rotate a new instance's credentials, but with the credentials that it
    already has.

    Call this only while our agent is running, because the Go agent would exit and rely on its service manager to
    restart it.
    """
    settings = json.loads((pod.machine.vcap / "bosh/warden-cpi-agent-env.json").read_text())
    mbus = settings["env"]["bosh"]["mbus"]
    await pod.run("update_settings", {"mbus": mbus, "trusted_certs": "", "blobstores": None})


async def test_go_agent_takes_over_and_stops_jobs_started_by_this_agent(pod: PodInstance) -> None:
    with this_agent(pod):
        await ready(pod)
        ours = await deploy(pod)
        await keep_credentials(pod)
    before = starts(pod.machine)
    assert [len(pids) for pids in before.values()] == [1, 1, 1]

    with go_agent_and_monit(pod):
        await ready(pod)
        theirs = await running(pod)
        for member in COMPARED:
            assert theirs[member] == ours[member], member
        assert starts(pod.machine) == before
        assert alive(pod.machine, before)
        await pod.run("stop")
        assert (await pod.until("stopped"))["job_state"] == "stopped"

    with this_agent(pod):
        await ready(pod)
        assert (await pod.until("stopped"))["deployment"] == "dep"
        await pod.run("start")
        await pod.until("running")
        assert [len(pids) for pids in starts(pod.machine).values()] == [2, 2, 2]


async def test_jobs_started_by_the_go_agent_survive_two_takeovers_and_handbacks(pod: PodInstance) -> None:
    with go_agent_and_monit(pod):
        await ready(pod)
        theirs = await deploy(pod)
    before = starts(pod.machine)
    assert [len(pids) for pids in before.values()] == [1, 1, 1]

    for _ in range(2):
        with this_agent(pod):
            await ready(pod)
            ours = await running(pod)
            for member in COMPARED:
                assert ours[member] == theirs[member], member
            assert starts(pod.machine) == before
        with go_agent_and_monit(pod):
            await ready(pod)
            again = await running(pod)
            for member in COMPARED:
                assert again[member] == theirs[member], member
            assert starts(pod.machine) == before
        assert alive(pod.machine, before)
