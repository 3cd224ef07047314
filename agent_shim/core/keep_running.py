"""Restarts endless tasks that crash. Each crash is logged and counted, and the pause before the restart doubles up to a
limit. Other tasks keep running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0
"""Maximum pause before a restart, in seconds. Each pause is twice as long as the previous one. After a task has run for
longer than this maximum, its next pause is ``FIRST_PAUSE_S`` again.
"""
FAILURE_PERIOD_S: Final = 60.0
MAX_FAILURES: Final = 5
"""A vital task that fails more often than this within ``FAILURE_PERIOD_S`` is no longer restarted."""

failures: Final[Counter[str]] = Counter()
"""Number of failures by task name, since the process started."""


async def run_forever(name: str, run: Callable[[], Awaitable[object]], *, is_vital: bool = False) -> NoReturn:
    """Call ``run``, and call it again whenever it returns or raises an error, although it should do neither.

    If ``is_vital`` is set and the task fails too often (``MAX_FAILURES``), raise ``RuntimeError`` with the last failure
    as its cause. The agent then exits and is started again.
    """
    pause = FIRST_PAUSE_S
    recent: deque[float] = deque(maxlen=MAX_FAILURES + 1)
    while True:
        started_at = time.monotonic()
        try:
            await run()
            raise RuntimeError(f"{name} has ended, but it must run forever")
        except asyncio.CancelledError as exc:
            if is_asked_to_end():
                raise
            error: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - whatever the error, other tasks must continue
            error = exc
        now = time.monotonic()
        failures[name] += 1
        recent.append(now)
        if is_vital and len(recent) > MAX_FAILURES and now - recent[0] <= FAILURE_PERIOD_S:
            raise RuntimeError(f"{name} fails repeatedly") from error
        if now - started_at > MAX_PAUSE_S:
            pause = FIRST_PAUSE_S
        logger.error("%s has failed; it restarts in %g s", name, pause, exc_info=error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def is_asked_to_end() -> bool:
    """Return True if the current task is being cancelled. If the result is False, a ``CancelledError`` was raised by
    something that the task has awaited.
    """
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
