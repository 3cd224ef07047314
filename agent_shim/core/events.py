"""Waits for an ``asyncio.Event`` while other work runs, or for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def ended_before(event: asyncio.Event, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until ``work`` has finished, the event is set, or the timeout expires. Return True if ``work`` has finished.
    Otherwise, ``work`` keeps running.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        waiting.cancel()


async def until_stopped(work: Awaitable[Any], stop: asyncio.Event) -> bool:
    """Wait until ``work`` has finished or ``stop`` is set. Return True if ``work`` has finished; otherwise cancel it
    and return False. If ``work`` fails, its error is raised.
    """
    working = asyncio.ensure_future(work)
    try:
        if is_done := await ended_before(stop, working):
            working.result()  # raises the error from ``work``, if any
        return is_done
    finally:
        working.cancel()


async def is_set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait up to ``seconds`` until the event is set. Return whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
