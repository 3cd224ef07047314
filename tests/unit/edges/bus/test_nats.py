"""Decisions of the bus about its links; ``integration/test_nats_links.py`` tests connections themselves."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlparse, urlsplit

import msgspec
import pytest

from agent_shim.core.errors import ActionError, BusError, CredentialsError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus import nats, tls
from agent_shim.edges.bus.nats import NatsBus, Timing
from agent_shim.host import clock
from tests.support.waiting import until


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

    def end(self, why: str) -> None:
        self.calls.append(f"ended: {why}")


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
    made._linked.set()  # by the link that has ended
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
    made, link = bus(None, timing=Timing(look=0.001, gone=2)), nats._Link(lambda *_: None, lambda _: None)
    made._link = link
    link._wire.peer = "192.0.2.1"
    other, both = ["192.0.2.2"], ["192.0.2.1", "192.0.2.2"]
    answers: list[list[str] | None] = [other, both, other, both, None, other]
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

    answers, made._link = [other, ["192.0.2.3"], other], link
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


async def test_only_a_request_that_breaks_counts_as_failed() -> None:
    """Neither one that is answered nor one that ends with the agent."""

    async def handle(data: bytes) -> tuple[str, bytes] | None:
        if data == b"break":
            raise ValueError
        if data == b"wait":
            await asyncio.Event().wait()
        return "director.a.b.c", b"pong"

    link = Link()
    made: Any = NatsBus("a", MBUS, handle)
    made._link = link
    for data in (b"ping", b"ping", b"break", b"wait"):
        made._received(link, data)
    tasks = list(made._answering)
    await until(lambda: len(made._answering) == 1)
    made._answering.copy().pop().cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert link.sent == [("director.a.b.c", b"pong")] * 2
    assert made.stats.failed == 1


# --- is the bus heard -------------------------------------------------------------------------------------------------


async def spin() -> None:
    """Let each task take its next steps."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("link", [None, Link(is_over=True)])
async def test_the_bus_is_heard_once_there_is_a_connection(link: Any) -> None:
    """One that has ended answers nothing, and an earlier attempt says nothing of the present."""
    told: list[str] = []
    made: Any = bus(link)
    made._on_connected = lambda: told.append("connected")
    if link is not None:
        made.stats.attempts = made._greeted_at = 1
    made._attempted.set()
    hearing = asyncio.create_task(made.is_heard(60))
    await spin()
    assert not hearing.done()

    new = Link()
    made._activate(new)
    async with asyncio.timeout(10):
        assert await hearing is True
    assert (told, new.calls) == (["connected"], ["flushed within 60 s"])


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_connection_without_an_answer_in_time_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """Another one replaces it; one that answers stays."""
    link = Link()

    async def flushed(_: float) -> bool:
        return is_answered

    monkeypatch.setattr(link, "flushed", flushed)

    assert await bus(link).is_heard(7) is is_answered
    assert link.calls == ([] if is_answered else ["ended: no answer to a ping within 7 s"])


async def test_a_bus_without_a_connection_in_time_is_not_heard() -> None:
    assert await bus(None).is_heard(0.01) is False


async def test_a_problem_is_logged_once_for_each_loss(caplog: pytest.LogCaptureFixture) -> None:
    """The next outage is another one, though its reason is the same."""
    made: Any = bus(None)
    for count in (1, 2):
        for _ in range(3):
            made._log_once("the server is away")
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
            "the server is away"
        ] * count
        made._activate(Link())


# --- one connection ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def link(monkeypatch: pytest.MonkeyPatch) -> nats._Link:
    """A connection whose commands go nowhere."""
    made = nats._Link(lambda *_: None, lambda _: None)
    monkeypatch.setattr(made, "_queue", lambda _: None)
    return made


