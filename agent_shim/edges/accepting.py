"""Listening sockets that a flood of connections cannot take from other callers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

PER_TURN: Final = 8
"""Connections accepted in one iteration of the loop. If it accepted a whole flood, a server would close the first
connections for the last ones before it has read a byte of them.
"""
WAITING: Final = 128
"""Connections that wait in the kernel."""
PER_SECOND: Final = 100
"""Connections of one address in a second. Further ones are closed unread: an answer costs the agent more than its
request costs the caller.
"""
REST_S: Final = 1.0
"""Seconds without accepting when no descriptor is free."""


class Listener:
    """Listening sockets, from ``listen``."""

    def __init__(
        self, protocol: Callable[[], asyncio.BaseProtocol], sockets: Sequence[socket.socket], *, bounded: bool
    ) -> None:
        self.sockets = sockets
        self._bounded = bounded
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._second = 0
        self._accepted: Counter[str] = Counter()
        """By address, in this second."""
        for each in sockets:
            each.setblocking(False)
            each.listen(WAITING)
            self._serve(each)

    def close(self) -> None:
        """Free the addresses. Connections remain."""
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()

    def _serve(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(PER_TURN):
            try:
                caller, (address, *_) = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                logger.warning("cannot accept a connection: %s", exc.strerror)
                self._loop.remove_reader(listener)
                self._loop.call_later(REST_S, self._serve, listener)
                return
            if self._bounded and not self._has_share(address):
                caller.close()
                continue
            caller.setblocking(False)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, caller))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _has_share(self, address: str) -> bool:
        if (second := int(self._loop.time())) != self._second:
            self._second = second
            self._accepted.clear()
        self._accepted[address] += 1
        return self._accepted[address] <= PER_SECOND


async def listen(
    protocol: Callable[[], asyncio.BaseProtocol], host: str | None, port: int, *, bounded: bool = True
) -> Listener:
    """Serve an address (None: all) with a protocol. Raises ``OSError``.

    Unless ``bounded``, no connection is closed unread: where all have one address, a flood would shut out the others.
    """
    bound = await asyncio.get_running_loop().create_server(protocol, host, port, start_serving=False)
    try:
        return Listener(
            protocol, [socket.socket(fileno=os.dup(each.fileno())) for each in bound.sockets], bounded=bounded
        )
    finally:
        bound.close()


def address_of(caller: socket.socket | None) -> str:
    """Return the address of a connection's other end. "" if it has none."""
    try:
        return str(caller.getpeername()[0]) if caller is not None else ""
    except OSError:
        return ""


def least_deserving(callers: Iterable[tuple[T, str]]) -> T | None:
    """Return the oldest caller of the address with the most. ``callers`` are in order of arrival."""
    arrived = list(callers)
    (busiest, _), *_ = Counter(address for _, address in arrived).most_common(1) or [("", 0)]
    return next((caller for caller, address in arrived if address == busiest), None)
