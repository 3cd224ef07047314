"""Tests root tasks, which are meant to run until the agent exits and are restarted if they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agent_shim.core import keep_running


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_running, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(keep_running, "MAX_PAUSE_S", 0.002)
    keep_running.failures.clear()


def failing(times: int, then: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Return a function that fails ``times`` times, then sets ``then`` and runs forever."""
    count = 0

    async def run() -> None:
        nonlocal count
        count += 1
        if count <= times:
            raise ZeroDivisionError
        then.set()
        await asyncio.Event().wait()

    return run


@pytest.mark.parametrize(("times", "is_vital"), [(20, False), (keep_running.MAX_FAILURES, True)])
async def test_failed_root_task_is_restarted_and_counted(times: int, is_vital: bool) -> None:
    lasts = asyncio.Event()
    working = asyncio.create_task(keep_running.run_forever("watch", failing(times, lasts), is_vital=is_vital))
    async with asyncio.timeout(10):
        await lasts.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert keep_running.failures == {"watch": times}


async def test_repeated_failure_of_a_vital_task_stops_the_agent() -> None:
    with pytest.raises(RuntimeError, match="bus fails repeatedly") as raised:
        await keep_running.run_forever("bus", failing(keep_running.MAX_FAILURES + 1, asyncio.Event()), is_vital=True)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


async def test_root_task_that_returns_or_cancels_itself_counts_as_failed() -> None:
    async def ends() -> None:
        if keep_running.failures["watch"]:
            raise asyncio.CancelledError

    working = asyncio.create_task(keep_running.run_forever("watch", ends))
    async with asyncio.timeout(10):
        while keep_running.failures["watch"] < 2:
            await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
