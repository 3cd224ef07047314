"""Defines the counters for the message bus, which are reported as metrics."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct):
    """Counters for the message bus since the bus object was created."""

    attempts: int = 0
    """Number of connection attempts, including successful ones."""
    connects: int = 0
    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    rejected: int = 0
    """Number of invalid requests."""
    duplicates: int = 0
    """Number of requests dropped because they arrived twice, as happens while credentials are rotated."""
    flooded: int = 0
    """Number of requests dropped because too many were in progress."""
    failed: int = 0
    """Number of requests whose handling failed."""
    unanswered: int = 0
    """Number of replies that could not be sent."""
    denied: int = 0
    """Number of messages that the server rejected because permission was missing, plus the number of callers that the
    agent rejected.
    """
    last_error: str = ""
    """The most recent connection problem, or "" if there has been none since the last successful connection."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)