async def test_data_is_flushed_when_its_own_ping_is_answered(link: nats._Link) -> None:
    """Not by the answer to an earlier one, and not on a connection that has ended."""
    for _ in range(2):
        flushing = asyncio.create_task(link.flushed(60))
        await spin()
        assert not flushing.done()
        await link._process_pong()
        async with asyncio.timeout(10):
            assert await flushing is True

    flushing = asyncio.create_task(link.flushed(60))
    await spin()
    await link._process_pong()
    link.end("gone")
    async with asyncio.timeout(10):
        assert await flushing is False
        assert await link.flushed(0.0) is False
    await spin()
    assert "bus round trip" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_pings_without_an_answer_end_a_connection_if_they_follow_each_other(
    link: nats._Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lost answer is none, also the first one."""
    answers = [False, True, False, True, True, False, False]

    def ask() -> None:
        if answers.pop(0):
            link._heard += 1

    monkeypatch.setattr(link, "_ask", ask)
    monkeypatch.setattr(clock, "until_beat", lambda _: 0.0)
    await link._live(Timing(unanswered=2))

    assert answers == []
    assert await link.over() == "no answer to 2 pings"


@pytest.mark.parametrize("is_last_alive", [True, False])
async def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch, is_last_alive: bool) -> None:
    """The error of the last one is that of the attempt."""
    tried: list[str] = []

    async def look_up(_: object) -> list[str]:
        return ["192.0.2.1", "192.0.2.2"]

    async def open_connection(address: str, *_: object, **__: object) -> tuple[object, object]:
        tried.append(address)
        if is_last_alive and address == "192.0.2.2":
            return object(), object()
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(nats, "look_up", look_up)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    transport = nats._Transport()  # type: ignore[no-untyped-call]
    with contextlib.nullcontext() if is_last_alive else pytest.raises(ConnectionRefusedError, match=r"192\.0\.2\.2"):
        await transport.connect(urlparse("nats://h:1"), 100, 1)

    assert tried == ["192.0.2.1", "192.0.2.2"]
    assert transport.peer == ("192.0.2.2" if is_last_alive else "")


# --- connections one after the other ----------------------------------------------------------------------------------


class Counted(Timing, frozen=True):
    """Times without a pause; each would have been that of so many failures."""

    paused: list[int] = msgspec.field(default_factory=list)

    def pause(self, failures: int, slow: int = 0) -> float:  # noqa: ARG002
        self.paused.append(failures)
        return 0.0


async def test_only_connections_that_last_make_the_next_pause_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends at once is a failure like one that is refused."""
    outcomes: list[object] = [False, False, BusError("refused"), True, False, asyncio.CancelledError()]

    async def relink() -> None:
        if isinstance(outcomes[0], BaseException):
            raise outcomes.pop(0)  # type: ignore[misc]

    async def wait_for_loss() -> object:
        return outcomes.pop(0)

    timing = Counted()
    made = bus(None, timing=timing)
    monkeypatch.setattr(made, "_relink", relink)
    monkeypatch.setattr(made, "_wait_for_loss", wait_for_loss)
    with pytest.raises(asyncio.CancelledError):
        await made.run()

    assert timing.paused == [1, 2, 3, 0, 1]


@pytest.mark.parametrize(("ping", "has_lasted"), [(0.0, True), (3600.0, False)])
async def test_a_connection_lasts_if_it_outlives_a_ping(ping: float, has_lasted: bool) -> None:
    made: Any = bus(EndedLink(), timing=Timing(ping=ping))

    assert await made._wait_for_loss() is has_lasted
    assert made._link is None
    assert made.stats.last_error == "lost the connection to the bus at h:1: gone"


class EndedLink(Link):
    """A link that was lost."""

    url = urlsplit("nats://192.0.2.1:1")

    async def over(self) -> str:
        return "gone"


async def test_new_credentials_are_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any connection is."""
    outcomes: list[object] = [BusError("away")] * 3 + [Link()]

    async def connect(_: Mbus) -> Any:
        if isinstance(found := outcomes.pop(0), BusError):
            raise found
        return found

    timing = Counted()
    made = bus(None, timing=timing)
    monkeypatch.setattr(made, "_connect", connect)
    await made.rotate(MBUS)

    assert timing.paused == [1, 2, 3]


async def test_a_rotation_waits_until_the_last_one_has_closed_its_old_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three connections would bring a request twice unnoticed."""
    old, new = Link(), Link()
    made: Any = bus(old, timing=Timing(overlap=0.0))
    other = msgspec.structs.replace(MBUS, urls=("nats://other:1",))
    attempts: list[Mbus] = []

    async def connect(mbus: Mbus) -> Any:
        attempts.append(mbus)
        return new

    retired = asyncio.Event()
    made._retiring = asyncio.create_task(retired.wait())
    monkeypatch.setattr(made, "_connect", connect)
    rotating = asyncio.create_task(made.rotate(other))
    await spin()
    assert attempts == []

    retired.set()
    async with asyncio.timeout(10):
        await rotating
        await made._retiring
    assert (attempts, made.mbus, made._link) == ([other], other, new)
    assert (old.calls, new.calls) == (["flushed within 0 s", "ended: replaced"], ["flushed within 0 s"])
    assert made._seen is None


async def test_the_old_connection_stays_for_a_while_beside_the_new_one() -> None:
    """A request may be on its way to it, though the server knows the new one."""
    old, new = Link(), Link()
    made: Any = bus(new, timing=Timing(overlap=60.0))
    retiring = asyncio.create_task(made._retire(old, new))
    await spin()

    assert (old.calls, new.calls) == (["flushed within 60 s"], [])
    retiring.cancel()
    await asyncio.gather(retiring, return_exceptions=True)


async def test_after_credentials_that_are_refused_no_message_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are unusable once they were refused for a while; then the rotation has ended, with one connection."""
    attempts: list[Mbus] = []

    async def connect(mbus: Mbus) -> Any:
        attempts.append(mbus)
        raise CredentialsError("refused")

    made: Any = bus(Link(), timing=Counted(refused=0.05))
    monkeypatch.setattr(made, "_connect", connect)
    with pytest.raises(ActionError, match="cannot use the new bus credentials: refused"):
        await made.rotate(msgspec.structs.replace(MBUS, urls=("nats://other:1",)))

    assert len(attempts) > 1
    assert (made._seen, made.mbus) == (None, MBUS)


async def test_between_two_attempts_of_new_credentials_is_their_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server that is away would get them without an end."""
    attempts: list[Mbus] = []

    async def connect(mbus: Mbus) -> Any:
        attempts.append(mbus)
        raise BusError("away")

    made = bus(None, timing=Timing(step=1000.0, longest=2000.0))
    monkeypatch.setattr(made, "_connect", connect)
    rotating = asyncio.create_task(made.rotate(MBUS))
    await spin()

    assert len(attempts) == 1
    rotating.cancel()
    await asyncio.gather(rotating, return_exceptions=True)


async def test_a_connection_makes_the_slow_attempts_before_it_count_no_longer() -> None:
    """The next outage may have another reason, and its first attempts need not wait three times as long."""
    made: Any = bus(None)
    made._slow = 2
    made._activate(Link())

    assert made._slow == 0


async def test_an_end_in_the_midst_of_a_rotation_closes_both_connections() -> None:
    """Data sent on the present one leaves first."""
    old, new = EndingLink(), Link()
    made: Any = bus(old)
    watching = asyncio.create_task(made._wait_for_loss())
    await spin()
    made._link = new
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert old.calls == ["abandoned"]

    await made._shut_down()
    assert new.calls == ["flushed within 1 s", "abandoned"]


class EndingLink(Link):
    """A link that lasts until its task is cancelled."""

    url = urlsplit("nats://192.0.2.1:1")

    async def over(self) -> str:
        await asyncio.Event().wait()
        return ""


async def test_the_present_connection_is_flushed_before_it_is_closed() -> None:
    """Its last messages are in no other place."""
    link = EndingLink()
    made: Any = bus(link)
    running = asyncio.create_task(made.run())
    await spin()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert link.calls == ["flushed within 1 s", "abandoned"]
