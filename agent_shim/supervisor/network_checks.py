"""Carries out monit's network tests: ``failed host … port``, ``unixsocket``, ``url`` and ``icmp``.

A probe has a single timeout, which includes the name lookup. Probes read no more than necessary, and never block the
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
    endpoint = f"{connection.host} port {connection.port}{' (udp)' if connection.is_udp else ''}"
    return f"unix socket {connection.unixsocket}" if connection.unixsocket else endpoint


async def probe(connection: Connection) -> str:
    """Test a connection. Return "" on success, otherwise the reason for the failure."""
    target = where(connection)
    allowed = connection.timeout or NET_TIMEOUT  # a timeout of 0 means the default
    try:
        async with asyncio.timeout(allowed), _opened(connection) as conversation:
            if connection.protocol.name == "generic":
                await _dialogue(conversation, connection.protocol)
            elif connection.protocol.name == "http":
                await _http(conversation, connection)
            elif connection.is_udp:
                await _require_not_refused(conversation)
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
    ``OSError`` if no address does.
    """
    kind = socket.SOCK_DGRAM if connection.is_udp else socket.SOCK_STREAM
    timeout = connection.timeout or NET_TIMEOUT
    if connection.unixsocket:
        endpoints: list[tuple[socket.AddressFamily, Address]] = [(socket.AF_UNIX, connection.unixsocket)]
    else:
        endpoints = await _addresses(connection.host, connection.port, kind, timeout)
    refused: OSError = OSError(0, "it has no address")  # raised if there are no endpoints; ``probe`` quotes the message
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
    """Connect a socket. Raises ``OSError``. The caller limits the total time."""
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
    """Look up a host's addresses. If the name server does not answer, only probes of this host are delayed. Raises
    ``OSError``.
    """
    port &= 0xFFFF  # use only the low 16 bits, as monit's htons and the C library do
    if family := network.family_of(host):
        return [(family, (host, port))]
    look_up = partial(socket.getaddrinfo, host, port, type=kind)
    try:
        found = await blocking.call(f"look up {host}", look_up, timeout=timeout)
    except UnicodeError as exc:  # a label of the host name is empty or too long
        raise OSError(errno.EINVAL, "no host can have this name") from exc
    return [(family, address) for family, _, _, _, address in found]


# --- protocols --------------------------------------------------------------------------------------------------------


async def _require_not_refused(conversation: _Conversation) -> None:
    """Send one byte in a UDP packet, and wait up to ``REFUSAL_S`` seconds for an answer. Raises ``OSError`` if the
    kernel reports that nobody is listening.
    """
    await conversation.send(b"\0")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_S):
            await conversation.more()


async def _dialogue(conversation: _Conversation, protocol: Protocol) -> None:
    """Carry out the ``send`` and ``expect`` steps in order. An expected answer may arrive in pieces."""
    for verb, text in protocol.dialogue:
        if verb == "send":
            await conversation.send(wire_text(text))
            continue
        pattern = posix_regex.compiled(text)
        while not pattern.search(bytes(conversation.received)):
            if len(conversation.received) > MAX_HEAD_BYTES or not await conversation.more():
                raise _WrongError(f"does not answer {text!r}")
        conversation.received = b""


def wire_text(text: str) -> bytes:
    r"""Encode a ``send`` string. ``\0xHH`` stands for the byte HH, and all other characters are sent as written in the
    file.
    """
    raw = text.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\0x([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), raw)


