"""Calls that may hang and therefore run in a daemon thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from agent_shim.host.daemon_thread import pool, run_in_daemon_thread


async def test_daemon_thread_returns_results_and_errors() -> None:
    assert await run_in_daemon_thread(lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon_thread(lambda: 1 // 0, "nothing")


async def test_hanging_daemon_threads_do_not_block_other_calls() -> None:
    """Even with many hanging threads, the event loop and other calls continue."""
    gate = threading.Event()
    hung = [run_in_daemon_thread(gate.wait, f"hung {number}") for number in range(50)]
    try:
        assert await run_in_daemon_thread(lambda: 7, "seven") == 7
        assert not any(each.done() for each in hung)
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("hung"))
    finally:
        gate.set()
        await asyncio.gather(*hung)


async def test_result_of_a_cancelled_daemon_thread_call_is_dropped() -> None:
    """A result that arrives after a cancellation must not cause an error."""
    gate = threading.Event()
    answer = run_in_daemon_thread(gate.wait, "late")
    answer.cancel()
    gate.set()
    assert await run_in_daemon_thread(lambda: 7, "seven") == 7
    assert answer.cancelled()


def no_thread(_self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_daemon_thread_that_cannot_start_raises_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers handle this error like any other ``OSError``."""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="can't start new thread"):
        await run_in_daemon_thread(lambda: 7, "seven")


def test_thread_pool_starts_all_threads_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating a pool does not fail if no thread can be started."""
    threads = pool(3)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert [threads.submit(int, number).result() for number in range(30)] == [*range(30)]
        pool(3).shutdown()
    threads.shutdown()


def test_thread_pool_works_with_the_threads_that_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in the threads that did start."""
    start, left = threading.Thread.start, ["one", "two"]

    def started(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    found, given_up_at = None, time.monotonic() + 30
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started)
        threads = pool(3)
        assert left == []
        while found is None and time.monotonic() < given_up_at:
            with contextlib.suppress(RuntimeError):  # submit tries to start another thread unless one is idle
                found = threads.submit(int, "7").result(30)
            time.sleep(0.001)

    assert found == 7
    threads.shutdown()
