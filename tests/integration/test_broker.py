"""The test bus gives agents the same permissions as a real bus, and admits and removes users while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.core.settings import Mbus
from agent_shim.demo import broker
from agent_shim.demo.director import BusClient, HealthMonitor, joined
from agent_shim.demo.pki import DIRECTOR, HEALTH_MONITOR
from tests.support.broker import NatsServer, knowing
from tests.support.waiting import until


@pytest.mark.attack("another agent reads other agents' requests, replies or inboxes, or publishes in their name")
async def test_agent_may_publish_only_its_own_messages(tmp_path: Path) -> None:
    async with (
        knowing(tmp_path) as server,
        HealthMonitor().on(server.peer(HEALTH_MONITOR)) as monitor,
        joined(server.mbus("agent"), ("agent.agent",), lambda *_: None) as agent,
    ):
        await agent.publish("hm.agent.alert.agent", b"1")
        await monitor.wait_for("alert", "agent")
        await agent.publish("hm.agent.alert.other", b"2")
        await until(
            lambda: "Permissions Violation" in server.log.read_text() or "Publish Violation" in server.log.read_text()
        )
        await asyncio.sleep(0.05)

        assert monitor.of("alert", "other") == []


@pytest.mark.attack("another agent reads other agents' requests, replies or inboxes, or publishes in their name")
@pytest.mark.parametrize("subject", ["agent.other", "agent.>", "_INBOX.x", "director.>"])
async def test_subscription_to_the_subject_of_another_agent_is_refused(tmp_path: Path, subject: str) -> None:
    async with knowing(tmp_path) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), joined(server.mbus("agent"), (subject,), lambda *_: None):
                pass


async def test_broker_admits_agents_by_their_certificates(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        assert await admits(server, server.peer(DIRECTOR), "director.x.>")
        assert await admits(server, server.peer(HEALTH_MONITOR), "hm.agent.alert.*")

        await server.add_agent("agent", permanent=False)

        assert await admits(server, server.mbus("agent", bootstrap=True), "agent.agent")
        assert not await admits(server, server.mbus("agent"), "agent.agent")

        await server.add_agent("agent", bootstrap=False)

        assert not await admits(server, server.mbus("agent", bootstrap=True), "agent.agent")
        assert await admits(server, server.mbus("agent"), "agent.agent")

        await server.remove_agent("agent")

        assert not await admits(server, server.mbus("agent"), "agent.agent")


async def admits(server: NatsServer, mbus: Mbus, subject: str) -> bool:
    """Return True if the server accepts the credentials in ``mbus``, and False if it rejects them."""
    peer = BusClient(mbus, (subject,), lambda *_: None)

    def refusals() -> int:
        return server.log.read_text().count("authentication error")

    before = refusals()
    serving, joining = asyncio.create_task(peer.serve()), asyncio.create_task(peer.wait_joined())
    try:
        await until(lambda: joining.done() or refusals() > before)
        return joining.done()
    finally:
        serving.cancel()
        joining.cancel()
        await asyncio.wait([serving, joining])


def test_error_names_a_missing_nats_server_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nats-server"):
        broker.nats_server()
