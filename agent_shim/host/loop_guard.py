"""A guard for tests and ``AGENT_SHIM_DEBUG``: no callback blocks the event loop for longer than 50 ms.

Wall time proves little on a busy machine, so it only triggers the check. Two figures of the kernel count: the thread's
own CPU time, and the time that the thread slept during a callback: the wall time minus CPU time and minus the time that
it waited for a CPU (schedstat). Sleep is ignored if other threads of the process ran meanwhile, as the loop may have
waited for the interpreter's lock, or if pages were read from a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

LIMIT_S: Final = 0.05
OTHERS_S: Final = 0.001
"""CPU time of other threads above which a sleep may be a wait for the interpreter's lock."""

_per_thread: Final = threading.local()
_installed: list[Any] = []
violations: Final[list[str]] = []
"""Reports of callbacks that blocked a loop of this process."""


class _Clock(NamedTuple):
    wall: float
    cpu: float
    process: float
    ready: float
    faults: int
    spawning: float


def _now(*, is_end: bool) -> _Clock:
    """Read the clocks; a wait for the processor between two of them must not look like sleep.

    So the wall clock is read last at the beginning and first at the end.
    """
    wall = time.perf_counter() if is_end else 0.0
    cpu = time.thread_time()
    process = time.process_time()
    ready = _waited_for_processor()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    spawning = getattr(_per_thread, "spawning", 0.0)
    return _Clock(wall if is_end else time.perf_counter(), cpu, process, ready, faults, spawning)


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Exclude the start of a program, whose duration on a busy machine is not the loop's fault."""
    begun_at, cpu = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        waited = time.perf_counter() - begun_at - (time.thread_time() - cpu)
        _per_thread.spawning = getattr(_per_thread, "spawning", 0.0) + waited


def _waited_for_processor() -> float:
    """Return the seconds that this thread waited for a CPU; 0 where the kernel does not report it."""
    descriptor = getattr(_per_thread, "schedstat", None)
    if descriptor is None:
        try:
            descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            descriptor = -1
        _per_thread.schedstat = descriptor
    if descriptor < 0:
        return 0.0
    return int(os.pread(descriptor, 100, 0).split()[1]) / 1e9


def judge(before: _Clock, after: _Clock) -> str:
    """Describe the time between two readings if it blocked the loop; else return ""."""
    cpu = after.cpu - before.cpu
    if cpu >= LIMIT_S:
        return f"computed for {cpu * 1e3:.0f} ms"
    slept = after.wall - before.wall - cpu - (after.ready - before.ready) - (after.spawning - before.spawning)
    others = after.process - before.process - cpu
    if slept >= LIMIT_S and others < OTHERS_S and after.faults == before.faults:
        return f"slept for {slept * 1e3:.0f} ms"
    return ""


def install(reports: Path | None = None) -> None:
    """Guard all loops of this process from now on; each violation is logged and becomes a file in ``reports``."""
    if _installed:
        return
    run = asyncio.Handle._run  # noqa: SLF001 - where asyncio itself measures slow callbacks
    _installed.append(run)

    def guarded(handle: asyncio.Handle) -> None:
        before = _now(is_end=False)
        try:
            run(handle)
        finally:
            if time.perf_counter() - before.wall >= LIMIT_S and (what := judge(before, _now(is_end=True))):
                _report(f"the event loop was blocked: a callback {what}: {_named(handle)}", reports)

    setattr(asyncio.Handle, "_run", guarded)  # noqa: B010 - a name that is not in the types


def remove() -> None:
    """Remove the guard."""
    if _installed:
        setattr(asyncio.Handle, "_run", _installed.pop())  # noqa: B010


def _named(handle: asyncio.Handle) -> str:
    """Describe the callback, and the asyncio task that it belongs to."""
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    return repr(owner if isinstance(owner, asyncio.Task) else handle)


def _report(text: str, reports: Path | None) -> None:
    violations.append(text)
    logger.error("%s", text)
    if reports is not None:
        with contextlib.suppress(OSError):
            (reports / f"{os.getpid()}.{len(violations)}").write_text(text)
