"""The log files of jobs as one stream of lines, each with where it comes from; whatever rotates them meanwhile.

Below ``sys/log`` users of jobs may write, so no link there is followed, by no part of a path. What follows a file keeps
it open: one that was renamed is read to its end before the new one of that name begins, one that was cut to nothing
(copytruncate) begins again.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from agent_shim.core import safetext
from agent_shim.host import guarded

RATE: Final = 256 * 1024
"""Bytes a second of a file that go on to a stream; what is more is left out, and how much that was is told."""
PERIOD: Final = 0.5
"""Seconds between looks."""
SEARCH: Final = 2.0
"""Seconds between searches for new files."""
LONGEST: Final = 16 * 1024
"""Bytes of a line; the rest of it comes as the next one."""
MAX_FILES: Final = 500
"""That are followed, shared among the jobs: the files of one keep no other's out."""
MIN_JOB_FILES: Final = 10
DEPTH: Final = 8
"""Levels of directories of a job that are searched."""
MAX_JOB_ENTRIES: Final = 5_000
"""In the directories of a job that are looked at."""
MAX_TAIL_BYTES: Final = 16 * 1024 * 1024
"""In which the last lines are looked for."""
JOB_FILES: Final = (".log", ".out", ".err")
"""Endings of files that are being written; rotated ones have others."""
AGENT_FILES: Final = ("current",)


class Line(NamedTuple):
    """``file`` is the path below the directory of the job, ``raw`` what was written there, without its line break."""

    job: str
    file: str
    raw: bytes

    @property
    def text(self) -> str:
        """The line with U+FFFD for each byte that is no UTF-8; not yet safe for a terminal."""
        return self.raw.decode(errors="replace").rstrip("\r")

    def plain(self) -> str:
        """For people: ``job/file | text``."""
        return safetext.lines(f"{self.job}/{self.file} | {self.text}")

    def as_json(self) -> str:
        """For collectors, beside the JSON lines of the agent."""
        members = {"logger": "job", "job": self.job, "file": self.file, "message": self.text}
        return safetext.line(json.dumps(members, ensure_ascii=False))


class _File:
    """One that is followed; ``position`` is where the next byte is read."""

    def __init__(self, descriptor: int, position: int) -> None:
        self.descriptor = descriptor
        self.position = position
        self.rest = b""
        """A line that has no end yet."""

    @property
    def identity(self) -> tuple[int, int]:
        known = os.fstat(self.descriptor)
        return known.st_dev, known.st_ino


