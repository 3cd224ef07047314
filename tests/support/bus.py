"""Runs an agent's bus connection without the rest of the agent, and a NATS server with scripted behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent_shim.core.settings import Mbus
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR, Authority, Pair
from agent_shim.edges.bus import Handle, tls
from agent_shim.edges.bus.nats import BusTiming, NatsBus
from tests.support.broker import NatsServer
from tests.support.serving import serving
from tests.support.waiting import TIMEOUT_S

FAST = BusTiming(
    connect=10.0,
    ping=60.0,
    step=0.02,
    longest=0.1,
    early_step=0.02,
    overlap=0.1,
    refused=0.3,
    unreachable=20.0,
    goodbye=0.2,
)
"""Bus timing for tests. Delays that tests wait for are short, and limits that should never be reached are long."""


async def echo(data: bytes) -> tuple[str, bytes] | None:
    """Answer a request with the name of its method. The ``sleep`` method first sleeps for its argument in seconds."""
    request = json.loads(data)
    if request["method"] == "sleep":
        await asyncio.sleep(request["arguments"][0])
    return request["reply_to"], json.dumps({"value": request["method"]}).encode()


@asynccontextmanager
async def on_bus(
    mbus: Mbus, agent_id: str = "agent", handle: Handle = echo, *, timing: BusTiming = FAST, **options: Any
) -> AsyncIterator[NatsBus]:
    """Run a ``NatsBus`` during the block. It might not be connected yet when the block begins."""
    bus = NatsBus(agent_id, mbus, handle, timing=timing, **options)
    running = asyncio.create_task(bus.run(), name="bus")
    try:
        yield bus
        assert not running.done(), "nothing ends the bus"
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@dataclass(frozen=True)
class Talk:
    """A NATS server with a connected agent (``bus``), Director and Health Monitor."""

    server: NatsServer
    bus: NatsBus
    director: Director
    monitor: HealthMonitor


@asynccontextmanager
async def talking(where: Path, *, agent_id: str = "agent", **options: Any) -> AsyncIterator[Talk]:
    """Start a server, and connect a Director, a Health Monitor, and an agent that echoes requests."""
    async with NatsServer(where) as server:
        await server.add_agent(agent_id)
        async with (
            on_bus(server.mbus(agent_id), agent_id, **options) as bus,
            Director(poll=0.01).on(server.peer()) as director,
            HealthMonitor().on(server.peer(HEALTH_MONITOR)) as monitor,
        ):
            await connected(bus)
            yield Talk(server, bus, director, monitor)


async def connected(bus: NatsBus) -> None:
    """Wait up to 30 s until the bus is connected."""
    async with asyncio.timeout(TIMEOUT_S):
        await bus.wait_connected()


def sockets_to(port: int) -> set[Any]:
    """Return the local addresses of this process's connections to a port."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr for each in connections if getattr(each.raddr, "port", 0) == port}


class ClientConnection:
    """A client's connection as seen by the server, after the TLS handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lines: list[str] = []
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def push(self, data: bytes) -> None:
        """Send data, and wait while too much unsent data is buffered."""
        self._writer.write(data)
        # The event loop has to run once to notice that the connection is lost. Otherwise drain() would accept data
        # forever.
        await asyncio.sleep(0)
        await self._writer.drain()

    async def expect(self, start: str) -> str:
        """Return the next line, which must begin with ``start``."""
        line = (await self._reader.readuntil(b"\r\n")).decode().rstrip("\r\n")
        self.lines.append(line)
        assert line.startswith(start), f"{start!r} expected, not {line!r}"
        return line

    async def payload(self, size: int) -> bytes:
        return (await self._reader.readexactly(size + 2))[:-2]

    async def greet(self) -> None:
        """Perform the NATS handshake until the client's subscription is confirmed."""
        await self.expect("CONNECT ")
        await self.expect("PING")
        self.send(b"PONG\r\n")
        await self.expect("SUB agent.agent ")
        await self.expect("PING")
        self.send(b"PONG\r\n")

    def shrink_receive_buffer(self) -> None:
        """Shrink the socket's receive buffer so that the kernel buffers only a few kilobytes of unread data."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def answer_pings(self) -> None:
        """Answer pings, as an idle server does, until the client disconnects. Ignore all other messages."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                if await self.expect("") == "PING":
                    self.send(b"PONG\r\n")


Script = Callable[[ClientConnection], Awaitable[None]]

INFO = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"tls_required":true}\r\n'


class FakeServer:
    """A NATS server that runs one of the scripts for each connection: the first for the first connection, and so on.
    The last script is also used for all later connections.

    A failed assertion in a script fails the test.
    """

    def __init__(self, *scripts: Script, info: bytes = INFO, authority: Authority, pair: Pair | None = None) -> None:
        self.port = 0
        self.connections = 0
        self.failures: list[BaseException] = []
        self._scripts = scripts
        self._info = info
        self._authority = authority
        pair = pair or authority.server()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_pair(self.context, pair.certificate, pair.private_key)
        self.context.load_verify_locations(cadata=authority.ca)
        self.context.verify_mode = ssl.CERT_REQUIRED

    @property
    def mbus(self) -> Mbus:
        pair = self._authority.agent("agent")
        return Mbus((f"nats://127.0.0.1:{self.port}",), self._authority.ca, pair.certificate, pair.private_key)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeServer]:
        async with serving(self._play) as self.port:
            yield self
        assert self.failures == []

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        try:
            writer.write(self._info)
            if b"tls_required" in self._info:
                await writer.start_tls(self.context)
            await script(ClientConnection(reader, writer))
        except (OSError, EOFError):
            pass
        except AssertionError as exc:
            self.failures.append(exc)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def facing(*scripts: Script, info: bytes = INFO, **options: Any) -> AsyncIterator[NatsBus]:
    """Run a bus that is connected to a ``FakeServer`` with ``scripts``."""
    fake = FakeServer(*scripts, info=info, authority=Authority())
    async with fake.serving() as server, on_bus(server.mbus, **options) as bus:
        yield bus
