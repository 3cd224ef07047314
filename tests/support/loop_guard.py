"""Reports each callback that blocks the event loop of an agent under test for more than 50 ms.

Wall time alone proves nothing, because on a busy machine a callback may just have waited for a CPU. A callback is
therefore reported only if its CPU time or its sleep time exceeds the limit. Sleep time is the wall time minus the CPU
time and minus the time spent waiting for a CPU (schedstat). It counts only if a second thread, which checks every 10
ms, saw the loop's thread asleep in a system call. Two kinds of sleep do not count, because other threads that wait for
a CPU can prolong them: waiting for the GIL, and reading ``/proc``, which takes kernel locks. Sleep is also ignored if
pages were read from a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

LIMIT_S: Final = 0.05
LOOK_S: Final = 0.01
"""Seconds between the second thread's checks. It looks only at callbacks that have been running for two intervals."""
READ, FUTEX = ("63", "98") if os.uname().machine == "aarch64" else ("0", "202")
"""The numbers of the system calls ``read`` and ``futex``."""
RUNTIME_BYTES: Final = 1 << 20
"""Upper limit on the size of the interpreter's state, which contains the GIL."""

_per_thread: Final = threading.local()
_installed: list[Any] = []
_start_thread: Final = threading.Thread.start
_start_program: Final = subprocess.Popen.__init__
violations: Final[list[str]] = []
"""Reports of callbacks that blocked an event loop in this process."""


class _Clock(NamedTuple):
    wall: float
    cpu: float
    ready: float
    faults: int
    spawning: float


