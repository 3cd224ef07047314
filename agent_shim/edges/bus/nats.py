"""NATS connection of the agent: one subscription, replies to the subject in the request, automatic recovery.

The only module that uses nats-py, and of that client only a single connection from handshake to close. A connection
with any broken part is discarded, and a new client replaces it. Reconnection, liveness checks, back-off and credential
rotation are implemented here, because those of nats-py can give up or stop receiving without an error.

Subjects and permissions are those of nats-sync (``nats_sync/nats_auth_config.rb``), delays those of the Go agent
(``mbus/nats_handler.go``) with jitter. All times are seconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import socket
import ssl
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn
from urllib.parse import ParseResult, SplitResult, urlsplit

import msgspec

from agent_shim.core import lean_imports, wire
from agent_shim.core.errors import ActionError, BusError, CredentialsError, ShimError
from agent_shim.core.settings import Mbus, bus_address
from agent_shim.edges.bus import Handle, Stats, tls
from agent_shim.host import clock, network
from agent_shim.host.daemon_thread import run_in_daemon_thread

# 15 MB: for websockets (aiohttp), a version (importlib.metadata), JetStream (nats.js) and clusters (ipaddress) only.
_LATE: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "dataclasses": {"dataclass": lean_imports.as_struct},
    "inspect": lean_imports.FEW_OF_INSPECT,
    "ipaddress": {},
    "pkgutil": {"extend_path": lambda path, _: path},  # no other package extends nats
}
with lean_imports.without("aiohttp", "importlib.metadata", empty=["nats.js"], late=_LATE):
    from nats import errors as nats_errors
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport
    from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 10_000
MAX_SUBJECT_BYTES: Final = 1024
"""nats-server closes a connection that sends a line of more than 4096 characters (max_control_line)."""
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
"""Concurrent requests, in number and size in memory; requests beyond that are dropped, as in nats.go."""
PINGS: Final = 1000
MAX_PING_BYTES: Final = 512
"""Pings beyond that number: other requests may wait for long, and an agent without a pong counts as lost."""
MAX_SEEN: Final = 100_000
"""Entries for the messages of a rotation, two or three for each; a copy of one beyond is another request."""

RECEIVED_BYTES: Final = 32 * 1024
"""Buffer of a connection: as much as nats-py takes at once."""
MAX_LINE_BYTES: Final = 1024 * 1024
"""Limit of a line of the server, which is searched again with each piece; lists of its cluster are the longest."""
MAX_BACKLOG_BYTES: Final = 8 * 1024 * 1024
"""Bytes queued for a slow server; beyond that, publishing fails, as in nats.go."""

REREAD_AFTER_FAILURES: Final = 3
"""Consecutive failures before the settings are read again: the bus may have moved."""

SWEEP_DELAY_S: Final = 1.0
"""Seconds after the end of a connection before its garbage is collected."""

DISABLED_TIMER_S: Final = 10 * 365 * 24 * 3600
"""Interval that disables the timers of nats-py."""


class Timing(msgspec.Struct, frozen=True):
    """Timeouts and intervals of the bus; tests shrink them."""

    connect: float = 10.0
    """Timeout of one attempt at one address: look-up, TCP, TLS, subscription."""
    dial: float = 4.0
    """Time for TCP within it, for each address of a name: a network that is gone answers no sooner for a longer wait,
    and may be back for the next attempt. The kernel tries thrice in it.
    """
    ping: float = 5.0
    """Interval between pings; after ``unanswered`` missed replies the connection counts as dead: 10 to 15 s."""
    unanswered: int = 2
    step: float = 2.0
    longest: float = 10.0
    """The pause after the n-th consecutive failure is n steps, at most ``longest``, minus a random part.

    The random part is up to four fifths while the pause grows, so that agents that lost their server at the same moment
    do not return in waves; then up to half. The pause must stay well below the 45 s that the Director waits for a
    reply.
    """
    early: float = 60.0
    early_step: float = 1.0
    """Period after the start with a fixed pause of about ``early_step``: the server may not know the agent yet."""
    reply: float = 45.0
    """Time a reply waits for a connection; the Director then gives up."""
    overlap: float = 2.0
    """Time the old connection stays open beside the new one during a rotation."""
    refused: float = 20.0
    unreachable: float = 120.0
    """Time new credentials are tried while the server refuses them, and while only the old ones reach a server."""
    goodbye: float = 1.0
    """Time for the last replies to be sent."""
    look: float = 20.0
    gone: int = 3
    """Interval between look-ups of the server's name; after ``gone`` of them without our peer, reconnect."""

    def pause(self, failures: int, slow: int = 0) -> float:
        """Pause after consecutive failures; 0 failures means that a working connection broke.

        Each of up to two ``slow`` attempts, which a server greeted but did not complete in time, adds the pause once
        more, and likewise the next attempt's timeout: a server to which thousands of agents return at once would
        otherwise only start handshakes that time out.
        """
        if failures == 0:
            return random.uniform(0, self.step)  # noqa: S311 - no secret
        most = min(failures * self.step, self.longest)
        return random.uniform(most / 5 if most < self.longest else most / 2, most) * _slowdown(slow)  # noqa: S311

    def handshake_timeout_s(self, slow: int) -> float:
        """Timeout of an attempt."""
        return self.connect * _slowdown(slow)

    def early_pause(self) -> float:
        """Pause while nats-sync does not know the agent yet."""
        return self.early_step * random.uniform(0.75, 1.25)  # noqa: S311


