"""A small HTTP server that stores and returns PUT bodies and misbehaves on request, and an HTTP proxy.

Both use raw sockets, because a correct HTTP server cannot cut connections, stall or lie.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agent_shim.demo.pki import Pair
from tests.support.serving import serving

HALF = "half"
"""Announces the full length of the body, but sends half of it and closes the connection."""
STALL = "stall"
"""Sends half of the body and then nothing more, and leaves the connection open."""
SILENT = "silent"
"""Reads the request and never answers."""
DEAF = "deaf"
"""Reads the header of a request, but never its body, and does not answer."""
ENDLESS = "endless"
DRIBBLE = "dribble"
"""Sends one byte every 50 milliseconds."""
NO_LENGTH = "no length"
"""Sends no Content-Length. The body ends when the server closes the connection."""
WRONG = "wrong"
"""Sends a body of the right length with wrong content."""
ENCODED = "encoded"
"""Sends ``Content-Encoding: gzip``, as some servers do for every file that ends in gz."""
THINK = "think"
"""Reads a whole PUT request and answers half a second later."""


@dataclass
class SeenRequest:
    """A request that the server has received. Header names are lower-case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass
class BlobServer:
    """A blob server. ``blobs`` maps URL paths, without the query, to contents.

    Each entry of ``plan`` determines how the server handles one of the next requests. An entry is a status (sent before
    the body is read), ``redirect:URL``, or one of the constants above. Once ``plan`` is empty, the server behaves
    correctly.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)
    requests: list[SeenRequest] = field(default_factory=list)
    user: str = ""
    """The ``name:password`` that every request must contain, or "" for no authentication."""
    continues: bool = True
    """Whether the server sends "100 Continue" to clients that expect it."""
    delay: float = 0
    """Seconds by which every response is delayed."""
    busiest: int = 0
    """Highest number of requests that the server has handled at the same time."""
    port: int = 0
    scheme: str = "http"
    _busy: int = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            try:
                await self._answer(reader, writer)
                await writer.drain()
            finally:
                self._busy -= 1
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_head(reader)
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        how = self.plan.pop(0) if self.plan else ""
        if self.user and request.headers.get("authorization") != basic(self.user):
            how = "401"
        if how.isdigit():
            await respond(writer, int(how), b"this is not said to anybody")
            await _linger(reader)
        elif how.startswith("redirect:"):
            await respond(writer, 302, b"", location=how.removeprefix("redirect:"))
            await _linger(reader)
        elif how == SILENT:
            await reader.read()
        elif how == DEAF:
            await asyncio.sleep(3600)
        elif request.method == "PUT":
            await self._take(request, reader, writer)
            await asyncio.sleep(0.5 if how == THINK else 0)
            await respond(writer, 201, b"")
        else:
            await self._give(request, writer, how)

    async def _take(self, request: SeenRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.continues and request.headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = await reader.readexactly(int(request.headers["content-length"]))
        self.blobs[urlsplit(request.target).path] = request.body

    async def _give(self, request: SeenRequest, writer: asyncio.StreamWriter, how: str) -> None:
        body = self.blobs.get(urlsplit(request.target).path)
        if body is None:
            await respond(writer, 404, b"no such blob")
        elif how == NO_LENGTH:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        elif how == ENDLESS:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while True:
                writer.write(body)
                await writer.drain()
        elif how == ENCODED:
            await respond(writer, 200, body, encoding="gzip")
        elif how == WRONG:
            await respond(writer, 200, bytes(len(body)))
        elif how in (HALF, STALL, DRIBBLE):
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            if how == DRIBBLE:
                for byte in body:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.05)
            else:
                writer.write(body[: len(body) // 2])
                await writer.drain()
                await asyncio.sleep(3600 if how == STALL else 0)
        else:
            await respond(writer, 200, body)


async def read_head(reader: asyncio.StreamReader) -> SeenRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
    return SeenRequest(method, target, headers)


async def respond(writer: asyncio.StreamWriter, status: int, body: bytes, **headers: str) -> None:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('encoding', 'Content-Encoding')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()


async def _linger(reader: asyncio.StreamReader) -> None:
    """Wait until the client closes the connection, as nginx does.

    If the server closed it first, a client that is still writing would see a reset instead of the response.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await reader.read()


def basic(user: str) -> str:
    """Return the Basic authorization header for ``name:password``."""
    return f"Basic {base64.b64encode(user.encode()).decode()}"


@asynccontextmanager
async def http_server(where: Path | None = None, pair: Pair | None = None) -> AsyncIterator[BlobServer]:
    """Run a server. If ``pair`` is given, write the certificate and key to ``where`` and use TLS."""
    server = BlobServer()
    context = None
    if pair is not None:
        assert where is not None
        (where / "server.pem").write_text(pair.certificate + pair.private_key)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(where / "server.pem")
        server.scheme = "https"
    async with serving(server.serve, context=context) as server.port:
        yield server


@dataclass
class ForwardProxy:
    """A forward proxy that forwards requests and opens tunnels. ``seen`` contains the requests that it received."""

    seen: list[SeenRequest] = field(default_factory=list)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await self._hand_on(reader, writer)
            finally:
                writer.close()

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_head(reader)
        self.seen.append(request)
        tunnel = request.method == "CONNECT"
        there = urlsplit(f"//{request.target}" if tunnel else request.target)
        their_reader, their_writer = await asyncio.open_connection(there.hostname, there.port)
        try:
            if tunnel:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                lines = [f"{request.method} {there.path}?{there.query} HTTP/1.1"]
                lines += [f"{name}: {value}" for name, value in request.headers.items()]
                their_writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
            async with asyncio.TaskGroup() as both:
                both.create_task(_pour(reader, their_writer))
                both.create_task(_pour(their_reader, writer))
        finally:
            their_writer.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


@asynccontextmanager
async def http_proxy() -> AsyncIterator[ForwardProxy]:
    """Run a proxy for the duration of the block."""
    proxy = ForwardProxy()
    async with serving(proxy.serve) as proxy.port:
        yield proxy
