"""Lets tests wait for a condition, which is checked repeatedly until it is true. A wait fails only after ``TIMEOUT_S``
seconds, so a busy machine usually makes a test slower but does not make it fail.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

TIMEOUT_S: Final = 120.0 * float(os.environ.get("SHIM_TEST_SLOW", "1"))
"""Seconds after which a wait fails."""

FIRST_S: Final = 0.003
LONGEST_S: Final = 0.05
GROWTH: Final = 1.2
"""Factor by which the interval between two checks grows. Conditions that become true soon are noticed quickly, and slow
ones need few checks.
"""

Fact = TypeVar("Fact")


async def until(
    fact: Callable[[], Fact | Awaitable[Fact | None] | None], what: str = "", *, timeout: float = TIMEOUT_S
) -> Fact:
    """Call ``fact()`` until its result is true, and return the result. ``fact`` may be a coroutine function."""
    pause = FIRST_S
    try:
        async with asyncio.timeout(timeout):
            while True:
                found = fact()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(pause)
                pause = min(pause * GROWTH, LONGEST_S)
    except TimeoutError:
        text = what or (inspect.getsource(fact).strip() if hasattr(fact, "__code__") else repr(fact))
        raise AssertionError(f"never came true: {text}") from None
