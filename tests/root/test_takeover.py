"""From monit to this agent and back: the processes of the jobs go on, whoever keeps them. With Debian's monit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.paths import Paths
from tests.support import jobs
from tests.support.machine import Machine
from tests.support.pod import AGENT, NETWORKS, Pod, end
from tests.support.pod import pod as made

pytestmark = pytest.mark.root

CONTROL = """
set daemon 1
set logfile /var/vcap/monit/monit.log
set pidfile /var/vcap/monit/monit.pid
set idfile /var/vcap/monit/monit.id
set statefile /var/vcap/monit/monit.state
set httpd unixsocket /var/vcap/monit/monit.sock
    allow vcap:"secret"
include /var/vcap/monit/job/*.monitrc
"""
CTL = """#!/bin/sh
pidfile=/var/vcap/sys/run/{name}/{name}.pid
case $1 in
start)
    sleep 1000 &
    echo $! | tee -a /var/vcap/data/{name}/starts >$pidfile ;;
stop) kill $(cat $pidfile); rm -f $pidfile ;;
esac
"""
NAMES = ("web", "worker", "db")


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with made(tmp_path) as one:
        one.keeps_root = True
        one.start_container()
        yield one


def leave_as_the_go_agent(machine: Machine) -> None:
    """The tree after ``apply`` and ``start`` (agent/applier, jobsupervisor), with logs of every start."""
    vcap, package = machine.vcap, "/var/vcap/data/packages/tool/digest"
    for path in ("monit/job", "bosh", "data/sys/run", "data/sys/log", "jobs", "packages", "instance"):
        (vcap / path).mkdir(parents=True, exist_ok=True)
    (vcap / "sys").symlink_to("/var/vcap/data/sys")
    (vcap / package.removeprefix("/var/vcap/")).mkdir(parents=True)
    (vcap / "packages/tool").symlink_to(package)
    digest = "0" * 40
    for number, name in enumerate(reversed(NAMES)):
        bundle = f"data/jobs/{name}/{hashlib.sha1(f'1-{digest}'.encode()).hexdigest()}"
        files = {"monit": jobs.sleeper(Paths(), name)["monit"], "bin/ctl": CTL.format(name=name)}
        for path, text in files.items():
            place = vcap / bundle / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            place.chmod(0o750)
        (vcap / "jobs" / name).symlink_to(f"/var/vcap/{bundle}")
        (vcap / f"monit/job/{number:04}_{name}.monitrc").write_text(files["monit"])
        for above in ("data/sys/run", "data/sys/log", "data"):
            (vcap / above / name).mkdir()
    spec = {
        "properties": {"logging": {"max_log_file_size": ""}},
        "job": {
            "name": "group",
            "release": "",
            "template": NAMES[0],
            "version": "1",
            "templates": [{"name": name, "version": "1"} for name in NAMES],
        },
        "packages": {},
        "configuration_hash": "hash",
        "networks": NETWORKS,
        "resource_pool": None,
        "deployment": "dep",
        "name": "group",
        "index": 0,
        "id": "instance-id",
        "az": "z1",
        "persistent_disk": 0,
        "rendered_templates_archive": {"sha1": digest, "blobstore_id": "blob"},
    }
    machine.write("/var/vcap/bosh/spec.json", spec, mode=0o644)
    machine.write("/var/vcap/bosh/settings.json", {"agent_id": AGENT, "vm": {"name": "vm-1"}}, mode=0o644)


def start_monit(machine: Machine) -> subprocess.Popen[bytes]:
    place = machine.vcap / "monit/monitrc"
    place.write_text(CONTROL)
    place.chmod(0o600)
    return machine.popen(["monit", "-I", "-c", "/var/vcap/monit/monitrc"])


def starts(machine: Machine) -> dict[str, list[str]]:
    """The process numbers under which each job was ever started."""
    return {
        name: path.read_text().split() if (path := machine.vcap / f"data/{name}/starts").exists() else []
        for name in NAMES
    }


async def until_monit_has(machine: Machine, expected: int) -> None:
    """Wait until so many processes are known to run by monit."""
    async with asyncio.timeout(60):
        while True:
            shown = machine.popen(["monit", "-c", "/var/vcap/monit/monitrc", "summary"], stdout=subprocess.PIPE)
            out, _ = shown.communicate()
            if sum(line.split()[1:2] == [b"OK"] for line in out.splitlines() if b"Process" in line) == expected:
                return
            await asyncio.sleep(0.2)


def alive(machine: Machine, numbers: dict[str, list[str]]) -> bool:
    return all((machine.root / "proc" / pids[-1]).exists() for pids in numbers.values())


async def test_from_monit_and_back(pod: Pod) -> None:
    """There and back twice; each process is started once, by whoever came first."""
    machine = pod.machine
    leave_as_the_go_agent(machine)
    monit = start_monit(machine)
    await until_monit_has(machine, len(NAMES))
    before = starts(machine)
    assert [len(pids) for pids in before.values()] == [1, 1, 1]

    for _ in range(2):
        machine.run("kill $(cat /var/vcap/monit/monit.pid)")
        monit.wait()
        await pod.start_agent()
        state = await pod.until("running")
        assert [process["name"] for process in state["processes"]] == list(NAMES)
        pod.end_agent()
        said = machine.run(f"{sys.executable} -m agent_shim.cli handback")
        assert sorted(line.split(" runs on as ")[0] for line in said.splitlines() if " runs on as " in line) == sorted(
            NAMES
        )

        monit = start_monit(machine)
        await until_monit_has(machine, len(NAMES))

        assert starts(machine) == before
        assert alive(machine, before)
    machine.run("kill $(cat /var/vcap/monit/monit.pid)")
    monit.wait()


async def test_what_has_died_without_monit_is_started(pod: Pod) -> None:
    """The others are not touched."""
    machine = pod.machine
    leave_as_the_go_agent(machine)
    monit = start_monit(machine)
    await until_monit_has(machine, len(NAMES))
    before = starts(machine)
    machine.run("kill $(cat /var/vcap/monit/monit.pid)")
    monit.wait()
    machine.run(f"kill -9 {before['web'][0]}")

    await pod.start_agent()

    await pod.until("running")
    after = starts(machine)
    assert [len(pids) for pids in after.values()] == [2, 1, 1]
    assert alive(machine, after)


async def test_stopped_by_the_go_agent(pod: Pod) -> None:
    """They stay stopped."""
    machine = pod.machine
    leave_as_the_go_agent(machine)
    (machine.vcap / "monit/stopped").touch()
    await pod.start_agent()

    state = await pod.until("stopped")

    assert [process["state"] for process in state["processes"]] == ["unknown"] * 3
    assert starts(machine) == {name: [] for name in NAMES}
    await pod.run("start")
    await pod.until("running")


async def test_all_that_the_go_agent_had_stored(pod: Pod) -> None:
    """Its settings on top of those of the CPI, its spec, the disk that it had mounted."""
    pod.kill()
    pod.attach("disk-1")
    (pod.volume("disk-1") / "data").write_text("precious")
    pod.start_container()
    machine = pod.machine
    leave_as_the_go_agent(machine)
    updates: dict[str, Any] = {
        "blobstores": None,
        "disk_associations": None,
        "mbus": {"cert": {}, "urls": None},
        "trusted_certs": "",
    }
    machine.write("/var/vcap/bosh/update_settings.json", updates, mode=0o644)
    (machine.vcap / "bosh/managed_disk_settings.json").write_text("disk-1")
    machine.write("/var/vcap/bosh/persistent_disk_hints.json", {}, mode=0o644)
    machine.write("/var/vcap/bosh/agent_state.json", {"Linux": {"hosts_configured": True}}, mode=0o644)

    await pod.start_agent()

    state = await pod.until("running")
    assert (state["deployment"], state["job"]["name"]) == ("dep", "group")
    assert await pod.run("list_disk") == ["disk-1"]
    assert (machine.vcap / "store/data").read_text() == "precious"
    assert json.loads((machine.vcap / "bosh/agent_state.json").read_text()) == {"Linux": {"hosts_configured": True}}


GO_AGENT = os.environ.get("BOSH_AGENT", "")
HTTP = """
set httpd port 2822 and use address 127.0.0.1
    allow 127.0.0.1
"""


@pytest.mark.skipif(not GO_AGENT, reason="BOSH_AGENT names no binary of the Go agent")
async def test_the_go_agent_itself_goes_on(pod: Pod) -> None:
    """What this agent has deployed, handed back: the Go agent with monit reports it, stops it, and gives it back."""
    machine = pod.machine
    shutil.copy(GO_AGENT, machine.root / "mnt/bosh-agent")
    files = {"monit": jobs.sleeper(Paths(), "web")["monit"], "bin/ctl": CTL.format(name="web")}
    await pod.start_agent()
    spec = jobs.spec(pod.scratch / "blobs", {"web": files}, {"tool": {"bin/tool": "x"}})
    await pod.run("apply", spec)
    await pod.run("start")
    ours = await pod.until("running")
    credentials = json.loads((machine.vcap / "bosh/warden-cpi-agent-env.json").read_text())["env"]["bosh"]["mbus"]
    await pod.run("update_settings", {"mbus": credentials, "trusted_certs": "", "blobstores": None})
    before = starts(machine)["web"]
    pod.end_agent()
    machine.run(f"{sys.executable} -m agent_shim.cli handback")

    place = machine.vcap / "monit/monitrc"
    place.write_text(CONTROL.partition("set httpd")[0] + HTTP + "include /var/vcap/monit/job/*.monitrc\n")
    place.chmod(0o600)
    monit = machine.popen(["monit", "-I", "-c", "/var/vcap/monit/monitrc"])
    wrapper = machine.vcap / "bosh/bin/monit"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nexec /usr/bin/monit -c /var/vcap/monit/monitrc "$@"\n')
    wrapper.chmod(0o755)
    log = (pod.scratch / "go.log").open("wb")
    argv = [
        "env",
        "PATH=/var/vcap/bosh/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "/mnt/bosh-agent",
        "-P",
        "dummy",
        "-M",
        "monit",
    ]
    go = machine.popen([*argv, "-C", "/var/vcap/bosh/agent.json"], cwd="/", stdout=log, stderr=log)
    try:
        await pod.director.wait_until_ready(AGENT, timeout=30)
        theirs = await pod.until("running")
        for member in ("deployment", "job", "packages", "configuration_hash", "networks", "id", "name", "index", "az"):
            assert theirs[member] == ours[member], member
        assert [process["name"] for process in theirs["processes"]] == ["web"]
        assert starts(machine)["web"] == before
        await pod.run("stop")
        assert (await pod.until("stopped"))["job_state"] == "stopped"
    finally:
        end(go)
        log.close()
        machine.run("kill $(cat /var/vcap/monit/monit.pid)")
        monit.wait()

    await pod.start_agent()
    assert (await pod.until("stopped"))["deployment"] == "dep"
    await pod.run("start")
    await pod.until("running")
    assert len(starts(machine)["web"]) == 2
