"""Prepares a machine as the Go agent and monit would have left it, and runs Debian's monit there."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
from typing import Any, Final

from agent_shim.core.paths import Paths
from tests.support import jobs, monitrc
from tests.support.machine import Machine
from tests.support.pod import AGENT, NETWORKS

CONTROL = monitrc.control(cycle=1, http='unixsocket /var/vcap/monit/monit.sock allow vcap:"secret"')
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


def leave_as_the_go_agent(machine: Machine) -> None:
    """Write the directory tree that the Go agent leaves after ``apply`` and ``start`` (agent/applier, jobsupervisor).

    Each job in this tree records the pid of every start.
    """
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
    """Return, for each job, the pids that its start script has recorded."""
    return {
        name: path.read_text().split() if (path := machine.vcap / f"data/{name}/starts").exists() else []
        for name in NAMES
    }


async def until_monit_has(machine: Machine, expected: int) -> None:
    """Wait until monit reports ``expected`` processes as running."""
    async with asyncio.timeout(60):
        while True:
            shown = machine.popen(["monit", "-c", "/var/vcap/monit/monitrc", "summary"], stdout=subprocess.PIPE)
            out, _ = shown.communicate()
            if sum(line.split()[1:2] == [b"OK"] for line in out.splitlines() if b"Process" in line) == expected:
                return
            await asyncio.sleep(0.2)


def alive(machine: Machine, numbers: dict[str, list[str]]) -> bool:
    return all((machine.root / "proc" / pids[-1]).exists() for pids in numbers.values())


TASK: Final = "task-of-before"
"""ID of a task that the Go agent had accepted but not finished."""


def write_all_state_files(machine: Machine, disk: str) -> None:
    """Write the remaining files that the Go agent keeps below ``bosh``. ``disk`` is the disk that it had mounted.

    Formats: agent/task/concrete_manager.go, platform/linux_platform.go, platform/bootstrap_state.go, agent/bootonce.
    """
    updates: dict[str, Any] = {
        "blobstores": None,
        "disk_associations": None,
        "mbus": {"cert": {}, "urls": None},
        "trusted_certs": "",
    }
    request = {"protocol": 3, "method": "update_settings", "arguments": [updates], "reply_to": "director.x.y"}
    payload = base64.b64encode(json.dumps(request).encode()).decode()
    documents: dict[str, Any] = {
        "update_settings.json": updates,
        "persistent_disk_hints.json": {},
        "agent_state.json": {"Linux": {"hosts_configured": True}},
        "tasks.json": {TASK: {"TaskID": TASK, "Method": "update_settings", "Payload": payload}},
        "etc/blobstore-local.json": {"blobstore_path": "/var/vcap/blobs"},
    }
    for name, document in documents.items():
        machine.write(f"/var/vcap/bosh/{name}", document, mode=0o644)
    texts = {
        "managed_disk_settings.json": disk,
        "bootonce": "",
        "canrestart/bootonce": "",
        "etc/ntpserver": "10.0.0.1 10.0.0.2",
        "etc/operating_system": "ubuntu",
        "etc/infrastructure": "warden",
    }
    for name, text in texts.items():
        place = machine.vcap / "bosh" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
