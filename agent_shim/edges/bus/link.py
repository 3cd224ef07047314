"""Implements a single connection to a NATS server, with one subscription, using nats-py.

This is the only module that uses nats-py. nats-py may claim to be connected although it has stopped reading or writing
(after an error in one of its tasks, or a late answer to a ping). A connection on which nothing arrives any more is
therefore treated as broken.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import ParseResult, SplitResult

from agent_shim.core import lean_imports
from agent_shim.core.errors import BusError
from agent_shim.core.settings import NATS_PORT, bus_address
from agent_shim.core.wire import MAX_REPLY_BYTES
from agent_shim.edges.bus import tls
from agent_shim.host import blocking, clock, network

# Import ``nats.aio.client`` with stand-ins for the other modules. The real ones would use 14 MB and are needed only for
# websockets, JetStream and looking up nats-py's version.
lean_imports.preload("nats.aio.client", "aiohttp", "multidict", "nats.js", "importlib.metadata")
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import Transport

NEVER_S: Final = 10 * 365 * 24 * 3600
"""A very long interval, which turns off nats-py's timers."""

MAX_SUBJECT_BYTES: Final = 1024
"""Maximum length of a subject. It is well below the line length of 4096 characters (max_control_line) above which
nats-server closes a connection.
"""
MAX_UNREAD_BYTES: Final = 8 * 1024 * 1024
"""Maximum number of bytes that a server may send without completing a message (1 MiB at most) or answering a ping.
Beyond that, the connection is closed, because nats-py scans an unfinished line from the start whenever data arrives,
which blocks the event loop.
"""
MAX_BACKLOG_BYTES: Final = 8 * 1024 * 1024
"""Maximum number of bytes queued for a slow server. Beyond that, publishing fails, as in nats.go."""
LOOKUP_TIMEOUT_S: Final = 30.0
"""Timeout for looking up the server's name. The C library gives up after a similar time."""

GREETING: Final = b'INFO {"tls_required":true,"max_payload":%d}\r\n' % MAX_REPLY_BYTES
"""The greeting that nats-py receives instead of the server's real greeting, which arrives before TLS and could
therefore be forged.
"""


async def look_up(url: ParseResult | SplitResult) -> list[str]:
    """Look up the addresses of a URL's host, in random order. Raises ``OSError``."""
    host = url.hostname or ""
    if network.family_of(host):
        return [host]
    ask = partial(socket.getaddrinfo, host, url.port, type=socket.SOCK_STREAM)
    # This is urgent, because the agent must find its bus even if all other threads are waiting for disks that hang.
    entries = await blocking.call(f"look up {host} for the bus", ask, timeout=LOOKUP_TIMEOUT_S, is_urgent=True)
    found = {str(address[0]) for *_, address in entries}
    return random.sample(sorted(found), len(found))


def host_port(url: str) -> str:
    """Return the host and port of an address, without its password."""
    return bus_address(url).netloc.rpartition("@")[2] or "an unreadable address"


