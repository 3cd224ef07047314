"""Tests packet filter rules that keep jobs, but no other process, from connecting to the message bus. Each pod has its
own network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agent_shim.demo.director import Director, RpcTimeoutError
from agent_shim.demo.pki import Authority
from agent_shim.services.firewall import AWAITED
from tests.support.broker import NatsServer
from tests.support.pod import AGENT, PodInstance
from tests.support.proxy import Proxy
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.root

VCAP = "setpriv --reuid=vcap --regid=vcap --clear-groups"
DAEMON = 1
"""The uid of a user who is neither root nor vcap."""

PASSING_ON = """
import asyncio, sys
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.transport.abort()
async def accepted(reader, writer):
    try:
        far_reader, far_writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    except OSError:
        return writer.transport.abort()
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)
async def main():
    await asyncio.start_server(accepted, "127.0.0.1", 15001)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
REDIRECTED = """
table ip mesh {{
  chain out {{
    type nat hook output priority -100;
    ip daddr {host} tcp dport {port} meta skuid 0 redirect to :15001
  }}
}}
"""


class ProxiedPod(PodInstance):
    """A pod that connects to its bus through ``proxy``, which listens on ``gateway``.

    Programs inside the pod run in threads, because the proxy runs in this event loop. If the loop were blocked, the
    agent would lose its connection.
    """

    proxy: Proxy

    async def may_connect(self, prefix: str = "") -> bool:
        """Return True if a program can connect to the bus when it runs with the command prefix ``prefix``."""
        at = urlsplit(self.url)
        code = f"import socket; socket.create_connection(({at.hostname!r}, {at.port}), 5)"
        done = self.machine.popen([*prefix.split(), sys.executable, "-c", code], stderr=subprocess.PIPE)
        _, err = await asyncio.to_thread(done.communicate, timeout=30)
        assert done.returncode == 0 or b"ConnectionRefusedError" in err, err
        return done.returncode == 0

    async def firewall(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the agent's report about the packet filter contains ``wanted`` and the agent knows the bus
        addresses. Return the report.
        """
        command = f"{sys.executable} -m agent_shim.cli status --json"
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                said: dict[str, Any] = json.loads(await asyncio.to_thread(self.machine.run, command))["firewall"]
                if said.items() >= wanted.items() and said["why"] != AWAITED:
                    return said
                await asyncio.sleep(0.05)

    def tables(self) -> str:
        return self.machine.run("nft list tables")


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[ProxiedPod]:
    number = os.getpid() % 16384 * 4
    gateway = f"198.18.{number // 256}.{number % 256 + 1}"
    authority, director = Authority(), Director(poll=0)
    pair = authority.server(hosts=("127.0.0.1", gateway))
    async with NatsServer(tmp_path / "bus", authority, pair=pair) as server, Proxy(server.port, gateway) as proxy:
        await server.add_agent(AGENT)
        async with director.on(server.peer()):
            one = ProxiedPod(tmp_path, server, director)
            one.gateway, one.proxy = gateway, proxy
            one.url = f"nats://{gateway}:{proxy.port}"
            try:
                yield one
            finally:
                one.kill()


@pytest.mark.attack("a job connects to the bus")
async def test_packet_filter_blocks_jobs_from_the_bus_but_not_root(pod: ProxiedPod) -> None:
    pod.start_container()
    assert await pod.may_connect(VCAP)

    await pod.start_agent()

    await pod.firewall(enforced=True)
    assert not await pod.may_connect(VCAP)
    assert await pod.may_connect()
    assert await pod.director.value(AGENT, "ping") == "pong"
    done = pod.machine.popen([sys.executable, "-m", "agent_shim.cli", "doctor", "--json"], stdout=subprocess.PIPE)
    out, _ = await asyncio.to_thread(done.communicate, timeout=60)
    found = json.loads(out)["findings"]
    assert next(one for one in found if one["topic"] == "firewall")["verdict"] == "good"


async def test_boot_and_doctor_cause_no_errors_in_the_bus_servers_log(pod: ProxiedPod) -> None:
    """The agent opens connections to test whether its rules work. The connections must complete the handshake.
    Otherwise, the server would log an error for every connection from every VM.
    """
    pod.start_container()
    await pod.start_agent()
    await pod.firewall(enforced=True)
    await asyncio.to_thread(pod.machine.run, f"{sys.executable} -m agent_shim.cli doctor --json || true")
    assert await pod.director.value(AGENT, "ping") == "pong"

    lines = pod.server.log.read_text().splitlines()
    assert [line for line in lines if "[ERR]" in line or "[WRN]" in line] == []


@pytest.mark.attack("root in a container removes the packet filter rules")
async def test_packet_filter_rules_are_restored_and_outlive_the_agent(pod: ProxiedPod) -> None:
    await pod.start()
    await pod.firewall(enforced=True)
    pod.machine.run("nft delete table inet agent_shim")

    pod.proxy.cut()
    await until(lambda: pod.tables() != "")

    assert not await pod.may_connect(VCAP)
    pod.end_agent()
    assert not await pod.may_connect(VCAP)
    await pod.start_agent()


async def test_handback_removes_only_the_agents_packet_filter_rules(pod: ProxiedPod) -> None:
    await pod.start()
    await pod.firewall(enforced=True)
    pod.machine.run("nft add table inet bosh_agent")
    pod.end_agent()

    await asyncio.to_thread(pod.machine.run, f"{sys.executable} -m agent_shim.cli handback")

    assert pod.tables() == "table inet bosh_agent\n"
    assert await pod.may_connect(VCAP)


async def test_disabled_packet_filter_has_no_rules(pod: ProxiedPod) -> None:
    pod.shim = {"firewall": False}
    await pod.start()

    assert await pod.firewall() == {"enforced": False, "why": "it is switched off in agent.json"}
    assert pod.tables() == ""


async def test_agent_without_packet_filter_privilege_reports_it_and_continues(pod: ProxiedPod) -> None:
    """Most pods lack CAP_NET_ADMIN."""
    pod.prefix = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-all"]
    await pod.start()

    said = await pod.firewall(enforced=False)

    assert "Operation not permitted" in said["why"]
    assert await pod.director.value(AGENT, "ping") == "pong"


async def test_packet_filter_does_not_cut_off_an_agent_behind_a_proxy(pod: ProxiedPod) -> None:
    """A service mesh's sidecar redirects the agent's packets and sends them as another user, whom the rules would
    block. The agent must notice that and remove its rules.
    """
    pod.start_container()
    at = urlsplit(pod.url)
    other = ["setpriv", f"--reuid={DAEMON}", f"--regid={DAEMON}", "--clear-groups"]
    sidecar = pod.machine.popen([*other, sys.executable, "-c", PASSING_ON, str(at.hostname), str(at.port)])
    loaded = pod.machine.popen(["nft", "-f", "-"], stdin=subprocess.PIPE)
    loaded.communicate(REDIRECTED.format(host=at.hostname, port=at.port).encode())
    assert loaded.returncode == 0
    async with asyncio.timeout(TIMEOUT_S):
        while not await pod.may_connect():
            await asyncio.sleep(0.05)

    pod.exec_agent()
    async with asyncio.timeout(TIMEOUT_S):  # The agent needs two connections to test the rules.
        while True:
            with contextlib.suppress(RpcTimeoutError):
                await pod.director.value(AGENT, "ping", timeout=2)
                break

    said = await pod.firewall(why="the bus is reached through a proxy of another user, which the rules would block")
    assert not said["enforced"]
    assert pod.tables() == "table ip mesh\n"
    assert await pod.director.value(AGENT, "ping", timeout=60) == "pong"
    pod.kill()
    sidecar.wait()
