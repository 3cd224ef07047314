"""The agent on NATS: one subscription, replies to where the request says, never deaf for long.

Only this module knows nats-py. Of that client it uses what works, one connection from handshake to end: a connection
that breaks in any of its parts is thrown away, and a new client takes its place. Reconnecting, liveness, back-off and
the rotation of credentials are done here, because nats-py's own give up or go deaf in ways nobody notices.

Subjects and permissions are those of nats-sync (``nats_sync/nats_auth_config.rb``), delays those of the Go agent
(``mbus/nats_handler.go``) with jitter. All times are seconds.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn
from urllib.parse import ParseResult, SplitResult, urlsplit

from agent_shim.core import lean_imports
from agent_shim.core.errors import ActionError, BusError, CredentialsError, ShimError
from agent_shim.core.settings import Mbus, bus_address
from agent_shim.edges.bus import Handle, Stats, tls
from agent_shim.host.daemon_thread import run_in_daemon_thread

# aiohttp is there for websockets, importlib.metadata for a version number, nats.js for JetStream: 15 MB for nothing.
with lean_imports.without("aiohttp", "importlib.metadata", empty="nats.js"):
    from nats import errors as nats_errors
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 10_000
MAX_SUBJECT_BYTES: Final = 1024
"""nats-server ends a connection that sends a line of more than 4096 characters (max_control_line)."""
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
"""Requests that are worked on at a time, in number and size; what comes beyond is dropped, as nats.go does."""

MAX_BACKLOG: Final = 8 * 1024 * 1024
"""Bytes that wait for a slow server; beyond it publishing fails, as in nats.go."""

HOPELESS: Final = 3
"""Failures in a row after which other settings are asked for: the bus may have moved."""

SWEPT: Final = 1.0
"""Seconds after the end of a link in which its last user lets go of it."""

NEVER: Final = 10 * 365 * 24 * 3600
"""For the clocks of nats-py that we do not use."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the bus waits for what; tests shrink it."""

    connect: float = 10.0
    """One attempt at one address: name, TCP, TLS, subscription."""
    ping: float = 5.0
    """Between two pings; after ``unanswered`` of them without an answer the link counts as dead: 10 to 15 s."""
    unanswered: int = 2
    step: float = 2.0
    longest: float = 10.0
    """The pause after the n-th failure in a row is n steps, at most ``longest``, less a part at random.

    That part is up to four fifths as long as the pause grows, so that agents which have lost their server in one moment
    come in no waves; then up to half.
    It must stay well below the 45 s that the Director waits for a reply.
    """
    early: float = 60.0
    early_step: float = 1.0
    """In this first time, while the server does not know us yet, the pause is one ``early_step`` (more or less)."""
    reply: float = 45.0
    """How long a reply waits for a link; the Director has given up then."""
    overlap: float = 2.0
    """How long the old link stays beside the new one when credentials are rotated."""
    refused: float = 20.0
    unreachable: float = 120.0
    """How long new credentials are tried while the server refuses them, while only the old ones reach one."""
    goodbye: float = 1.0
    """How long the last replies may take to leave."""
    look: float = 20.0
    gone: int = 3
    """Between two looks whether the server's name still leads to where we are; when so often it did not, we follow."""

    def pause(self, failures: int, slow: int = 0) -> float:
        """The pause after so many failures in a row; 0 failures: a link that worked has just broken.

        After ``slow`` attempts that a server greeted and did not bring to an end in time it is up to three times as
        long, and so is the next attempt's ``patience``: a server to which thousands come back at once would do nothing
        but begin handshakes that are given up.
        """
        if failures == 0:
            return random.uniform(0, self.step)  # noqa: S311 - no secret
        most = min(failures * self.step, self.longest)
        return random.uniform(most / 5 if most < self.longest else most / 2, most) * _more(slow)  # noqa: S311

    def patience(self, slow: int) -> float:
        """How long an attempt may take."""
        return self.connect * _more(slow)

    def early_pause(self) -> float:
        """The pause while nats-sync has not heard of us."""
        return self.early_step * random.uniform(0.75, 1.25)  # noqa: S311


