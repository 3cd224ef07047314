"""A faulty or hostile bus server sends messages to the agent.

The agent always recovers and receives requests again, and trusts nothing that arrives without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from typing import Any

import pytest
from msgspec.structs import replace
from nats.aio.client import Srv

from agent_shim.demo.pki import Authority
from agent_shim.edges.bus import link, tls
from agent_shim.edges.bus.nats import NatsBus
from tests.support.bus import FAST, INFO, ClientConnection, FakeServer, Script, connected, echo, facing, on_bus
from tests.support.old_tls import lenient, outdated
from tests.support.waiting import until

REQUEST = b'{"method":"ping","reply_to":"director.d.agent.r"}'


def message(data: bytes, *, sid: bytes = b"1") -> bytes:
    """Return a message in the form in which a NATS server delivers it to a subscriber."""
    return b"MSG agent.agent %b %d\r\n%b\r\n" % (sid, len(data), data)


async def idle_server(wire: ClientConnection) -> None:
    """Act as a working server that sends no requests."""
    await wire.greet()
    await wire.answer_pings()


async def requesting_server(wire: ClientConnection) -> None:
    """Act as a server that delivers a request and expects the agent's reply."""
    await wire.greet()
    wire.send(message(REQUEST))
    while (await wire.expect(""))[:4] == "PING":
        wire.send(b"PONG\r\n")
    assert wire.lines[-1].split() == ["PUB", "director.d.agent.r", "17"]
    assert json.loads(await wire.payload(17)) == {"value": "ping"}
    await wire.answer_pings()


def sending(words: bytes) -> Script:
    """Return a script that completes the handshake, sends ``words``, and then only answers pings."""

    async def script(wire: ClientConnection) -> None:
        await wire.greet()
        wire.send(words)
        await wire.answer_pings()

    return script


PINGS = b"PING\r\n" * 3


@pytest.mark.parametrize(
    "words",
    [
        b"-ERR 'Stale Connection'\r\n" + PINGS,
        b"-ERR 'Authorization Violation'\r\n" + PINGS,
        b"-ERR 'Authorization Timeout'\r\n" + PINGS,
        b"-ERR 'User Authentication Expired'\r\n" + PINGS,
        b"-ERR 'User Authentication Revoked'\r\n" + PINGS,
        b"-ERR 'Maximum Connections Exceeded'\r\n" + PINGS,
        b"-ERR 'Maximum Payload Violation'\r\n" + PINGS,
        b"-ERR 'Secure Connection - TLS Required'\r\n" + PINGS,
        b"-ERR 'Server Shutdown'\r\n" + PINGS,
        b"-ERR 'Slow Consumer'\r\n" + PINGS,
        b"-ERR 'Unknown Protocol Operation'\r\n" + PINGS,
        b"-ERR 'Permissions Violation for Subscription to \"agent.agent\"'\r\n" + PINGS,
        b"-ERR '\xff\xfe'\r\n" + PINGS,
        b"-ERR \r\n" + PINGS,
        b"NONSENSE and more\r\n" + PINGS,
        b"INFO {broken\r\n" + PINGS,
        b"MSG agent.agent x 2\r\n{}\r\n" + PINGS,
        b"MSG \xff\xff 1 2\r\n{}\r\n" + PINGS,
        b"-ERR '\xff\xfe'\r\n",
        b"INFO {broken\r\n",
        b"MSG agent.agent 1 \xff 2\r\n{}\r\n",
        b"+OK nonsense\r\n",
    ],
)
async def test_invalid_bus_server_message_leads_to_a_new_connection(words: bytes) -> None:
    """If nats-py cannot decode something, it stops reading but still reports that it is connected. Unanswered pings
    would reveal this only after 10 to 15 s.
    """
    async with facing(sending(words), requesting_server) as bus:
        await until(lambda: bus.stats.sent >= 1)

        assert bus.stats.attempts == 2


@pytest.mark.attack("a neighbour poses as the bus and sends invalid data")
@pytest.mark.parametrize(
    "words",
    [
        b"-ERR 'Permissions Violation for Publish to \"director.x\"'\r\n",
        b"INFO "
        + json.dumps({"connect_urls": [f"10.0.{n // 256}.{n % 256}:4222" for n in range(14_000)]}).encode()
        + b"\r\n",
        b'INFO {"ldm":true}\r\n',
        b"+OK\r\n",
        b"PONG\r\n" * 50,
        message(b""),
        message(REQUEST, sid=b"99"),
        b"HMSG agent.agent 1 16 18\r\nNATS/1.0 503\r\n\r\n{}\r\n",
        b"HMSG agent.agent 1 20 2\r\n{}\r\n",
    ],
    ids=[
        "denied",
        "long news",
        "lame duck",
        "ok",
        "pongs",
        "empty",
        "other sid",
        "headers",
        "no headers",
    ],
)
async def test_unusual_bus_server_messages_are_tolerated(words: bytes) -> None:
    async def script(wire: ClientConnection) -> None:
        await wire.greet()
        wire.send(words)
        wire.send(message(b'{"method":"after","reply_to":"director.d.agent.r"}'))
        while (await wire.expect("")).split() != ["PUB", "director.d.agent.r", "18"]:
            if wire.lines[-1] == "PING":
                wire.send(b"PONG\r\n")
        await wire.payload(18)
        wire.send(b"PONG\r\n")
        await wire.answer_pings()

    async with facing(script) as bus:
        await until(lambda: bus.stats.sent >= 1)

        assert bus.stats.connects == 1


