"""Restart crashed endless tasks: log, count, back off; other tasks are not affected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 60.0
"""Maximum pause before a restart; each pause is twice the one before. A run of this length resets it."""
WINDOW: Final = 60.0
OFTEN: Final = 5
"""Failures within a period above which a vital task is given up."""

failures: Final[Counter[str]] = Counter()
"""Failures by task since the process started."""


async def run_forever(name: str, run: Callable[[], Awaitable[object]], *, is_vital: bool = False) -> NoReturn:
    """Restart ``run`` whenever it ends, which is a bug. Raises its error if it ``is_vital`` and fails too often."""
    pause = FIRST_PAUSE
    recent: deque[float] = deque(maxlen=OFTEN + 1)
    while True:
        begun_at = time.monotonic()
        try:
            await run()
            raise RuntimeError(f"{name} has ended, which it must not")
        except asyncio.CancelledError as exc:
            if is_asked_to_end():
                raise
            error: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - whatever the error, other tasks must continue
            error = exc
        now = time.monotonic()
        failures[name] += 1
        recent.append(now)
        if is_vital and len(recent) > OFTEN and now - recent[0] <= WINDOW:
            raise RuntimeError(f"{name} fails again and again") from error
        if now - begun_at > LONGEST_PAUSE:
            pause = FIRST_PAUSE
        logger.error("%s has failed; it is begun again in %g s", name, pause, exc_info=error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_asked_to_end() -> bool:
    """Return True if a caught cancellation is addressed to the current task and does not come from within."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
