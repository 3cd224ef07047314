"""Watches the event loop from a separate thread. If the loop is blocked, the thread reports this and, after a minute,
makes the process exit.

The loop counts beats, and the thread checks whether each arrives. Once a beat is overdue, the thread counts its own
steps instead of seconds. Otherwise, a process that was merely stopped for a while (SIGSTOP, a frozen container, a
suspended machine) would look blocked.

While C code holds the interpreter lock, no Python thread runs. For that case, a kernel timer that measures CPU time is
restarted at each step. When it expires, it kills the process. In both cases, faulthandler first writes the stacks of
all threads to stderr. They show code locations, but no values that may be secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Final

from agent_shim.host import clock

logger = logging.getLogger(__name__)

BEAT_S: Final = 10.0
"""Interval between two beats of the loop. Other tasks have the same period, so that one wake-up serves all of them."""
STEP_S: Final = 2.0
"""How often the thread checks whether a missing beat has arrived."""
REPORT_AFTER_S: Final = 6.0
END_AFTER_S: Final = 60.0
_reading: Final[list[str]] = []
"""What the current ``reading`` blocks are reading, as parts of a log message."""


@contextlib.contextmanager
def reading(service: str, what: str) -> Iterator[None]:
    """Record what the block reads. If the block keeps the event loop from running, the watchdog reports which file of
    which service was being read.
    """
    _reading.append(f" by reading {what} of {service}")
    try:
        yield
    finally:
        _reading.pop()


@contextlib.contextmanager
def watching(feed: Callable[[], None], period: float = 0.0) -> Iterator[None]:
    """Watch the running loop for the duration of the block. Call ``feed`` at least every ``period`` seconds, even while
    the loop is blocked. If ``period`` is 0, any interval will do. ``feed`` keeps systemd's watchdog from killing this
    process before the stacks are written.
    """
    loop, ident, ended, beats = asyncio.get_running_loop(), threading.get_ident(), threading.Event(), 0
    beat_s = min(period or BEAT_S, BEAT_S)
    step_s = min(beat_s / 2, STEP_S)

    def beat() -> None:
        """Count a beat and schedule the next one."""
        nonlocal beats
        beats += 1
        if not ended.is_set():
            loop.call_later(clock.until_beat(beat_s), beat)

    def watch() -> None:
        """Check for beats until the block ends. ``missed_s`` is how long the next beat has been overdue."""
        beats_seen, missed_s = 0, 0.0
        while not ended.wait(step_s if missed_s else clock.until_beat(beat_s) + step_s):
            signal.setitimer(signal.ITIMER_VIRTUAL, END_AFTER_S)
            before = missed_s
            missed_s = missed_s + step_s if beats == beats_seen else 0.0
            beats_seen = beats
            if before < REPORT_AFTER_S <= missed_s:
                faulthandler.dump_traceback_later(END_AFTER_S, exit=True)  # exit even if writing to the log hangs
                stack = "".join(traceback.format_stack(sys._current_frames().get(ident)))  # noqa: SLF001 - documented
                text = "the event loop is blocked%s: the agent exits after %g s, and the next one adopts the jobs"
                logger.critical(text, "".join(_reading), END_AFTER_S, extra={"members": {"stack": stack}})
                faulthandler.cancel_dump_traceback_later()
            elif missed_s >= END_AFTER_S:
                # Dump the stacks in this thread, because it holds the GIL. faulthandler's timer thread does not hold
                # the GIL, so it may crash if a frame changes during the dump.
                faulthandler.dump_traceback()
                os._exit(1)
            elif not missed_s and before >= REPORT_AFTER_S:
                logger.error("the event loop runs again; it was blocked for about %g s", before)
            feed()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    faulthandler.register(signal.SIGVTALRM, all_threads=True, chain=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, END_AFTER_S)  # C code may hold the GIL even before the first step
    beat()
    with contextlib.suppress(RuntimeError):  # if no thread can be started, the loop is not watched
        threading.Thread(target=watch, name="watchdog", daemon=True).start()  # noqa: TID251 - watches the loop
    try:
        yield
    finally:
        ended.set()
