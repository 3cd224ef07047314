"""Test servers that close all their connections when they stop, even those that they have just accepted.

A connection that stays open would fail a later test: Python warns of it when it collects the garbage.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

IP_FREEBIND: Final = 15  # from include/uapi/linux/in.h

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Begin = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


@asynccontextmanager
async def serving(
    talk: Talk, *, address: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Listen on an IPv4 address and run ``talk`` for each client. Yield the port. All connections are cut when the
    block ends.

    The address may be assigned later. If ``port`` is 0, a free port is used.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        listener.bind((address, port))

        async def listen(begin: Begin) -> asyncio.Server:
            return await asyncio.start_server(begin, sock=listener, ssl=context)

        async with _serving(talk, listen):
            yield listener.getsockname()[1]


@asynccontextmanager
async def serving_at(path: Path, talk: Talk) -> AsyncIterator[None]:
    """Listen on a Unix socket at ``path`` and run ``talk`` for each client. All connections are cut when the block
    ends.
    """

    async def listen(begin: Begin) -> asyncio.Server:
        return await asyncio.start_unix_server(begin, path)

    async with _serving(talk, listen):
        yield


@asynccontextmanager
async def _serving(talk: Talk, listen: Callable[[Begin], Awaitable[asyncio.Server]]) -> AsyncIterator[asyncio.Server]:
    talks: set[asyncio.Task[None]] = set()

    async def have(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(have(reader, writer), name="talk of a server")
        talks.add(task)
        task.add_done_callback(talks.discard)

    server = await listen(begin)
    try:
        yield server
    finally:
        try:
            # Without this, asyncio would lose a socket that it has accepted just before close().
            await _run_due_callbacks()
        finally:
            server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await _run_due_callbacks()  # asyncio closes a socket one loop iteration after its transport was aborted.


async def _run_due_callbacks() -> None:
    """Let the event loop run the callbacks that are due, and those that they schedule in turn."""
    for _ in range(10):
        await asyncio.sleep(0)
