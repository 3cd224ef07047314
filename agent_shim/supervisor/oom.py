"""Who was killed for want of memory, as far as the counters of the container's cgroup show it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

from agent_shim.host import cgroups, host_stats

MEMORY: Final = 20.0
"""Seconds for which a kill waits for the death that it explains."""


class Kills:
    """Counts kills of the kernel, each of which explains one death; ``read`` tells how many there were, or None."""

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or _of_container()
        self._seen = self._read() or 0
        self._open: list[float] = []

    def claim(self) -> bool:
        """Whether a kill of late explains a death just seen; it explains no other then."""
        self.count()
        if not self._open:
            return False
        self._open.pop(0)
        return True

    def count(self) -> None:
        """Take note of new kills, and forget those that nobody has claimed: they have hit other processes."""
        now = time.monotonic()
        kills = self._read() or 0
        self._open = [at for at in self._open if now - at < MEMORY] + [now] * max(0, kills - self._seen)
        self._seen = kills


def _of_container() -> Callable[[], int | None]:
    cgroup = cgroups.find()
    # Found once: the kills are asked for at each of many deaths.
    level = functools.cache(lambda: cgroups.oom_level(cgroup, host_stats.memory()))

    def read() -> int | None:
        try:
            found = level()
            return cgroups.oom_kills_of(*found) if found else None
        except (OSError, ValueError):
            return None

    return read
