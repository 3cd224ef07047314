"""Network tests of monit: ``failed host … port``, ``unixsocket`` and ``icmp``.

Each probe has one timeout for everything, including the name look-up, reads no more than necessary, and never blocks
the event loop. Protocols other than http and send/expect are judged by their greeting, or by the connection alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, TypeAlias

import httptools

from agent_shim.host.daemon_thread import run_in_daemon_thread
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit.ast import NET_TIMEOUT, Connection, Ping, Protocol

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[Any, ...] | str
"""Address in the form of the socket module: host and port, or a path."""

MAX_HEAD_BYTES: Final = 16 * 1024
"""Maximum size of a greeting, an expected answer or an http response head."""
MAX_PAGE_BYTES: Final = 1024 * 1024
"""Maximum size of a page read for its checksum or content."""
CHUNK: Final = 16 * 1024
UDP_REFUSAL_TIMEOUT_S: Final = 2.0
"""Seconds for a host to report a closed UDP port."""
FINAL_STATUS: Final = 200
"""Lower ones are interim responses."""
BAD_STATUS: Final = 400

GREETINGS: Final = {
    "ftp": b"220",
    "imap": b"* OK",
    "lmtp": b"220",
    "nntp": b"20",
    "pop": b"+OK",
    "smtp": b"220",
    "ssh": b"SSH-",
}


class _WrongError(Exception):
    """The answer violates the rule."""


def where(connection: Connection) -> str:
    """Describe the endpoint."""
    if connection.unixsocket:
        return f"unix socket {connection.unixsocket}"
    kind = "" if connection.type == "tcp" else " (udp)"
    return f"{connection.host} port {connection.port}{kind}"


async def probe(connection: Connection) -> str:
    """Return the reason of a failed connection; empty on success."""
    place = where(connection)
    allowed = connection.timeout or NET_TIMEOUT
    try:
        async with asyncio.timeout(allowed), _opened(connection) as line:
            await _speak(line, connection)
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
    kind = socket.SOCK_DGRAM if connection.type == "udp" else socket.SOCK_STREAM
    if connection.unixsocket:
        places: list[tuple[socket.AddressFamily, Address]] = [(socket.AF_UNIX, connection.unixsocket)]
    else:
        places = await _addresses(connection.host, connection.port)
    refused: OSError = OSError(0, "it has no address")
    for family, address in places:
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
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
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await run_in_daemon_thread(look_up, f"look up {host}")
    return [(family, address) for family, _, _, _, address in found]


# --- protocols --------------------------------------------------------------------------------------------------------


async def _speak(line: _Line, connection: Connection) -> None:
    protocol = connection.protocol
    if protocol.name == "generic":
        await _dialogue(line, protocol)
    elif protocol.name in ("http", "apache-status"):
        await _http(line, connection)
    elif connection.type == "udp":
        await _require_no_refusal(line)
    elif greeting := GREETINGS.get(protocol.name):
        while len(line.received) < len(greeting) and await line.more():
            pass
        if not line.received.startswith(greeting):
            raise _WrongError(f"does not greet like {protocol.name}")


async def _require_no_refusal(line: _Line) -> None:
    """Raise if the host refuses the datagram; a UDP service need not answer."""
    await line.send(b"\0")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UDP_REFUSAL_TIMEOUT_S):
            await line.more()


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


class _Page:
    """Parser events of an http response."""

    def __init__(self) -> None:
        self.status = 0
        self.has_status_line = False
        self.body = bytearray()
        self.is_whole = False
        # Lenient like monit: a probe forwards nothing that another parser could read differently.
        self.parser = httptools.HttpResponseParser(self)
        self.parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_transfer_encoding=True,
            lenient_chunked_length=True,
            lenient_data_after_close=True,
            lenient_optional_cr_before_lf=True,
        )

    def on_header(self, _name: bytes, _value: bytes) -> None:
        self.has_status_line = True

    def on_headers_complete(self) -> None:
        self.has_status_line = True
        # The last status counts, after interim ones such as 100 Continue.
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.is_whole = self.status >= FINAL_STATUS

    @property
    def has_head(self) -> bool:
        return self.status >= FINAL_STATUS or self.is_whole

    def read(self, data: bytes) -> None:
        """Feed the parser; raises ``_WrongError`` if the data is not http."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # status 101: http ends here, and monit takes it for an answer
            self.is_whole = True
        except httptools.HttpParserError as exc:
            if not self.has_status_line:
                raise _WrongError("does not answer like an http server") from exc
            # An invalid header: monit still counts the status, and there is no page.
            self.status = self.parser.get_status_code()
            self.is_whole = True


