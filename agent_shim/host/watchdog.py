"""A thread that watches the event loop, reports where it hangs, and ends the process when it hangs for a minute.

Nothing here needs the loop. The thread asks the loop to turn once in ``STEP_S``; it counts its own steps instead of
seconds, so that a process that was stopped (SIGSTOP, a frozen container, a suspended machine) is not taken for one that
hangs. While the interpreter itself is held by C code no thread of Python runs: a timer of the kernel, which counts
processor time and which each step winds up again, then dumps all stacks (faulthandler) and ends the process.

``reading`` notes which service is read on the loop. What hangs is marked on disk by its service, so that the next agent
leaves it alone.
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
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import msgspec

from agent_shim.core.errors import HostError
from agent_shim.host import files

logger = logging.getLogger(__name__)

STEP_S: Final = 2.0
TELL_AFTER_S: Final = 6.0
"""Held so long, the loop is reported, and what it reads is marked."""
END_AFTER_S: Final = 60.0
EXIT_CODE: Final = 70
FAREWELL_S: Final = 1.0
"""For the last lines of the log to leave."""
MARKS: Final = "held.json"
"""The file of marks: services, in small letters, and what of them held the loop."""
DUMP: Final = "held.trace"
"""The file with the stacks of an interpreter that was held."""
PAGE: Final = "held.page"
"""The file with what the loop reads just now: service and what of it, each with a NUL behind it."""

_readings: Final[dict[int, tuple[str, str]]] = {}
"""Service and what of it is read, by thread."""


_PAGE_BYTES: Final = 4096
_page: mmap.mmap | None = None
"""The note of the loop's thread in a file: what is written there outlives the process without a system call."""
_page_thread = 0


def _put(thread: int, note: tuple[str, str] | None) -> None:
    if _page is not None and thread == _page_thread:
        data = "\0".join((*(note or ("", "")), "")).encode("utf-8", "replace")[:_PAGE_BYTES]
        _page[: len(data)] = data


class reading:  # noqa: N801 - used as a function
    """Note for the length of the block that ``what`` of a service is read by this thread."""

    __slots__ = ("_before", "_note", "_thread")

    def __init__(self, service: str, what: str) -> None:
        self._note = (service, what)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._before = _readings.get(self._thread)
        _readings[self._thread] = self._note
        _put(self._thread, self._note)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            _readings.pop(self._thread, None)
        else:
            _readings[self._thread] = self._before
        _put(self._thread, self._before)


# --- marks ----------------------------------------------------------------------------------------------------------


