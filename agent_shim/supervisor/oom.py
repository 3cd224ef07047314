"""Detects OOM kills using the counters in the container's cgroup."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

from agent_shim.host import cgroups, host_stats

CLAIM_TIMEOUT_S: Final = 20.0
"""How long after an OOM kill a process exit can still be attributed to the kill."""


class Kills:
    """Counts OOM kills, and attributes each of them to one process exit. ``read`` returns the total number of OOM kills
    so far, or None if it is unavailable.
    """

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or _container_counter()
        self._seen = self._read()
        """The last total that could be read, or None."""
        self._unclaimed: list[float] = []
        """Monotonic time of each recent kill that does not explain an exit yet."""

    def claim(self) -> bool:
        """Claim a recent OOM kill as the cause of an exit that was just observed. Return False if there is none."""
        self.count()
        if not self._unclaimed:
            return False
        self._unclaimed.pop(0)
        return True

    def count(self) -> None:
        """Count new kills, and forget expired ones. No service has claimed an expired kill, so it must have hit some
        other process.
        """
        now = time.monotonic()
        kills = self._read()
        self._unclaimed = [at for at in self._unclaimed if now - at < CLAIM_TIMEOUT_S]
        if kills is not None:
            if self._seen is not None:
                self._unclaimed += [now] * max(0, kills - self._seen)
            self._seen = kills


def _container_counter() -> Callable[[], int | None]:
    """Return a function that reads how many OOM kills there have been in this container."""
    cgroup = cgroups.find()
    # Look up the cgroup only once, because its counter is read at every exit.
    level = functools.cache(lambda: cgroups.oom_level(cgroup, host_stats.memory_total()))

    def read() -> int | None:
        try:
            found = level()
            return cgroups.oom_kills_of(*found) if found else None
        except (OSError, ValueError):
            return None

    return read