async def _http(line: _Line, connection: Connection) -> None:
    """Send one GET; follows no redirect, and fails on any status from 400 on, even a missing permission."""
    protocol = connection.protocol
    path = protocol.request or ("/server-status?auto" if protocol.name == "apache-status" else "/")
    host = protocol.hostheader or connection.host or "localhost"
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nUser-Agent: monit/5.2.5\r\nConnection: close\r\n\r\n"
    await line.send(head.encode("utf-8", "surrogateescape"))
    page, received = _Page(), 0
    while not page.has_head:
        if received > MAX_HEAD_BYTES or not await line.more():
            raise _WrongError("does not answer like an http server")
        received += len(line.received)
        page.read(line.taken())
    if page.status >= BAD_STATUS:
        raise _WrongError(f"answers {path} with status {page.status}")
    if protocol.checksum or protocol.content:
        # Count encoded bytes: one-byte chunks would otherwise be read without end.
        while not page.is_whole and received < MAX_HEAD_BYTES + MAX_PAGE_BYTES and await line.more():
            received += len(line.received)
            page.read(line.taken())
        _judge_page(bytes(page.body[:MAX_PAGE_BYTES]), protocol, path)


def _judge_page(page: bytes, protocol: Protocol, path: str) -> None:
    if protocol.checksum:
        name = "md5" if len(protocol.checksum) == hashlib.md5(usedforsecurity=False).digest_size * 2 else "sha1"
        if hashlib.new(name, page, usedforsecurity=False).hexdigest() != protocol.checksum:
            raise _WrongError(f"serves a page at {path} that does not match its checksum")
    if protocol.content:
        is_there = posix_regex.compiled(protocol.content).search(page)
        if is_there != (protocol.content_operator == "="):
            raise _WrongError(f"has {'no ' if not is_there else ''}{protocol.content!r} in the page {path}")


# --- echo requests ----------------------------------------------------------------------------------------------------


async def ping(address: str, test: Ping) -> str | None:
    """Return why no echo request was answered; empty if one was, None without permission to send any."""
    allowed = test.timeout or NET_TIMEOUT
    try:
        async with asyncio.timeout(allowed):
            places = await _addresses(address, 0)
        family, place = places[0]
    except (TimeoutError, OSError, IndexError) as exc:
        return f"icmp failed: {address} has no address: {exc}"
    try:
        sock = _echo_socket(family)
    except OSError as exc:
        logger.info("cannot send echo requests to %s: %s", address, exc.strerror)
        return None
    with sock:
        for number in range(max(1, test.count)):
            if await _is_answered(sock, family, place, number, allowed):
                return ""
    return f"icmp failed: {address} answered none of {test.count} echo requests"


def _echo_socket(family: socket.AddressFamily) -> socket.socket:
    """Open a ping socket of the kernel if the group permits, else a raw socket."""
    protocol = socket.getprotobyname("ipv6-icmp") if family is socket.AF_INET6 else socket.IPPROTO_ICMP
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        return socket.socket(family, socket.SOCK_DGRAM | flags, protocol)
    except OSError:
        return socket.socket(family, socket.SOCK_RAW | flags, protocol)


async def _is_answered(
    sock: socket.socket, family: socket.AddressFamily, place: Address, number: int, allowed: float
) -> bool:
    request, reply = (128, 129) if family is socket.AF_INET6 else (8, 0)
    mark = os.urandom(16)
    head = struct.pack("!BBHHH", request, 0, 0, os.getpid() & 0xFFFF, number)
    if family is socket.AF_INET:
        head = head[:2] + struct.pack("!H", checksum(head + mark)) + head[4:]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(allowed):
            await loop.sock_sendto(sock, head + mark, place)
            while True:
                packet = await loop.sock_recv(sock, CHUNK)
                # A raw IPv4 socket includes the IP header; it also receives our own request, which is no reply.
                start = (packet[0] & 15) * 4 if sock.type == socket.SOCK_RAW and family is socket.AF_INET else 0
                if packet[start : start + 1] == bytes([reply]) and packet.endswith(mark):
                    return True
    except (TimeoutError, OSError):
        return False


def checksum(data: bytes) -> int:
    """Compute the Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(padded[at : at + 2], "big") for at in range(0, len(padded), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