class _Stream(asyncio.StreamReaderProtocol):
    """Closes the connection when the server closes its half. Otherwise asyncio would log a warning, because TLS has no
    half-closed state.
    """

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader)

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Wire(Transport):
    """The TCP and TLS transport of one connection. It replaces nats-py's own transport, which has several defects.

    nats-py's transport resolves names in threads that delay the exit, trusts data received before TLS, waits without a
    deadline for a server that accepts no data, and needs 30 s to close a dead connection.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._reader = asyncio.StreamReader()
        self._pipe: asyncio.Transport | None = None
        self._is_secure = False
        self.has_greeted = False
        """True if the server has sent anything. This shows that the server is running even if the connection fails."""
        self.peer = ""
        """The server's address."""
        self._read_by: asyncio.Task[Any] | None = None
        """nats-py's read task. It ends if it cannot decode what it has read."""
        self.reads = 0
        """How many times nats-py has read data or the end of the stream."""
        self.unread = 0
        """Bytes received since the link last got a message or an answer to a ping."""

    async def dial(self, url: SplitResult, timeout_s: float) -> None:
        """Connect to the first of the host's addresses that answers within ``timeout_s`` seconds. Raises
        ``OSError``.
        """
        addresses, loop = await look_up(url), asyncio.get_running_loop()
        for number, address in enumerate(addresses, 1):
            try:
                async with asyncio.timeout(timeout_s):
                    self._pipe, stream = await loop.create_connection(_Stream, address, url.port or NATS_PORT)
                    self._reader = stream.reader
            except OSError:
                if number == len(addresses):
                    raise
            else:
                self.peer = address
                return

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Do nothing when nats-py asks to connect, because ``dial`` has already connected."""

    async def connect_tls(self, uri: str | ParseResult, ssl_context: ssl.SSLContext, *_: int, **__: int) -> None:
        """Upgrade to TLS with a new reader.

        Plaintext received before the handshake must not be read as data from the authenticated server.
        """
        assert self._pipe is not None
        if self._pipe.is_closing():  # start_tls would wait for an answer that never comes
            raise ConnectionResetError("the server has closed the connection")
        stream, host = _Stream(), uri if isinstance(uri, str) else uri.hostname
        loop = asyncio.get_running_loop()
        self._pipe = await loop.start_tls(self._pipe, stream, ssl_context, server_hostname=host)
        assert self._pipe is not None
        stream.reader.set_transport(self._pipe)
        self._reader = stream.reader
        tls.check_server_name(self._pipe.get_extra_info("ssl_object"))
        self._is_secure = True

    async def readline(self) -> bytes:
        """Read the next line of the handshake.

        The greeting, which arrives before TLS, must offer TLS and is replaced by ``GREETING``. Later INFO lines from
        the server are skipped.
        """
        while True:
            line = await self._reader.readline()
            self.has_greeted = self.has_greeted or line != b""
            if not line.startswith(b"INFO "):
                return line
            if not self._is_secure:
                if b'"tls_required":true' not in line.replace(b" ", b""):
                    raise nats_errors.SecureConnWantedError
                return GREETING

    async def read(self, buffer_size: int) -> bytes:
        """Read data for nats-py's read task. If the connection or that task ends, report the end to the link."""
        if self._read_by is None:
            self._read_by = asyncio.current_task()
            assert self._read_by is not None
            self._read_by.add_done_callback(lambda _: self._on_end("nats-py has stopped reading"))
        try:
            data = await self._reader.read(buffer_size)
        except OSError as exc:
            self._on_end(str(exc) or type(exc).__name__)
            raise
        self.reads += 1
        self.unread += len(data)
        if not data or self.unread > MAX_UNREAD_BYTES:
            self._on_end("the server sends a message without an end" if data else "the server has closed it")
        return data

    @property
    def backlog(self) -> int:
        """Number of bytes that the server has not accepted yet."""
        return 0 if self._pipe is None else self._pipe.get_write_buffer_size()

    def write(self, payload: bytes) -> None:
        """Queue data, and end the connection if the server does not accept it."""
        if self._pipe is not None:
            self._pipe.write(payload)
        # Only answers to the server's pings can exceed this limit, because ``Link.send`` has a lower limit, at which it
        # rejects messages.
        if self.backlog > MAX_BACKLOG_BYTES + 2 * MAX_REPLY_BYTES:
            self._on_end("the server does not accept data")

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def drain(self) -> None:
        """Do nothing, because ``Link.send`` limits the backlog."""

    def at_eof(self) -> bool:
        return self._reader.at_eof()

    def close(self) -> None:
        """Close the connection without TLS's ``close_notify``, and drop the references that keep the TLS buffers in
        memory.
        """
        if self._pipe is not None:
            self._pipe.abort()
            self._pipe, self._reader = None, asyncio.StreamReader()
            self._reader.feed_eof()

    async def wait_closed(self) -> None:
        """Do nothing, because ``close`` aborts the connection."""

    def __bool__(self) -> bool:
        """True even before the connection is made. Otherwise, nats-py would replace this transport with its own."""
        return True


