"""Waiting for an event beside other work, or up to a time."""

from __future__ import annotations

import asyncio
from typing import Any


async def ended_before(event: asyncio.Event, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait for ``work``. False if the event is set or the time is up before. ``work`` continues in any case."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        waiting.cancel()


async def is_set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for the event up to ``seconds``. True if it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
