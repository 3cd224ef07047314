"""Simulates a Director and a Health Monitor, which implement only the agent protocol and share no code with the agent.

Replies, timeouts and retries are handled as in the real Director (``agent_client.rb`` and ``nats_rpc.rb`` of
bosh-director), so that a test sees the same delays and failures as a user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from agent_shim.core.errors import ShimError
from agent_shim.core.settings import Mbus
from agent_shim.edges.bus import tls

PROTOCOL: Final = 3

RETRIES: Final[Mapping[str, int]] = {"get_task": 4, "get_state": 2, "upload_blob": 3}
"""Number of retries if there is no reply, by method. Requests with other methods are not retried."""

STOP_LIMIT_S: Final = 300.0
"""How long in total the Director waits for a ``stop`` task to finish."""


class RpcTimeoutError(ShimError):
    """No reply arrived in time."""


class RpcRemoteError(ShimError):
    """The agent returned an exception. This error has the same message."""


# --- raw access to the bus --------------------------------------------------------------------------------------------

OnMessage = Callable[[str, bytes], None]


class BusClient:
    """A bus client that subscribes before it publishes anything, and reconnects automatically. Use ``joined`` to create
    one.
    """

    def __init__(self, mbus: Mbus, subjects: tuple[str, ...], on_message: OnMessage) -> None:
        self._url = urlsplit(random.choice(mbus.urls))  # noqa: S311 - not used for security
        self._context = tls.client_context(mbus)
        lines = [
            'CONNECT {"verbose":false,"pedantic":false,"lang":"python","version":"0","protocol":1}',
            *(f"SUB {subject} {number}" for number, subject in enumerate(subjects, 1)),
        ]
        self._hello = "\r\n".join([*lines, "PING", ""]).encode()
        self._on_message = on_message
        self.writer: asyncio.StreamWriter | None = None
        """The current connection, or None before the first connection."""
        self._joined = asyncio.Event()
        self.published = 0
        """Number of messages sent."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish a message as soon as the client is connected."""
        await self._joined.wait()
        self.published += 1
        assert self.writer is not None, "it is set before the client has joined"
        self.writer.write(b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(data), data))
        await self.writer.drain()

    async def serve(self) -> None:
        """Stay connected to the bus until cancelled."""
        while True:
            with contextlib.suppress(OSError, EOFError):
                await self._connect()
            self._joined.clear()
            await asyncio.sleep(0.1)

    async def wait_joined(self) -> None:
        """Wait until the subscriptions are active."""
        await self._joined.wait()

    async def _connect(self) -> None:
        """Connect, subscribe, and handle messages until the connection ends. Raises ``OSError``."""
        reader, self.writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            await reader.readline()  # the server's greeting
            await self.writer.start_tls(self._context, server_hostname=self._url.hostname)
            self.writer.write(self._hello)
            await self._read(reader, self.writer)
        finally:
            self.writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the server's messages until the connection ends."""
        buffer = bytearray()
        while data := await reader.read(1 << 16):
            buffer += data
            begin = 0
            while (end := buffer.find(b"\r\n", begin)) >= 0:
                verb, _, rest = buffer[begin:end].partition(b" ")
                begin, line_begin = end + 2, begin
                if verb == b"MSG":
                    words = rest.split()
                    size = int(words[-1])
                    if len(buffer) < begin + size + 2:  # the message is incomplete, so parse its line again later
                        begin = line_begin
                        break
                    self._on_message(words[0].decode(), bytes(buffer[begin : begin + size]))
                    begin += size + 2
                elif verb == b"PING":
                    writer.write(b"PONG\r\n")
                elif verb == b"PONG":  # answers the PING sent after the subscriptions
                    self._joined.set()
                elif verb == b"-ERR":
                    raise ConnectionError(rest.decode(errors="replace"))
            del buffer[:begin]


@asynccontextmanager
async def joined(mbus: Mbus, subjects: tuple[str, ...], on_message: OnMessage) -> AsyncIterator[BusClient]:
    """Connect a client to the bus for the duration of the block."""
    peer = BusClient(mbus, subjects, on_message)
    serving = asyncio.create_task(peer.serve(), name="peer")
    try:
        async with asyncio.timeout(30):
            await peer.wait_joined()
        yield peer
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


# --- Director ---------------------------------------------------------------------------------------------------------


