"""Keeps each service's last events for operators. The events are kept only in memory, so they are lost when the agent
restarts.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import msgspec

KEPT: Final = 10
"""Maximum number of events kept per service."""


class Happening(msgspec.Struct):
    """An event and its repetitions. ``at`` is the time of the last repetition, in seconds since 1970."""

    at: float
    text: str
    count: int = 1


class History:
    """Events by service name. An event with the same description as the service's last event only increases the count
    of that event.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, deque[Happening]] = {}

    def add(self, name: str, text: str) -> None:
        """Add an event with the current time."""
        events = self._by_name.setdefault(name, deque(maxlen=KEPT))
        if events and events[-1].text == text:
            events[-1].at, events[-1].count = time.time(), events[-1].count + 1
        else:
            events.append(Happening(time.time(), text))

    def of(self, name: str) -> list[Happening]:
        """Return a service's events, oldest first."""
        return list(self._by_name.get(name, ()))
