"""Work that may hang, aside."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_shim.host.apart import apart


async def test_result_and_error_come_back() -> None:
    """Both where they are waited for."""
    assert await apart(lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        await apart(lambda: 1 // 0, "nothing")


async def test_work_that_hangs_holds_nobody() -> None:
    """Many at once may hang: the loop goes on, and so does other work."""
    gate = threading.Event()
    hung = [apart(gate.wait, f"hung {number}") for number in range(50)]
    try:
        assert await apart(lambda: 7, "seven") == 7
        assert not any(each.done() for each in hung)
    finally:
        gate.set()
        await asyncio.gather(*hung)


async def test_answer_nobody_waits_for_is_dropped() -> None:
    """A waiter that gave up is not disturbed by it."""
    gate = threading.Event()
    answer = apart(gate.wait, "late")
    answer.cancel()
    gate.set()
    assert await apart(lambda: 7, "seven") == 7
    assert answer.cancelled()
