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
    """Counts OOM kills, each of which explains the exit of one process. ``read`` returns the total number of OOM kills
    so far, or None if it is unavailable.
    """

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or _of_container()
        self._seen = self._read() or 0
        self._open: list[float] = []

    def claim(self) -> bool:
        """Claim a recent OOM kill as the cause of an exit that was just seen. Return False if there is none."""
        self.count()
        if not self._open:
            return False
        self._open.pop(0)
        return True

    def count(self) -> None:
        """Count new kills, and drop expired ones, which must have affected other processes."""
        now = time.monotonic()
        kills = self._read() or 0
        self._open = [at for at in self._open if now - at < CLAIM_TIMEOUT_S] + [now] * max(0, kills - self._seen)
        self._seen = kills


def _of_container() -> Callable[[], int | None]:
    cgroup = cgroups.find()
    # Find the cgroup level only once, because the counter is read at every exit.
    level = functools.cache(lambda: cgroups.oom_level(cgroup, host_stats.memory_total()))

    def read() -> int | None:
        try:
            found = level()
            return cgroups.oom_kills_of(*found) if found else None
        except (OSError, ValueError):
            return None

    return read
