"""Decisions of the bus about its links; ``integration/test_nats_links.py`` tests connections themselves."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agent_shim.core.errors import BusError, CredentialsError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus import nats, tls
from agent_shim.edges.bus.nats import NatsBus, Timing


class Link:
    """A link that takes messages, or has ended."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.sent: list[tuple[str, bytes]] = []
        self.calls: list[str] = []
        self.address, self.peer = "h:1", "192.0.2.1"

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, data))

    async def flushed(self, timeout_s: float) -> bool:
        self.calls.append(f"flushed within {timeout_s:g} s")
        return True

    async def abandon(self) -> None:
        self.calls.append("abandoned")


MBUS = Mbus(("nats://h:1",), "", "", "")


def bus(link: Any, reread: Callable[[Mbus], Mbus] = lambda refused: refused, timing: Timing | None = None) -> NatsBus:
    async def handle(_: bytes) -> tuple[str, bytes] | None:
        return "director.a.b.c", b"pong"

    made = NatsBus("a", MBUS, handle, reread=reread, timing=timing)
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


async def test_before_the_end_what_was_sent_is_flushed() -> None:
    """The reply of the last request is in no other place; without a link there is nothing to send."""
    link = Link()
    await bus(link).drain(3)
    await bus(None).drain(3)

    assert link.calls == ["flushed within 3 s"]


async def test_a_link_that_comes_after_that_of_a_rotation_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them would bring each request twice."""
    made: Any = bus(None)
    ours, late = Link(), Link()

    async def connect(_: Mbus) -> Any:
        made._link = ours
        return late

    monkeypatch.setattr(made, "_connect", connect)
    await made._relink()

    assert made._link is ours
    assert (ours.calls, late.calls) == ([], ["abandoned"])


async def test_credentials_are_read_again_while_no_server_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is gone may have a successor elsewhere; one failure says nothing yet."""
    asked = asyncio.Event()
    attempts: list[Mbus] = []

    def reread(before: Mbus) -> Mbus:
        asked.set()
        return before

    async def connect(mbus: Mbus) -> Any:
        attempts.append(mbus)
        raise BusError("cannot connect to the bus")

    made = bus(None, reread, Timing(step=0.0, longest=0.0))
    monkeypatch.setattr(made, "_connect", connect)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(10):
        await asked.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert len(attempts) == nats.REREAD_AFTER_FAILURES + 1


class Greeted(Link):
    """A link that a server greets and does not complete."""

    has_greeted = True

    def __init__(self, *_: object) -> None:
        super().__init__()

    async def open(self, *_: object) -> None:
        raise BusError("authorization violation")


async def test_a_server_that_greets_an_attempt_in_vain_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive, and the agent is not cut off."""
    monkeypatch.setattr(nats, "_Link", Greeted)
    monkeypatch.setattr(tls, "client_context", lambda _: None)
    made = bus(None)
    hearing = asyncio.create_task(made.is_heard(60))
    await asyncio.sleep(0)

    with pytest.raises(CredentialsError, match="does not know us"):
        await made._connect(MBUS)

    async with asyncio.timeout(10):
        assert await hearing


async def test_a_server_whose_name_leads_to_it_is_followed_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a name that cannot be looked up."""
    made, link = bus(None, timing=Timing(look=0.0, gone=2)), nats._Link(lambda *_: None, lambda _: None)
    made._link = link
    link._wire.peer = "192.0.2.1"
    answers: list[list[str] | None] = [["192.0.2.1"], ["192.0.2.2"], ["192.0.2.1", "192.0.2.2"], None, ["192.0.2.2"]]
    rotated: list[Mbus] = []

    async def look_up(_: object) -> list[str]:
        if not answers:
            made._link = None
            return ["192.0.2.1"]
        if (found := answers.pop(0)) is None:
            raise OSError
        return found

    async def rotate(mbus: Mbus) -> None:
        rotated.append(mbus)

    monkeypatch.setattr(nats, "look_up", look_up)
    monkeypatch.setattr(made, "rotate", rotate)
    async with asyncio.timeout(10):
        await made._follow(link)
    assert rotated == []

    answers, made._link = [["192.0.2.2"], ["192.0.2.3"]], link
    async with asyncio.timeout(10):
        await made._follow(link)
    assert rotated == [MBUS]


@pytest.mark.parametrize(
    ("error", "is_refused", "text"),
    [
        (ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] x"), True, "the server refuses our certificate"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] x"), False, "WRONG_VERSION_NUMBER"),
        (ssl.SSLError(1, "x"), False, "x"),
        (ssl.SSLCertVerificationError(1, "x"), True, "x"),
        (BusError("'Authorization Violation'"), True, "the server does not know us (Authorization Violation)"),
        (CredentialsError("x"), True, "cannot use the bus credentials: x"),
        (TimeoutError(), False, "no answer in time"),
        (ConnectionResetError(), False, "ConnectionResetError"),
        (OSError(111, "refused"), False, "refused"),
    ],
)
def test_which_failures_other_credentials_may_mend(error: Exception, is_refused: bool, text: str) -> None:
    """The address is named without its password."""
    if isinstance(error, ssl.SSLError):  # as OpenSSL's own have it
        error.reason = str(error).partition("SSL: ")[2].partition("]")[0] or None  # type: ignore[assignment]
    found = nats._failure("nats://u:secret@h:1", error)

    assert isinstance(found, CredentialsError) is is_refused
    assert text in str(found)
    assert "secret" not in str(found)
    assert "h:1" in str(found) or "use the bus credentials" in str(found)


async def test_a_message_of_both_links_is_counted_once() -> None:
    made = bus(None)
    made._seen = Counter()
    first, second = nats._Link(lambda *_: None, lambda _: None), nats._Link(lambda *_: None, lambda _: None)
    for link in (first, second, first):
        made._received(link, b"request")
    for task in list(made._answering):
        task.cancel()

    assert (made.stats.received, made.stats.duplicates, len(made._answering)) == (3, 1, 2)
    assert made.stats.received_bytes == 3 * len(b"request")
    await asyncio.gather(*made._answering, return_exceptions=True)
    assert made._answering_bytes == 0


async def test_a_flood_during_a_rotation_is_not_remembered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats, "MAX_SEEN", 20)
    made = bus(None)
    made._seen = Counter()
    first, second = nats._Link(lambda *_: None, lambda _: None), nats._Link(lambda *_: None, lambda _: None)
    messages = [b"%d" % number for number in range(1000)]

    assert not any(made._is_duplicate(first, message) for message in messages)
    assert len(made._seen) < 25
    assert made._is_duplicate(second, messages[0])
    assert not made._is_duplicate(second, messages[-1])
