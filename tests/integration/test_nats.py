"""Tests requests and replies over a real bus, whose server gives the agent the same permissions as in production."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.core.errors import BusError
from agent_shim.demo.director import joined
from agent_shim.edges.bus import nats
from tests.support.bus import FAST, ClientConnection, connected, echo, facing, on_bus, talking
from tests.support.waiting import until


async def test_bus_request_is_answered_and_counted(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        assert await talk.director.value("agent", "ping") == "ping"
        stats = talk.bus.stats

        assert (stats.received, stats.sent, stats.connects, stats.reconnects) == (1, 1, 1, 0)
        assert stats.received_bytes > stats.sent_bytes == len(b'{"value": "ping"}')


async def test_bus_requests_begin_in_order(tmp_path: Path) -> None:
    begun = []

    async def handle(data: bytes) -> tuple[str, bytes] | None:
        begun.append(json.loads(data)["arguments"][0])
        return await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        replies = await asyncio.gather(*(talk.director.value("agent", "count", n) for n in range(500)))

    assert replies == ["count"] * 500
    assert begun == list(range(500))


async def test_t3_agent_subscribes_only_to_its_own_subject() -> None:
    seen: list[str] = []

    async def script(wire: ClientConnection) -> None:
        await wire.greet()
        seen.extend(wire.lines)
        await wire.answer_pings()

    async with facing(script) as bus:
        await connected(bus)

    assert [line.split(" ")[0] for line in seen] == ["CONNECT", "PING", "SUB", "PING"]
    assert seen[2].split() == ["SUB", "agent.agent", "1"]


async def test_failing_request_handler_does_not_affect_the_bus(tmp_path: Path) -> None:
    async def handle(data: bytes) -> tuple[str, bytes] | None:
        match json.loads(data)["method"]:
            case "raise":
                raise KeyError("a bug")
            case "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(20)
        return await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        await talk.director.send("agent", "raise")
        await talk.director.send("agent", "cancel")

        assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.failed == 1
        assert talk.bus.stats.connects == 1


@pytest.mark.attack("another agent forges a reply_to")
async def test_t3_reply_that_the_server_denies_is_counted(tmp_path: Path) -> None:
    async def handle(data: bytes) -> tuple[str, bytes] | None:
        return ("director.x.other.y", b"{}") if b"elsewhere" in data else await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        await talk.director.send("agent", "elsewhere")
        await until(lambda: talk.bus.stats.denied == 1)

        assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.connects == 1
        assert "director.x.other.y" in talk.bus.stats.last_error


@pytest.mark.attack("another agent forges a reply_to")
@pytest.mark.parametrize(
    ("subject", "size"),
    [
        ("", 2),
        ("director.a b", 2),
        ("director.a\r\nPUB agent.other 2\r\n{}", 2),
        ("director.a.agent.b", 1024 * 1024 + 1),
        ("a" * 10_000, 2),
        ("\N{GRINNING FACE}" * 1024, 2),
    ],
    ids=["none", "blank", "injected", "too long", "a line too long", "a line too long in bytes"],
)
async def test_bus_reply_that_cannot_be_sent_is_dropped(tmp_path: Path, subject: str, size: int) -> None:
    async def handle(data: bytes) -> tuple[str, bytes] | None:
        return (subject, b"x" * size) if b'"bad"' in data else await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        await talk.director.send("agent", "bad")
        await until(lambda: talk.bus.stats.unanswered == 1)

        assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.connects == 1


@pytest.mark.attack("another agent forges a reply_to")
@pytest.mark.parametrize(
    "subject", ["agent.agent", "agent.other", "director.>", "hm.agent.alert.other", "$SYS.REQ.SERVER.PING", ">"]
)
async def test_forged_reply_subject_reaches_no_other_client(tmp_path: Path, subject: str) -> None:
    """A reply to the agent's own subject must be dropped as well, because the agent would receive it as a request and
    answer its own answers forever.
    """

    async def handle(data: bytes) -> tuple[str, bytes] | None:
        return (subject, b"{}") if b'"bad"' in data else await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        await talk.server.add_agent("other")
        heard: list[object] = []
        async with joined(talk.server.mbus("other"), ("agent.other",), lambda *news: heard.append(news)):
            await talk.director.send("agent", "bad")
            await until(lambda: talk.bus.stats.denied + talk.bus.stats.unanswered == 1)

            assert await talk.director.value("agent", "ping") == "ping"
            assert heard == []
        assert talk.monitor.of("alert", "other") == []
        assert (talk.bus.stats.connects, talk.bus.stats.received) == (1, 2)


@pytest.mark.attack("another agent reads other agents' requests, replies or inboxes, or publishes in their name")
@pytest.mark.parametrize("subject", ["agent.agent", "director.x.agent.y", "hm.agent.heartbeat.agent"])
async def test_agent_cannot_send_requests_to_another_agent_or_publish_in_its_name(tmp_path: Path, subject: str) -> None:
    async with talking(tmp_path) as talk:
        await talk.server.add_agent("other")
        async with joined(talk.server.mbus("other"), ("agent.other",), lambda *_: None) as other:
            await other.publish(subject, b'{"method":"ping","reply_to":"director.x.other.y"}')
            await until(lambda: "iolation" in talk.server.log.read_text())

        assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.received == 1
        assert talk.monitor.of("heartbeat", "agent") == []


async def test_bus_requests_beyond_the_limit_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats, "MAX_REQUESTS", 3)
    async with talking(tmp_path) as talk:
        held = [asyncio.create_task(talk.director.value("agent", "sleep", 0.3)) for _ in range(10)]
        await until(lambda: talk.bus.stats.received == 10)

        assert talk.bus.stats.flooded > 0
        await until(lambda: sum(task.done() for task in held) == 10 - talk.bus.stats.flooded)
        for _ in range(20):
            assert await talk.director.value("agent", "ping") == "ping"
        for task in held:
            task.cancel()


async def test_ping_is_answered_during_a_flood_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pings were dropped like other requests, the Director would consider a busy agent dead."""
    monkeypatch.setattr(nats, "MAX_REQUESTS", 3)
    async with talking(tmp_path) as talk:
        held = [asyncio.create_task(talk.director.value("agent", "sleep", 600)) for _ in range(10)]
        await until(lambda: talk.bus.stats.received == 10 and talk.bus.stats.flooded > 0)
        flooded = talk.bus.stats.flooded

        for _ in range(20):
            assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.flooded == flooded
        for task in held:
            task.cancel()


