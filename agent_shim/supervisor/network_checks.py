"""Carries out monit's network tests: ``failed host … port``, ``unixsocket``, ``url`` and ``icmp``.

A probe has a single timeout, which includes the name lookup. It reads no more than necessary, and never blocks the
event loop. For protocols other than http and send/expect, only the connection is tested.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import os
import re
import socket
import struct
import urllib.parse
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, TypeAlias

import httptools

from agent_shim.host import blocking, network
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit.ast import NET_TIMEOUT, Connection, Echo, Protocol
from agent_shim.supervisor.monit.rules import DIGESTS

Address: TypeAlias = tuple[Any, ...] | str
"""An address in the format of the socket module: host and port, or a path."""

MAX_HEAD_BYTES: Final = 16 * 1024
"""Maximum size of an expected answer or an http response head."""
MAX_CONTENT_BYTES: Final = 1_024_000
"""Maximum size of the part of a page that is searched, as in monit."""
CHUNK: Final = 16 * 1024
REFUSAL_S: Final = 2.0
"""How long to wait for the refusal of a UDP packet. If the port is open, there may be no answer at all."""
HTTP_PORT: Final = 80
ECHO_REQUEST, ECHO_REPLY = 8, 0
"""ICMP message types (RFC 792)."""
FINAL_STATUS: Final = 200
"""The lowest status code of a final response. Interim responses, such as 100 Continue, have lower codes."""
BAD_STATUS: Final = 400


class _WrongError(Exception):
    """The answer does not match what the rule expects."""


def where(connection: Connection) -> str:
    """Describe a connection's endpoint."""
    there = f"{connection.host} port {connection.port}{' (udp)' if connection.is_udp else ''}"
    return f"unix socket {connection.unixsocket}" if connection.unixsocket else there


async def probe(connection: Connection) -> str:
    """Test a connection. Return the reason if it failed, or ""."""
    target = where(connection)
    allowed = connection.timeout or NET_TIMEOUT
    try:
        async with asyncio.timeout(allowed), _opened(connection) as line:
            if connection.protocol.name == "generic":
                await _dialogue(line, connection.protocol)
            elif connection.protocol.name == "http":
                await _http(line, connection)
            elif connection.is_udp:
                await _require_not_refused(line)
    except TimeoutError:
        return f"connection failed: no answer from {target} within {allowed} seconds"
    except _WrongError as exc:
        return f"connection failed: {target} {exc}"
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
        return f"connection failed: cannot connect to {target}: {why}"
    return ""


# --- connection -------------------------------------------------------------------------------------------------------