class _Sweeper:
    """Has the collector look at everything, once in a while for all who have asked for it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where a look is to come."""
        self._asked = False

    def ask(self) -> None:
        """Have a look ``SWEPT`` seconds from now, or up to twice as many."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            self._asked = True
        else:
            self._loop = loop
            loop.call_later(SWEPT, self._look)

    def _look(self) -> None:
        loop, self._loop = self._loop, None
        gc.collect()
        if self._asked and loop is not None:  # too soon for who asked last
            self._asked = False
            self._loop = loop
            loop.call_later(SWEPT, self._look)


_sweeper: Final = _Sweeper()


async def look_up(url: ParseResult | SplitResult) -> list[str]:
    """The addresses of the host of a URL, in random order; raises ``OSError``."""
    host = url.hostname or ""
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    ask = partial(socket.getaddrinfo, host, url.port, type=socket.SOCK_STREAM)
    found = {str(address[0]) for *_, address in await run_in_daemon_thread(ask, f"look up {host}")}
    return random.sample(sorted(found), len(found))


def _more(slow: int) -> int:
    return min(1 + slow, 3)


# --- one connection -------------------------------------------------------------------------------------------------


class _OverTls(asyncio.StreamReaderProtocol):
    """Ends the connection with the server's half of it; anything else means nothing with TLS and gets logged."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Transport(TcpTransport):
    """TCP and TLS of one connection; closes without a farewell, for which a dead peer makes one wait 30 s."""

    is_secure = False
    has_greeted = False
    peer = ""
    """The address at the other end."""

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002
        """As nats-py does, but a name server that is silent holds nobody up, not even our end."""
        addresses = await look_up(uri)
        for number, address in enumerate(addresses, 1):
            try:
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
        """Goes on with a new reader: what came in the clear until now is not taken for the server's word."""
        assert self._io_writer is not None
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        protocol = _OverTls(reader)
        host = uri if isinstance(uri, str) else uri.hostname
        transport = await loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=host)
        assert transport is not None
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        tls.check_server_name(transport.get_extra_info("ssl_object"))
        self.is_secure = True

    async def readline(self) -> bytes:
        """The next line of the handshake; news of the server in the midst of it are passed over."""
        while True:
            line: bytes = await super().readline()  # type: ignore[no-untyped-call]
            self.has_greeted = True
            if not (self.is_secure and line.startswith(b"INFO ")):
                return line

    def close(self) -> None:
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    async def wait_closed(self) -> None:
        """There is nothing to wait for."""

    def __bool__(self) -> bool:
        """Also before it is connected: or nats-py makes one of its own."""
        return True


