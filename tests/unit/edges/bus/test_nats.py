"""Replies whose connection ends; ``integration/test_nats_links.py`` tests connections themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_shim.core.errors import BusError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus.nats import NatsBus


class Link:
    """A link that takes messages, or ends with the first one."""

    def __init__(self, *, is_good: bool) -> None:
        self.is_over = False
        self.sent: list[tuple[str, bytes]] = []
        self._is_good = is_good

    async def send(self, subject: str, data: bytes) -> None:
        if not self._is_good:
            self.is_over = True
            raise BusError("the link is lost")
        self.sent.append((subject, data))


def bus(link: Any) -> NatsBus:
    async def handle(_: bytes) -> tuple[str, bytes] | None:
        return "director.a.b.c", b"pong"

    made = NatsBus("a", Mbus(("nats://h:1",), "", "", ""), handle)
    made._link = link
    return made


async def test_a_reply_that_is_lost_with_its_link_is_sent_again_on_the_next_one() -> None:
    """Most requests have no retry: the Director would wait 45 s for a result that exists."""
    lost, next_one = Link(is_good=False), Link(is_good=True)
    made = bus(lost)
    answering = asyncio.create_task(made._answer(b"request"))
    async with asyncio.timeout(10):
        while not lost.is_over:
            await asyncio.sleep(0)
    assert not answering.done()

    made._link = next_one  # type: ignore[assignment]
    made._linked.set()
    async with asyncio.timeout(10):
        await answering

    assert next_one.sent == [("director.a.b.c", b"pong")]
    assert made.stats.unanswered == 0


async def test_a_reply_that_a_living_link_refuses_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """It is the reply that is wrong, and would be again."""
    refusing = Link(is_good=False)
    made = bus(refusing)

    async def refuse(subject: str, data: bytes) -> None:
        raise BusError(f"{subject} with {len(data)} bytes is too much")

    refusing.send = refuse  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await made._answer(b"request")

    assert made.stats.unanswered == 1
    assert "cannot send a reply" in caplog.text
