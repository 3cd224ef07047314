"""Work that may hang for ever (a dead file server, a name server that is silent), in a thread of its own.

The threads of ``asyncio.to_thread`` are few and are waited for at the end: one that hangs would take another's place,
and keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What ``work`` returns or raises; nothing waits for it when we end."""
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