class _Link(Client):
    """One connection with its subscription, from the first byte to the last; it is never revived."""

    def __init__(self, on_message: Callable[[_Link, bytes], None], on_denied: Callable[[str], None]) -> None:
        super().__init__()
        self.address = ""
        self.url = urlsplit("")
        self._on_message = on_message
        self._on_denied = on_denied
        self._wire = self._transport = _Transport()  # type: ignore[no-untyped-call]
        self._parts: list[asyncio.Task[Any]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked = 0
        self._heard = 0
        self._ponged = asyncio.Event()

    async def open(self, url: str, context: ssl.SSLContext, agent_id: str, timing: Timing) -> None:
        """Connect and subscribe; returns when the server has confirmed the subscription."""
        self.url = bus_address(url)
        self.address = _place(url)
        if not self.url.hostname:
            raise BusError("an address is nats://HOST:PORT, with a password percent-encoded")
        await self.connect(
            [url],
            error_cb=_ignore,
            name=agent_id,
            allow_reconnect=False,
            connect_timeout=NEVER,
            ping_interval=NEVER,
            pending_size=-1,
            tls=context,
        )
        if self._reading_task is None or self._flusher_task is None or self._ping_interval_task is None:
            raise BusError("nats-py has not begun to read")
        self._own("reader", self._reading_task)
        self._own("writer", self._flusher_task)
        self._own("clock", self._ping_interval_task)
        if not self.is_connected:
            raise BusError("the server does not answer as a NATS server does")
        await self._send_command(f"SUB agent.{agent_id} 1\r\n".encode())
        await self.settle(NEVER)
        if self.is_over:
            raise BusError(self._ended.result())
        self._own("liveness", asyncio.create_task(self._live(timing), name="bus liveness"))

    @property
    def has_greeted(self) -> bool:
        """Whether a server has said a word, whatever became of the connection: it lives."""
        return self._wire.has_greeted

    @property
    def is_over(self) -> bool:
        return self._ended.done()

    @property
    def peer(self) -> str:
        """The address of the server."""
        return self._wire.peer

    async def over(self) -> str:
        """Until the connection is over; says why."""
        await asyncio.wait({self._ended})
        return self._ended.result()

    def end(self, why: str) -> None:
        """The connection is over; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(why)

    async def send(self, subject: str, data: bytes) -> None:
        """Hand a message over to be sent; raises ``BusError``."""
        if self.is_over:
            raise BusError(self._ended.result())
        size = len(subject.encode())
        if size > MAX_SUBJECT_BYTES:
            raise BusError(f"a subject of {size} bytes would end the link")
        if self.pending_data_size > MAX_BACKLOG:
            raise BusError("the server does not take what is sent")
        try:
            await self.publish(subject, data)
        except nats_errors.Error as exc:
            raise BusError(str(exc) or type(exc).__name__) from exc

    async def settle(self, patience: float) -> bool:
        """Until the server has dealt with all that was sent, or the link is over, or ``patience`` seconds are.

        True in the first case.
        """
        arrived: asyncio.Future[Any] = asyncio.create_task(self._round_trip(), name="bus round trip")
        try:
            await asyncio.wait({arrived, self._ended}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            return arrived.done() and not self.is_over
        finally:
            arrived.cancel()

    async def abandon(self) -> None:
        """Let go of the connection at once."""
        self.end("closed")
        self._wire.close()
        await _ended(*self._parts)
        # It is a ring of objects, of which the collector sees few and TLS holds half a megabyte: it would come late.
        _sweeper.ask()

    def _own(self, name: str, part: asyncio.Task[Any]) -> None:
        """A link lives as long as each of its parts: nats-py calls itself connected whichever of them has died."""
        self._parts.append(part)
        part.add_done_callback(lambda _: self.end(f"its {name} has stopped"))

    async def _ask(self) -> None:
        """Send a ping behind all that waits to be sent; nats-py's own way sends it before."""
        self._asked += 1
        await self._send_command(b"PING\r\n")
        await self._flush_pending()

    async def _round_trip(self) -> None:
        await self._ask()
        answered = self._asked
        while self._heard < answered:
            self._ponged.clear()
            await self._ponged.wait()

    async def _live(self, timing: Timing) -> None:
        silent = 0
        while silent < timing.unanswered:
            before = self._heard
            await self._ask()
            await asyncio.sleep(timing.ping)
            silent = 0 if self._heard > before else silent + 1
        self.end(f"no answer to {silent} pings")

    # What follows takes the place of methods of nats-py, which heal, queue and close by themselves.

    async def _select_next_server(self) -> None:
        self._current_server = self._server_pool[0]
        await self._connect_to_server(self._current_server)

    def _connect_command(self) -> bytes:
        if not self._wire.is_secure:
            raise nats_errors.SecureConnWantedError
        return super()._connect_command()

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

    Once is not enough: nats-py passes over a cancellation in places, and ``asyncio.wait_for`` of Python 3.11 does when
    what it waited for came at the same moment.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ignore(_: Exception) -> None:
    """Errors that nats-py reports also end the connection or are raised."""


# --- the bus --------------------------------------------------------------------------------------------------------


class NatsBus:
    """The agent's place on the bus; ``run`` is the root task that keeps it.

    ``handle`` answers requests, each in an asyncio task of its own, begun in order of arrival. ``on_connected`` is
    called whenever a link is up. ``reread`` is given the credentials that a server or TLS refused and says which to
    try next.
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
        self._mbus = mbus
        self._handle = handle
        self._on_connected = on_connected
        self._reread = reread
        self._timing = timing or Timing()
        self._link: _Link | None = None
        self._linked = asyncio.Event()
        self._attempted = asyncio.Event()
        self._greeted_at = 0
        """The number of the last attempt that a server greeted, and refused."""
        self._noted: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._answering_bytes = 0
        self._slow = 0
        """Attempts in a row that a server greeted and did not bring to an end in time."""
        self._rotating = asyncio.Lock()
        """There are two links at most: duplicates are told apart by that."""
        self._retiring: asyncio.Task[None] | None = None
        self._seen: Counter[int | tuple[_Link, int]] | None = None

    @property
    def mbus(self) -> Mbus:
        """The addresses and credentials in use."""
        return self._mbus

    @property
    def is_connected(self) -> bool:
        """Whether a message published now would go out and a request sent now would arrive, as far as we know."""
        return self._link is not None and not self._link.is_over

    async def settle(self, patience: float) -> None:
        """Until what is being answered is answered and on its way, for ``patience`` seconds at most."""
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=patience)
        if self._link is not None:
            await self._link.settle(patience)

    async def is_heard(self, patience: float) -> bool:
        """Whether a server says anything to us within ``patience`` seconds from now: on the link, or at an attempt.

        Nothing is opened for it: ``run`` makes the attempts. One that was under way already counts if it succeeds. A
        link that does not answer in time is given up.
        """
        begun = self.stats.attempts
        try:
            async with asyncio.timeout(patience):
                while self._link is None or self._link.is_over:
                    self._attempted.clear()
                    await self._attempted.wait()
                    if self._greeted_at > begun:
                        return True
        except TimeoutError:
            return False
        link = self._link
        is_answered = await link.settle(patience)
        if not is_answered:
            link.end(f"no answer to a ping within {patience:g} s")
        return is_answered

    async def wait_connected(self) -> None:
        """Until there is a link."""
        while not self.is_connected:
            self._linked.clear()
            await self._linked.wait()

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message now or raise ``BusError``: nothing is kept for later, when it would no longer be true."""
        if self._link is None:
            raise BusError(f"cannot publish to {subject!r}: there is no link to the bus")
        try:
            async with asyncio.timeout(self._timing.connect):
                await self._link.send(subject, data)
        except (BusError, TimeoutError) as exc:
            raise BusError(f"cannot publish to {subject[:100]!r}: {str(exc) or 'the server does not take it'}") from exc
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)

    async def run(self) -> NoReturn:
        """Keep a link up, for ever. When cancelled, what was published gets a moment to leave."""
        early_until = time.monotonic() + self._timing.early
        failures = 0
        try:
            while True:
                try:
                    if self._link is None:
                        await self._relink()
                    failures = 0 if await self._stay() else failures + 1
                    pause = self._timing.pause(failures)
                except BusError as exc:
                    is_refused = isinstance(exc, CredentialsError)
                    self._note(str(exc))
                    if is_refused or failures >= HOPELESS:
                        self._reconsider()
                    if is_refused and time.monotonic() < early_until:
                        pause = self._timing.early_pause()
                    else:
                        failures += 1
                        pause = self._timing.pause(failures, self._slow)
                if self._link is None:
                    await asyncio.sleep(pause)
        finally:
            await self._leave()

    async def rotate(self, mbus: Mbus) -> None:
        """Go over to other credentials without a gap: the new link subscribes before the old one goes.

        A request that reaches both is handled once. Raises ``ActionError`` when the new ones cannot be used, and then
        nothing has changed.
        """
        async with self._rotating:
            if self._retiring is not None:
                await asyncio.wait({self._retiring})
            self._seen = Counter()
            try:
                new = await self._insist(mbus)
            except BaseException:
                self._seen = None
                raise
            old, self._mbus = self._link, mbus
            self._take(new)
            self._retiring = asyncio.create_task(self._retire(old, new), name="bus rotation")

    # --- links ---

    async def _relink(self) -> None:
        link = await self._connect(self._mbus)
        if self._link is None:
            self._take(link)
        else:  # a rotation was faster
            await link.abandon()

    async def _insist(self, mbus: Mbus) -> _Link:
        """A link with new credentials, however long the bus is away; raises ``ActionError`` when they are no good."""
        began, failures = time.monotonic(), 0
        while True:
            try:
                return await self._connect(mbus)
            except BusError as exc:
                is_refused = isinstance(exc, CredentialsError)
                if not is_refused and not self.is_connected:
                    began = time.monotonic()  # the bus is away: that speaks against nothing
                patience = self._timing.refused if is_refused else self._timing.unreachable
                if time.monotonic() - began > patience:
                    raise ActionError(f"cannot use the new bus credentials: {exc}") from exc
                failures += 1
            await asyncio.sleep(self._timing.pause(failures))

    def _reconsider(self) -> None:
        try:
            self._mbus = self._reread(self._mbus)
        except (ShimError, OSError) as exc:
            self._note(f"cannot read the credentials of the bus anew: {exc}")

    async def _connect(self, mbus: Mbus) -> _Link:
        """One try of every address, in random order; raises ``BusError``, whatever went wrong."""
        failure = BusError("cannot reach the bus: the settings name no address")
        for url in random.sample(mbus.urls, len(mbus.urls)):
            try:
                return await self._open(url, mbus)
            except Exception as exc:  # noqa: BLE001 - whatever nats-py or a server comes up with, we try again
                failure = _failure(url, exc)
        raise failure

    async def _open(self, url: str, mbus: Mbus) -> _Link:
        self.stats.attempts += 1
        number = self.stats.attempts
        link = _Link(self._received, self._denied)
        opening = asyncio.create_task(
            link.open(url, tls.client_context(mbus), self._agent_id, self._timing), name="bus connection"
        )
        try:
            await asyncio.wait({opening}, timeout=self._timing.patience(self._slow))
            if not opening.done():
                self._slow += link.has_greeted
                raise TimeoutError
            opening.result()
        except BaseException:
            if link.has_greeted:
                self._greeted_at = number
                self._attempted.set()
            await _ended(opening)
            await link.abandon()
            raise
        return link

    def _take(self, link: _Link) -> None:
        self._link = link
        self._slow = 0
        self.stats.connects += 1
        self.stats.connected_at = time.monotonic()
        self.stats.last_error = ""
        self._noted.clear()
        logger.info("connected to the bus at %s", link.address)
        self._linked.set()
        self._attempted.set()
        self._on_connected()

    async def _stay(self) -> bool:
        """Until the present link is over; whether it was of use, that is, held for longer than a ping."""
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
            self.stats.connected_at = None
            self._note(f"the link to the bus at {link.address} is lost: {why}")
        return time.monotonic() - began > self._timing.ping

    async def _follow(self, link: _Link) -> None:
        """Go over to where the name of the server leads now, while the server that has lost it may still talk to us."""
        gone = 0
        while link is self._link:
            await asyncio.sleep(self._timing.look)
            with suppress(OSError):
                gone = 0 if link.peer in await look_up(link.url) else gone + 1
            if gone >= self._timing.gone:
                logger.info("%s is no longer %s: a new link is made", link.address, link.peer)
                gone = 0
                try:
                    await self.rotate(self._mbus)
                except ActionError as exc:
                    self._note(f"cannot follow {link.address}: {exc}")

    async def _retire(self, old: _Link | None, new: _Link) -> None:
        """Let the old link hear what was sent before the new one listened, then end it."""
        if old is not None:
            await old.settle(self._timing.overlap)
            await asyncio.sleep(self._timing.overlap)
            old.end("replaced")
            await new.settle(self._timing.overlap)
        self._seen = None

    async def _leave(self) -> None:
        link, self._link = self._link, None
        tasks = [*self._answering, *([self._retiring] if self._retiring else [])]
        for task in tasks:
            task.cancel()
        if link is not None:
            await link.settle(self._timing.goodbye)
            await link.abandon()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, problem: str, kind: str = "") -> None:
        """A trouble that lasts is logged once until there is a link again."""
        if (kind or problem) not in self._noted:
            logger.warning("%s", problem)
        self._noted.add(kind or problem)
        self.stats.last_error = problem

    # --- messages ---

    def _received(self, link: _Link, data: bytes) -> None:
        self.stats.received += 1
        self.stats.received_bytes += len(data)
        if self._is_duplicate(link, data):
            self.stats.duplicates += 1
        elif len(self._answering) >= MAX_REQUESTS or self._answering_bytes + len(data) > MAX_REQUEST_BYTES:
            self.stats.flooded += 1
        else:
            task = asyncio.create_task(self._answer(data), name="request")
            task.add_done_callback(partial(self._answered, len(data)))
            self._answering.add(task)
            self._answering_bytes += len(data)

    def _is_duplicate(self, link: _Link, data: bytes) -> bool:
        """Whether the other link of a rotation has brought this very message: its ``reply_to`` makes it unique."""
        if self._seen is None:
            return False
        message = hash(data)
        self._seen[link, message] += 1
        self._seen[message] += 1
        return self._seen[message] - self._seen[link, message] >= self._seen[link, message]

    async def _answer(self, data: bytes) -> None:
        answer = await self._handle(data)
        if answer is None:
            self.stats.rejected += 1
            return
        try:
            async with asyncio.timeout(self._timing.reply):
                await self._reply(*answer)
        except (BusError, TimeoutError) as exc:
            self.stats.unanswered += 1
            logger.warning("a reply is dropped: %s", str(exc) or "there was no link to the bus in time")

    async def _reply(self, subject: str, reply: bytes) -> None:
        """Send a reply on the present link or the next one; raises ``BusError`` when it is the reply that is wrong."""
        while True:
            await self.wait_connected()
            link = self._link
            try:
                return await self.publish(subject, reply)
            except BusError:
                if self._link is link and self.is_connected:
                    raise

    def _answered(self, size: int, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._answering_bytes -= size
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.stats.failed += 1
            logger.error("a request was not answered", exc_info=exc)

    def _denied(self, text: str) -> None:
        self.stats.denied += 1
        self._note(f"the bus refuses a message: {text}", kind="denied")


def _place(url: str) -> str:
    """Host and port of an address, never a part of its password."""
    return bus_address(url).netloc.rpartition("@")[2] or "an address that cannot be read"


def _failure(url: str, exc: Exception) -> BusError:
    """What went wrong at an address, in words; ``CredentialsError`` where other credentials might help."""
    if isinstance(exc, CredentialsError):
        return CredentialsError(f"cannot use the credentials of the bus: {exc}")
    where = f"cannot connect to the bus at {_place(url)}"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return CredentialsError(f"{where}: {getattr(exc, 'verify_message', exc)}")
    if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        return CredentialsError(f"{where}: the server refuses our certificate ({exc.reason})")
    if "authorization violation" in str(exc).lower():
        return CredentialsError(f"{where}: the server does not know us (Authorization Violation)")
    if isinstance(exc, TimeoutError):
        return BusError(f"{where}: no answer in time")
    return BusError(f"{where}: {str(exc) or type(exc).__name__}")
