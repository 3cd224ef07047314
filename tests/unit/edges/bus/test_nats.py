"""Replies whose connection ends; ``integration/test_nats_links.py`` tests connections themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_shim.core.errors import BusError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus.nats import NatsBus


class Link:
    """A link that takes messages, or has ended."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.sent: list[tuple[str, bytes]] = []

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, data))


def bus(link: Any) -> NatsBus:
    async def handle(_: bytes) -> tuple[str, bytes] | None:
        return "director.a.b.c", b"pong"

    made = NatsBus("a", Mbus(("nats://h:1",), "", "", ""), handle)
    made._link = link
    return made


async def test_a_reply_whose_link_has_ended_is_sent_on_the_next_one() -> None:
    """Most requests have no retry: the Director would wait 45 s for a result that exists."""
    next_one = Link()
    made = bus(Link(is_over=True))
    answering = asyncio.create_task(made._answer(b"request"))
    for _ in range(5):
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
    refusing = Link()
    made = bus(refusing)

    def refuse(subject: str, data: bytes) -> None:
        raise BusError(f"{subject} with {len(data)} bytes is too much")

    refusing.send = refuse  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await made._answer(b"request")

    assert made.stats.unanswered == 1
    assert "cannot send a reply" in caplog.text
