"""Tests network checks: requests and results. ``integration/test_network_checks.py`` connects to real listeners."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from agent_shim.supervisor import network_checks
from agent_shim.supervisor.monit.ast import Connection, Protocol
from tests.support.serving import serving


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("ping", b"ping"),
        (r"\0x41\0x00\0xfF", b"A\0\xff"),
        (r"é\0x0a", "é\n".encode()),
        ("\\0x00\udcff", b"\0\xff"),
        ("é", "é".encode()),
        (r"\0x4", rb"\0x4"),
    ],
)
def test_send_string_of_a_network_check_can_contain_any_byte(text: str, sent: bytes) -> None:
    assert network_checks.wire_text(text) == sent


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
async def test_network_check_of_an_ip_address_does_not_query_a_name_server(
    monkeypatch: pytest.MonkeyPatch, host: str, family: socket.AddressFamily
) -> None:
    """A name server that does not answer could delay the check."""
    with socket.create_server((host, 0), family=family) as server:
        monkeypatch.setattr(socket, "getaddrinfo", None)

        assert await network_checks.probe(Connection(host, server.getsockname()[1])) == ""


async def test_network_check_reports_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])

    assert await network_checks.probe(Connection("web", 80)) == (
        "connection failed: cannot connect to web port 80: it has no address"
    )


async def test_http_check_fails_on_an_endless_header(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    loop = asyncio.get_running_loop()
    receive = loop.sock_recv

    async def counted(sock: socket.socket, size: int) -> bytes:
        nonlocal read
        data = await receive(sock, size)
        read += len(data)
        return data

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"X: " + b"y" * 997 + b"\r\n")
                await writer.drain()

    monkeypatch.setattr(loop, "sock_recv", counted)
    async with serving(endless) as port:
        why = await network_checks.probe(Connection("127.0.0.1", port, protocol=Protocol("http", "/")))

    assert why == f"connection failed: 127.0.0.1 port {port} does not answer like an http server"
    assert read <= network_checks.MAX_HEAD_BYTES + 2 * network_checks.CHUNK


def test_http_check_reads_small_chunks_without_copying_the_page() -> None:
    """If each chunk copied the page read so far, a server that sends a megabyte in one-byte chunks would keep the
    agent busy.
    """

    def seconds(before: int) -> float:
        """Return the CPU time for reading 2000 one-byte chunks after a first chunk of ``before`` bytes."""
        response = network_checks.PageReader(Protocol("http", content="x"))
        response.read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % before + b"a" * before + b"\r\n")
        begun = time.thread_time()
        response.read(b"1\r\na\r\n" * 2000)
        return time.thread_time() - begun

    assert min(seconds(900_000) for _ in range(3)) < 10 * min(seconds(1) for _ in range(3))
