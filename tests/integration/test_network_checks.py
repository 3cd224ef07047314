"""Tests network checks against real servers that answer correctly, answer wrongly, stay silent, or never stop
answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.supervisor import network_checks
from agent_shim.supervisor.monit.ast import Connection, Echo, Protocol
from tests.support.serving import Talk, serving

HTTP = Protocol("http", "/health")


@contextlib.asynccontextmanager
async def listener(talk: Talk) -> AsyncIterator[int]:
    """Run ``talk`` as a server on a loopback port. Yield the port."""

    async def talk_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await talk(reader, writer)
            await writer.drain()

    async with serving(talk_and_leave) as port:
        yield port


def server_sending(*parts: bytes, after: bytes = b"") -> Talk:
    """Return a server that waits until it has received ``after``, and then sends ``parts`` one after the other."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if after:
            await reader.readuntil(after)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    return talk


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def run_check(talk: Talk, protocol: Protocol = Protocol(), timeout: int = 5) -> str:  # noqa: B008 - the struct is frozen
    """Run a network check against a server that behaves like ``talk``. Return the error message, or "" if the check
    passes.
    """
    async with listener(talk) as port:
        return await network_checks.probe(Connection("127.0.0.1", port, protocol=protocol, timeout=timeout))


def page(status: str, body: bytes = b"", *headers: str) -> Talk:
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""])
    return server_sending(head.encode() + body, after=b"\r\n\r\n")


@pytest.mark.parametrize("protocol", ["default", "mysql", "ssh"])
async def test_port_check_passes_for_an_open_port(protocol: str) -> None:
    """If the rule names no protocol, or a protocol that the agent does not support, an open connection is enough."""
    assert await run_check(silence, Protocol(protocol)) == ""


async def test_port_check_error_names_a_closed_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert await network_checks.probe(Connection("127.0.0.1", port)) == (
            f"connection failed: cannot connect to 127.0.0.1 port {port}: Connection refused"
        )


@pytest.mark.parametrize(
    ("host", "port"),
    [("no-such-host.invalid", 1), ("no..such", 1), ("n" * 64, 1), ("127.0.0.1", 0x10001), ("::1", 1 << 40)],
)
async def test_network_check_for_an_unknown_host_or_invalid_port_fails(host: str, port: int) -> None:
    """If the failed lookup raised an exception, all jobs' rule checks would stop."""
    assert f"cannot connect to {host} port {port}: " in await network_checks.probe(Connection(host, port))
    assert host in (await network_checks.echo(host, Echo(1)) or host)


