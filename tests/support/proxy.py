"""A TCP proxy that simulates a bad network: it can delay data, cut connections, or stop forwarding."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Final, Self

from tests.support.serving import serving

ESTABLISHED: Final = 1  # from include/net/tcp_states.h


class Proxy:
    """An async context manager that forwards connections to the loopback port ``target``, and can delay, cut or stall
    them.

    It listens on ``address``, which may be assigned later. If ``port`` is 0, it listens on a free port.
    """

    def __init__(self, target: int, address: str = "127.0.0.1", port: int = 0) -> None:
        self.delay = 0.0
        """Seconds by which each chunk of data is delayed."""
        self.connections = 0
        """Number of connections accepted so far."""
        self.target = target
        self._address = address
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._made: list[asyncio.StreamWriter] = []
        self.port = port
        """The port on which the proxy listens."""
        self._serving = contextlib.AsyncExitStack()

    @property
    def left(self) -> int:
        """Number of client connections that have been closed. A closed connection is noticed even if no data is being
        forwarded.
        """
        return sum(not _is_held(writer) for writer in self._made)

    async def __aenter__(self) -> Self:
        server = serving(self._forward, address=self._address, port=self.port)
        self.port = await self._serving.enter_async_context(server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._serving.aclose()

    def cut(self) -> None:
        """Reset every existing connection. New connections are still accepted."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def swallow(self) -> None:
        """Act as a black hole: accept connections and leave them open, but forward no data in either direction."""
        self._flowing.clear()

    def flow(self) -> None:
        """Resume forwarding, starting with the data that was held back."""
        self._flowing.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        self._made.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def _is_held(writer: asyncio.StreamWriter) -> bool:
    """Return True if neither the client nor the proxy has closed the connection."""
    try:
        state: bytes = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == ESTABLISHED
    except OSError:
        return False
