"""Just enough HTTP for scrapers, probes and clients of monit: one small request, one answer, then the end.

aiohttp would do more and cost an idle agent 9 MB. All times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agent_shim.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_REQUEST: Final = 8192
"""Bytes of a request with its headers and body; who sends more is told so."""
MAX_CONNECTIONS: Final = 64
"""When one more comes, the oldest goes: idle strangers must not keep the kubelet's probe waiting."""
HEADER_TIME: Final = 5.0
ANSWER_TIME: Final = 10.0

PLAIN: Final = "text/plain; charset=utf-8"

_STATUS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Request:
    """``target`` is a path with its query; names of ``headers`` are in small letters."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """``headers`` beside those that every answer has."""

    status: int
    body: bytes
    kind: str = PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)


Answer: TypeAlias = Callable[[Request], Response | Awaitable[Response]]
"""Says what is answered, at once or later."""

_BAD: Final = Response(400, b"this is HTTP/1.1\n")
_TOO_LONG: Final = Response(431, b"a request has at most 8192 bytes\n")


class _Connection(asyncio.Protocol):
    """One request, one answer, a task only where the answer takes one; a timer ends what takes too long."""

    def __init__(self, answer: Answer, methods: Sequence[str], connections: dict[_Connection, None]) -> None:
        self._answer = answer
        self._methods = methods
        self._connections = connections
        self._received = bytearray()
        self._is_taken = False
        self._with_body = True
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[self] = None
        self._timer = asyncio.get_running_loop().call_later(HEADER_TIME, transport.abort)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._is_taken:
            # What comes after the request is read and forgotten: closing on it would destroy the answer on its way.
            if len(self._received) > 8 * MAX_REQUEST:
                self.transport.abort()
        elif (end := self._received.find(b"\r\n\r\n")) >= 0 and end <= MAX_REQUEST:
            self._take(self._received[:end].decode("latin-1"), end + 4)
        elif len(self._received) > MAX_REQUEST:
            self._send(_TOO_LONG)

    def _take(self, head: str, begin: int) -> None:
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            self._send(_BAD)
            return
        if words[0] not in self._methods:
            allowed = ", ".join(self._methods)
            self._send(Response(405, f"only {' and '.join(self._methods)}\n".encode(), headers={"Allow": allowed}))
            return
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            headers[name] = ",".join(filter(None, [headers.get(name), value.strip()]))
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            self._send(_BAD)
        elif begin + int(length[:9]) > MAX_REQUEST:
            self._send(_TOO_LONG)
        elif len(self._received) >= begin + int(length):
            self._with_body = words[0] != "HEAD"
            body = bytes(self._received[begin : begin + int(length)])
            self._respond(Request(words[0], words[1], headers, body))

    def _respond(self, request: Request) -> None:
        found = self._answer(request)
        if isinstance(found, Response):
            self._send(found)
            return
        self._is_taken = True
        # An answer that does not come, or that a bug has ended, costs its connection.
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ANSWER_TIME, self.transport.abort)

        async def send(later: Awaitable[Response]) -> None:
            self._send(await later)

        self._task = asyncio.create_task(send(found), name="an answer over http")

    def _send(self, response: Response) -> None:
        self._is_taken = True
        self._timer.cancel()
        if self.transport.is_closing():
            return
        self._timer = asyncio.get_running_loop().call_later(ANSWER_TIME, self.transport.abort)
        fields = {
            "Content-Type": response.kind,
            "Content-Length": str(len(response.body)),
            **response.headers,
            "Connection": "close",
        }
        lines = [
            f"HTTP/1.1 {response.status} {_STATUS[response.status]}",
            *(f"{name}: {value}" for name, value in fields.items()),
        ]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
        self.transport.write(head + (response.body if self._with_body else b""))
        self.transport.write_eof()


def parse_address(text: str) -> tuple[str, int] | None:
    """``ADDR:PORT`` or ``[ADDR]:PORT`` as host and port; None for ``off``."""
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"cannot listen on {text!r}: an address is ADDR:PORT or off")
    return host.removeprefix("[").removesuffix("]"), int(port)


@asynccontextmanager
async def listening(
    address: str, answer: Answer, purpose: str, methods: Sequence[str] = ("GET", "HEAD")
) -> AsyncIterator[tuple[str, int] | None]:
    """Answer on ``address`` for the length of the block; yields where, or None when off or when it cannot be had."""
    connections: dict[_Connection, None] = {}
    async with serving(address, lambda: _Connection(answer, methods, connections), purpose) as where:
        try:
            yield where
        finally:
            for connection in list(connections):
                connection.transport.abort()


@asynccontextmanager
async def serving(
    address: str, protocol: Callable[[], asyncio.BaseProtocol], purpose: str
) -> AsyncIterator[tuple[str, int] | None]:
    """Listen with a protocol; an address that is taken is an error in the log and not the end: jobs matter more."""
    where = parse_address(address)
    try:
        server = where and await asyncio.get_running_loop().create_server(protocol, *where, backlog=128)
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror
        logger.error("cannot listen on %s for %s: %s", address, purpose, why)
        server = None
    if not server:
        yield None
        return
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
