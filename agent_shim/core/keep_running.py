"""Endless work: what fails though nothing should is said, counted and begun again, and nothing else is disturbed."""

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
"""Seconds before it is begun again; each pause is twice the one before, until it has lasted that long."""
WINDOW: Final = 60.0
OFTEN: Final = 5
"""More failures than that in so many seconds are too many for what is vital."""

failures: Final[Counter[str]] = Counter()
"""How often which has failed, since the process began."""


async def run_forever(name: str, run: Callable[[], Awaitable[object]], *, is_vital: bool = False) -> NoReturn:
    """Keep ``run`` going: whatever ends it is a bug. Raises that error when what ``is_vital`` fails too often."""
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
        except Exception as exc:  # noqa: BLE001 - whatever it is: the others have done nothing wrong
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
    """Whether a cancellation that was caught is meant for the asyncio task that caught it, and not from within."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