def _now(*, is_end: bool) -> _Clock:
    """Read the clocks. The wall clock is read last at the beginning of a period, and first at the end (``is_end``).

    In the opposite order, a wait for a CPU between two readings would be mistaken for sleep.
    """
    wall = time.perf_counter() if is_end else 0.0
    cpu = time.thread_time()
    ready = _waited_for_processor()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    spawning = getattr(_per_thread, "spawning", 0.0)
    return _Clock(wall if is_end else time.perf_counter(), cpu, ready, faults, spawning)


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Exclude the start of a program or thread from the check, because it may take a long time on a busy machine."""
    callback: _Callback | None = getattr(_per_thread, "callback", None)
    if callback is not None:
        callback.is_spawning = True
    begun_at, cpu = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        if callback is not None:
            callback.is_spawning = False
        waited = time.perf_counter() - begun_at - (time.thread_time() - cpu)
        _per_thread.spawning = getattr(_per_thread, "spawning", 0.0) + waited


def _waited_for_processor() -> float:
    """Return the seconds that this thread waited for a CPU, or 0 if the kernel does not report it."""
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


def judge(before: _Clock, after: _Clock, seen: str) -> str:
    """Describe how the event loop was blocked between two clock readings, or return "" if it was not blocked.

    ``seen`` is the second thread's observation (``_SleepFinder.end``).
    """
    cpu = after.cpu - before.cpu
    if cpu >= LIMIT_S:
        return f"computed for {cpu * 1e3:.0f} ms"
    slept = after.wall - before.wall - cpu - (after.ready - before.ready) - (after.spawning - before.spawning)
    if slept >= LIMIT_S and seen and after.faults == before.faults:
        return f"slept for {slept * 1e3:.0f} ms in {seen}"
    return ""


def install(reports: Path | None = None) -> None:
    """Check the callbacks of all event loops in this process from now on. Log each violation, and write it to a file in
    ``reports`` if given.
    """
    if _installed:
        return
    run = asyncio.Handle._run  # noqa: SLF001 what asyncio calls for each callback
    witness = _SleepFinder()
    witness.start()
    _installed.extend((witness, run))

    def start_thread(thread: threading.Thread) -> None:
        with spawning():
            _start_thread(thread)

    def start_program(program: subprocess.Popen[bytes], *how: Any, **more: Any) -> None:
        with spawning():
            _start_program(program, *how, **more)

    def guarded(handle: asyncio.Handle) -> None:
        witness.begin()
        before = _now(is_end=False)
        try:
            run(handle)
        finally:
            lasted = time.perf_counter() - before.wall
            after = _now(is_end=True) if lasted >= LIMIT_S else before
            seen = witness.end()
            if lasted >= LIMIT_S and (what := judge(before, after, seen)):
                _report(f"the event loop was blocked: a callback {what}: {_named(handle)}", reports)

    setattr(threading.Thread, "start", start_thread)  # noqa: B010 - mypy rejects assigning to a method
    setattr(subprocess.Popen, "__init__", start_program)  # noqa: B010
    setattr(asyncio.Handle, "_run", guarded)  # noqa: B010


def remove() -> None:
    """Stop checking callbacks, and restore the functions that ``install`` has replaced."""
    if _installed:
        setattr(asyncio.Handle, "_run", _installed.pop())  # noqa: B010
        _installed.pop().over.set()
        setattr(threading.Thread, "start", _start_thread)  # noqa: B010
        setattr(subprocess.Popen, "__init__", _start_program)  # noqa: B010


class _Callback:
    """The callback that a thread is running."""

    __slots__ = ("begun_at", "is_spawning", "seen")

    def __init__(self) -> None:
        self.begun_at = 0.0
        self.is_spawning = False
        """True while a program or thread is being started, which may sleep. ``_SleepFinder`` must not record this
        sleep. Otherwise, if the callback later waited for the GIL, which may also take a long time, the recorded place
        would be reported for that wait.
        """
        self.seen = ""


class _SleepFinder(threading.Thread):
    """Finds threads that sleep in a system call while they run a callback."""

    def __init__(self) -> None:
        super().__init__(name="witness", daemon=True)
        self.over = threading.Event()
        self._callbacks: dict[tuple[int, int], _Callback] = {}
        self._locks = _locks_of_the_interpreter()

    def begin(self) -> None:
        """Record that a callback has begun in this thread."""
        callback = getattr(_per_thread, "callback", None)
        if callback is None or _per_thread.witness is not self:
            callback = _per_thread.callback = _Callback()
            _per_thread.witness = self
            self._callbacks[threading.get_ident(), threading.get_native_id()] = callback
        callback.seen = ""
        callback.begun_at = time.perf_counter()

    def end(self) -> str:
        """Record that the callback has returned.

        Return the system call and the place in the code where the thread was seen asleep, or "" if it was never asleep.
        """
        callback: _Callback = _per_thread.callback
        callback.begun_at = 0.0
        return callback.seen

    def run(self) -> None:
        while not self.over.wait(LOOK_S):
            for (ident, native), callback in list(self._callbacks.items()):
                begun_at = callback.begun_at
                if not begun_at or callback.is_spawning or callback.seen or time.perf_counter() - begun_at < 2 * LOOK_S:
                    continue
                where, call = _stack(ident), _sleep(native, self._locks)
                if call and callback.begun_at == begun_at and not callback.is_spawning:
                    callback.seen = f"system call {call} at {where}"


def _sleep(native: int, locks: range) -> str:
    """Return the number of the system call in which a thread is asleep, or "" if the thread is awake.

    Also return "" if the thread is reading ``/proc`` or waiting for the GIL, because such sleep does not count.
    """
    try:
        state = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()[0]
        call, *arguments = Path(f"/proc/self/task/{native}/syscall").read_text().split()
        is_of_proc = call == READ and Path(f"/proc/self/fd/{int(arguments[0], 16)}").readlink().is_relative_to("/proc")
    except OSError:
        return ""
    if state not in "SD" or not call.isdigit() or is_of_proc or (call == FUTEX and int(arguments[0], 16) in locks):
        return ""
    return call


def _locks_of_the_interpreter() -> range:
    """Return the address range of the interpreter's state, which contains the GIL's locks.

    If the interpreter does not export the ``_PyRuntime`` symbol, return all addresses so that every wait for a lock
    counts as a wait for the GIL.
    """
    import ctypes  # Imported late, because only guarded agents need this module.

    try:
        state = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except ValueError:
        return range(sys.maxsize)
    return range(state, state + RUNTIME_BYTES)


def _stack(ident: int) -> str:
    frame = sys._current_frames().get(ident)  # noqa: SLF001 the only way to another thread's stack
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=4, lookup_lines=False)
    return " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack)


def _named(handle: asyncio.Handle) -> str:
    """Describe the callback and the asyncio task to which it belongs."""
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    return repr(owner if isinstance(owner, asyncio.Task) else handle)


def _report(text: str, reports: Path | None) -> None:
    violations.append(text)
    logger.error("%s", text)
    if reports is not None:
        with contextlib.suppress(OSError):
            (reports / f"{os.getpid()}.{len(violations)}").write_text(text)
