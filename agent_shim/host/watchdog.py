"""A thread that watches the event loop, reports a blocked one, and ends the process after a minute.

The loop counts beats of ``BEAT_S``, and a step later the thread looks for the last one. Until a missing one comes it
counts its own steps instead of seconds, so that a stopped process (SIGSTOP, a frozen container, a suspended machine)
does not count as blocked. While C code holds the interpreter no Python thread runs: a kernel timer on CPU time,
restarted by each step, then dumps all stacks (faulthandler) and ends the process.

``reading`` notes the service that is being read on the loop. A service that blocks the loop is recorded on disk, so
that the next agent does not read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import HostError
from agent_shim.host import clock, files

logger = logging.getLogger(__name__)

STEP_S: Final = 2.0
BEAT_S: Final = 10.0
"""The loop's other tasks wake with this beat too."""
TELL_AFTER_S: Final = 6.0
"""Time without a beat after which a blocked loop is reported and the service being read is recorded."""
END_AFTER_S: Final = 60.0
EXIT_CODE: Final = 70
FAREWELL_S: Final = 1.0
"""For the last log lines to be written."""
MARKS: Final = "held.json"
"""File of records: lower-case service names, and the part that blocked the loop."""
DUMP: Final = "held.trace"
"""File with the stacks of a blocked interpreter."""
PAGE: Final = "held.page"
"""File with the current reading: service and part, each terminated by NUL."""

_readings: Final[dict[int, tuple[str, str]]] = {}
"""Service and part being read, by thread."""


_PAGE_BYTES: Final = 4096
_page: mmap.mmap | None = None
"""Note of the loop's thread in a mapped file: it survives the process without a system call."""
_page_thread = 0


def _put(thread: int, note: tuple[str, str] | None) -> None:
    if _page is not None and thread == _page_thread:
        data = "\0".join((*(note or ("", "")), "")).encode("utf-8", "replace")[:_PAGE_BYTES]
        _page[: len(data)] = data


@contextlib.contextmanager
def reading(service: str, what: str) -> Iterator[None]:
    """Note for the block that this thread reads ``what`` of a service."""
    thread = threading.get_ident()
    before = _readings.get(thread)
    _readings[thread] = (service, what)
    _put(thread, (service, what))
    try:
        yield
    finally:
        if before is None:
            _readings.pop(thread, None)
        else:
            _readings[thread] = before
        _put(thread, before)


# --- marks ----------------------------------------------------------------------------------------------------------


