"""Tests that an agent that runs as root on its own machine answers all requests that a Director sends to create an
instance.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.director import HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.host import network
from tests.support import jobs
from tests.support.fleet import Fleet
from tests.support.machine import Machine
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.root

AGENT = "0d6e3a52-21d5-4d0a-9d4a-6a1b6f0f8a11"
DYNAMIC: dict[str, Any] = {"type": "dynamic", "cloud_properties": {}, "prefix": "32", "default": ["dns", "gateway"]}
KEEP = dict.fromkeys(("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep")
HANG = "#!/bin/sh\ntouch /var/vcap/data/web/hangs\nwhile [ ! -e /var/vcap/data/web/go ]; do sleep 0.02; done\n"


@pytest.fixture
async def machine(fleet: Fleet) -> Machine:
    assert network.default_address() is not None, "a dynamic network needs a default route on the machine of the tests"
    return await fleet.add(AGENT, {"default": {"type": "dynamic", "default": ["dns", "gateway"]}})


def full_spec(fleet: Fleet) -> dict[str, Any]:
    """Return the spec of an instance with one job and one package."""
    web = jobs.sleeper(Paths(), "web") | {"bin/pre-start": "#!/bin/sh\nid -un\n"}
    return jobs.spec(fleet.blobs(AGENT), {"web": web}, {"tool": {"bin/tool": "x"}}, networks={"default": DYNAMIC})


async def test_agent_answers_all_requests_that_create_an_instance(fleet: Fleet, machine: Machine) -> None:
    director, wanted = fleet.director, full_spec(fleet)

    async def run(method: str, *arguments: Any) -> Any:
        return await director.run(AGENT, method, *arguments)

    monitor = HealthMonitor()
    async with monitor.on(fleet.server.peer(HEALTH_MONITOR)):
        assert await director.value(AGENT, "ping") == "pong"
        rotation = {"mbus": {"cert": fleet.credentials(AGENT)}, "trusted_certs": "", "disk_associations": []}
        first = await director.value(AGENT, "update_settings", rotation)
        assert first["state"] == "running"
        task_id = first["agent_task_id"]
        while (answer := await director.value(AGENT, "get_task", task_id)) != "ok":
            assert answer == {"agent_task_id": task_id, "state": "running"}
        await fleet.server.add_agent(AGENT, bootstrap=False)

        partial = {name: wanted[name] for name in ("deployment", "job", "index", "id")}
        assert await run("apply", partial | {"networks": {"default": DYNAMIC}}) == "applied"
        state = await run("get_state")
        address = network.default_address()
        assert address is not None
        filled = DYNAMIC | {"ip": address.ip, "netmask": address.netmask, "gateway": address.gateway}
        assert state["networks"] == {"default": filled}
        assert (state["job_state"], "processes" in state) == ("running", False)

        records = json.dumps({"version": 1, "records": [["10.0.0.9", "a.b.bosh"]]}).encode()
        named = jobs.blob(fleet.blobs(AGENT), records)
        digest = f"sha256:{hashlib.sha256(records).hexdigest()}"
        assert await director.value(AGENT, "sync_dns", named["blobstore_id"], digest, 1) == "synced"
        assert "10.0.0.9 a.b.bosh" in (machine.root / "etc/hosts").read_text()

        assert await run("prepare", wanted) == "prepared"
        assert await run("run_script", "pre-stop", {"env": KEEP}) == {}
        assert await run("drain", "update", wanted) == 0
        assert await run("stop") == "stopped"
        assert await run("run_script", "post-stop", {}) == {}
        assert await run("list_disk") == []
        assert await run("update_settings", {"trusted_certs": "", "disk_associations": []}) == "ok"
        assert await run("apply", wanted) == "applied"
        assert await run("run_script", "pre-start", {}) == {}
        assert (machine.vcap / "data/sys/log/web/pre-start.stdout.log").read_text() == "root\n"
        assert await director.value(AGENT, "start") == "started"
        async with asyncio.timeout(TIMEOUT_S):
            while (state := await run("get_state"))["job_state"] != "running":
                assert state["job_state"] == "starting"
        assert state["networks"] == {"default": filled}
        assert [(process["name"], process["state"]) for process in state["processes"]] == [("web", "running")]
        assert await run("run_script", "post-start", {}) == {}
        assert await run("run_script", "post-deploy", {}) == {}
        uptime = (await monitor.wait_for("heartbeat", AGENT)).body["vitals"]["uptime"]
        assert uptime.get("secs", 0) >= 0  # The agent omits the seconds if they are 0.

    facts = machine.run("cd /var/vcap && stat -c '%a %U:%G' data/sys jobs/web/ jobs/web/monit data/web bosh/spec.json")
    assert facts.splitlines() == ["750 root:vcap", "750 root:vcap", "640 root:vcap", "770 root:vcap", "600 root:root"]
    assert machine.run("readlink /var/vcap/sys").strip() == "/var/vcap/data/sys"


async def test_quick_requests_do_not_wait_for_tasks(fleet: Fleet, machine: Machine) -> None:
    director = fleet.director
    wanted = jobs.spec(fleet.blobs(AGENT), {"web": {"monit": "", "bin/pre-start": HANG}}, networks={"default": DYNAMIC})
    await director.run(AGENT, "apply", wanted)
    hanging = (await director.value(AGENT, "run_script", "pre-start", {}))["agent_task_id"]
    await until((machine.vcap / "data/web/hangs").exists)
    waiting = [(await director.value(AGENT, "run_script", "nothing", {}))["agent_task_id"] for _ in range(8)]
    records = json.dumps({"version": 1, "records": []}).encode()
    named = jobs.blob(fleet.blobs(AGENT), records)
    digest = f"sha256:{hashlib.sha256(records).hexdigest()}"

    async with asyncio.timeout(TIMEOUT_S):
        assert await director.value(AGENT, "ping") == "pong"
        assert (await director.value(AGENT, "get_state", "full"))["agent_id"] == AGENT
        assert await director.value(AGENT, "sync_dns", named["blobstore_id"], digest, 1) == "synced"
        made = await director.value(AGENT, "ssh", "setup", {"user": "bosh_0123abc", "public_key": "ssh-rsa AAAA x"})
        gone = await director.value(AGENT, "ssh", "cleanup", {"user_regex": "^bosh_0123abc$"})

    assert (made["status"], made["command"], made["host_public_key"][:8]) == ("success", "setup", "ssh-rsa ")
    assert gone == {"command": "cleanup", "status": "success"}
    (machine.vcap / "data/web/go").touch()
    for task_id in [hanging, *waiting]:
        async with asyncio.timeout(TIMEOUT_S):
            while (answer := await director.value(AGENT, "get_task", task_id)) != {}:
                assert answer["state"] == "running"
