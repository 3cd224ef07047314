"""Order of the starts of services."""

from __future__ import annotations

from typing import Final, Protocol

MAX_LAUNCHES: Final = 8
"""More than programs start at once (``ctl_programs``), so none of those turns is left unused."""


class Starter(Protocol):
    """A service that is to start."""

    def go_on(self) -> None:
        """Ask for a turn again and begin the start, unless it is no longer wanted."""


class LaunchQueue:
    """Lets ``most`` services begin to start at a time: one that waits takes no task, whose room the heap would keep.

    A service leaves once its program has started, so a slow start delays no other.
    """

    def __init__(self, most: int = MAX_LAUNCHES) -> None:
        self._most = most
        self._admitted: set[Starter] = set()
        self._waiting: dict[Starter, None] = {}

    def admits(self, service: Starter) -> bool:
        """Return True if the service may begin; otherwise its ``go_on`` is called when it may."""
        if service not in self._admitted and len(self._admitted) >= self._most:
            self._waiting[service] = None
            return False
        self._admitted.add(service)
        return True

    def leave(self, service: Starter) -> None:
        """Give up its turn, if it has one, to the next one."""
        self._admitted.discard(service)
        while self._waiting and len(self._admitted) < self._most:
            following = next(iter(self._waiting))
            del self._waiting[following]
            following.go_on()
