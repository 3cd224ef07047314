"""Transports for the agent protocol: NATS for a Director, HTTPS for create-env."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

from agent_shim.core.bus_stats import Stats
from agent_shim.core.settings import Mbus

Handle = Callable[[bytes], Awaitable[tuple[str, bytes] | None]]
"""Handles a request. Returns the reply subject and the reply, or None to drop the request."""


class Bus(Protocol):
    """Interface that the transports for NATS and HTTPS implement."""

    stats: Stats

    @property
    def mbus(self) -> Mbus:
        """The addresses and credentials in use."""

    @property
    def is_connected(self) -> bool:
        """True if the agent can currently receive requests, as far as it can tell."""

    async def run(self) -> NoReturn:
        """Serve as a root task until cancelled."""

    async def drain(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until all pending requests have been answered."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish a message to the Health Monitor. Raises ``BusError``."""

    async def rotate(self, mbus: Mbus) -> None:
        """Switch to other addresses or credentials. If no connection with the new values is possible, raise
        ``ActionError`` and change nothing.
        """
