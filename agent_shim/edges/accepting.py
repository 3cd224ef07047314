"""Creates listening sockets that stay usable for other callers while one caller floods them with connections."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

PER_TURN: Final = 8
"""Maximum number of connections accepted in one iteration of the event loop. If a server accepted a whole flood of
connections in one iteration, it would close the first ones to make room for the last ones before reading anything from
them.
"""
WAITING: Final = 128
"""Maximum number of connections that wait in the kernel to be accepted."""


async def listen(protocol: Callable[[], asyncio.BaseProtocol], host: str | None, port: int) -> asyncio.Server:
    """Listen on ``host`` (None for all addresses) and ``port``. Raises ``OSError``."""
    # asyncio uses ``backlog`` for both limits (``PER_TURN`` and ``WAITING``), so set the kernel's queue separately.
    # This needs a duplicated socket, because the objects that asyncio returns have no ``listen``.
    server = await asyncio.get_running_loop().create_server(protocol, host, port, backlog=PER_TURN)
    for listener in server.sockets:
        with socket.socket(fileno=os.dup(listener.fileno())) as duplicate:
            duplicate.listen(WAITING)
    return server


def address_of(caller: socket.socket | None) -> str:
    """Return the address of a connection's other end, or "" if it has none."""
    try:
        return str(caller.getpeername()[0]) if caller is not None else ""
    except OSError:
        return ""


def connection_to_close(callers: Iterable[tuple[T, str]]) -> T | None:
    """Return the connection to close if there are too many: the oldest one from the address with the most connections.

    ``callers`` lists connections and their addresses in order of arrival. If it is empty, return None.
    """
    arrived = list(callers)
    (busiest, _), *_ = Counter(address for _, address in arrived).most_common(1) or [("", 0)]
    return next((caller for caller, address in arrived if address == busiest), None)