@pytest.mark.attack("a neighbour poses as the bus and sends invalid data")
async def test_advertised_bus_servers_are_not_remembered() -> None:
    """nats-py would remember every address that a server advertises, without a limit."""

    async def script(wire: ClientConnection) -> None:
        await wire.greet()
        for news in range(1, 21):
            urls = [f"10.{news}.0.{n}:4222" for n in range(200)]
            await wire.push(b"INFO %b\r\n" % json.dumps({"connect_urls": urls}).encode())
        wire.send(message(REQUEST))
        await wire.answer_pings()

    async with facing(script) as bus:
        await until(lambda: bus.stats.sent >= 1)
        gc.collect()

        kept = [one.uri.netloc for one in gc.get_objects() if isinstance(one, Srv)]
        assert not [one for one in kept if one.startswith("10.10.")]


async def test_bus_connection_attempt_that_fails_at_exit_logs_no_asyncio_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    async def fail(*_: object) -> None:
        # Cancel only after asyncio has noticed that the attempt failed.
        loop.call_soon(lambda: loop.call_soon(tasks.pop().cancel))
        raise ValueError("cut off")

    monkeypatch.setattr(link.Link, "open", fail)
    bus = NatsBus("agent", FakeServer(authority=Authority()).mbus, echo, timing=FAST)
    tasks.append(asyncio.create_task(bus.run()))
    await asyncio.wait(tasks)
    gc.collect()

    assert caplog.records == []


@pytest.mark.attack("a neighbour stalls the connection to the bus")
async def test_connection_to_a_bus_server_that_pings_without_reading_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, the agent's unread answers to the pings would accumulate in memory."""
    monkeypatch.setattr(link, "MAX_BACKLOG_BYTES", 200_000)
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect
    sent = 0

    async def connect_with_small_buffer(sock: socket.socket, address: Any) -> None:
        """Connect with a small send buffer. With the default size, it would take a million pings to fill the buffer."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await connect(sock, address)

    async def script(wire: ClientConnection) -> None:
        nonlocal sent
        await wire.greet()
        wire.shrink_receive_buffer()
        with contextlib.suppress(OSError):
            while sent < 50_000_000:
                await wire.push(b"PING\r\n" * 10_000 + b"PONG\r\n" * 5)
                sent += 60_000

    monkeypatch.setattr(loop, "sock_connect", connect_with_small_buffer)
    async with facing(script, requesting_server) as bus:
        await until(lambda: bus.stats.connects >= 2)
    assert sent < 50_000_000


@pytest.mark.attack("a neighbour poses as the bus and sends invalid data")
@pytest.mark.parametrize("words", [b"MSG agent.agent 1 %d\r\n" % 10**11, b"INFO ", b"MSG ", b"+"])
async def test_endless_bus_server_line_or_message_closes_the_connection(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a size limit, the agent would close the connection only after several of its pings had gone
    unanswered.
    """
    monkeypatch.setattr(link, "MAX_UNREAD_BYTES", 1 << 20)
    sent = 0

    async def script(wire: ClientConnection) -> None:
        nonlocal sent
        await wire.greet()
        wire.send(words)
        with contextlib.suppress(OSError):
            while sent < 200_000_000:
                await wire.push(b"x" * 100_000)
                sent += 100_000

    async with facing(script, requesting_server) as bus:
        await until(lambda: bus.stats.sent >= 1)

        assert bus.stats.attempts == 2
    assert sent < 20_000_000


@pytest.mark.attack("a neighbour strips or weakens TLS on the bus connection, or injects bytes before the handshake")
@pytest.mark.parametrize("limit", ["5", '"x"', "null", "-1", "[]"])
async def test_bus_message_limit_announced_before_tls_is_ignored(limit: str) -> None:
    """If an attacker could announce a tiny limit, the agent would drop all its replies and heartbeats."""
    info = INFO.replace(b"1048576", limit.encode())
    async with facing(requesting_server, info=info) as bus:
        await until(lambda: bus.stats.sent >= 1)


async def test_bus_is_connected_only_after_the_subscription_is_confirmed() -> None:
    confirm = asyncio.Event()

    async def script(wire: ClientConnection) -> None:
        await wire.expect("CONNECT ")
        await wire.expect("PING")
        wire.send(b"PONG\r\n")
        await wire.expect("SUB agent.agent ")
        await wire.expect("PING")
        await confirm.wait()
        wire.send(b"PONG\r\n")
        await wire.answer_pings()

    async with facing(script) as bus:
        await asyncio.sleep(0.2)

        assert not bus.is_connected

        confirm.set()
        await connected(bus)