def read_marks(path: Path) -> dict[str, str]:
    """Return the parts of services that blocked an earlier agent; empty without a readable file."""
    try:
        return wire.decode(files.read(path, is_own=True), dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        logger.warning("cannot read %s: %s; services that blocked an earlier agent are read again", path, exc)
        return {}


def write_marks(path: Path, marks: dict[str, str]) -> None:
    """Replace the records; raises ``HostError``."""
    if marks:
        files.write_atomic(path, msgspec.json.encode(marks), mode=0o600)
    else:
        path.unlink(missing_ok=True)


# --- the thread -----------------------------------------------------------------------------------------------------


def forget(directory: Path) -> None:
    """Remove the files of watchdogs in ``directory``; no agent may be running."""
    for name in (MARKS, DUMP, PAGE):
        (directory / name).unlink(missing_ok=True)


class Watchdog:
    """Watches the running loop from ``start`` to ``stop``; ``feed`` is called in each step.

    Calls end when the process is about to be killed: an outer watchdog (systemd) must not be faster than this one.
    """

    def __init__(self, feed: Callable[[], None] = lambda: None, *, period: float = 0.0) -> None:
        """``period``: maximum seconds between two calls of ``feed``; 0 for any."""
        self._feed = feed
        self._beat = min(period or BEAT_S, BEAT_S)
        self._step = min(self._beat / 2, STEP_S)
        self._marks: Path | None = None
        self._trace: TextIO | None = None
        self._marked = ""
        self._marking = threading.Lock()
        """Held while a record is written or taken back: the disk may be slower than the loop recovers."""
        self._beats = 0
        self._held_s = 0.0
        self._over = threading.Event()
        self._loop_thread = 0

    def start(self) -> None:
        """Start, on the loop. If no thread can be started, that is logged and the loop is not watched."""
        self._loop_thread = threading.get_ident()
        self._count()
        try:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        except RuntimeError as exc:
            logger.error("cannot watch the event loop: %s", exc)

    def stop(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def remember(self, directory: Path) -> None:
        """Keep records and interpreter dumps in ``directory``, and report those of the previous agent.

        Blocks. Raises nothing: on failure nothing is kept.
        """
        self._marks = directory / MARKS
        try:
            try:
                self._report_dump(directory)
            finally:  # new files, whatever was in their place
                for name in (DUMP, PAGE):
                    files.remove_tree(directory / name)
            self._trace = (directory / DUMP).open("x")
            faulthandler.register(signal.SIGVTALRM, self._trace, all_threads=True, chain=True)
            self._map_page(directory / PAGE)
            self._arm()
        except (OSError, HostError, ValueError) as exc:
            logger.warning("cannot record in %s which service blocks the event loop: %s", directory, exc)

    def disown(self) -> None:
        """Stop writing to the directory, another agent's now. A blocked interpreter dumps its stacks on stderr."""
        global _page
        self._marks, _page = None, None
        if self._trace is not None:
            faulthandler.register(signal.SIGVTALRM, sys.stderr.fileno(), all_threads=True, chain=True)

    def _report_dump(self, directory: Path) -> None:
        """Report the dump of the kernel timer, and write the record that the previous agent could not."""
        dump, page = directory / DUMP, directory / PAGE
        if not dump.exists() or not (text := files.read(dump, is_own=True).decode(errors="replace")):
            return
        logger.error("the previous agent was killed: its interpreter was blocked", extra=_members(text))
        written = files.read(page, is_own=True) if page.exists() else b"\0"
        service, what, *_ = written.decode(errors="replace").split("\0")
        if service:
            write_marks(directory / MARKS, read_marks(directory / MARKS) | {service.lower(): what})

    def _map_page(self, path: Path) -> None:
        global _page, _page_thread
        with path.open("x+b") as file:
            file.truncate(_PAGE_BYTES)
            _page, _page_thread = mmap.mmap(file.fileno(), _PAGE_BYTES), self._loop_thread

    def _watch(self) -> None:
        seen = 0
        while not self._over.wait(self._step if self._held_s else clock.until_beat(self._beat) + self._step):
            self._arm()
            if self._beats != seen:
                if self._held_s >= TELL_AFTER_S:
                    self._aside(self._recovered, self._held_s)
                self._held_s, seen = 0.0, self._beats
            else:
                before, self._held_s = self._held_s, self._held_s + self._step
                if before < TELL_AFTER_S <= self._held_s:
                    self._aside(self._report, self._where())
            if self._held_s >= END_AFTER_S:
                self._end()
            self._feed()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # armed again beside ``stop``

    def _arm(self) -> None:
        """Restart the kernel timer, once there is a place for its dump."""
        if self._trace is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, END_AFTER_S)

    def _count(self) -> None:
        self._beats += 1
        if not self._over.is_set():
            asyncio.get_running_loop().call_later(clock.until_beat(self._beat), self._count)

    def _where(self) -> str:
        """Return the loop's stack: locations only, since values may be secrets."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=40, lookup_lines=False)
        return "\n".join(f'  File "{each.filename}", line {each.lineno}, in {each.name}' for each in stack)

    def _report(self, where: str) -> None:
        service, what = _readings.get(self._loop_thread, ("", ""))
        about = f" by reading {what} of {service}" if service else ""
        logger.critical("the event loop is blocked%s for %g s", about, TELL_AFTER_S, extra=_members(where))
        if service and self._marks is not None:
            with self._marking:
                self._marked = service.lower()
                with contextlib.suppress(HostError, OSError):
                    write_marks(self._marks, read_marks(self._marks) | {self._marked: what})

    def _recovered(self, held_s: float) -> None:
        logger.error("the event loop runs again; it was blocked for about %g s", held_s)
        with self._marking:
            if self._marked and self._marks is not None:
                marks = read_marks(self._marks)
                marks.pop(self._marked, None)
                self._marked = ""
                with contextlib.suppress(HostError, OSError):
                    write_marks(self._marks, marks)

    def _end(self) -> None:
        where = self._where()
        text = f"the event loop was blocked for {END_AFTER_S:g} s: the agent exits, and the next one adopts the jobs"
        self._aside(lambda: logger.critical("%s", text, extra=_members(where)))
        self._over.wait(FAREWELL_S)
        os._exit(EXIT_CODE)

    @staticmethod
    def _aside(work: Callable[..., None], *arguments: object) -> None:
        """Run in a daemon thread: log and disk may hang too, and must not delay the exit."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=work, args=arguments, name="watchdog report", daemon=True).start()


def _members(stack: str) -> dict[str, dict[str, str]]:
    return {"members": {"stack": stack}}
