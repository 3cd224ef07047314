"""Work that may hang for ever (a dead file server, a name server that is silent), in a thread of its own.

The threads of ``asyncio.to_thread`` are few and are waited for at the end: one that hangs would take another's place,
and keep the process alive.
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
    """What ``work`` returns or raises; nothing waits for it when we end. ``OSError`` where no thread can be made."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            found = work()
        except Exception as exc:  # noqa: BLE001 - raised where it is waited for
            settle = partial(answer.set_exception, exc)
        else:
            settle = partial(answer.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as exc:
        answer.set_exception(OSError(errno.EAGAIN, f"{exc}"))
    return answer


def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for ``asyncio.to_thread``, all of them there at once: later on the machine may grant no more."""
    made = ThreadPoolExecutor(threads, thread_name_prefix="blocking")
    together = threading.Barrier(threads)
    try:
        for _ in range(threads):
            made.submit(together.wait)
    except RuntimeError:
        together.abort()  # those that there are must do
    return made
