"""A minimal HTTP server for scrapers, probes and monit clients, with one request and one response per connection.

httptools (llhttp) parses requests strictly. In an idle agent, httptools uses 0.2 MB of mostly shared memory, h11 would
use 0.3 MB, and aiohttp 9 MB. The limits (bytes per request, bytes per connection, time, connections) are enforced
outside the parser.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import httptools
import msgspec

from agent_shim.core import settings
from agent_shim.core.errors import ConfigError
from agent_shim.edges import accepting

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 8192
"""Maximum size of a request including its first line, headers and body. Larger requests are rejected."""
MAX_RECEIVED_BYTES: Final = 8 * MAX_REQUEST_BYTES
"""Maximum number of bytes received on a connection. Data after a request is dropped unread, and if a client sends more
than this, the connection is closed.
"""
MAX_CONNECTIONS: Final = 64
"""Maximum number of connections. To make room for a new connection, the oldest one from the address with the most
connections is closed, because idle clients must not delay the kubelet's probe.
"""
REQUEST_TIMEOUT_S: Final = 5.0
"""Seconds within which a client must send a complete request."""
ANSWER_TIMEOUT_S: Final = 10.0
"""Maximum number of seconds for producing an answer. After that, the client has the same time to read the answer."""
VERSIONS: Final = ("1.0", "1.1")

PLAIN: Final = "text/plain; charset=utf-8"

_STATUS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class HttpRequest(msgspec.Struct, frozen=True):
    """A request. ``target`` is the path with the query, and header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


class HttpResponse(msgspec.Struct, frozen=True):
    """A response. ``headers`` are sent in addition to those that every response contains."""

    status: int
    body: bytes
    kind: str = PLAIN
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


Answer: TypeAlias = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]
"""A function that answers a request, directly or with an awaitable."""

_BAD: Final = HttpResponse(400, b"not an HTTP/1.1 request\n")
_TOO_LONG: Final = HttpResponse(431, b"a request may be at most 8192 bytes long\n")


class _Head:
    """Receives parser events for the first request. Later requests on the connection are ignored."""

    def __init__(self) -> None:
        self.parser: httptools.HttpRequestParser | None = None
        """The parser, until the method and the version have been copied from it. After that, it is None, because the
        parser overwrites its own values when it reads a later request.
        """
        self.method = ""
        self.version = ""
        self.target = b""
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.has_head = False
        """True once all headers have been read."""
        self.is_whole = False
        """True once the body has been read, too."""

    def on_url(self, piece: bytes) -> None:
        if not self.has_head:
            self.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # fields after the head are trailers or belong to a later request
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
            self.headers[key] = ",".join(filter(None, [self.headers.get(key), text]))

    def on_headers_complete(self) -> None:
        if self.parser is not None:
            self.method = self.parser.get_method().decode("latin-1")
            self.version = self.parser.get_http_version()
            self.parser = None
        self.has_head = True

    def on_body(self, piece: bytes) -> None:
        if not self.is_whole:
            self.body += piece

    def on_message_complete(self) -> None:
        self.is_whole = True