class _Conversation:
    """A connected socket and its unread data."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def more(self) -> bool:
        """Wait for more data. Return False at the end of the stream."""
        chunk = await asyncio.get_running_loop().sock_recv(self.sock, CHUNK)
        self.received += chunk
        return bool(chunk)

    def taken(self) -> bytes:
        """Return and clear the unread data."""
        data, self.received = self.received, b""
        return data


@contextlib.asynccontextmanager
async def _opened(connection: Connection) -> AsyncIterator[_Conversation]:
    """Connect to the first address that accepts the connection, and close the socket when the block ends. Raises
    ``OSError`` if none does.
    """
    kind = socket.SOCK_DGRAM if connection.is_udp else socket.SOCK_STREAM
    timeout = connection.timeout or NET_TIMEOUT
    if connection.unixsocket:
        endpoints: list[tuple[socket.AddressFamily, Address]] = [(socket.AF_UNIX, connection.unixsocket)]
    else:
        endpoints = await _addresses(connection.host, connection.port, kind, timeout)
    refused: OSError = OSError(0, "it has no address")
    for family, address in endpoints:
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            await _connect(sock, address, timeout)
        except OSError as exc:
            refused = exc
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        with sock:
            yield _Conversation(sock)
        return
    raise refused


async def _connect(sock: socket.socket, address: Address, timeout: float) -> None:
    if sock.family is not socket.AF_UNIX:
        await asyncio.get_running_loop().sock_connect(sock, address)
        return
    while True:
        try:  # use a thread, because the path may be on a disk that hangs
            await blocking.call(f"socket {address}", partial(sock.connect, address), timeout=timeout)
        except BlockingIOError:
            # The listen queue is full, because the server does not accept connections. Try again, because no
            # event reports free space in the queue.
            await asyncio.sleep(0.05)
        else:
            return


async def _addresses(
    host: str, port: int, kind: socket.SocketKind, timeout: float
) -> list[tuple[socket.AddressFamily, Address]]:
    """Look up a host's addresses. A name server that does not answer delays only the probes of this host. Raises
    ``OSError``.
    """
    port &= 0xFFFF  # keep the low 16 bits, as monit's htons and the C library do
    if family := network.family_of(host):
        return [(family, (host, port))]
    look_up = partial(socket.getaddrinfo, host, port, type=kind)
    try:
        found = await blocking.call(f"look up {host}", look_up, timeout=timeout)
    except UnicodeError as exc:  # a label of the host name is empty or too long
        raise OSError(errno.EINVAL, "no host can have this name") from exc
    return [(family, address) for family, _, _, _, address in found]


# --- protocols --------------------------------------------------------------------------------------------------------


async def _require_not_refused(line: _Conversation) -> None:
    """Send one byte in a UDP packet, and wait up to ``REFUSAL_S`` seconds for an answer. Raises ``OSError`` if the
    kernel reports that nobody is listening.
    """
    await line.send(b"\0")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_S):
            await line.more()


async def _dialogue(line: _Conversation, protocol: Protocol) -> None:
    """Carry out the ``send`` and ``expect`` steps in order. An expected answer may arrive in pieces."""
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
    r"""Encode a ``send`` text, in which ``\0xHH`` represents any byte. Other characters are sent as in the file."""
    raw = text.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\0x([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), raw)


class PageReader:
    """Collects an HTTP response from the events of a parser. The whole page has to be read only if ``wanted`` has a
    pattern or a checksum for it.
    """

    def __init__(self, wanted: Protocol) -> None:
        self.status = 0
        self.has_status_line = False
        self.has_head = False
        self.is_whole = not (wanted.content or wanted.checksum)
        self.has_length = False
        self.page = bytearray()
        self.digest = hashlib.new(DIGESTS[len(wanted.checksum)], usedforsecurity=False) if wanted.checksum else None
        # Accept invalid HTTP, as monit does. This is safe, because a probe does not forward data that another parser
        # could interpret differently.
        self.parser = httptools.HttpResponseParser(self)
        self.parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_transfer_encoding=True,
            lenient_data_after_close=True,
            lenient_optional_cr_before_lf=True,
        )

    def on_header(self, name: bytes, _value: bytes) -> None:
        self.has_status_line = True
        self.has_length = self.has_length or name.lower() == b"content-length"

    def on_headers_complete(self) -> None:
        self.has_status_line = True
        # Use the status of the last response, because interim responses such as 100 Continue may precede it.
        self.status = self.parser.get_status_code()
        self.has_head = self.status >= FINAL_STATUS

    def on_body(self, data: bytes) -> None:
        self.page += data[: MAX_CONTENT_BYTES - len(self.page)]
        if self.digest:
            self.digest.update(data)

    def on_message_complete(self) -> None:
        self.is_whole = self.is_whole or self.has_head

    def read(self, data: bytes) -> None:
        """Feed data to the parser. Raises ``_WrongError`` if the data is not HTTP."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # another protocol follows status 101, which monit accepts as an answer
            self.has_head = self.is_whole = True
        except httptools.HttpParserError as exc:
            if not self.has_status_line:
                raise _WrongError("does not answer like an http server") from exc
            # A header is invalid, but the status counts, as in monit.
            self.status = self.parser.get_status_code()
            self.has_head = self.is_whole = True


