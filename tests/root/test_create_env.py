"""Tests ``bosh create-env`` and ``delete-env`` for a VM with a disk and an agent that runs as root.

``integration/test_create_env.py`` tests jobs and packages. The requests are in the same order as the bosh CLI's
(``deployment/disk/manager.go``, ``deployment/vm/vm.go``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.release import archive
from tests.integration.test_create_env import EMPTY, NETWORKS, spec
from tests.support.create_env import AgentClient, mbus, pair
from tests.support.jobs import sleeper
from tests.support.machine import Machine, machine

pytestmark = pytest.mark.root

VOLUMES = Path("/var/vcap/volumes")
WRITING = "#!/bin/sh\necho written >/var/vcap/store/data\n"


@dataclass
class VmWithVolumes:
    """A VM and the two volumes that the CPI can attach to it."""

    machine: Machine
    cli: AgentClient
    volumes: Path


@pytest.fixture
def env(tmp_path: Path) -> Iterator[VmWithVolumes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    volumes = tmp_path / "volumes"
    for cid in ("disk-1", "disk-2"):
        (volumes / cid).mkdir(parents=True)
    certificate = {"certificate": pair().certificate, "private_key": pair().private_key}
    settings = {
        "agent_id": "create-env",
        "vm": {"name": "vm-create-env"},
        "mbus": mbus(port).urls[0],
        "networks": NETWORKS,
        "blobstore": {"provider": "local", "options": {"blobstore_path": "/var/vcap/micro_bosh/data/cache"}},
        "env": {"bosh": {"mbus": {"cert": certificate}}},
    }
    (tmp_path / "inside").mkdir()
    with machine(tmp_path / "inside", {f"{VOLUMES}/{path.name}": path for path in volumes.iterdir()}) as made:
        made.write("/var/vcap/bosh/agent.json", {"AgentShim": {"http": "off"}})
        made.write("/var/vcap/bosh/warden-cpi-agent-env.json", settings)
        argv = [sys.executable, "-m", "agent_shim.cli", "run", "-C", "/var/vcap/bosh/agent.json"]
        with (tmp_path / "agent.log").open("wb") as log:
            agent = made.popen(argv, stdout=log, stderr=subprocess.STDOUT)
            yield VmWithVolumes(made, AgentClient(port), volumes)
            agent.terminate()
            agent.wait()


async def until_ready(cli: AgentClient) -> None:
    """Send pings until the agent answers, as the CLI does."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await cli.value("ping") == "pong"
                return
            except OSError:
                await asyncio.sleep(0.05)


async def attach(cli: AgentClient, cid: str) -> None:
    await until_ready(cli)
    assert await cli.run("add_persistent_disk", cid, {"path": str(VOLUMES / cid)}) == {}
    assert await cli.run("mount_disk", cid) == {}


async def test_create_env_resizes_a_disk_and_delete_env_removes_it(env: VmWithVolumes) -> None:
    cli = env.cli
    await attach(cli, "disk-1")
    await cli.run("apply", EMPTY)
    files: dict[str, Any] = {f"writer/{path}": text for path, text in sleeper(Paths(), "writer").items()}
    templates = archive(files | {"writer/bin/pre-start": WRITING})
    assert (await cli.put_blob("templates-blob", templates)).status == 201
    await cli.run("stop")
    rendered = {"blobstore_id": "templates-blob", "sha1": hashlib.sha1(templates).hexdigest()}
    await cli.run("apply", spec({}, {"writer": "abc"}, rendered))
    await cli.run("run_script", "pre-start", {})
    assert await cli.value("start") == "started"
    async with asyncio.timeout(60):
        while (await cli.value("get_state"))["job_state"] != "running":
            await asyncio.sleep(0.05)
    assert (env.volumes / "disk-1/data").read_text() == "written\n"

    await cli.run("stop")
    await attach(cli, "disk-2")
    assert await cli.run("migrate_disk") == {}
    assert await cli.value("list_disk") == ["disk-2"]
    assert await cli.run("remove_persistent_disk", "disk-1") == {}
    assert (env.volumes / "disk-2/data").read_text() == "written\n"
    assert await cli.value("start") == "started"

    await cli.run("run_script", "pre-stop", {})
    assert await cli.run("drain", "shutdown", {}) == 0
    assert await cli.run("stop") == "stopped"
    await cli.run("run_script", "post-stop", {})
    for cid in await cli.value("list_disk"):
        assert (await cli.run("unmount_disk", cid))["message"].startswith("Unmounted partition of ")
    assert await cli.value("list_disk") == []
    assert not (env.machine.vcap / "store/data").exists()
    hints = json.loads((env.machine.vcap / "bosh/persistent_disk_hints.json").read_bytes())
    assert set(hints) == {"disk-2"}