class PageReader:
    """Reads an HTTP response. The parser calls the methods that begin with ``on_``. The whole page has to be read only
    if ``wanted`` contains a pattern or a checksum.
    """

    def __init__(self, wanted: Protocol) -> None:
        self.status = 0
        self.has_status_line = False
        """True if the response is certainly HTTP, even if an invalid header follows."""
        self.has_head = False
        """True once the headers of the final response have been read."""
        self.is_whole = not (wanted.content or wanted.checksum)
        """True once everything that has to be read has been read."""
        self.has_length = False
        """True if the headers state the length of the page."""
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
        self.has_status_line = True  # the parser reports headers only after a valid status line
        self.has_length = self.has_length or name.lower() == b"content-length"

    def on_headers_complete(self) -> None:
        self.has_status_line = True
        # Use the status of the last response, because interim responses such as 100 Continue may precede it.
        self.status = self.parser.get_status_code()
        self.has_head = self.status >= FINAL_STATUS

    def on_body(self, data: bytes) -> None:
        # Only the beginning of the page is searched for the pattern, but the checksum covers the whole page.
        self.page += data[: MAX_CONTENT_BYTES - len(self.page)]
        if self.digest:
            self.digest.update(data)

    def on_message_complete(self) -> None:
        self.is_whole = self.is_whole or self.has_head  # an interim response does not count

    def read(self, data: bytes) -> None:
        """Feed data to the parser. Raises ``_WrongError`` if the data is not HTTP."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the server switches to another protocol, which monit accepts
            self.has_head = self.is_whole = True
        except httptools.HttpParserError as exc:
            if not self.has_status_line:
                raise _WrongError("does not answer like an http server") from exc
            # The rest of the response is invalid. As in monit, the status is used anyway.
            self.status = self.parser.get_status_code()
            self.has_head = self.is_whole = True


async def _http(conversation: _Conversation, connection: Connection) -> None:
    """Send a GET request and check the response. Redirects are not followed. Any status of 400 or above is a failure,
    even 401 and 403.
    """
    protocol, path = connection.protocol, requested(connection.protocol)
    shown = path.partition("?")[0]  # the query may be secret
    head = [f"GET {path} HTTP/1.1", f"Host: {protocol.hostheader or _host(connection)}", "Accept: */*"]
    head += ["User-Agent: monit/5.2.5", "Connection: close"]
    if protocol.credentials:
        secret = base64.b64encode(protocol.credentials.encode("utf-8", "surrogateescape")).decode()
        head.append(f"Authorization: Basic {secret}")
    await conversation.send("".join(f"{each}\r\n" for each in [*head, ""]).encode("utf-8", "surrogateescape"))
    response, received = PageReader(protocol), 0
    while not response.has_head:
        if received > MAX_HEAD_BYTES or not await conversation.more():
            raise _WrongError("does not answer like an http server")
        received += len(conversation.received)
        response.read(conversation.taken())
    if response.status >= BAD_STATUS:
        raise _WrongError(f"answers {shown} with status {response.status}")
    while not response.is_whole and await conversation.more():
        response.read(conversation.taken())
    if protocol.content:
        search = partial(posix_regex.compiled(protocol.content).search, bytes(response.page))
        if await blocking.call(f"page of {where(connection)}", search) == protocol.is_negated:
            raise _WrongError(f"answers {shown} {'with' if protocol.is_negated else 'without'} {protocol.content!r}")
    # Like monit, compare the checksum only if the headers state the length of the page.
    if response.digest and response.has_length and response.digest.hexdigest() != protocol.checksum:
        raise _WrongError(f"answers {shown} with another checksum")


def requested(protocol: Protocol) -> str:
    """Return a request's path, percent-encoded as by monit, which also encodes ``%``."""
    path = protocol.request or "/"
    return urllib.parse.quote(path.encode("utf-8", "surrogateescape"), safe="!$&'()*+,-./:;=?@_~")


def _host(connection: Connection) -> str:
    """Return the default value of the Host header."""
    host = connection.host or "localhost"
    return host if connection.unixsocket or connection.port == HTTP_PORT else f"{host}:{connection.port}"


# --- echo requests ----------------------------------------------------------------------------------------------------


async def echo(host: str, test: Echo) -> str | None:
    """Send up to ``test.count`` echo requests to a host, one after the other. Return "" as soon as the host answers,
    the reason if it does not, or None if this container is not allowed to send such requests.
    """
    allowed = test.timeout or NET_TIMEOUT
    try:
        endpoints = await _addresses(host, 0, socket.SOCK_DGRAM, allowed)
        address = next((address for family, address in endpoints if family is socket.AF_INET), None)
        if address is None:
            return f"{host} has no address of IPv4"
        sock = _icmp_socket()
        if sock is None:
            return None
        with sock:
            for number in range(test.count):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(allowed):
                        await _exchange_echo(sock, address, number)
                        return ""
    except TimeoutError:
        return f"cannot look up {host} within {allowed} seconds"
    except OSError as exc:
        return f"cannot send an echo request to {host}: {exc.strerror or exc}"
    return f"{host} does not answer {test.count} echo requests"


def _icmp_socket() -> socket.socket | None:
    """Open a socket for echo requests: an unprivileged ICMP socket or, if this user is not allowed to open one, a raw
    socket. Return None if neither is allowed.
    """
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        with contextlib.suppress(PermissionError):
            return socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK, socket.IPPROTO_ICMP)
    return None


async def _exchange_echo(sock: socket.socket, address: Address, number: int) -> None:
    """Send one echo request and wait for its reply. The reply is recognized by its random payload, because the kernel
    replaces the identifier in messages of an unprivileged socket. Other messages are ignored.
    """
    loop, payload = asyncio.get_running_loop(), os.urandom(16)
    ident = os.getpid() & 0xFFFF
    head = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, ident, number)
    checksum = _checksum(head + payload)
    await loop.sock_sendto(sock, struct.pack("!BBHHH", ECHO_REQUEST, 0, checksum, ident, number) + payload, address)
    while True:
        answer = await loop.sock_recv(sock, CHUNK)
        if sock.type == socket.SOCK_RAW:  # remove the IP header, whose length in words is in its first byte
            answer = answer[(answer[0] & 0x0F) * 4 :]
        if answer[:1] == bytes([ECHO_REPLY]) and answer[8:] == payload:  # the header takes up 8 bytes
            return


def _checksum(message: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of a message with an even length."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF ^ (total + (total >> 16)) & 0xFFFF