class Director:
    """A Director. ``poll`` is the interval in seconds at which it queries a task (one second for a real Director)."""

    def __init__(self, *, poll: float = 1.0) -> None:
        self.uuid = str(uuid.uuid4())
        self.poll = poll
        self.polls = 0
        """How often a task has been queried so far."""
        self.peer: BusClient | None = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Pending requests by id. Each future gets the reply."""

    @asynccontextmanager
    async def on(self, mbus: Mbus) -> AsyncIterator[Director]:
        """Connect a Director to a bus for the duration of the block."""
        async with joined(mbus, (f"director.{self.uuid}.>",), self._received) as self.peer:
            yield self

    async def send(self, agent_id: str, method: str, *arguments: Any) -> None:
        """Send a request without waiting for a reply (``shutdown``, ``delete_arp_entries``)."""
        await self.request(agent_id, method, arguments, str(uuid.uuid4()))

    async def call(
        self, agent_id: str, method: str, *arguments: Any, timeout: float = 45.0, retries: int | None = None
    ) -> dict[str, Any]:
        """Send a request and return the reply, which contains a value or an exception.

        If no reply arrives within ``timeout`` seconds, the request is repeated up to ``retries`` times, by default as
        often as a real Director repeats requests with this method. After that, raise ``RpcTimeoutError``.
        """
        times = RETRIES.get(method, 0) if retries is None else retries
        for _ in range(1 + times):
            request_id = str(uuid.uuid4())
            reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = reply
            try:
                async with asyncio.timeout(timeout):
                    await self.request(agent_id, method, arguments, request_id)
                    return await reply
            except TimeoutError:
                continue
            finally:
                self._waiting.pop(request_id, None)
        raise RpcTimeoutError(f"Timed out sending '{method}' to agent {agent_id!r} after {timeout:g} seconds")

    async def value(self, agent_id: str, method: str, *arguments: Any, timeout: float = 45.0) -> Any:
        """Send a request and return the value in the reply. Raises ``RpcRemoteError`` if the reply contains an
        exception.
        """
        return _value(await self.call(agent_id, method, *arguments, timeout=timeout))

    async def run(
        self, agent_id: str, method: str, *arguments: Any, timeout: float = 45.0, limit: float | None = None
    ) -> Any:
        """Return the result of an action. If the agent starts a task, poll the task until it has finished.

        ``timeout`` is the time limit for each reply in seconds. ``limit`` is the maximum time for polling in seconds
        (by default 300 for ``stop`` and unlimited otherwise). Raises ``RpcTimeoutError`` and ``RpcRemoteError``.
        """
        limit = STOP_LIMIT_S if limit is None and method == "stop" else limit
        until = time.monotonic() + limit if limit is not None else float("inf")
        answer = await self.value(agent_id, method, *arguments, timeout=timeout)
        while task_id := _running(answer):
            self.polls += 1
            answer = await self.value(agent_id, "get_task", task_id, timeout=timeout)
            if _running(answer):
                if time.monotonic() > until:
                    raise RpcTimeoutError(f"Timed out waiting for '{method}' of agent {agent_id!r} to end")
                await asyncio.sleep(self.poll)
        return answer

    async def wait_until_ready(self, agent_id: str, *, timeout: float = 600.0, patience: float = 1.0) -> None:
        """Ping the agent until it answers, for at most ``timeout`` seconds in total and ``patience`` seconds for each
        reply. Raises ``TimeoutError``.
        """
        async with asyncio.timeout(timeout):
            while True:
                with contextlib.suppress(RpcTimeoutError):
                    await self.value(agent_id, "ping", timeout=patience)
                    return

    async def request(self, agent_id: str, method: str, arguments: tuple[Any, ...], request_id: str) -> None:
        """Send a request with an id that the caller chooses. Raises ``ShimError`` without a bus connection."""
        if self.peer is None:
            raise ShimError("cannot ask an agent: this Director is not connected to a bus")
        reply_to = f"director.{self.uuid}.{agent_id}.{request_id}"
        request = {"protocol": PROTOCOL, "method": method, "arguments": arguments, "reply_to": reply_to}
        await self.peer.publish(f"agent.{agent_id}", json.dumps(request).encode())

    def _received(self, subject: str, data: bytes) -> None:
        """Deliver a reply to the request whose id is the last part of the subject."""
        reply = self._waiting.pop(subject.rpartition(".")[2], None)
        with contextlib.suppress(ValueError):
            document = json.loads(data)
            # Drop a reply that is not an object. As with the real Director, the request then times out, because even
            # such a reply removes the request from the list of pending requests.
            if reply is not None and not reply.done() and isinstance(document, dict) and document:
                reply.set_result(document)


def _value(reply: dict[str, Any]) -> Any:
    """Return the value in a reply. Raises ``RpcRemoteError`` if the reply contains an exception."""
    if "exception" in reply:
        exception = reply["exception"]
        raise RpcRemoteError(str(exception.get("message", "") if isinstance(exception, dict) else exception))
    return reply.get("value")


def _running(answer: Any) -> str:
    """Return the id of the running task in a reply, or "" if the reply names none."""
    if isinstance(answer, dict) and answer.get("state") == "running":
        return str(answer.get("agent_task_id", ""))
    return ""


# --- Health Monitor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that an agent sent without being asked.

    ``kind`` is heartbeat, alert or shutdown, and ``at`` is monotonic time.
    """

    kind: str
    agent_id: str
    body: Any
    at: float = field(default_factory=time.monotonic)


class HealthMonitor:
    """A Health Monitor that collects notices from agents, in order of arrival."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def on(self, mbus: Mbus) -> AsyncIterator[HealthMonitor]:
        """Connect a Health Monitor to a bus for the duration of the block."""
        subjects = tuple(f"hm.agent.{kind}.*" for kind in ("heartbeat", "alert", "shutdown"))
        async with joined(mbus, subjects, self._received):
            yield self

    def of(self, kind: str, agent_id: str) -> list[Notice]:
        """Return all notices of one kind received from an agent so far."""
        return [notice for notice in self.notices if (notice.kind, notice.agent_id) == (kind, agent_id)]

    async def wait_for(
        self, kind: str, agent_id: str, where: Callable[[Any], bool] = lambda _: True, *, timeout: float = 30.0
    ) -> Notice:
        """Wait up to ``timeout`` seconds for a notice whose body matches ``where``, and return the notice. Raises
        ``TimeoutError``.
        """
        async with asyncio.timeout(timeout):
            while True:
                for notice in self.of(kind, agent_id):
                    if where(notice.body):
                        return notice
                await self._news.wait()

    def _received(self, subject: str, data: bytes) -> None:
        _, _, kind, agent_id = subject.split(".", 3)
        self.notices.append(Notice(kind, agent_id, json.loads(data)))
        # Wake all waiting callers. Callers that arrive later wait for the next notice.
        self._news.set()
        self._news = asyncio.Event()
