"""Keeps the agent connected to NATS. The agent has a single subscription, and sends each reply to the subject named in
the request.

A connection that ends or no longer responds is discarded and replaced by a new one. Reconnection, back-off and
credential rotation are implemented here, because nats-py can give up or stop receiving without an error.

Subjects and permissions are the same as in nats-sync (``nats_sync/nats_auth_config.rb``). Delays are the same as in the
Go agent (``mbus/nats_handler.go``), plus jitter. All times are in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from agent_shim.core.bus_stats import Stats
from agent_shim.core.errors import ActionError, BusError, CredentialsError, ShimError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus import Handle, tls
from agent_shim.edges.bus.link import Link, host_port, look_up
from agent_shim.host import clock

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 10_000
"""Maximum number of concurrent requests. Further requests are dropped, as in nats.go."""
PINGS: Final = 1000
"""Maximum number of pings that are answered in addition to ``MAX_REQUESTS``."""
MAX_PING_BYTES: Final = 512
"""Only requests of up to this size are recognized as pings. Pings are answered even while too many other requests are
in progress, because those requests may take a long time, and the Director considers an agent lost if it does not answer
pings.
"""
OF_A_DIRECTOR: Final = re.compile(rb'"reply_to" ?: ?"director\.[^"]*\.[0-9a-f-]{36}"')
"""Matches a reply subject that is unique to one request (``nats_rpc.rb``), so if the same bytes arrive again, they are
a copy of that request.
"""
COPY_WINDOW_S: Final = 60.0
"""Seconds during which a copy of a request is recognized. Copies arise while credentials are rotated, because the old
and the new connection then deliver each request at nearly the same time.
"""
MAX_SEEN: Final = 10_000
"""Number of requests that are remembered to recognize copies. A copy of an older request is treated as a new
request.
"""

REREAD_AFTER_FAILURES: Final = 3
"""Number of consecutive failures after which the settings are read again, because the bus address may have changed."""


class BusTiming(msgspec.Struct, frozen=True):
    """Bus timeouts and intervals. Tests use shorter ones."""

    connect: float = 10.0
    """Timeout for one attempt at one address: lookup, TCP, TLS and subscription."""
    dial: float = 4.0
    """Timeout for the TCP connection to one of a host name's addresses. The kernel sends three SYNs during this time.
    If there is no answer by then, the network is probably down, and a new attempt later is more useful than waiting
    longer.
    """
    ping: float = 5.0
    """Interval between pings. After ``unanswered`` missed replies (10 to 15 s), the connection is considered dead."""
    unanswered: int = 2
    step: float = 2.0
    """The pause after the n-th consecutive failure is n steps, at most ``longest``, minus a random part.

    Because of the random part, agents that lost their server at the same moment do not all return at once. It is up to
    four fifths of the pause while the pause still grows, and up to half of it later.
    """
    longest: float = 10.0
    """Longest pause after a failure. It must stay well below the 45 s that the Director waits for a reply."""
    early: float = 60.0
    early_step: float = 1.0
    """Pause between attempts during the first ``early`` seconds after the start, when the server might not know the
    agent yet.
    """
    reply: float = 45.0
    """How long a reply waits for a connection. The Director gives up on the request after the same time."""
    overlap: float = 2.0
    """How long the old connection stays open in addition to the new one during a rotation."""
    refused: float = 20.0
    """How long new credentials are tried if the server rejects them."""
    unreachable: float = 120.0
    """How long new credentials are tried if no connection with them succeeds while the old connection still works."""
    goodbye: float = 1.0
    """How long sending the last replies may take."""
    look: float = 20.0
    """Interval between lookups of the server's name."""
    gone: int = 3
    """The agent reconnects if this many consecutive lookups of the server's name, ``look`` seconds apart, do not return
    the address to which it is connected.
    """

    def pause(self, failures: int, slow: int = 0) -> float:
        """Return the pause after ``failures`` consecutive failures. ``failures`` is 0 if a working connection broke.

        The pause is doubled after one ``slow`` attempt and tripled after two or more. An attempt is slow if the server
        sent its greeting but did not complete the handshake in time. The timeout for the next attempt grows by the same
        factor. Otherwise, if thousands of agents returned to a server at the same time, every handshake would time out
        before the server could finish it.
        """
        if failures == 0:
            return random.uniform(0, self.step)  # noqa: S311 - no secret
        most = min(failures * self.step, self.longest)
        return random.uniform(most / 5 if most < self.longest else most / 2, most) * min(1 + slow, 3)  # noqa: S311

    def handshake_timeout_s(self, slow: int) -> float:
        """Return the timeout for an attempt that follows ``slow`` consecutive slow attempts. See ``pause`` for the
        reason why it grows.
        """
        return self.connect * min(1 + slow, 3)

    def early_pause(self) -> float:
        """Return the pause after a rejected attempt during the ``early`` period, when nats-sync might not know the
        agent yet.
        """
        return self.early_step * random.uniform(0.75, 1.25)  # noqa: S311