class Follower:
    """Follows the files of one job (or of all, "") below ``directory``; blocking, for a thread or a command.

    With a ``rate`` (bytes a second) only so much of a file is passed on. Files are known by their paths below the
    directory, with surrogates for what is no UTF-8.
    """

    def __init__(
        self,
        directory: Path,
        job: str = "",
        *,
        names: tuple[str, ...] = JOB_FILES,
        rate: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``names`` are endings of the names of files."""
        self._directory = directory
        self._job = job
        self._names = names
        self._rate = rate
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._crowded: set[str] = set()
        """Jobs of which it was told that not all their files are followed."""
        self._searched_at = float("-inf")
        self._looked_at = clock()

    def last(self, count: int) -> Iterator[Line]:
        """The last ``count`` lines of each file, file by file; what comes after them is for ``poll``."""
        yield from self._search(at_end=True)
        for name in sorted(self._files):
            one = self._files[name]
            yield from (self._line(name, text) for text in last_lines(one.descriptor, one.position, count))

    def poll(self) -> Iterator[Line]:
        """What was written since the last look. A file that is new is read from its beginning."""
        now = self._clock()
        elapsed, self._looked_at = now - self._looked_at, now
        if now - self._searched_at >= SEARCH:
            yield from self._search(at_end=False)
        allowed = None if self._rate is None else int(self._rate * max(elapsed, PERIOD))
        for name in list(self._files):
            for text in self._news(name, allowed):
                yield self._line(name, text)

    def begin_at_end(self) -> None:
        """Pass over what is there already."""
        for _ in self._search(at_end=True):
            pass

    def close(self) -> None:
        """Let all files go."""
        for one in self._files.values():
            os.close(one.descriptor)
        self._files.clear()

    def _line(self, name: str, text: bytes) -> Line:
        job, _, file = name.partition("/")
        return Line(job, guarded.shown(file), text)

    def _search(self, *, at_end: bool) -> Iterator[Line]:
        """Open what is new, of each job the files written to last; a line for a job that has too many."""
        self._searched_at = self._clock()
        with suppress(OSError), guarded.held(self._directory) as top:
            jobs = [self._job] if self._job else self._jobs(top)
            share = max(MIN_JOB_FILES, MAX_FILES // max(1, len(jobs)))
            for job in jobs:
                found = self._found(top, job)
                room = share - sum(name.startswith(f"{job}/") for name in self._files)
                new = (each for each in found if each.path not in self._files)
                wanted = heapq.nlargest(max(0, room) + 1, new, key=lambda each: each.status.st_mtime_ns)
                for each in sorted(wanted[: max(0, room)]):
                    self._open(top, each.path, at_end=at_end)
                if len(wanted) > max(0, room) and job not in self._crowded:
                    self._crowded.add(job)
                    yield Line(job, "*", b"(of this job %d files are followed: it has more)" % share)

    def _jobs(self, top: int) -> list[str]:
        directory = guarded.open_directory(top, "")
        try:
            return sorted(guarded.names(directory))
        finally:
            os.close(directory)

    def _found(self, top: int, job: str) -> Iterator[guarded.Entry]:
        """Log files of a job, in any of its directories."""
        for entry in guarded.walk(top, job, depth=DEPTH, limit=MAX_JOB_ENTRIES):
            if entry.path.endswith(self._names):
                yield entry

    def _open(self, top: int, name: str, *, at_end: bool) -> None:
        with suppress(OSError):
            found = guarded.open_beneath(top, name, os.O_PATH)
            try:
                guarded.refuse_second_name(os.fstat(found))
                descriptor = guarded.reopen(found, os.O_RDONLY)
            finally:
                os.close(found)
            self._files[name] = _File(descriptor, os.fstat(descriptor).st_size if at_end else 0)

    def _news(self, name: str, allowed: int | None) -> Iterator[bytes]:
        one = self._files[name]
        yield from _read(one, allowed)
        if self._is_another(name, one):
            yield from _read(one, allowed)
            if one.rest:
                yield one.rest
            os.close(one.descriptor)
            del self._files[name]
            with suppress(OSError), guarded.held(self._directory) as top:
                self._open(top, name, at_end=False)
            if name in self._files:
                yield from _read(self._files[name], allowed)

    def _is_another(self, name: str, one: _File) -> bool:
        """Whether the name leads elsewhere now, or nowhere."""
        try:
            found = guarded.status(self._directory / name, self._directory)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != one.identity


def _read(one: _File, allowed: int | None) -> Iterator[bytes]:
    """Whole lines from where we were; what is beyond ``allowed`` bytes is passed over and told, and so are holes."""
    size = os.fstat(one.descriptor).st_size
    if size < one.position:
        one.position, one.rest = 0, b""
    if allowed is not None and size - one.position > allowed:
        left_out = size - one.position - allowed
        yield one.rest + f"({left_out} bytes are left out here: more than may pass in a second)".encode()
        one.position, one.rest = size - allowed, b""
    yield from _lines(one, size)


def _lines(one: _File, end: int) -> Iterator[bytes]:
    """Whole lines up to ``end``, the beginning of the next one kept; long ones in pieces, holes left out."""
    for place, chunk in guarded.chunks(one.descriptor, one.position, end):
        one.position = place + len(chunk)
        *lines, one.rest = (one.rest + chunk).split(b"\n")
        yield from lines
        while len(one.rest) > LONGEST:
            yield one.rest[:LONGEST]
            one.rest = one.rest[LONGEST:]
    one.position = max(one.position, end)


def last_lines(descriptor: int, size: int, count: int) -> Iterator[bytes]:
    """The last ``count`` lines of the first ``size`` bytes of a file, of at most ``MAX_TAIL_BYTES``."""
    one = _File(descriptor, _begin_of_last(descriptor, size, count))
    yield from _lines(one, size)
    if one.rest:
        yield one.rest


def _begin_of_last(descriptor: int, size: int, count: int) -> int:
    lowest = max(0, size - MAX_TAIL_BYTES)
    if not count or not size:
        return size
    wanted = count + (os.pread(descriptor, 1, size - 1) == b"\n")
    at = size
    while at > lowest:
        begin = max(lowest, at - guarded.CHUNK_BYTES)
        chunk = os.pread(descriptor, at - begin, begin)
        place = len(chunk)
        while (place := chunk.rfind(b"\n", 0, place)) >= 0:
            wanted -= 1
            if not wanted:
                return begin + place + 1
        at = begin
    return lowest


def stream(directory: Path, *, as_json: bool, out: TextIO) -> None:
    """Pass on to ``out`` what jobs write from now on, from a thread of its own: whoever reads it may stop to."""
    # Unbuffered: a thread that waits for its reader must hold no lock that the interpreter wants at its end.
    raw = open(out.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - for as long as the process lives

    def run() -> None:
        follower = Follower(directory, rate=RATE)
        follower.begin_at_end()
        pause = threading.Event()
        with suppress(OSError, ValueError):  # nobody is there to read any more
            while not pause.wait(PERIOD):
                for line in follower.poll():
                    data = f"{line.as_json() if as_json else line.plain()}\n".encode(errors="backslashreplace")
                    while data:
                        data = data[raw.write(data) or 0 :]

    threading.Thread(target=run, name="job logs", daemon=True).start()