async def test_bus_messages_published_without_a_connection_are_not_sent_later(tmp_path: Path) -> None:
    """A message that arrives late, such as an old heartbeat, would be misleading."""
    async with talking(tmp_path) as talk:
        await talk.server.remove_agent("agent")
        await until(lambda: not talk.bus.is_connected)
        with pytest.raises(BusError, match=r"cannot publish to 'hm\.agent\.heartbeat\.agent"):
            await talk.bus.publish("hm.agent.heartbeat.agent", b'"stale"')
        await talk.server.add_agent("agent")
        await connected(talk.bus)
        await talk.bus.publish("hm.agent.heartbeat.agent", b'"fresh"')
        await talk.monitor.wait_for("heartbeat", "agent", lambda body: body == "fresh")

        assert [notice.body for notice in talk.monitor.notices] == ["fresh"]


async def test_bus_reply_waits_for_the_next_connection(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def handle(data: bytes) -> tuple[str, bytes] | None:
        if b"hold" in data:
            await release.wait()
        return await echo(data)

    async with talking(tmp_path, handle=handle) as talk:
        held = asyncio.create_task(talk.director.value("agent", "hold"))
        await until(lambda: talk.bus.stats.received == 1)
        await talk.server.remove_agent("agent")
        await until(lambda: not talk.bus.is_connected)
        release.set()
        await talk.server.add_agent("agent")

        assert await held == "hold"
        assert talk.bus.stats.connects == 2


async def test_bus_reply_is_dropped_once_the_director_has_given_up(tmp_path: Path) -> None:
    async with talking(tmp_path, timing=replace(FAST, reply=0.1)) as talk:
        await talk.director.send("agent", "sleep", 0.3)
        await until(lambda: talk.bus.stats.received == 1)
        await talk.server.kill()
        await until(lambda: talk.bus.stats.unanswered == 1)


async def test_bus_message_published_right_before_a_disconnection_is_sent(tmp_path: Path) -> None:
    """Megabytes of other messages are queued ahead of this message."""
    async with talking(tmp_path) as talk:
        async with on_bus(talk.server.mbus("agent")) as other:
            await connected(other)
            for _ in range(6):
                await other.publish("hm.agent.heartbeat.agent", b'"%b"' % bytes(b"x" * 1_000_000))
            await other.publish("hm.agent.shutdown.agent", b"null")

        await talk.monitor.wait_for("shutdown", "agent")


async def test_bus_drain_waits_for_requests_in_progress_up_to_a_time_limit(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        answer = asyncio.create_task(talk.director.value("agent", "sleep", 0.1))
        await until(lambda: talk.bus.stats.received == 1)
        await talk.bus.drain(20)

        assert talk.bus.stats.sent == 1
        assert await answer == "sleep"

        endless = asyncio.create_task(talk.director.value("agent", "sleep", 40))
        await until(lambda: talk.bus.stats.received == 2)
        await talk.bus.drain(0.05)

        assert talk.bus.stats.sent == 1
        endless.cancel()
