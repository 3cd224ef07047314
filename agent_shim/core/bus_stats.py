"""Counters that the bus updates and the metrics report."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct):
    """Counters of a bus since its creation."""

    attempts: int = 0
    """Number of connection attempts, including successful ones."""
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
    """Why the bus is not connected, or the last problem of the connection, or "" if there was none."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)
