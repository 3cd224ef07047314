"""A test server that closes all its connections when it stops, even those that it has just accepted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(talk: Talk, *, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Listen on a port and run ``talk`` for each client. Yield the port. All connections are cut when the block
    ends.
    """
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

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
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