class _Sweeper:
    """Runs a full garbage collection, one for all requests of a period."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Loop with a scheduled collection."""
        self._asked = False

    def ask(self) -> None:
        """Schedule a collection in ``SWEEP_DELAY_S`` seconds, or up to twice as many."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            self._asked = True
        else:
            self._loop = loop
            loop.call_later(SWEEP_DELAY_S, self._look)

    def _look(self) -> None:
        loop, self._loop = self._loop, None
        gc.collect()
        if self._asked and loop is not None:  # too early for the last request
            self._asked = False
            self._loop = loop
            loop.call_later(SWEEP_DELAY_S, self._look)


_sweeper: Final = _Sweeper()


async def look_up(url: ParseResult | SplitResult) -> list[str]:
    """Look up the addresses of a URL's host, in random order; raises ``OSError``."""
    host = url.hostname or ""
    if network.family_of(host):
        return [host]
    ask = partial(socket.getaddrinfo, host, url.port, type=socket.SOCK_STREAM)
    found = {str(address[0]) for *_, address in await run_in_daemon_thread(ask, f"look up {host}")}
    return random.sample(sorted(found), len(found))


def _slowdown(slow: int) -> int:
    return min(1 + slow, 3)


# --- one connection -------------------------------------------------------------------------------------------------


sslproto.SSLProtocol.max_size = RECEIVED_BYTES  # asyncio holds 256 KiB for each connection


