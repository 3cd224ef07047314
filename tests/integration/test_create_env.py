"""Tests ``bosh create-env`` and ``delete-env`` with a real agent. A client sends the same requests as the bosh CLI.

The order of the requests comes from the CLI (``deployment/vm/vm.go``, ``deployment/instance/instance.go``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.release import archive
from agent_shim.host import process
from tests.support.create_env import AgentClient, mbus, pair
from tests.support.instance import COMMAND
from tests.support.jobs import sleeper
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NETWORKS = {"private": {"type": "manual", "ip": "10.0.0.6", "netmask": "255.255.255.0", "gateway": "10.0.0.1"}}


@dataclass
class CreateEnvVm:
    """A simulated VM, which consists of the agent's process, its base directory and its HTTPS address."""

    scratch: Path
    cli: AgentClient
    agent: process.Process | None = None

    @property
    def paths(self) -> Paths:
        return Paths(self.scratch / "vcap")

    @property
    def log(self) -> str:
        return (self.scratch / "agent.log").read_text()

    async def start(self) -> None:
        """Start the agent and ping it until it answers, as the CLI does."""
        argv = [
            word.format(config=self.scratch / "agent.json", base=self.paths.base)
            for word in shlex.split(COMMAND, posix=True)
        ]
        log = self.scratch / "agent.log"
        self.agent = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await self.cli.value("ping") == "pong"
                    return
                except OSError:
                    assert Path(f"/proc/{self.agent.pid}").exists(), self.log
                    await asyncio.sleep(0.05)

    async def stop(self) -> int | None:
        if self.agent is None:
            return None
        agent, self.agent = self.agent, None
        agent.send(signal.SIGTERM)
        return await agent.wait()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[CreateEnvVm]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "agent_id": "create-env",
                "vm": {"name": "vm-create-env"},
                "mbus": mbus(port).urls[0],
                "networks": NETWORKS,
                "blobstore": {"provider": "local", "options": {"blobstore_path": "/var/vcap/micro_bosh/data/cache"}},
                "env": {
                    "bosh": {"mbus": {"cert": {"certificate": pair().certificate, "private_key": pair().private_key}}}
                },
            }
        )
    )
    sources = {"Sources": [{"Type": "File", "SettingsPath": str(settings)}]}
    config = {"Infrastructure": {"Settings": sources}, "AgentShim": {"http": "127.0.0.1:0", "logFormat": "json"}}
    (tmp_path / "agent.json").write_text(json.dumps(config))
    one = CreateEnvVm(tmp_path, AgentClient(port))
    try:
        yield one
    finally:
        await one.stop()
        for pidfile in one.paths.run.glob("*/*.pid"):
            if (survivor := process.adopt(int(pidfile.read_text()))) is not None:
                await survivor.terminate(1)


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def spec(packages: Mapping[str, Any], jobs: Mapping[str, str], rendered: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec that the CLI creates in ``agentclient/applyspec``."""
    return {
        "deployment": "bosh",
        "name": "bosh",
        "index": 0,
        "id": "0",
        "az": "unknown",
        "packages": packages,
        "networks": NETWORKS,
        "job": {
            "name": "bosh",
            "templates": [
                {"name": name, "version": version, "sha1": "", "blobstore_id": ""} for name, version in jobs.items()
            ],
        },
        "rendered_templates_archive": rendered,
        "configuration_hash": "unused-configuration-hash",
    }


EMPTY = spec({}, {}, {"blobstore_id": "", "sha1": ""})


async def deploy(machine: CreateEnvVm) -> None:
    """Send all requests in a deployment, from the first ping to post-start."""
    cli = machine.cli
    await cli.run("apply", EMPTY)
    assert (await cli.value("get_state"))["networks"] == NETWORKS

    source = archive({"packaging": 'echo compiled by $BOSH_COMPILE_TARGET > "$BOSH_INSTALL_TARGET/word"\n'})
    assert (await cli.put_blob("source-blob", source)).status == 201
    compiled = (await cli.run("compile_package", "source-blob", sha1(source), "words", "1.1", {}))["result"]
    packages = {"words": {"name": "words", "version": "1.1", **compiled}}

    script = "#!/bin/sh\necho {0} >> {1}/scripts\n"
    files: dict[str, str | bytes] = {}
    files |= {f"sleeper/{path}": text for path, text in sleeper(machine.paths, "sleeper").items()}
    files |= {
        f"sleeper/bin/{name}": script.format(name, machine.scratch)
        for name in ("pre-start", "post-start", "pre-stop", "post-stop")
    }
    files["sleeper/bin/drain"] = script.format("drain", machine.scratch) + "echo 0\n"
    templates = archive(files)
    assert (await cli.put_blob("templates-blob", templates)).status == 201

    await cli.run("stop")
    rendered = {"blobstore_id": "templates-blob", "sha1": sha1(templates)}
    await cli.run("apply", spec(packages, {"sleeper": "abc"}, rendered))
    await cli.run("run_script", "pre-start", {})
    assert await cli.value("start") == "started"
    async with asyncio.timeout(60):
        while (state := await cli.value("get_state"))["job_state"] != "running":
            await asyncio.sleep(0.05)
    assert [process["name"] for process in state["processes"]] == ["sleeper"]
    await cli.run("run_script", "post-start", {})


async def test_create_env_and_delete_env_work_end_to_end(machine: CreateEnvVm) -> None:
    cli, pidfile = machine.cli, machine.paths.run / "sleeper/sleeper.pid"
    await machine.start()
    await deploy(machine)
    first = pidfile.read_text()
    await cli.run("stop")
    await cli.run("apply", EMPTY)
    assert not (machine.paths.jobs / "sleeper").exists()
    assert not (machine.paths.packages / "words").exists()
    (machine.scratch / "scripts").unlink()

    await deploy(machine)
    pid = int(pidfile.read_text())
    assert str(pid) != first.strip()
    assert Path(f"/proc/{pid}").exists()
    assert "compiled by" in (machine.paths.packages / "words/word").read_text()

    await cli.put_blob("next-blob", b"content")
    assert await machine.stop() == 0
    await machine.start()
    async with asyncio.timeout(60):
        while (await cli.value("get_state"))["job_state"] != "running":
            await asyncio.sleep(0.05)
    assert int(pidfile.read_text()) == pid
    assert (await cli.get_blob("next-blob")).body == b"content"
    assert (await cli.get_blob("templates-blob")).status == 404, "what is installed is not kept twice"

    await cli.run("run_script", "pre-stop", {})
    assert await cli.run("drain", "shutdown", {}) == 0
    assert await cli.run("stop") == "stopped"
    await cli.run("run_script", "post-stop", {})
    assert await cli.value("list_disk") == []
    await until(lambda: not Path(f"/proc/{pid}").exists())
    said = (machine.scratch / "scripts").read_text().split()
    assert said == ["pre-start", "post-start", "pre-stop", "drain", "post-stop"]
    assert (await cli.value("get_state"))["job_state"] == "stopped"
    assert await machine.stop() == 0


@pytest.mark.attack("a reader finds secrets in the log")
async def test_create_env_passwords_are_not_logged(machine: CreateEnvVm) -> None:
    await machine.start()
    reply = await machine.cli.call("update_settings", {"mbus": {"urls": ["nats://127.0.0.1:4222"]}})
    task = await machine.cli.call("get_task", reply["value"]["agent_task_id"])
    assert "cannot go over to a bus of the kind nats" in task["exception"]["message"]
    assert await machine.cli.value("ping") == "pong"
    await machine.cli.send("POST", "/agent", b"{}", auth="Basic c2VjcmV0")
    await machine.cli.call("nonsense")
    assert await machine.stop() == 0

    said = machine.log
    assert "nonsense" in said
    for secret in ("p%2Fss", "p/ss", "c2VjcmV0", "secret"):
        assert secret not in said
