"""Tests how the HTTP server for metrics, probes and monit's API limits connections and rejects ambiguous requests."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, suppress

import pytest

from agent_shim.edges import http_server
from agent_shim.edges.http_server import HttpRequest, HttpResponse

Where = tuple[str, int]


@pytest.fixture
async def heard() -> list[HttpRequest]:
    return []


@pytest.fixture
async def where(heard: list[HttpRequest]) -> AsyncIterator[Where]:
    """Provide a server that accepts the same requests as monit's HTTP endpoint, and records them."""

    def answer(request: HttpRequest) -> HttpResponse:
        # A client from an earlier test may still be connecting to this port, if that test's server used it. Only
        # such clients send a password, so ignore requests that contain one.
        if "authorization" not in request.headers:
            heard.append(request)
        return HttpResponse(200, b"here")

    async with http_server.listening("127.0.0.1:0", answer, "a test", ("GET", "HEAD", "POST")) as found:
        assert found is not None
        yield found


async def ask(where: Where, *pieces: bytes) -> bytes:
    """Send ``pieces`` one after the other, and return everything that the server sends."""
    reader, writer = await asyncio.open_connection(*where)
    try:
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            return await reader.read()
    finally:
        writer.close()


LENGTHS = {
    "leading zeros": b"0000000009999999999",
    "more zeros than an int has digits": b"0" * 5000 + b"9999999999",
    "thousands of digits": b"9" * 5000,
    "beyond 64 bits": b"18446744073709551616",
    "just too much": b"8192",
}


@pytest.mark.attack("a neighbour sends malformed or endless requests to an open port")
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
async def test_oversized_http_body_is_rejected_before_it_is_sent(where: Where, length: bytes) -> None:
    answer = await ask(where, b"POST / HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")

    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


BEGINNINGS = {
    "a body": b"POST / HTTP/1.1\r\nContent-Length: 0000000009999999999\r\n\r\n",
    "chunks": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
    "a head": b"GET / HTTP/1.1\r\nX: ",
    "a target": b"GET /",
    "empty lines": b"\r\n" * 100,
    "requests": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "an upgrade": b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
}