def read_marks(path: Path) -> dict[str, str]:
    """What of which service held an agent before; empty where there is no such file, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        logger.warning("cannot read %s: %s; services that held the agent before are read again", path, exc)
        return {}


def write_marks(path: Path, marks: dict[str, str]) -> None:
    """Replace the marks; raises ``HostError``."""
    if marks:
        files.write_atomic(path, msgspec.json.encode(marks), mode=0o600)
    else:
        path.unlink(missing_ok=True)


# --- the thread -----------------------------------------------------------------------------------------------------


def forget(directory: Path) -> None:
    """Remove what watchdogs have left in ``directory``; no agent runs."""
    for name in (MARKS, DUMP, PAGE):
        (directory / name).unlink(missing_ok=True)


class Watchdog:
    """Watches the running loop from ``start`` to ``stop``; ``feed`` is called in each step in which all is well enough.

    That is until the process is about to be ended: a watchdog above (systemd) must not be quicker than this one.
    """

    def __init__(self, feed: Callable[[], None] = lambda: None, *, step: float = STEP_S) -> None:
        self._feed = feed
        self._step = min(step, STEP_S)
        self._marks: Path | None = None
        self._trace: TextIO | None = None
        self._marked = ""
        self._has_turned = True
        self._held_s = 0.0
        self._over = threading.Event()
        self._loop_thread = 0

    def start(self) -> None:
        """Begin; called on the loop. Without a thread to be had the loop goes unwatched, and the log says so."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        try:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        except RuntimeError as exc:
            logger.error("cannot watch the event loop: %s", exc)

    def stop(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def remember(self, directory: Path) -> None:
        """Keep marks and the dump of a held interpreter in ``directory``; report what the agent before has left there.

        Blocking. Raises nothing: where nothing can be kept, nothing is remembered.
        """
        self._marks = directory / MARKS
        try:
            self._report_dump(directory)
            self._trace = (directory / DUMP).open("w")
            faulthandler.register(signal.SIGVTALRM, self._trace, all_threads=True, chain=True)
            self._map_page(directory / PAGE)
        except (OSError, HostError, ValueError) as exc:
            logger.warning("cannot keep in %s what holds the event loop: %s", directory, exc)

    def disown(self) -> None:
        """Keep nothing any more: the directory is another agent's. A held interpreter dumps its stacks on stderr."""
        global _page
        self._marks, _page = None, None
        if self._trace is not None:
            faulthandler.register(signal.SIGVTALRM, sys.stderr.fileno(), all_threads=True, chain=True)

    def _report_dump(self, directory: Path) -> None:
        """What the kernel's timer has left, and the mark that the agent before could not write."""
        dump, page = directory / DUMP, directory / PAGE
        if not dump.exists() or not (text := dump.read_text(errors="replace")):
            return
        logger.error("the agent before this one was ended: its interpreter was held", extra=_members(text))
        service, what, *_ = page.read_bytes().decode(errors="replace").split("\0") if page.exists() else ("", "")
        if service:
            write_marks(directory / MARKS, read_marks(directory / MARKS) | {service.lower(): what})

    def _map_page(self, path: Path) -> None:
        global _page, _page_thread
        with path.open("w+b") as file:
            file.truncate(_PAGE_BYTES)
            _page, _page_thread = mmap.mmap(file.fileno(), _PAGE_BYTES), self._loop_thread

    def _watch(self) -> None:
        while not self._over.wait(self._step):
            if self._trace is not None:
                signal.setitimer(signal.ITIMER_VIRTUAL, END_AFTER_S)
            if self._has_turned:
                if self._held_s >= TELL_AFTER_S:
                    self._aside(self._recovered, self._held_s)
                self._held_s = 0.0
                self._has_turned = False
                with contextlib.suppress(RuntimeError):  # closed: the end is near
                    self._loop.call_soon_threadsafe(self._turned)
            else:
                before, self._held_s = self._held_s, self._held_s + self._step
                if before < TELL_AFTER_S <= self._held_s:
                    self._aside(self._tell, self._where())
            if self._held_s >= END_AFTER_S:
                self._end()
            self._feed()

    def _turned(self) -> None:
        self._has_turned = True

    def _where(self) -> str:
        """Where the loop is now: places alone, since the values may be secrets."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=40, lookup_lines=False)
        return "\n".join(f'  File "{each.filename}", line {each.lineno}, in {each.name}' for each in stack)

    def _tell(self, where: str) -> None:
        service, what = _readings.get(self._loop_thread, ("", ""))
        about = f" by reading {what} of {service}" if service else ""
        logger.critical("the event loop is held%s for %g s now", about, TELL_AFTER_S, extra=_members(where))
        if service and self._marks is not None:
            with contextlib.suppress(HostError, OSError):
                write_marks(self._marks, read_marks(self._marks) | {service.lower(): what})
            self._marked = service.lower()

    def _recovered(self, held_s: float) -> None:
        logger.error("the event loop turns again; it was held for about %g s", held_s)
        if self._marked and self._marks is not None:
            marks = read_marks(self._marks)
            marks.pop(self._marked, None)
            self._marked = ""
            with contextlib.suppress(HostError, OSError):
                write_marks(self._marks, marks)

    def _end(self) -> None:
        where = self._where()
        text = f"the event loop was held for {END_AFTER_S:g} s: this agent ends, and the next one adopts the jobs"
        self._aside(lambda: logger.critical("%s", text, extra=_members(where)))
        self._over.wait(FAREWELL_S)
        os._exit(EXIT_CODE)

    @staticmethod
    def _aside(work: Callable[..., None], *arguments: object) -> None:
        """In a thread of its own: the log and the disk may hang as well, and the end must come all the same."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=work, args=arguments, name="watchdog report", daemon=True).start()


def _members(stack: str) -> dict[str, dict[str, str]]:
    return {"members": {"stack": stack}}
