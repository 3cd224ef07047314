"""Tests how blocking calls run in threads: calls that may hang, and the thread pool that ``asyncio.to_thread`` uses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from agent_shim.host import blocking

# --- calls that may hang ----------------------------------------------------------------------------------------------


async def test_blocking_call_returns_results_and_raises_errors() -> None:
    assert await blocking.call("x", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await blocking.call("x", lambda: 1 // 0)


async def test_hanging_call_times_out_and_delays_only_calls_with_the_same_owner() -> None:
    gate = threading.Event()
    before = set(threading.enumerate())
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="no answer"):
                await blocking.call("evil", gate.wait, timeout=0.05)
        (hung,) = set(threading.enumerate()) - before
        assert hung.daemon
        assert await blocking.call("good", lambda: 7) == 7
    finally:
        gate.set()
    assert await blocking.call("evil", lambda: 7) == 7


async def test_hanging_calls_are_limited_unless_they_are_urgent() -> None:
    gate = threading.Event()
    before = set(threading.enumerate())  # one of these threads may be about to end
    try:
        calls = [blocking.call(f"evil {number}", gate.wait, timeout=0.05) for number in range(2 * blocking.MAX_THREADS)]
        assert all(isinstance(each, OSError) for each in await asyncio.gather(*calls, return_exceptions=True))
        assert len(set(threading.enumerate()) - before) == blocking.MAX_THREADS
        with pytest.raises(TimeoutError):
            await blocking.call("good", lambda: 7, timeout=0.05)
        assert await blocking.call("good", lambda: 7, is_urgent=True) == 7
    finally:
        gate.set()
    assert await blocking.call("good", lambda: 7) == 7


async def test_result_of_a_cancelled_call_is_dropped() -> None:
    gate = threading.Event()
    waiting = asyncio.create_task(blocking.call("late", gate.wait, timeout=30))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await blocking.call("late", lambda: 7) == 7
    assert waiting.cancelled()


def no_thread(_self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_call_whose_thread_cannot_start_raises_an_os_error_and_does_not_block_later_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match="can't start new thread"):
            await blocking.call("x", lambda: 7)
    assert await blocking.call("x", lambda: 7) == 7


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_thread_pool_starts_all_threads_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = blocking.pool(3)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert [threads.submit(int, number).result() for number in range(30)] == [*range(30)]
        blocking.pool(3).shutdown()
    threads.shutdown()


def test_thread_pool_works_if_only_some_of_its_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, ["one", "two"]

    def started(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    found, given_up_at = None, time.monotonic() + 30
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started)
        threads = blocking.pool(3)
        assert left == []
        while found is None and time.monotonic() < given_up_at:
            with contextlib.suppress(RuntimeError):  # submit fails unless a thread is idle
                found = threads.submit(int, "7").result(30)
            time.sleep(0.001)

    assert found == 7
    threads.shutdown()