class _HttpConnection(asyncio.Protocol):
    """A connection with one request and one response. If the connection stalls, a timer closes it. A task is created
    only if the response is awaitable.

    ``connections`` contains all connections of the server and their source addresses, in order of arrival. Each
    connection adds and removes itself.
    """

    def __init__(self, answer: Answer, methods: Sequence[str], connections: dict[_HttpConnection, str]) -> None:
        self._answer = answer
        self._methods = methods
        self._connections = connections
        self._request = _Head()
        self._request.parser = self._parser = httptools.HttpRequestParser(self._request)
        self._received = 0
        """Number of bytes received so far."""
        self._is_handled = False
        """True once a response is being produced or has been sent. Data after that is ignored."""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, closing another one if there are too many, and start the request timer."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if len(self._connections) >= MAX_CONNECTIONS:
            to_close = accepting.connection_to_close(self._connections.items())
            assert to_close is not None
            del self._connections[to_close]
            to_close.transport.abort()
        self._connections[self] = accepting.address_of(transport.get_extra_info("socket"))
        self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, transport.abort)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Read the request. Only its first ``MAX_REQUEST_BYTES`` are parsed."""
        room = MAX_REQUEST_BYTES - self._received
        self._received += len(data)
        if self._received > MAX_RECEIVED_BYTES:
            self.transport.abort()
        elif not self._is_handled and (refusal := self._read(data[:room], is_over=len(data) > room)):
            self._send(refusal)

    def _read(self, data: bytes, *, is_over: bool) -> HttpResponse | None:
        """Feed data to the parser. If this completes the request, begin to respond. If the request is invalid, return
        the error response, otherwise None. ``is_over`` is set if the client has sent more data than is allowed.
        """
        request = self._request
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is complete, and upgrades are ignored
        except httptools.HttpParserError:
            if not request.is_whole:  # data after the request is ignored
                return _BAD
        if not request.has_head:
            return _TOO_LONG if is_over else None
        if refusal := self._refusal():
            return refusal
        if request.is_whole:
            target = request.target.decode("latin-1")
            self._respond(HttpRequest(request.method, target, request.headers, bytes(request.body)))
            return None
        return _TOO_LONG if is_over else None

    def _refusal(self) -> HttpResponse | None:
        """Return the error response for an invalid request head, or None if the head is valid."""
        request = self._request
        if request.version not in VERSIONS or not request.target.startswith(b"/"):
            return _BAD
        if request.method not in self._methods:
            allowed = ", ".join(self._methods)
            return HttpResponse(405, f"only {' and '.join(self._methods)}\n".encode(), headers={"Allow": allowed})
        # The parser ensures that the value consists of digits, but it may have leading zeros and thousands of digits. A
        # body of exactly ``MAX_REQUEST_BYTES`` is too long, because the head counts, too.
        length = request.headers.get("content-length", "").lstrip("0")
        if len(length) > len(str(MAX_REQUEST_BYTES)) or int(length or 0) >= MAX_REQUEST_BYTES:
            return _TOO_LONG
        return None

    def _respond(self, request: HttpRequest) -> None:
        """Send the response to a request, or start a task that does so if the response is not available yet."""
        answer = self._answer(request)
        if isinstance(answer, HttpResponse):
            self._send(answer)
            return
        self._is_handled = True
        # If a bug keeps the response from being produced, the timer closes the connection.
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self.transport.abort)

        async def send(response: Awaitable[HttpResponse]) -> None:
            self._send(await response)

        self._task = asyncio.create_task(send(answer), name="http answer")

    def _send(self, response: HttpResponse) -> None:
        """Send the response and stop sending. The client has to close the connection before the timer expires."""
        self._is_handled = True
        self._timer.cancel()
        if self.transport.is_closing():
            return
        self._timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self.transport.abort)
        fields = {"Content-Type": response.kind, "Content-Length": str(len(response.body)), **response.headers}
        lines = [f"{name}: {value}" for name, value in fields.items()]
        version = "1.0" if self._request.version == "1.0" else "1.1"  # some clients understand only 1.0
        status = f"HTTP/{version} {response.status} {_STATUS[response.status]}"
        head = "\r\n".join([status, *lines, "Connection: close", "", ""]).encode("latin-1", "replace")
        self.transport.write(head + (b"" if self._request.method == "HEAD" else response.body))
        self.transport.write_eof()


def connection(answer: Answer, methods: Sequence[str]) -> asyncio.Protocol:
    """Create the protocol object for a single connection that is not counted against the limit. Only fuzzing uses it,
    to feed data without a socket.
    """
    return _HttpConnection(answer, methods, {})


def parse_address(text: str) -> tuple[str, int] | None:
    """Parse ``ADDR:PORT`` or ``[ADDR]:PORT`` into host and port. Return None for ``off``. Raises ``ConfigError``."""
    if text == "off":
        return None
    match = re.search(settings.LISTENER, text)
    if match is None:
        raise ConfigError(f"cannot listen on {text!r}: the address must be ADDR:PORT or off")
    return match["host"].removeprefix("[").removesuffix("]"), int(match["port"])


@asynccontextmanager
async def listening(
    address: str, answer: Answer, purpose: str, methods: Sequence[str] = ("GET", "HEAD")
) -> AsyncIterator[tuple[str, int] | None]:
    """Serve on ``address`` for the duration of the block. Yields the bound address, or None if ``address`` is ``off``
    or cannot be bound. The logged error names ``purpose``.
    """
    connections: dict[_HttpConnection, str] = {}
    async with serving(address, lambda: _HttpConnection(answer, methods, connections), purpose) as where:
        try:
            yield where
        finally:
            for connection in list(connections):
                connection.transport.abort()


@asynccontextmanager
async def serving(
    address: str, protocol: Callable[[], asyncio.BaseProtocol], purpose: str
) -> AsyncIterator[tuple[str, int] | None]:
    """Listen with a protocol for the duration of the block. Yields the bound address, or None if ``address`` is ``off``
    or cannot be bound. Such a failure is only logged, because the jobs can run without the server. Raises
    ``ConfigError`` for an invalid ``address``.
    """
    where = parse_address(address)
    try:
        server = where and await accepting.listen(protocol, *where)
    except OSError as exc:
        # A failed name lookup has a negative number, which is not an errno.
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
