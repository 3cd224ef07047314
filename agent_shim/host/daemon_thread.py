"""Daemon threads for work that may hang forever, for example because of a file server or name server that does not
answer.

``asyncio.to_thread`` has only a few threads, and the process waits for them when it exits, so a thread that hangs would
block other work and the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread and return a future. Raises ``OSError`` if no thread can be started."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            found = work()
        except Exception as exc:  # noqa: BLE001 - raised where the future is awaited
            settle = partial(answer.set_exception, exc)
        else:
            settle = partial(answer.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as exc:
        answer.set_exception(OSError(errno.EAGAIN, f"{exc}"))
    return answer


def pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool for ``asyncio.to_thread`` with all its threads started, because the machine may refuse new threads
    later.
    """
    made = ThreadPoolExecutor(threads, thread_name_prefix="blocking")
    together = threading.Barrier(threads)
    try:
        for _ in range(threads):
            made.submit(together.wait)
    except RuntimeError:
        together.abort()  # use only the threads that have started
    return made
