"""Runs blocking work in threads, so that it does not stop the event loop.

There are two ways. ``asyncio.to_thread`` runs work that always finishes soon, such as reading the agent's own files.
Its pool has only a few threads, and the process waits for them when it exits. :func:`call` runs work that may hang,
because it depends on a file server, a name server or a job's files. It has a deadline, and its thread is a daemon
thread, which does not delay the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

TIMEOUT_S: Final = 2.0
"""Default deadline for a call."""
MAX_THREADS: Final = 32
"""Maximum number of threads that may hang at the same time, for example because many jobs' volumes do not answer."""
_POLL_S: Final = 0.01

_busy: Final[set[str]] = set()
"""The ``owner`` arguments of the calls in progress. The calls' threads change this set, so ``_lock`` protects it."""
_lock: Final = threading.Lock()


async def call(owner: str, work: Callable[[], T], *, timeout: float = TIMEOUT_S, is_urgent: bool = False) -> T:
    """Run ``work`` in a daemon thread, and return or raise its outcome within ``timeout`` seconds.

    ``owner`` names the resource that may hang, for example a disk, a host or a job's files. Calls with the same owner
    run one after another, so a resource that hangs occupies only one thread. Calls also wait while ``MAX_THREADS``
    other calls are in progress, unless ``is_urgent`` is set, for example because the bus depends on the call.

    Raises ``TimeoutError`` if there is no result in time. In that case, ``work`` might still be running, or might not
    have started yet. Raises ``OSError`` (EAGAIN) if no thread can be started.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        deliver: Callable[[], None]
        try:
            result = work()
        except Exception as exc:  # noqa: BLE001 - raised where the future is awaited
            deliver = partial(answer.set_exception, exc)
        else:
            deliver = partial(answer.set_result, result)
        finally:
            _release(owner)
        # If the caller has timed out or has been cancelled, the future is already cancelled.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if answer.done() else deliver())

    try:
        async with asyncio.timeout(timeout):
            while not _acquire(owner, is_urgent=is_urgent):  # noqa: ASYNC110 - rarely waits
                await asyncio.sleep(_POLL_S)
            try:
                threading.Thread(target=run, name=owner, daemon=True).start()
            except RuntimeError as exc:
                _release(owner)
                raise OSError(errno.EAGAIN, f"{exc}") from None
            return await answer
    except TimeoutError:
        # Python turns an OSError with this number into a TimeoutError.
        raise OSError(errno.ETIMEDOUT, f"no answer within {timeout:g} s") from None


def _acquire(owner: str, *, is_urgent: bool) -> bool:
    """Reserve ``owner`` for a new call. Return False if the call has to wait (see ``call``)."""
    with _lock:
        is_free = owner not in _busy and (is_urgent or len(_busy) < MAX_THREADS)
        if is_free:
            _busy.add(owner)
    return is_free


def _release(owner: str) -> None:
    """Let the next call with this owner start, because the current one has ended."""
    with _lock:
        _busy.discard(owner)


def pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool for ``asyncio.to_thread`` with all its threads started, because the machine may refuse new threads
    later.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix="blocking")
    # Each thread waits until all have started, because the executor would otherwise reuse an idle thread.
    all_started = threading.Barrier(threads)
    try:
        for _ in range(threads):
            executor.submit(all_started.wait)
    except RuntimeError:
        all_started.abort()  # use only the threads that have started
    return executor