class _OverTls(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Receives into one buffer: without it TLS maps and unmaps 256 KiB of memory for each message.

    Closes the connection when the server closes its half; TLS knows no half-closed state, and asyncio logs it.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._received = memoryview(bytearray(RECEIVED_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._received[:nbytes].tobytes())

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Transport(TcpTransport):
    """TCP and TLS of one connection; closes without a TLS shutdown, which waits 30 s for a dead peer."""

    is_secure = False
    has_greeted = False
    dial = 0.0
    """Timeout of TCP for one address."""
    peer = ""
    """Peer address."""

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002
        """Connect as nats-py does, but with a name look-up that blocks neither the loop nor the exit."""
        addresses = await look_up(uri)
        for number, address in enumerate(addresses, 1):
            try:
                async with asyncio.timeout(self.dial):
                    reader, writer = await asyncio.open_connection(address, uri.port, limit=buffer_size)
            except OSError:
                if number == len(addresses):
                    raise
            else:
                self.peer = address
                self._bare_io_reader = self._io_reader = reader
                self._bare_io_writer = self._io_writer = writer
                return

    async def connect_tls(self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002
        """Upgrade to TLS with a new reader, so that plaintext received earlier is not taken for the server's."""
        assert self._io_writer is not None
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        protocol = _OverTls(reader)
        host: Any = uri if isinstance(uri, str) else uri.hostname
        if host.isascii():
            host = host.encode()  # a name in letters would bring the codec for others, which takes 0.2 MB
        transport = await loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=host)
        assert transport is not None
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        tls.check_server_name(transport.get_extra_info("ssl_object"))
        self.is_secure = True

    async def readline(self) -> bytes:
        """Read the next line of the handshake; skips INFO messages in its midst."""
        while True:
            line: bytes = await super().readline()  # type: ignore[no-untyped-call]
            self.has_greeted = True
            if not (self.is_secure and line.startswith(b"INFO ")):
                return line

    @property
    def backlog(self) -> int:
        """Bytes that the server has not taken yet."""
        return 0 if self._io_writer is None else self._io_writer.transport.get_write_buffer_size()

    def close(self) -> None:
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    async def wait_closed(self) -> None:
        """Return immediately: ``close`` aborts."""

    def __bool__(self) -> bool:
        """True even before the connection, otherwise nats-py replaces the transport with its own."""
        return True


class _Parser(Parser):
    """Ends a connection whose server sends a line or a message without end."""

    async def parse(self, data: bytes = b"") -> None:
        await super().parse(data)
        is_line = self.state == AWAITING_CONTROL_LINE
        if len(self.buf) > MAX_LINE_BYTES if is_line else self.needed > MAX_REQUEST_BYTES:
            raise nats_errors.ProtocolError


class _Link(Client):
    """One connection with its subscription, from handshake to close; never reused."""

    def __init__(self, on_message: Callable[[_Link, bytes], None], on_denied: Callable[[str], None]) -> None:
        super().__init__()
        self.address = ""
        self.url = urlsplit("")
        self._on_message = on_message
        self._on_denied = on_denied
        self._wire = self._transport = _Transport()  # type: ignore[no-untyped-call]
        self._ps = _Parser(self)
        self._parts: list[asyncio.Task[Any]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked = 0
        self._heard = 0
        self._ponged = asyncio.Event()
        self._commands: list[bytes] = []
        """Sent together at the end of this turn of the event loop: many replies are one write."""
        self._commands_bytes = 0

    async def open(self, url: str, context: ssl.SSLContext, agent_id: str, timing: Timing) -> None:
        """Connect and subscribe; returns once the server has confirmed the subscription."""
        self.url = bus_address(url)
        self.address = _host_port(url)
        self._wire.dial = timing.dial
        if not self.url.hostname:
            raise BusError("the address must be nats://HOST:PORT, with a percent-encoded password")
        await self.connect(
            [url],
            error_cb=_ignore,
            name=agent_id,
            allow_reconnect=False,
            connect_timeout=DISABLED_TIMER_S,
            ping_interval=DISABLED_TIMER_S,
            pending_size=-1,
            tls=context,
        )
        if self._reading_task is None or self._flusher_task is None or self._ping_interval_task is None:
            raise BusError("nats-py did not start reading")
        self._attach("reader", self._reading_task)
        self._attach("writer", self._flusher_task)
        self._attach("clock", self._ping_interval_task)
        if not self.is_connected:
            raise BusError("the server does not answer like a NATS server")
        self._queue(f"SUB agent.{agent_id} 1\r\n".encode())
        await self.flushed(DISABLED_TIMER_S)
        if self.is_over:
            raise BusError(self._ended.result())
        self._attach("liveness", asyncio.create_task(self._live(timing), name="bus liveness"))

    @property
    def has_greeted(self) -> bool:
        """True if a server has sent anything: it is alive, whatever the outcome of the connection."""
        return self._wire.has_greeted

    @property
    def is_over(self) -> bool:
        return self._ended.done()

    @property
    def peer(self) -> str:
        """Address of the server."""
        return self._wire.peer

    async def over(self) -> str:
        """Wait for the end of the connection; returns the reason."""
        await asyncio.wait({self._ended})
        return self._ended.result()

    def end(self, why: str) -> None:
        """Mark the connection as ended; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(why)

    def send(self, subject: str, data: bytes) -> None:
        """Queue a message; raises ``BusError`` for one that the server would answer by closing the connection."""
        if self.is_over:
            raise BusError(self._ended.result())
        name = subject.encode()
        if name.split() != [name]:
            raise BusError("a subject is one word")
        if len(name) > MAX_SUBJECT_BYTES:
            raise BusError(f"a subject of {len(name)} bytes would close the connection")
        # Not the limit in the server's INFO: a stranger who tells a low one before TLS would make the agent mute.
        if len(data) > wire.MAX_REPLY_BYTES:
            raise BusError(f"a message of {len(data)} bytes exceeds the limit of a server, {wire.MAX_REPLY_BYTES}")
        if self._commands_bytes + self._wire.backlog > MAX_BACKLOG_BYTES:
            raise BusError("the server does not accept data")
        self._queue(b"PUB %b %d\r\n%b\r\n" % (name, len(data), data))

    def _queue(self, command: bytes) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._send_commands)
        self._commands.append(command)
        self._commands_bytes += len(command)

    def _send_commands(self) -> None:
        commands, self._commands, self._commands_bytes = self._commands, [], 0
        if not self.is_over:
            self._wire.write(b"".join(commands))  # type: ignore[no-untyped-call]

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until the server has processed all sent data, at most ``timeout_s`` seconds.

        Returns False on a timeout or the end of the connection.
        """
        arrived: asyncio.Future[Any] = asyncio.create_task(self._round_trip(), name="bus round trip")
        try:
            await asyncio.wait({arrived, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return arrived.done() and not self.is_over
        finally:
            arrived.cancel()

    async def abandon(self) -> None:
        """Close the connection immediately."""
        self.end("closed")
        self._wire.close()
        await _ended(*self._parts)
        # The client is a reference cycle of few objects, but TLS holds half a megabyte: automatic collection comes
        # late.
        _sweeper.ask()

    def _attach(self, name: str, part: asyncio.Task[Any]) -> None:
        """End the connection with any of its tasks: nats-py calls itself connected even after one has died."""
        self._parts.append(part)
        part.add_done_callback(lambda _: self.end(f"its {name} has stopped"))

    def _ask(self) -> None:
        """Send a ping after all queued data."""
        self._asked += 1
        self._queue(b"PING\r\n")

    async def _round_trip(self) -> None:
        self._ask()
        answered = self._asked
        while self._heard < answered:
            self._ponged.clear()
            await self._ponged.wait()

    async def _live(self, timing: Timing) -> None:
        """Ping on the common beat; the subscription was confirmed just before the first one."""
        silent = 0
        await asyncio.sleep(clock.until_beat(timing.ping))
        while silent < timing.unanswered:
            before = self._heard
            self._ask()
            await asyncio.sleep(clock.until_beat(timing.ping))
            silent = 0 if self._heard > before else silent + 1
        self.end(f"no answer to {silent} pings")

    # Overrides of nats-py methods that would reconnect, queue and close on their own.

    async def _select_next_server(self) -> None:
        self._current_server = self._server_pool[0]
        await self._connect_to_server(self._current_server)

    def _connect_command(self) -> bytes:
        if not self._wire.is_secure:
            raise nats_errors.SecureConnWantedError
        return super()._connect_command()

    async def _process_info(self, info: Any, initial_connection: bool = False) -> None:
        """Ignore the servers of a cluster: the settings have the addresses, and nats-py compares each with all."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:  # noqa: ARG002
        self._on_message(self, data)

    async def _process_pong(self) -> None:
        self._heard += 1
        self._ponged.set()

    async def _process_err(self, err_msg: str) -> None:
        text = err_msg.strip("'")
        if text.startswith("permissions violation for publish"):
            self._on_denied(text)
        else:
            self.end(text)

    async def _process_op_err(self, e: Exception) -> None:
        self.end(str(e) or type(e).__name__)


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that wait inside nats-py until they are done.

    Once is not enough: nats-py swallows cancellations in places, as does ``asyncio.wait_for`` of Python 3.11 if its
    awaitable completes at the same moment.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ignore(_: Exception) -> None:
    """Ignore errors reported by nats-py: they also end the connection or are raised."""


# --- the bus --------------------------------------------------------------------------------------------------------


class NatsBus:
    """Keeps the agent connected to the bus; ``run`` is its root task.

    ``handle`` answers requests, each in a task of its own, started in order of arrival. ``on_connected`` is called for
    each new connection. ``reread`` receives refused credentials and returns those to try next.
    """

    def __init__(
        self,
        agent_id: str,
        mbus: Mbus,
        handle: Handle,
        *,
        on_connected: Callable[[], None] = lambda: None,
        reread: Callable[[Mbus], Mbus] = lambda refused: refused,
        timing: Timing | None = None,
    ) -> None:
        self.stats = Stats()
        self._agent_id = agent_id
        self.mbus = mbus
        """Addresses and credentials in use."""
        self._handle = handle
        self._on_connected = on_connected
        self._reread = reread
        self._timing = timing or Timing()
        self._link: _Link | None = None
        self._linked = asyncio.Event()
        self._attempted = asyncio.Event()
        self._greeted_at = 0
        """Number of the last failed attempt that a server greeted."""
        self._logged: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._answering_bytes = 0
        self._slow = 0
        """Consecutive attempts that a server greeted but did not complete in time."""
        self._rotating = asyncio.Lock()
        """Limits rotation to two connections, which the detection of duplicates requires."""
        self._retiring: asyncio.Task[None] | None = None
        self._seen: Counter[int | tuple[_Link, int]] | None = None

    @property
    def is_connected(self) -> bool:
        """True if, as far as known, a message can be published and a request can arrive now."""
        return self._link is not None and not self._link.is_over

    async def drain(self, timeout_s: float) -> None:
        """Wait until pending requests are answered and sent, at most ``timeout_s`` seconds."""
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=timeout_s)
        if self._link is not None:
            await self._link.flushed(timeout_s)

    async def is_heard(self, timeout_s: float) -> bool:
        """Return True if a server sends anything within ``timeout_s`` seconds, on the connection or during an attempt.

        Opens no connection: ``run`` makes the attempts. An attempt already in progress counts if it succeeds. A
        connection that does not answer in time is closed.
        """
        begun = self.stats.attempts
        try:
            async with asyncio.timeout(timeout_s):
                while self._link is None or self._link.is_over:
                    self._attempted.clear()
                    await self._attempted.wait()
                    if self._greeted_at > begun:
                        return True
        except TimeoutError:
            return False
        link = self._link
        is_answered = await link.flushed(timeout_s)
        if not is_answered:
            link.end(f"no answer to a ping within {timeout_s:g} s")
        return is_answered

    async def wait_connected(self) -> None:
        """Wait for a connection."""
        while not self.is_connected:
            self._linked.clear()
            await self._linked.wait()

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message immediately or raise ``BusError``; nothing is queued, since it would be outdated later."""
        if self._link is None:
            raise BusError(f"cannot publish to {subject!r}: not connected to the bus")
        try:
            self._link.send(subject, data)
        except BusError as exc:
            raise BusError(f"cannot publish to {subject[:100]!r}: {exc}") from exc
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)

    async def run(self) -> NoReturn:
        """Keep the agent connected, endlessly. Cancellation leaves published messages a moment to be sent."""
        early_until = time.monotonic() + self._timing.early
        failures = 0
        try:
            while True:
                try:
                    if self._link is None:
                        await self._relink()
                    failures = 0 if await self._wait_for_loss() else failures + 1
                    pause = self._timing.pause(failures)
                except BusError as exc:
                    is_refused = isinstance(exc, CredentialsError)
                    self._log_once(str(exc))
                    if is_refused or failures >= REREAD_AFTER_FAILURES:
                        self._reread_credentials()
                    if is_refused and time.monotonic() < early_until:
                        pause = self._timing.early_pause()
                    else:
                        failures += 1
                        pause = self._timing.pause(failures, self._slow)
                if self._link is None:
                    await asyncio.sleep(pause)
        finally:
            await self._shut_down()

    async def rotate(self, mbus: Mbus) -> None:
        """Switch to other credentials without a gap: the new connection subscribes before the old one closes.

        A request received on both is handled once. Raises ``ActionError`` and changes nothing if the new credentials
        are unusable.
        """
        async with self._rotating:
            if self._retiring is not None:
                await asyncio.wait({self._retiring})
            self._seen = Counter()
            try:
                new = await self._connect_persistently(mbus)
            except BaseException:
                self._seen = None
                raise
            old, self.mbus = self._link, mbus
            self._activate(new)
            self._retiring = asyncio.create_task(self._retire(old, new), name="bus rotation")

    # --- links ---

    async def _relink(self) -> None:
        link = await self._connect(self.mbus)
        if self._link is None:
            self._activate(link)
        else:  # a rotation was faster
            await link.abandon()

    async def _connect_persistently(self, mbus: Mbus) -> _Link:
        """Connect with new credentials, waiting out an absent bus; raises ``ActionError`` if they are unusable."""
        began, failures = time.monotonic(), 0
        while True:
            is_refused = False
            try:
                left = began + self._timing.unreachable - time.monotonic()
                async with asyncio.timeout(max(left, self._timing.connect)):  # addresses may be many
                    return await self._connect(mbus)
            except BusError as exc:
                is_refused, why = isinstance(exc, CredentialsError), str(exc)
            except TimeoutError:
                why = "cannot connect to the bus: no answer in time"
            if not is_refused and not self.is_connected:
                began = time.monotonic()  # the bus is absent: no evidence against them
            timeout_s = self._timing.refused if is_refused else self._timing.unreachable
            if time.monotonic() - began >= timeout_s:
                raise ActionError(f"cannot use the new bus credentials: {why}")
            failures += 1
            await asyncio.sleep(self._timing.pause(failures))

    def _reread_credentials(self) -> None:
        try:
            self.mbus = self._reread(self.mbus)
        except (ShimError, OSError) as exc:
            self._log_once(f"cannot read the bus credentials again: {exc}")

    async def _connect(self, mbus: Mbus) -> _Link:
        """Try every address once, in random order; raises ``BusError`` for any failure."""
        failure = BusError("cannot connect to the bus: no address in the settings")
        for url in random.sample(mbus.urls, len(mbus.urls)):
            try:
                return await self._open(url, mbus)
            except Exception as exc:  # noqa: BLE001 - any failure of nats-py or a server is retried
                failure = _failure(url, exc)
        raise failure

    async def _open(self, url: str, mbus: Mbus) -> _Link:
        """Connect to an address; of several authorities with one name OpenSSL tries only the first."""
        try:
            return await self._attempt(url, mbus)
        except ssl.SSLCertVerificationError as exc:
            known = tls.authorities(mbus.ca) if mbus.ca else ()
            if len(known) < 2 or getattr(exc, "verify_code", 0) != tls.SIGNATURE_FAILURE:
                raise
            for ca in known[: tls.MAX_NAMESAKES]:
                with suppress(ssl.SSLCertVerificationError):
                    return await self._attempt(url, msgspec.structs.replace(mbus, ca=ca))
            raise

    async def _attempt(self, url: str, mbus: Mbus) -> _Link:
        self.stats.attempts += 1
        number = self.stats.attempts
        link = _Link(self._received, self._denied)
        opening = asyncio.create_task(
            link.open(url, tls.client_context(mbus), self._agent_id, self._timing), name="bus connection"
        )
        try:
            await asyncio.wait({opening}, timeout=self._timing.handshake_timeout_s(self._slow))
            if not opening.done():
                self._slow += link.has_greeted
                raise TimeoutError
            opening.result()
        except BaseException:
            if link.has_greeted:
                self._greeted_at = number
                self._attempted.set()
            try:
                await _ended(opening)
            finally:
                await link.abandon()
            raise
        return link

    def _activate(self, link: _Link) -> None:
        self._link = link
        self._slow = 0
        self.stats.connects += 1
        self.stats.last_error = ""
        self._logged.clear()
        logger.info("connected to the bus at %s", link.address)
        self._linked.set()
        self._attempted.set()
        self._on_connected()

    async def _wait_for_loss(self) -> bool:
        """Wait for the end of the current connection; True if it lasted longer than a ping."""
        link, began = self._link, time.monotonic()
        assert link is not None
        watching = asyncio.create_task(self._follow(link), name="bus name")
        try:
            why = await link.over()
        except asyncio.CancelledError:
            if link is not self._link:
                await link.abandon()
            raise
        finally:
            watching.cancel()
        await link.abandon()
        if self._link is link:
            self._link = None
            self._log_once(f"lost the connection to the bus at {link.address}: {why}")
        return time.monotonic() - began > self._timing.ping

    async def _follow(self, link: _Link) -> None:
        """Reconnect when the server's name resolves elsewhere; the server that lost the name may still answer."""
        gone = 0
        while link is self._link:
            await asyncio.sleep(clock.until_beat(self._timing.look))
            with suppress(OSError):
                gone = 0 if link.peer in await look_up(link.url) else gone + 1
            if gone >= self._timing.gone:
                logger.info("%s no longer resolves to %s, reconnecting", link.address, link.peer)
                gone = 0
                try:
                    await self.rotate(self.mbus)
                except ActionError as exc:
                    self._log_once(f"cannot follow {link.address}: {exc}")

    async def _retire(self, old: _Link | None, new: _Link) -> None:
        """Keep the old connection until requests sent before the new subscription have arrived, then close it."""
        if old is not None:
            await old.flushed(self._timing.overlap)
            await asyncio.sleep(self._timing.overlap)
            old.end("replaced")
            await new.flushed(self._timing.overlap)
        self._seen = None

    async def _shut_down(self) -> None:
        link, self._link = self._link, None
        tasks = [*self._answering, *([self._retiring] if self._retiring else [])]
        for task in tasks:
            task.cancel()
        if link is not None:
            await link.flushed(self._timing.goodbye)
            await link.abandon()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _log_once(self, problem: str, kind: str = "") -> None:
        """Log a persistent problem once per loss of connection."""
        if (kind or problem) not in self._logged:
            logger.warning("%s", problem)
        self._logged.add(kind or problem)
        self.stats.last_error = problem

    # --- messages ---

    def _received(self, link: _Link, data: bytes) -> None:
        self.stats.received += 1
        self.stats.received_bytes += len(data)
        size = wire.weight(data)
        is_full = len(self._answering) >= MAX_REQUESTS or self._answering_bytes + size > MAX_REQUEST_BYTES
        is_ping = len(data) <= MAX_PING_BYTES and b'"ping"' in data
        if self._is_duplicate(link, data):
            self.stats.duplicates += 1
        elif is_full and not (is_ping and len(self._answering) < MAX_REQUESTS + PINGS):
            self.stats.flooded += 1
        else:
            task = asyncio.create_task(self._answer(data), name="request")
            task.add_done_callback(partial(self._answered, size))
            self._answering.add(task)
            self._answering_bytes += size

    def _is_duplicate(self, link: _Link, data: bytes) -> bool:
        """True if the other connection of a rotation delivered the same message; its ``reply_to`` makes it unique."""
        if self._seen is None:
            return False
        message = hash(data)
        if len(self._seen) >= MAX_SEEN and message not in self._seen:
            return False
        self._seen[link, message] += 1
        self._seen[message] += 1
        return self._seen[message] - self._seen[link, message] >= self._seen[link, message]

    async def _answer(self, data: bytes) -> None:
        answer = await self._handle(data)
        if answer is None:
            self.stats.rejected += 1
            return
        try:
            if not self.is_connected:
                async with asyncio.timeout(self._timing.reply):
                    await self.wait_connected()
            await self.publish(*answer)
        except (BusError, TimeoutError) as exc:
            self.stats.unanswered += 1
            logger.warning("cannot send a reply, dropped: %s", str(exc) or "no connection to the bus in time")

    def _answered(self, size: int, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._answering_bytes -= size
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.stats.failed += 1
            logger.error("cannot answer a request", exc_info=exc)

    def _denied(self, text: str) -> None:
        self.stats.denied += 1
        self._log_once(f"the bus refused a message: {text}", kind="denied")


def _host_port(url: str) -> str:
    """Return host and port of an address, without its password."""
    return bus_address(url).netloc.rpartition("@")[2] or "an unreadable address"


def _failure(url: str, exc: Exception) -> BusError:
    """Describe a failed attempt; ``CredentialsError`` if other credentials might help."""
    if isinstance(exc, CredentialsError):
        return CredentialsError(f"cannot use the bus credentials: {exc}")
    where = f"cannot connect to the bus at {_host_port(url)}"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return CredentialsError(f"{where}: {getattr(exc, 'verify_message', exc)}")
    if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        return CredentialsError(f"{where}: the server refuses our certificate ({exc.reason})")
    if "authorization violation" in str(exc).lower():
        return CredentialsError(f"{where}: the server does not know us (Authorization Violation)")
    if isinstance(exc, TimeoutError):
        return BusError(f"{where}: no answer in time")
    return BusError(f"{where}: {str(exc) or type(exc).__name__}")
