"""Transports of the agent protocol: NATS for a Director, HTTPS for create-env."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

import msgspec

from agent_shim.core.settings import Mbus

Handle = Callable[[bytes], Awaitable[tuple[str, bytes] | None]]
"""Handles a request; returns reply subject and reply, or None to drop it."""


class Stats(msgspec.Struct):
    """Counters of a bus since its creation."""

    attempts: int = 0
    """Connections tried, successful ones included."""
    connects: int = 0
    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    rejected: int = 0
    """Invalid requests."""
    duplicates: int = 0
    flooded: int = 0
    """Requests dropped because too many were in progress."""
    failed: int = 0
    """Requests whose handling failed."""
    unanswered: int = 0
    """Replies that could not be sent."""
    denied: int = 0
    """Messages refused by the server for lack of permission, and callers refused by the agent."""
    last_error: str = ""
    """Reason for a missing connection, or the last problem on it; "" without a problem."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class Bus(Protocol):
    """Interface of both transports."""

    stats: Stats

    @property
    def mbus(self) -> Mbus:
        """The addresses and credentials in use."""

    @property
    def is_connected(self) -> bool:
        """True if, as far as known, a request can arrive now."""

    async def run(self) -> NoReturn:
        """Serve endlessly, as a root task."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until pending requests are answered, at most ``timeout_s`` seconds."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish a message to the Health Monitor. Raises ``BusError``."""

    async def rotate(self, mbus: Mbus) -> None:
        """Switch to other addresses or credentials. Raises ``ActionError`` and changes nothing if they are unusable."""
