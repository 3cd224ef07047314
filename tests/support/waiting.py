"""How tests wait for a fact: they check until it holds, however long a busy machine takes."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

TIMEOUT_S: Final = 120.0 * float(os.environ.get("SHIM_TEST_SLOW", "1"))
"""Seconds after which a fact that was waited for counts as missing."""

FIRST_S: Final = 0.003
LONGEST_S: Final = 0.05
GROWTH: Final = 1.2
"""Looks are closest at the beginning: most facts are there soon, and a slow one costs few looks."""

Fact = TypeVar("Fact")


async def until(
    fact: Callable[[], Fact | Awaitable[Fact | None] | None], what: str = "", *, timeout: float = TIMEOUT_S
) -> Fact:
    """Check until ``fact()`` is true, and return it. ``fact`` may be a coroutine function."""
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