class NatsBus:
    """Keeps the agent connected to the bus. ``run`` is the root task.

    ``handle`` answers requests, each in a separate task; the tasks are started in order of arrival. ``on_connected`` is
    called for each new connection. ``reread`` is called with credentials that were rejected or that failed several
    times, and returns the credentials to try next.
    """

    def __init__(
        self,
        agent_id: str,
        mbus: Mbus,
        handle: Handle,
        *,
        on_connected: Callable[[], None] = lambda: None,
        reread: Callable[[Mbus], Mbus] = lambda failed: failed,
        timing: BusTiming | None = None,
    ) -> None:
        self.stats = Stats()
        self._agent_id = agent_id
        self.mbus = mbus
        """Addresses and credentials in use."""
        self._handle = handle
        self._on_connected = on_connected
        self._reread = reread
        self._timing = timing or BusTiming()
        self._link: Link | None = None
        self._links: set[Link] = set()
        """All connections, including those being established and the old one during a rotation."""
        self._changed = asyncio.Event()
        """Set by each new connection, and by each failed attempt in which a server sent its greeting."""
        self._last_greeted = 0
        """Number (``stats.attempts``) of the last failed attempt in which a server sent its greeting."""
        self._slow = 0
        """Number of consecutive attempts in which a server sent its greeting but did not complete the handshake in
        time.
        """
        self._logged: set[str] = set()
        """Problems logged since the last successful connection (see ``_log_once``)."""
        self._answering: set[asyncio.Task[None]] = set()
        self._rotating = asyncio.Lock()
        self._retiring: asyncio.Task[None] | None = None
        """Closes the old connection after a rotation. The next rotation waits for it."""
        self._seen: dict[int, float] = {}
        """Arrival times of recent requests from a Director, by request hash, oldest first."""

    @property
    def is_connected(self) -> bool:
        """True if messages can currently be published and requests can arrive, as far as the agent can tell."""
        return self._link is not None and not self._link.is_over

    async def drain(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until all pending requests have been answered, then up to ``timeout_s``
        seconds until the server has received the replies.
        """
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=timeout_s)
        if self._link is not None:
            await self._link.flushed(timeout_s)

    async def is_heard(self, timeout_s: float) -> bool:
        """Return True if a server sends anything within ``timeout_s`` seconds, on the current connection or during an
        attempt to connect.

        If there is no connection, this method waits for the next attempt, because only ``run`` opens connections. In
        that case, the call may take twice as long. An attempt that is already in progress counts only if it succeeds. A
        connection that does not answer in time is closed. ``Firewall`` uses this method to check that its rules do not
        block the agent itself.
        """
        begun = self.stats.attempts
        try:
            async with asyncio.timeout(timeout_s):
                while (link := self._link) is None or link.is_over:
                    await self._wait_for_change()
                    if self._last_greeted > begun:
                        return True
        except TimeoutError:
            return False
        is_answered = await link.flushed(timeout_s)
        if not is_answered:
            link.end(f"no answer to a ping within {timeout_s:g} s")
        return is_answered

    async def wait_connected(self) -> None:
        """Wait until the bus is connected."""
        while not self.is_connected:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for the next connection, or for the next failed attempt in which a server sent its greeting."""
        self._changed.clear()
        await self._changed.wait()

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message immediately, or raise ``BusError``. Messages are not queued, because they would be outdated
        once the agent is connected again.
        """
        if self._link is None:
            raise BusError(f"cannot publish to {subject!r}: not connected to the bus")
        try:
            await self._link.send(subject, data)
        except BusError as exc:
            raise BusError(f"cannot publish to {subject[:100]!r}: {exc}") from exc
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)

    async def run(self) -> NoReturn:
        """Keep the agent connected until cancelled. On cancellation, keep sending the messages already published for
        up to ``goodbye`` seconds.
        """
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
                    # At first, the server might not know the agent yet.
                    if is_refused and time.monotonic() < early_until:
                        pause = self._timing.early_pause()
                    else:
                        failures += 1
                        pause = self._timing.pause(failures, self._slow)
                if self._link is None:  # a rotation may have connected in the meantime
                    await asyncio.sleep(pause)
        finally:
            await self._shut_down()

    async def rotate(self, mbus: Mbus) -> None:
        """Switch to other credentials without a gap: the new connection subscribes before the old one closes.

        A request received on both connections is handled once. If no connection with the new credentials succeeds,
        raise ``ActionError`` and change nothing.
        """
        async with self._rotating:
            if self._retiring is not None:
                await asyncio.wait({self._retiring})
            new = await self._connect_persistently(mbus)
            old, self.mbus = self._link, mbus
            self._activate(new)
            self._retiring = asyncio.create_task(self._retire(old), name="bus rotation")

    # --- links --------------------------------------------------------------------------------------------------------

    async def _relink(self) -> None:
        """Connect again. Raises ``BusError``."""
        link = await self._connect(self.mbus)
        if self._link is None:
            self._activate(link)
        else:  # a rotation has already connected
            await self._abandon(link)

    async def _connect_persistently(self, mbus: Mbus) -> Link:
        """Connect with new credentials. If the bus is unreachable, keep trying. Raises ``ActionError`` if the server
        keeps rejecting the credentials for ``refused`` seconds (see the bus's timing), or if no connection can be made
        with them for ``unreachable`` seconds while the old connection still works.
        """
        began, failures = time.monotonic(), 0
        while True:
            is_refused = False
            try:
                left = began + self._timing.unreachable - time.monotonic()
                # All addresses share one timeout, which is long enough for an attempt to connect to one of them.
                async with asyncio.timeout(max(left, self._timing.connect)):
                    return await self._connect(mbus)
            except BusError as exc:
                is_refused, why = isinstance(exc, CredentialsError), str(exc)
            except TimeoutError:
                why = "cannot connect to the bus: no answer in time"
            if not is_refused and not self.is_connected:
                # Restart the timeout, because an unreachable bus does not mean that the credentials are wrong.
                began = time.monotonic()
            timeout_s = self._timing.refused if is_refused else self._timing.unreachable
            if time.monotonic() - began >= timeout_s:
                raise ActionError(f"cannot use the new bus credentials: {why}")
            failures += 1
            await asyncio.sleep(self._timing.pause(failures))

    def _reread_credentials(self) -> None:
        """Read the addresses and credentials again. If that fails, keep the current ones."""
        try:
            self.mbus = self._reread(self.mbus)
        except (ShimError, OSError) as exc:
            self._log_once(f"cannot read the bus credentials again: {exc}")

    async def _connect(self, mbus: Mbus) -> Link:
        """Try every address once, in random order, until one works. Raises ``BusError`` if none works."""
        failure = BusError("cannot connect to the bus: no address in the settings")
        for url in random.sample(mbus.urls, len(mbus.urls)):
            try:
                return await self._open(url, mbus)
            except Exception as exc:  # noqa: BLE001 - any failure of nats-py or a server is retried
                failure = _failure(url, exc)
        raise failure

    async def _open(self, url: str, mbus: Mbus) -> Link:
        """Connect to an address. If several of the trusted CAs have the same name, try each of them in a separate
        attempt, because OpenSSL itself tries only the first.
        """
        try:
            return await self._attempt(url, mbus)
        except ssl.SSLCertVerificationError as exc:
            known = tls.authorities(mbus.ca) if mbus.ca else ()
            if len(known) < 2 or getattr(exc, "verify_code", 0) != tls.SIGNATURE_FAILURE:
                raise
            for ca in known:
                with suppress(ssl.SSLCertVerificationError):
                    return await self._attempt(url, msgspec.structs.replace(mbus, ca=ca))
            raise

    async def _attempt(self, url: str, mbus: Mbus) -> Link:
        """Connect to an address once and return the link. Raises ``TimeoutError`` or the error of the handshake."""
        self.stats.attempts += 1
        number, context = self.stats.attempts, tls.client_context(mbus)
        link = Link(url, self._received, self._denied)
        self._links.add(link)
        opening = link.begin(link.open(context, self._agent_id, self._timing.dial), "bus connection")
        try:
            await asyncio.wait({opening}, timeout=self._timing.handshake_timeout_s(self._slow))
            if not opening.done():
                self._slow += link.wire.has_greeted
                raise TimeoutError
            opening.result()
        except BaseException:
            if (
                link.wire.has_greeted
            ):  # ``is_heard`` waits for this, because a greeting proves that the bus is reachable
                self._last_greeted = number
                self._changed.set()
            await self._abandon(link)
            # The task may have failed just before the link was abandoned. Retrieve its exception, which asyncio would
            # otherwise log.
            await asyncio.gather(opening, return_exceptions=True)
            raise
        return link

    def _activate(self, link: Link) -> None:
        """Use a new link for all messages from now on, and watch it."""
        self._link = link
        self._slow = 0
        self.stats.connects += 1
        self.stats.last_error = ""
        self._logged.clear()
        logger.info("connected to the bus at %s", link.address)
        link.begin(link.watch(self._timing.ping, self._timing.unanswered), "bus liveness")
        link.begin(self._follow(link), "bus name")
        self._changed.set()
        self._on_connected()

    async def _wait_for_loss(self) -> bool:
        """Wait until the current connection has ended. Return True if the connection lasted longer than a ping
        interval, in which case the next pause is short.
        """
        link, began = self._link, time.monotonic()
        assert link is not None
        why = await link.over()
        await self._abandon(link)
        if self._link is link:  # otherwise a rotation has already replaced this link
            self._link = None
            self._log_once(f"lost the connection to the bus at {link.address}: {why}")
        return time.monotonic() - began > self._timing.ping

    async def _follow(self, link: Link) -> None:
        """Reconnect if the server's name no longer resolves to the address of this connection. A server at the old
        address may continue to answer, so pings would not reveal this.
        """
        gone = 0
        while link is self._link:
            await asyncio.sleep(clock.until_beat(self._timing.look))
            with suppress(OSError):
                gone = 0 if link.wire.peer in await look_up(link.url) else gone + 1
            if gone >= self._timing.gone:
                logger.info("%s no longer resolves to %s, reconnecting", link.address, link.wire.peer)
                gone = 0
                try:
                    await self.rotate(self.mbus)
                except ActionError as exc:
                    self._log_once(f"cannot reconnect to {link.address}: {exc}")

    async def _retire(self, old: Link | None) -> None:
        """Keep the old connection until requests sent before the new subscription have arrived, then close it."""
        if old is not None:
            await old.flushed(self._timing.overlap)
            await asyncio.sleep(self._timing.overlap)
            old.end("replaced")
            await self._abandon(old)  # ``run`` would close the connection too, but it may be pausing

    async def _abandon(self, link: Link) -> None:
        """Close a link that is no longer used."""
        await link.close()
        self._links.discard(link)

    async def _shut_down(self) -> None:
        """Cancel requests in progress, wait until the server has received the replies already sent, and disconnect. A
        connection that a rotation has replaced is closed too.
        """
        tasks = [*self._answering, *([self._retiring] if self._retiring else [])]
        for task in tasks:
            task.cancel()
        if self._link is not None:
            await self._link.flushed(self._timing.goodbye)
            self._link = None
        await asyncio.gather(*tasks, *(self._abandon(link) for link in self._links), return_exceptions=True)

    def _log_once(self, problem: str, kind: str = "") -> None:
        """Log a problem unless the same problem, or another one of the same ``kind``, was already logged since the last
        successful connection. In either case, store it as the last error, which ``agent-shim status`` shows.
        """
        if (kind or problem) not in self._logged:
            logger.warning("%s", problem)
        self._logged.add(kind or problem)
        self.stats.last_error = problem

    # --- messages -----------------------------------------------------------------------------------------------------

    def _received(self, data: bytes) -> None:
        """Start a task that answers a request. Drop the request if it is a duplicate. If too many requests are in
        progress, also drop it unless it is a ping.
        """
        self.stats.received += 1
        self.stats.received_bytes += len(data)
        is_full = len(self._answering) >= MAX_REQUESTS
        is_ping = len(data) <= MAX_PING_BYTES and b'"ping"' in data
        if self._is_copy(data):
            self.stats.duplicates += 1
        elif is_full and not (is_ping and len(self._answering) < MAX_REQUESTS + PINGS):
            self.stats.flooded += 1
        else:
            task = asyncio.create_task(self._answer(data), name="request")
            task.add_done_callback(self._answered)
            self._answering.add(task)

    def _is_copy(self, data: bytes) -> bool:
        """Return True if the same request from a Director has already arrived. While credentials are rotated, the old
        and the new connection both deliver each request.
        """
        now, message = time.monotonic(), hash(data)
        while self._seen and (len(self._seen) >= MAX_SEEN or next(iter(self._seen.values())) < now - COPY_WINDOW_S):
            del self._seen[next(iter(self._seen))]
        if message in self._seen:
            return True
        if OF_A_DIRECTOR.search(data):
            self._seen[message] = now
        return False

    async def _answer(self, data: bytes) -> None:
        """Handle a request and publish the reply, after a reconnection if necessary."""
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

    def _answered(self, task: asyncio.Task[None]) -> None:
        """Clean up after a task that answered a request, and log its error if it failed."""
        self._answering.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.stats.failed += 1
            logger.error("cannot answer a request", exc_info=exc)

    def _denied(self, text: str) -> None:
        """Count a message that the server did not permit, and log the first one after each connection."""
        self.stats.denied += 1
        self._log_once(f"the bus refused a message: {text}", kind="denied")


def _failure(url: str, exc: Exception) -> BusError:
    """Describe a failed attempt. Returns a ``CredentialsError`` if other credentials might help."""
    if isinstance(exc, CredentialsError):
        return CredentialsError(f"cannot use the bus credentials: {exc}")
    where = f"cannot connect to the bus at {host_port(url)}"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return CredentialsError(f"{where}: {getattr(exc, 'verify_message', exc)}")
    if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        return CredentialsError(f"{where}: the server refuses our certificate ({exc.reason})")
    if "authorization violation" in str(exc).lower():
        return CredentialsError(f"{where}: the server does not know us (Authorization Violation)")
    if isinstance(exc, TimeoutError):
        return BusError(f"{where}: no answer in time")
    return BusError(f"{where}: {str(exc) or type(exc).__name__}")