async def test_http_check_sends_the_same_request_as_monit() -> None:
    """Servers may have access rules that depend on the Host header or the User-Agent."""
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    assert await run_check(talk, Protocol("http", "/x?y=1", hostheader="web.example")) == ""
    assert heard[0].startswith(b"GET /x?y=1 HTTP/1.1\r\nHost: web.example\r\n")
    assert b"\r\nUser-Agent: monit/5.2.5\r\n" in heard[0]
    assert await run_check(talk, Protocol("http")) == ""
    assert heard[1].startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:")
    assert await run_check(talk, Protocol("http", '/a b"%20?c', credentials="me:secret")) == ""
    assert heard[2].startswith(b"GET /a%20b%22%2520?c HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Basic bWU6c2VjcmV0\r\n" in heard[2]


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        (Protocol("http", content="he.lo$"), ""),
        (Protocol("http", "/p?token=secret", content="good"), "answers /p without 'good'"),
        (Protocol("http", "/p", content="^hello", is_negated=True), "answers /p with '^hello'"),
        (Protocol("http", content="good", is_negated=True), ""),
        (Protocol("http", checksum=hashlib.md5(b"hello").hexdigest()), ""),
        (Protocol("http", checksum=hashlib.sha1(b"hello").hexdigest()), ""),
        (Protocol("http", "/p", checksum="0" * 32), "answers /p with another checksum"),
    ],
)
async def test_http_check_compares_content_and_checksum(protocol: Protocol, said: str) -> None:
    why = await run_check(server_sending(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", b"lo"), protocol)

    assert why.endswith(said) if said else why == ""


# --- udp and echo requests --------------------------------------------------------------------------------------------


async def test_udp_check_fails_only_if_the_port_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """UDP servers need not answer."""
    monkeypatch.setattr(network_checks, "REFUSAL_S", 0.2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        test = Connection("127.0.0.1", server.getsockname()[1], is_udp=True)

        assert await network_checks.probe(test) == ""
        server.settimeout(30)
        assert server.recv(10) == b"\0"
    place = f"127.0.0.1 port {test.port} (udp)"
    assert await network_checks.probe(test) == f"connection failed: cannot connect to {place}: Connection refused"


async def test_send_expect_check_works_over_udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        dialogue = Protocol("generic", dialogue=(("send", "ping"), ("expect", "^pong$")))
        test = Connection("127.0.0.1", server.getsockname()[1], protocol=dialogue, is_udp=True)

        def answer() -> None:
            heard, sender = server.recvfrom(10)
            server.sendto(heard.replace(b"i", b"o"), sender)

        answered = asyncio.create_task(asyncio.to_thread(answer))
        assert await network_checks.probe(test) == ""
        await answered


async def test_ping_check_passes_for_a_host_that_answers() -> None:
    """As in monit, the check also passes if the agent's user is not allowed to send echo requests."""
    assert await network_checks.echo("127.0.0.1", Echo()) in ("", None)
    assert "cannot send an echo request to no-such-host.invalid" in str(
        await network_checks.echo("no-such-host.invalid", Echo())
    )


async def test_http_check_does_not_wait_for_the_body() -> None:
    """The page may never end."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nx")
        await reader.read()

    assert await run_check(talk, HTTP, timeout=600) == ""


async def test_port_check_times_out_if_the_port_is_silent() -> None:
    """Two checks wait for the same silent server. Only the one with the short timeout fails."""
    patient = asyncio.create_task(run_check(silence, HTTP, timeout=600))

    assert "no answer from 127.0.0.1 port" in await run_check(silence, HTTP, timeout=1)
    assert not patient.done()
    patient.cancel()
    await asyncio.wait([patient])


async def test_send_expect_check_follows_its_dialogue() -> None:
    words = (("expect", "^ready [0-9]+"), ("send", "go\\0x00\r\n"), ("expect", "gone"))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"rea")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"dy 12\r\n")
        heard = await reader.readuntil(b"\r\n")
        writer.write(b"gone" if heard == b"go\0\r\n" else b"what?")

    assert await run_check(talk, Protocol("generic", dialogue=words)) == ""  # type: ignore[arg-type]
    wrong = Protocol("generic", dialogue=(("expect", "other"),))
    assert "does not answer 'other'" in await run_check(server_sending(b"ready\n"), wrong)
    twice = Protocol("generic", dialogue=(("expect", "ready"), ("expect", "ready")))
    assert "does not answer 'ready'" in await run_check(server_sending(b"ready\n"), twice)


async def test_unix_socket_check_fails_for_missing_and_full_sockets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        path = tmp_path / "s"
        missing = await network_checks.probe(Connection(unixsocket=str(path)))
        server.bind(str(path))
        server.listen(0)

        assert missing == f"connection failed: cannot connect to unix socket {path}: No such file or directory"
        first = socket.socket(socket.AF_UNIX)
        assert await network_checks.probe(Connection(unixsocket=str(path))) == ""
        with first, socket.socket(socket.AF_UNIX) as second:
            for each in (first, second):
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    each.connect(str(path))
            assert "no answer" in await network_checks.probe(Connection(unixsocket=str(path), timeout=1))


async def test_unix_socket_check_on_a_hanging_disk_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()
    monkeypatch.setattr(socket.socket, "connect", lambda *_: back.wait(20))
    try:
        assert "no answer" in await network_checks.probe(Connection(unixsocket="/disk/s", timeout=1))
    finally:
        back.set()


NO_HTTP = "does not answer like an http server"
LONG = b"A: b\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.0 200\r\n\r\n", ""),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", ""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 200 OK\r\n" + LONG, ""),
        (b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\nServer: of our own making\n\n", ""),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nframes", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ""),
        (b"HTTP/1.1 400 Bad\r\n\r\n", "answers /health with status 400"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", "answers /health with status 500"),
        (b"HTTP/1.1 503 Oh\r\n" + LONG, "answers /health with status 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", NO_HTTP),
        (b"HTTP/1.1 99999999999999999999 X\r\n\r\n", NO_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 9999, NO_HTTP),
        (b"HTTP/1.1 200", NO_HTTP),
        (b"SSH-2.0\r\n\r\n", NO_HTTP),
        (b"\0", NO_HTTP),
    ],
)
async def test_http_check_fails_for_status_400_and_above_as_in_monit(answer: bytes, fault: str) -> None:
    """Unusual but readable headers must not fail the check, because that would restart a working service."""
    why = await run_check(server_sending(answer, after=b"\r\n\r\n"), HTTP)

    assert fault in why if fault else why == ""


async def test_http_check_reads_a_response_without_a_content_length() -> None:
    text = b"HTTP/1.1 200 OK\r\n\r\nhello"
    slow = server_sending(*[bytes([byte]) for byte in text], after=b"\r\n\r\n")

    assert await run_check(slow, HTTP, timeout=0) == ""
    assert await run_check(server_sending(text), Protocol("http", content="lo$")) == ""
    assert await run_check(server_sending(text), Protocol("http", checksum="0" * 32)) == ""