@pytest.mark.attack("a neighbour sends malformed or endless requests to an open port")
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
async def test_endless_http_request_is_cut_off_and_not_kept_in_memory(where: Where, beginning: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, writer = await asyncio.open_connection(*where)

    async def pour() -> None:
        writer.write(beginning)
        for _ in range(800):
            writer.write(b"a" * 65536)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(pour(), 30)
    writer.close()

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024


AMBIGUOUS = {
    "two lengths": b"Content-Length: 1\r\nContent-Length: 2\r\n",
    "one length twice": b"Content-Length: 1\r\nContent-Length: 1\r\n",
    "a list of lengths": b"Content-Length: 1, 1\r\n",
    "a length and chunks": b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
    "chunks and a length": b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
    "another encoding": b"Transfer-Encoding: identity\r\n",
    "an encoding after the chunks": b"Transfer-Encoding: chunked, identity\r\n",
    "an encoding that looks like chunks": b"Transfer-Encoding: xchunked\r\n",
    "a length with a sign": b"Content-Length: +1\r\n",
    "a negative length": b"Content-Length: -1\r\n",
    "a hexadecimal length": b"Content-Length: 0x1\r\n",
    "a blank before the colon": b"Content-Length : 1\r\n",
    "a folded length": b"Content-Length:\r\n 1\r\n",
    "a folded header": b"X: a\r\n b\r\n",
    "a NUL in a value": b"X: a\0b\r\n",
    "a NUL in a name": b"X\0: a\r\n",
    "a header without a name": b": a\r\n",
    "lines without CR": b"X: a\nY: b\n",
    "a CR alone": b"X: a\rY: b\r\n",
}


@pytest.mark.attack("a neighbour hides a second request behind the first")
@pytest.mark.parametrize("headers", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_ambiguous_http_requests_are_rejected(where: Where, heard: list[HttpRequest], headers: bytes) -> None:
    answer = await ask(where, b"POST /web HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert heard == []


@pytest.mark.attack("a neighbour hides a second request behind the first")
@pytest.mark.parametrize(
    "line", [b"GET / HTTP/0.9", b"GET / HTTP/2.0", b"GET / HTTP/1.2", b"GET /\0 HTTP/1.1", b"GET /"]
)
async def test_http_server_rejects_unsupported_versions_and_malformed_request_lines(
    where: Where, heard: list[HttpRequest], line: bytes
) -> None:
    assert (await ask(where, line + b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert heard == []


@pytest.mark.attack("a neighbour hides a second request behind the first")
async def test_second_http_request_on_a_connection_is_ignored(where: Where, heard: list[HttpRequest]) -> None:
    answer = await ask(where, b"GET /1 HTTP/1.1\r\n\r\nPOST /2 HTTP/1.1\r\nContent-Length: 0\r\n\r\n")

    assert [(request.method, request.target) for request in heard] == [("GET", "/1")]
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"here")


@pytest.mark.attack("a neighbour hides a second request behind the first")
async def test_bytes_after_an_http_request_do_not_change_the_request(where: Where, heard: list[HttpRequest]) -> None:
    for follows in (b"HEAD /2 HTTP/1.1\r\n\r\n", b"DELETE /2 HTTP/1.1\r\n\r\n", b"GET /2 HTTP/0.9\r\n\r\n"):
        answer = await ask(where, b"POST /1 HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody" + follows)

        request = heard.pop()
        assert (request.method, request.target, request.body) == ("POST", "/1", b"body"), follows
        assert answer.startswith(b"HTTP/1.1 200 "), follows
        assert answer.endswith(b"here"), follows


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /a?b HTTP/1.1\r\nX-Y: 1\r\nx-y: 2\r\nContent-Length: 4\r\n\r\nbody",
        b"POST /a?b HTTP/1.1\r\nX-Y: 1\r\nx-y: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n",
        b"POST /a?b HTTP/1.0\r\nX-Y: 1\r\nx-y: 2\r\nContent-Length: 004\r\n\r\nbody",
    ],
)
async def test_http_request_is_parsed_the_same_whether_sent_whole_or_byte_by_byte(
    where: Where, heard: list[HttpRequest], request_: bytes
) -> None:
    whole = await ask(where, request_)
    await ask(where, *(request_[at : at + 1] for at in range(len(request_))))

    assert whole.endswith(b"here")
    assert heard[0] == heard[1]
    assert (heard[0].method, heard[0].target, heard[0].headers["x-y"], heard[0].body) == (
        "POST",
        "/a?b",
        "1,2",
        b"body",
    )


@pytest.mark.attack("a neighbour occupies all connections of an open port")
async def test_http_request_is_answered_even_if_excess_connections_follow(where: Where) -> None:
    with socket.create_connection(where) as probe, ExitStack() as crowd:
        probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
        for _ in range(http_server.MAX_CONNECTIONS + 20):
            crowd.enter_context(socket.create_connection(where))
        assert (await asyncio.to_thread(probe.recv, 100)).startswith(b"HTTP/1.0 200 ")


@pytest.mark.attack("a neighbour occupies all connections of an open port")
async def test_idle_http_connections_do_not_evict_connections_from_another_address(where: Where) -> None:
    reader, writer = await asyncio.open_connection(*where)
    async with AsyncExitStack() as crowd:
        for _ in range(2 * http_server.MAX_CONNECTIONS):
            _, idle = await asyncio.open_connection(*where, local_addr=("127.0.0.2", 0))
            crowd.callback(idle.close)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200 ")
    writer.close()


async def test_closed_http_connections_do_not_count_towards_the_limit(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 60.0)
    reader, writer = await asyncio.open_connection(*where)
    for _ in range(http_server.MAX_CONNECTIONS):
        await ask(where, b"GET / HTTP/1.0\r\n\r\n")
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.0 200 ")
    writer.close()


@pytest.mark.attack("a neighbour hides a second request behind the first")
async def test_http_trailer_is_not_read_as_a_header(where: Where, heard: list[HttpRequest]) -> None:
    """A proxy in front of the server may have checked the password only in the headers, so a password in a trailer must
    not be used.
    """
    head = b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert (await ask(where, head + b"0\r\nAuthorization: Basic eDp4\r\nHost: b\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert [request.headers for request in heard] == [{"host": "a", "transfer-encoding": "chunked"}]
