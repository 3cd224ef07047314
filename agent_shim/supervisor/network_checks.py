"""Network tests of monit: ``failed host … port`` and ``unixsocket``.

Each probe has one timeout for everything, including the name look-up, reads no more than necessary, and never blocks
the event loop. Protocols other than http and send/expect are judged by the connection alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, TypeAlias

from agent_shim.core import lean_imports
from agent_shim.host import network
from agent_shim.host.daemon_thread import run_in_daemon_thread
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit.ast import NET_TIMEOUT, Connection, Protocol

with lean_imports.without(empty=["httptools.parser.url_parser"]):  # 0.1 MB: the daemon parses no URL with it
    import httptools

Address: TypeAlias = tuple[Any, ...] | str
"""Address in the form of the socket module: host and port, or a path."""

MAX_HEAD_BYTES: Final = 16 * 1024
"""Maximum size of an expected answer or an http response head."""
CHUNK: Final = 16 * 1024
FINAL_STATUS: Final = 200
"""Lower ones are interim responses."""
BAD_STATUS: Final = 400


class _WrongError(Exception):
    """The answer violates the rule."""


def where(connection: Connection) -> str:
    """Describe the endpoint."""
    there = f"{connection.host} port {connection.port}"
    return f"unix socket {connection.unixsocket}" if connection.unixsocket else there


async def probe(connection: Connection) -> str:
    """Return the reason of a failed connection; empty on success."""
    place = where(connection)
    allowed = connection.timeout or NET_TIMEOUT
    try:
        async with asyncio.timeout(allowed), _opened(connection) as line:
            if connection.protocol.name == "generic":
                await _dialogue(line, connection.protocol)
            elif connection.protocol.name == "http":
                await _http(line, connection)
    except TimeoutError:
        return f"connection failed: no answer from {place} within {allowed} seconds"
    except _WrongError as exc:
        return f"connection failed: {place} {exc}"
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
        return f"connection failed: cannot connect to {place}: {why}"
    return ""


# --- connection -------------------------------------------------------------------------------------------------------


class _Line:
    """A connected socket and its unread data."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def more(self) -> bool:
        """Wait for more data; False at the end."""
        chunk = await asyncio.get_running_loop().sock_recv(self.sock, CHUNK)
        self.received += chunk
        return bool(chunk)

    def taken(self) -> bytes:
        """Return and clear the unread data."""
        data, self.received = self.received, b""
        return data


@contextlib.asynccontextmanager
async def _opened(connection: Connection) -> AsyncIterator[_Line]:
    """Connect; raises ``OSError`` on failure."""
    if connection.unixsocket:
        places: list[tuple[socket.AddressFamily, Address]] = [(socket.AF_UNIX, connection.unixsocket)]
    else:
        places = await _addresses(connection.host, connection.port)
    refused: OSError = OSError(0, "it has no address")
    for family, address in places:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            await _connect(sock, address)
        except OSError as exc:
            refused = exc
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        with sock:
            yield _Line(sock)
        return
    raise refused


async def _connect(sock: socket.socket, address: Address) -> None:
    if sock.family is not socket.AF_UNIX:
        await asyncio.get_running_loop().sock_connect(sock, address)
        return
    while True:
        try:
            sock.connect(address)
        except BlockingIOError:
            # The listen queue is full, and no event signals room: the server does not accept.
            await asyncio.sleep(0.05)
        else:
            return


async def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Address]]:
    """Look up the addresses of a host; a silent name server delays only this probe."""
    if family := network.family_of(host):
        return [(family, (host, port))]
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await run_in_daemon_thread(look_up, f"look up {host}")
    return [(family, address) for family, _, _, _, address in found]


# --- protocols --------------------------------------------------------------------------------------------------------


async def _dialogue(line: _Line, protocol: Protocol) -> None:
    """Send and expect in turn; an expected answer may arrive in pieces."""
    for verb, text in protocol.dialogue:
        if verb == "send":
            await line.send(wire_text(text))
            continue
        pattern = posix_regex.compiled(text)
        while not pattern.search(bytes(line.received)):
            if len(line.received) > MAX_HEAD_BYTES or not await line.more():
                raise _WrongError(f"does not answer {text!r}")
        line.received = b""


def wire_text(text: str) -> bytes:
    r"""Encode a ``send`` text, in which ``\0xHH`` represents any byte."""
    spelled = re.sub(r"\\0x([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), text)
    return spelled.encode("latin-1", "replace") if spelled != text else text.encode("utf-8", "surrogateescape")


class _Response:
    """Parser events of an http response."""

    def __init__(self) -> None:
        self.status = 0
        self.has_status_line = False
        self.has_head = False
        # Lenient like monit: a probe forwards nothing that another parser could read differently.
        self.parser = httptools.HttpResponseParser(self)
        self.parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_transfer_encoding=True,
            lenient_data_after_close=True,
            lenient_optional_cr_before_lf=True,
        )

    def on_header(self, _name: bytes, _value: bytes) -> None:
        self.has_status_line = True

    def on_headers_complete(self) -> None:
        self.has_status_line = True
        # The last status counts, after interim ones such as 100 Continue.
        self.status = self.parser.get_status_code()
        self.has_head = self.status >= FINAL_STATUS

    def read(self, data: bytes) -> None:
        """Feed the parser; raises ``_WrongError`` if the data is not http."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # status 101: http ends here, and monit accepts it as an answer
            self.has_head = True
        except httptools.HttpParserError as exc:
            if not self.has_status_line:
                raise _WrongError("does not answer like an http server") from exc
            # An invalid header: monit still counts the status.
            self.status = self.parser.get_status_code()
            self.has_head = True


async def _http(line: _Line, connection: Connection) -> None:
    """Send one GET; follows no redirect, and fails on any status from 400 on, even a missing permission."""
    path = connection.protocol.request or "/"
    host = connection.protocol.hostheader or connection.host or "localhost"
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nUser-Agent: monit/5.2.5\r\nConnection: close\r\n\r\n"
    await line.send(head.encode("utf-8", "surrogateescape"))
    response, received = _Response(), 0
    while not response.has_head:
        if received > MAX_HEAD_BYTES or not await line.more():
            raise _WrongError("does not answer like an http server")
        received += len(line.received)
        response.read(line.taken())
    if response.status >= BAD_STATUS:
        raise _WrongError(f"answers {path} with status {response.status}")