async def test_denied_bus_subscription_leads_to_a_new_connection() -> None:
    async def denying(wire: ClientConnection) -> None:
        await wire.expect("CONNECT ")
        await wire.expect("PING")
        wire.send(b"PONG\r\n")
        await wire.expect("SUB agent.agent ")
        wire.send(b"-ERR 'Permissions Violation for Subscription to \"agent.agent\"'\r\n")
        await wire.expect("PING")
        wire.send(b"PONG\r\n")
        await asyncio.sleep(20)

    async with facing(denying, denying, idle_server) as bus:
        await connected(bus)

        assert bus.stats.attempts == 3


@pytest.mark.attack("a neighbour stalls the connection to the bus")
@pytest.mark.parametrize("lines", [0, 1, 2, 3])
async def test_bus_handshake_with_a_silent_server_is_abandoned_and_retried(lines: int) -> None:
    async def silent(wire: ClientConnection) -> None:
        for number in range(lines):
            await wire.expect("")
            if number == 1:
                wire.send(b"PONG\r\n")
        await asyncio.sleep(20)

    async with facing(silent, idle_server, timing=replace(FAST, connect=0.3)) as bus:
        await connected(bus)

        assert bus.stats.attempts == 2


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"\r\n",
        b"INFO\r\n",
        b"INFO {}\r\n",
        b"INFO []\r\n",
        b"INFO {\xff\r\n",
        b"INFO " + b"x" * 300_000 + b"\r\n",
        b"220 mail\r\n",
    ],
)
async def test_bus_server_that_speaks_another_protocol_is_logged_once_and_retried(
    info: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    async def script(wire: ClientConnection) -> None:
        seen.append(await wire.expect(""))

    patience = 10.0 if info else 0.2
    async with facing(script, info=info, timing=replace(FAST, connect=patience)) as bus:
        await until(lambda: bus.stats.attempts >= 3)

        assert not bus.is_connected
        assert bus.stats.last_error.startswith("cannot connect to the bus at 127.0.0.1:")

    assert seen == []
    assert [record.message for record in caplog.records] == [bus.stats.last_error]


async def test_exit_during_a_bus_connection_attempt_leaves_no_connection() -> None:
    closed = asyncio.Event()

    async def script(wire: ClientConnection) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                await wire.expect("")
        closed.set()

    async with FakeServer(script, authority=Authority()).serving() as server:
        async with on_bus(server.mbus) as bus:
            await until(lambda: bus.stats.attempts == 1)
            await asyncio.sleep(0.1)
        await asyncio.wait_for(closed.wait(), 30)


@pytest.mark.attack("a neighbour strips or weakens TLS on the bus connection, or injects bytes before the handshake")
async def test_bus_sends_nothing_to_a_server_without_tls() -> None:
    """An attacker could remove the TLS requirement from the server's greeting."""
    plain = json.loads(INFO[5:])
    del plain["tls_required"]
    seen = []

    async def script(wire: ClientConnection) -> None:
        seen.append(await wire.expect(""))

    async with facing(script, info=b"INFO " + json.dumps(plain).encode() + b"\r\n") as bus:
        await until(lambda: bus.stats.attempts >= 3)

        assert "secure connection" in bus.stats.last_error

    assert seen == []


@pytest.mark.attack("a neighbour strips or weakens TLS on the bus connection, or injects bytes before the handshake")
async def test_bus_rejects_old_tls_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS 1.1 must be rejected even if the system's OpenSSL configuration allows it."""
    real, seen = tls.client_context, list[str]()

    async def script(wire: ClientConnection) -> None:
        seen.append(await wire.expect(""))

    old = FakeServer(script, authority=Authority())
    outdated(old.context)
    monkeypatch.setattr(tls, "client_context", lambda mbus: lenient(real(mbus)))
    async with old.serving() as server:
        async with on_bus(server.mbus) as bus:
            await until(lambda: bus.stats.attempts >= 3)
        assert seen == []

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await reader.readline()).startswith(b"INFO ")
        await writer.start_tls(outdated(real(server.mbus)), server_hostname="127.0.0.1")
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.1"
        writer.write(b"CONNECT {}\r\n")
        await until(lambda: seen == ["CONNECT {}"])
        writer.close()


@pytest.mark.attack("a neighbour strips or weakens TLS on the bus connection, or injects bytes before the handshake")
async def test_bus_ignores_bytes_received_before_tls() -> None:
    heard = []

    async def handle(data: bytes) -> None:
        heard.append(data)

    injected = b"PONG\r\n" + message(b"injected")
    async with facing(idle_server, info=INFO + injected, handle=handle) as bus:
        await connected(bus)

    assert heard == []