class Link:
    """A single connection with its subscription, from the handshake until it is closed. A link is never reused."""

    def __init__(self, url: str, on_message: Callable[[bytes], None], on_denied: Callable[[str], None]) -> None:
        self.url = bus_address(url)
        self.address = host_port(url)
        self._given_url = url
        self._on_message = on_message
        self._on_denied = on_denied
        self._denial: Exception | None = None
        """The last error with which the server denied a publication. nats-py stores it even though the connection stays
        open.
        """
        self._answers = 0
        """How many pings the server has answered."""
        self._messages = 0
        """How many requests nats-py has handed over."""
        self._subscription: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Gets the reason when the connection ends."""
        self.wire = _Wire(self.end)
        self._client = Client()
        # Set a private attribute, because nats-py has no parameter for a transport. No other private name is used.
        self._client._transport = self.wire  # noqa: SLF001

    async def open(self, context: ssl.SSLContext, agent_id: str, dial_timeout_s: float) -> None:
        """Connect and subscribe. Returns once the server has confirmed the subscription. ``dial_timeout_s`` limits only
        the TCP connection, so the caller must limit the whole call.
        """
        if not self.url.hostname:
            raise BusError("the address must be nats://HOST:PORT, with a percent-encoded password")
        await self.wire.dial(self.url, dial_timeout_s)
        # Turn off nats-py's reconnection, timers and size limits, because ``NatsBus`` and this class have their own.
        await self._client.connect(
            [self._given_url],
            error_cb=self._failed,
            closed_cb=self._closed,
            discovered_server_cb=self._forget_servers,
            name=agent_id,
            allow_reconnect=False,
            connect_timeout=NEVER_S,
            ping_interval=NEVER_S,
            pending_size=-1,
            flusher_queue_size=0,
            tls=context,
        )
        if not self._client.is_connected:
            raise BusError("the server does not answer like a NATS server")
        self._subscription = await self._client.subscribe(f"agent.{agent_id}", cb=self._received)
        await self.flushed(NEVER_S)
        if self.is_over:
            raise BusError(self._ended.result())

    @property
    def is_over(self) -> bool:
        return self._ended.done()

    async def over(self) -> str:
        """Wait until the connection has ended. Return the reason."""
        await asyncio.wait({self._ended})
        return self._ended.result()

    def end(self, why: str) -> None:
        """Mark the connection as ended, with ``why`` as the reason. If called several times, the first reason is kept,
        but an error from the server takes precedence.
        """
        if not self._ended.done():
            reported = self._client.last_error
            # nats-py also sets ``last_error`` when the server denies a publication, but that does not end the
            # connection.
            self._ended.set_result(why if reported in (None, self._denial) else str(reported))

    async def send(self, subject: str, data: bytes) -> None:
        """Queue a message.

        Raises ``BusError`` if the connection has ended or too much is queued, or if the server would close the
        connection because of the message.
        """
        if self.is_over:
            raise BusError(self._ended.result())
        name = subject.encode()
        if name.split() != [name]:  # the subject is empty or contains white space
            raise BusError("a subject must be one word")
        if len(name) > MAX_SUBJECT_BYTES:
            raise BusError(f"a subject of {len(name)} bytes would close the connection")
        if len(data) > MAX_REPLY_BYTES:
            raise BusError(f"a message of {len(data)} bytes exceeds the limit of a server, {MAX_REPLY_BYTES}")
        if self._client.pending_data_size + self.wire.backlog > MAX_BACKLOG_BYTES:
            raise BusError("the server does not accept data")
        try:
            await self._client.publish(subject, data)
        except nats_errors.Error as exc:
            raise BusError(str(exc)) from exc

    async def flushed(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until the server has processed all data sent so far.

        Returns False if the timeout expires or the connection ends first.
        """
        before, ping = self._answers, self._send_ping()
        ends: set[asyncio.Future[Any]] = {ping, self._ended}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        # A ping can also be done without an answer, namely if nats-py has stopped reading.
        return ping.done() and self._answers > before and not self.is_over

    async def watch(self, interval: float, unanswered: int) -> None:
        """Send a ping every ``interval`` seconds, in step with the agent's other timers. End the connection after
        ``unanswered`` consecutive intervals in which no ping was answered, or in which requests were waiting but none
        was handled.
        """
        silent = 0
        await asyncio.sleep(clock.until_beat(interval))
        while silent < unanswered:
            answers, messages = self._answers, self._messages
            self._send_ping()
            await asyncio.sleep(clock.until_beat(interval))
            is_waiting = self._subscription is not None and self._subscription.pending_msgs > 0
            is_stuck = is_waiting and self._messages == messages
            silent = silent + 1 if is_stuck or self._answers == answers else 0
        self.end(f"no answer to {silent} pings")

    async def close(self) -> None:
        """Close the connection immediately."""
        self.end("closed")
        self.wire.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Exception):  # nats-py may raise any exception if its connection is already gone
            await self._client.close()

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that is cancelled when the connection is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send_ping(self) -> asyncio.Task[None]:
        """Send a ping after all queued data. The returned task finishes when the answer arrives."""
        return self.begin(self._round_trip(), "bus ping")

    async def _round_trip(self) -> None:
        """Wait for the answer to a ping. No timeout is used, because nats-py stops reading if an answer arrives after
        its timeout.
        """
        before = self.wire.reads
        try:
            await self._client.flush(NEVER_S)  # sends the ping
        except nats_errors.Error as exc:
            self.end(str(exc))
        if self.wire.reads > before:  # otherwise nats-py has stopped reading, and flush has not waited for an answer
            self._answers += 1
            self.wire.unread = 0

    async def _received(self, message: Msg) -> None:
        """Pass a request that nats-py has received to ``on_message``."""
        self.wire.unread = 0
        self._messages += 1
        self._on_message(message.data)

    async def _failed(self, exc: Exception) -> None:
        """Handle the errors that nats-py reports. Errors not handled here either end the connection anyway or are
        harmless.
        """
        text = str(exc).removeprefix("nats: ")
        if text.startswith("permissions violation for publish"):
            self._denial = exc
            self._on_denied(text)
        elif text.startswith("permissions violation"):
            self.end(text)

    async def _closed(self) -> None:
        """Mark the connection as ended, because nats-py has closed it after an error."""
        self.end("nats-py has closed it")

    async def _forget_servers(self) -> None:
        """Discard the server addresses that a cluster announces. The agent uses only the addresses in the settings, but
        nats-py would collect all announced ones.
        """
        self._client.set_server_pool([self._given_url])