async def _http(line: _Conversation, connection: Connection) -> None:
    """Send one GET request and check the response. Redirects are not followed. Any status of 400 or above is a failure,
    even 401 and 403.
    """
    protocol, path = connection.protocol, requested(connection.protocol)
    shown = path.partition("?")[0]  # the query may be secret
    head = [f"GET {path} HTTP/1.1", f"Host: {protocol.hostheader or _host(connection)}", "Accept: */*"]
    head += ["User-Agent: monit/5.2.5", "Connection: close"]
    if protocol.credentials:
        secret = base64.b64encode(protocol.credentials.encode("utf-8", "surrogateescape")).decode()
        head.append(f"Authorization: Basic {secret}")
    await line.send("".join(f"{each}\r\n" for each in [*head, ""]).encode("utf-8", "surrogateescape"))
    response, received = PageReader(protocol), 0
    while not response.has_head:
        if received > MAX_HEAD_BYTES or not await line.more():
            raise _WrongError("does not answer like an http server")
        received += len(line.received)
        response.read(line.taken())
    if response.status >= BAD_STATUS:
        raise _WrongError(f"answers {shown} with status {response.status}")
    while not response.is_whole and await line.more():
        response.read(line.taken())
    if protocol.content:
        search = partial(posix_regex.compiled(protocol.content).search, bytes(response.page))
        if await blocking.call(f"page of {where(connection)}", search) == protocol.is_negated:
            raise _WrongError(f"answers {shown} {'with' if protocol.is_negated else 'without'} {protocol.content!r}")
    # Like monit, compare the checksum only if the headers state the length of the page.
    if response.digest and response.has_length and response.digest.hexdigest() != protocol.checksum:
        raise _WrongError(f"answers {shown} with another checksum")


def requested(protocol: Protocol) -> str:
    """Return a request's path, in which the same characters are percent-encoded as in monit, including ``%``."""
    path = protocol.request or "/"
    return urllib.parse.quote(path.encode("utf-8", "surrogateescape"), safe="!$&'()*+,-./:;=?@_~")


def _host(connection: Connection) -> str:
    host = connection.host or "localhost"
    return host if connection.unixsocket or connection.port == HTTP_PORT else f"{host}:{connection.port}"


# --- echo requests ----------------------------------------------------------------------------------------------------


async def echo(host: str, test: Echo) -> str | None:
    """Return why a host does not answer echo requests, "" if it does, or None if this container may not send them."""
    allowed = test.timeout or NET_TIMEOUT
    try:
        endpoints = await _addresses(host, 0, socket.SOCK_DGRAM, allowed)
        address = next((address for family, address in endpoints if family is socket.AF_INET), None)
        if address is None:
            return f"{host} has no address of IPv4"
        opened = _echoing()
        if opened is None:
            return None
        with opened:
            for number in range(test.count):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(allowed):
                        await _answered(opened, address, number)
                        return ""
    except TimeoutError:
        return f"cannot look up {host} within {allowed} seconds"
    except OSError as exc:
        return f"cannot send an echo request to {host}: {exc.strerror or exc}"
    return f"{host} does not answer {test.count} echo requests"


def _echoing() -> socket.socket | None:
    """Open a socket for echo requests. A raw socket is used only if this user may not open an unprivileged ICMP socket.
    Return None if neither kind is allowed.
    """
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        with contextlib.suppress(PermissionError):
            return socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK, socket.IPPROTO_ICMP)
    return None


async def _answered(sock: socket.socket, address: Address, number: int) -> None:
    """Send one echo request and wait for the matching reply. Other messages are ignored."""
    loop, mark = asyncio.get_running_loop(), os.urandom(16)
    ident = os.getpid() & 0xFFFF
    head = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, ident, number)
    checksum = _checksum(head + mark)
    await loop.sock_sendto(sock, struct.pack("!BBHHH", ECHO_REQUEST, 0, checksum, ident, number) + mark, address)
    while True:
        answer = await loop.sock_recv(sock, CHUNK)
        if sock.type == socket.SOCK_RAW:  # a raw socket also returns the IP header
            answer = answer[(answer[0] & 0x0F) * 4 :]
        if answer[:1] == bytes([ECHO_REPLY]) and answer[8:] == mark:
            return


def _checksum(message: bytes) -> int:
    """Return the checksum of a message with an even length (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF ^ (total + (total >> 16)) & 0xFFFF
