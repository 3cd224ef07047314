"""Answers operators' commands on the daemon's control socket.

This is a Unix socket with mode 0600, so only root and the agent's own user can connect to it. On each connection, the
client sends one request, which is a JSON object on one line (``{"method": …, "arguments": […]}`` as on the bus, or
``{"command": "status"}``), and gets one JSON reply on one line. ``control_client`` is the counterpart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agent_shim.core.errors import ConfigError

logger = logging.getLogger(__name__)

PEER: Final = struct.Struct("3i")
MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
REQUEST_TIMEOUT_S: Final = 10.0
"""Seconds within which a client must send its request."""


class Peer(NamedTuple):
    """The process at the other end of the socket, as the kernel recorded it when the client connected."""

    pid: int
    uid: int
    gid: int


Answer = Callable[[dict[str, Any], bytes, Peer], Awaitable[bytes]]
"""A function that returns the reply as JSON. Its arguments are the request, the line that contained it, and the client.
"""


@contextlib.asynccontextmanager
async def listening(path: Path, answer: Answer) -> AsyncIterator[None]:
    """Serve on ``path`` for the duration of the block. A socket left behind by a killed agent is replaced."""
    peers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peers.add(task)  # so that it is cancelled at the end of the block
        task.add_done_callback(peers.discard)
        await _serve(reader, writer, answer)

    _remove(path)
    before = os.umask(0o177)  # so that the socket is created with mode 0600
    try:
        server = await asyncio.start_unix_server(serve, path=path, limit=MAX_REQUEST_BYTES)
    except OSError as exc:
        why = exc.strerror or exc
        raise ConfigError(f"cannot listen on {path}: {why}; with -b choose a directory with a shorter path") from exc
    finally:
        os.umask(before)
    try:
        yield
    finally:
        server.close()
        for task in peers:
            task.cancel()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
    """Read a request, write the reply, and close the connection. Only root and the agent's user get a reply."""
    try:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        peer = Peer(*PEER.unpack(credentials))
        if peer.uid not in (0, os.geteuid()):
            logger.warning("refused a request on the control socket: its user is neither root nor the agent's")
            return
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        request = msgspec.json.decode(line)
        if isinstance(request, dict):
            writer.write(await answer(request, line, peer))
            writer.write(b"\n")
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
    except (TimeoutError, OSError, ValueError, RecursionError) as exc:
        logger.info("cannot answer a request on the control socket: %s", exc)
    finally:
        writer.close()
