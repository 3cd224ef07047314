"""Tests what a thief with a stolen agent certificate can and cannot do on a real bus while the agent is connected.

The bus gives the thief the agent's permissions, so the thief can read and answer requests to this agent. However,
the thief can neither keep requests from the agent nor reach anyone except the Director and the Health Monitor.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.demo.director import joined
from agent_shim.demo.pki import DIRECTOR, Authority
from tests.support.bus import connected, on_bus, talking
from tests.support.waiting import until

LONG_S = 20.0
"""Duration in seconds of a request that the thief answers before the agent."""


@pytest.mark.attack("another agent uses a stolen certificate")
@pytest.mark.parametrize("subject", ["agent.agent", "agent.agent thieves"], ids=["subscription", "queue group"])
async def test_stolen_certificate_can_read_requests_but_not_intercept_them(tmp_path: Path, subject: str) -> None:
    """Members of a queue group share their messages. The agent is not a member, so a thief who joins a group takes no
    request away from the agent.
    """
    async with talking(tmp_path) as talk:
        heard: list[str] = []
        async with joined(talk.server.mbus("agent"), (subject,), lambda _, data: heard.append(data.decode())):
            values = [await talk.director.value("agent", f"secret {n}") for n in range(50)]
            await until(lambda: len(heard) == 50)

        assert values == [f"secret {n}" for n in range(50)]
        assert talk.bus.stats.received == 50
        assert talk.bus.stats.connects == 1


@pytest.mark.attack("another agent uses a stolen certificate")
@pytest.mark.parametrize(
    "subject",
    "agent.agent agent.other agent.* director.x.other.y hm.agent.alert.other hm.director.alert _INBOX.x"
    " $SYS.REQ.USER.INFO $JS.API.INFO".split(),
)
async def test_stolen_certificate_cannot_send_requests_or_publish_for_other_agents(
    tmp_path: Path, subject: str
) -> None:
    async with talking(tmp_path) as talk:
        await talk.server.add_agent("other")
        async with (
            on_bus(talk.server.mbus("other"), "other") as other,
            joined(talk.server.mbus("agent"), ("agent.agent",), lambda *_: None) as thief,
        ):
            await connected(other)
            await thief.publish(subject, b'{"method":"ping","reply_to":"director.x.agent.y"}')
            await until(lambda: "iolation" in talk.server.log.read_text())

            assert await talk.director.value("other", "ping") == "ping"
            assert await talk.director.value("agent", "ping") == "ping"
            assert (talk.bus.stats.received, other.stats.received) == (1, 1)
        assert talk.monitor.notices == []


@pytest.mark.attack("another agent uses a stolen certificate")
@pytest.mark.parametrize(
    "subject", ["agent.other", "agent.*", "agent.>", "director.>", "hm.>", "_INBOX.>", "$SYS.>", ">", "agent.other x"]
)
async def test_stolen_certificate_cannot_read_messages_for_other_agents(tmp_path: Path, subject: str) -> None:
    async with talking(tmp_path) as talk:
        await talk.server.add_agent("other")
        thief = talk.server.mbus("agent")
        heard: list[object] = []
        async with on_bus(talk.server.mbus("other"), "other") as other:
            await connected(other)

            async def join() -> None:
                async with joined(thief, (subject,), lambda *news: heard.append(news)):
                    pass

            joining = asyncio.create_task(join())
            await until(lambda: joining.done() or "Subscription Violation" in talk.server.log.read_text())
            assert not joining.done()
            joining.cancel()
            assert await talk.director.value("other", "ping") == "ping"
            assert await talk.director.value("agent", "ping") == "ping"
        assert heard == []


@pytest.mark.attack("another agent uses a stolen certificate")
async def test_stolen_certificate_can_answer_before_the_agent(tmp_path: Path) -> None:
    """Neither the protocol nor the agent can prevent this, because the bus identifies an agent only by its key."""
    async with talking(tmp_path) as talk:
        sent: list[asyncio.Task[None]] = []

        def forge(_: str, data: bytes) -> None:
            reply_to = json.loads(data)["reply_to"]
            sent.append(asyncio.create_task(thief.publish(reply_to, b'{"value":"forged"}')))

        async with joined(talk.server.mbus("agent"), ("agent.agent",), forge) as thief:
            assert await talk.director.value("agent", "sleep", LONG_S) == "forged"


@pytest.mark.attack("another agent uses a stolen certificate")
async def test_requests_are_answered_while_a_client_with_a_stolen_certificate_never_reads(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        async with joined(talk.server.mbus("agent"), ("agent.agent",), lambda *_: None) as thief:
            assert thief.writer is not None
            transport = thief.writer.transport
            assert isinstance(transport, asyncio.Transport)
            transport.pause_reading()
            values = [await talk.director.value("agent", "count", "x" * 500_000) for _ in range(200)]

        assert "Slow Consumer" in talk.server.log.read_text()
        assert values == ["count"] * 200
        assert (talk.bus.stats.connects, talk.bus.stats.received) == (1, 200)


@pytest.mark.attack("another agent uses the CPI's certificate after the credentials were changed")
async def test_stolen_bootstrap_certificate_receives_nothing_after_rotation(tmp_path: Path) -> None:
    """The Director replaces the CPI's certificate with ``update_settings``. The CPI's user is then removed from the
    bus.
    """
    async with talking(tmp_path) as talk:
        heard: list[object] = []
        async with joined(
            talk.server.mbus("agent", bootstrap=True), ("agent.agent",), lambda *news: heard.append(news)
        ):
            await talk.bus.rotate(talk.server.mbus("agent"))
            await talk.server.add_agent("agent", bootstrap=False)

            assert await talk.director.value("agent", "ping") == "ping"
            assert heard == []
        async with joined(talk.server.mbus("agent"), ("agent.agent",), lambda *news: heard.append(news)):
            await talk.bus.rotate(talk.server.mbus("agent"))

            assert await talk.director.value("agent", "ping") == "ping"
            await until(lambda: heard != [])


@pytest.mark.attack("a neighbour poses as the bus, or sends requests in the Director's name")
async def test_forged_director_certificate_is_rejected_by_the_bus(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        pair = Authority().client(DIRECTOR)
        forged = replace(talk.server.peer(), certificate=pair.certificate, private_key=pair.private_key)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), joined(forged, ("director.>",), lambda *_: None):
                pass

        assert "unknown authority" in talk.server.log.read_text()
        assert await talk.director.value("agent", "ping") == "ping"


@pytest.mark.attack("another agent uses a stolen certificate")
async def test_two_agents_with_the_same_id_both_answer(tmp_path: Path) -> None:
    """While an instance's former container is still running, two agents have the same id."""
    async with talking(tmp_path) as talk, on_bus(talk.server.mbus("agent")) as twin:
        await connected(twin)

        assert [await talk.director.value("agent", "ping") for _ in range(20)] == ["ping"] * 20
        await until(lambda: (talk.bus.stats.received, twin.stats.received) == (20, 20))
        assert (talk.bus.stats.connects, twin.stats.connects) == (1, 1)
        assert talk.bus.stats.unanswered + twin.stats.unanswered == 0
