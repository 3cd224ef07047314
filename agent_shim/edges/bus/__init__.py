"""The two ways a Director or the bosh CLI reaches the agent: NATS, and HTTPS for create-env."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from agent_shim.core.settings import Mbus

Handle = Callable[[bytes], Awaitable[tuple[str, bytes] | None]]
"""Answers the bytes of a request with the subject and the bytes of the reply, or with None to drop it."""


@dataclass(slots=True)
class Stats:
    """What the bus has counted since it was made."""

    attempts: int = 0
    connects: int = 0
    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    rejected: int = 0
    """Messages that were no requests."""
    duplicates: int = 0
    flooded: int = 0
    """Requests dropped because too many were being worked on."""
    failed: int = 0
    """Requests whose handling broke."""
    unanswered: int = 0
    """Replies that could not be sent."""
    denied: int = 0
    """Messages the server refused for lack of permission, callers that we refused."""
    connected_at: float | None = None
    """Monotonic time of the present link; None without one."""
    last_error: str = ""
    """Why there is no link, or what was wrong last on it; "" when all is well."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class Bus(Protocol):
    """What the daemon asks of either."""

    stats: Stats

    @property
    def mbus(self) -> Mbus:
        """The addresses and credentials in use."""

    @property
    def is_connected(self) -> bool:
        """Whether a request sent now would arrive, as far as we know."""

    async def run(self) -> NoReturn:
        """Be there, for ever: somebody's root task."""

    async def settle(self, patience: float) -> None:
        """Until what is being answered is answered, for ``patience`` seconds at most."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Tell the Health Monitor something; raises ``BusError``."""

    async def rotate(self, mbus: Mbus) -> None:
        """Go over to other addresses or credentials; raises ``ActionError``, and then nothing has changed."""
