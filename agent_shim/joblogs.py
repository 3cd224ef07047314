"""The log files of jobs as one stream of lines, each with where it comes from; whatever rotates them meanwhile.

Below ``sys/log`` users of jobs may write, so no link there is followed, by no part of a path. What follows a file keeps
it open: one that was renamed is read to its end before the new one of that name begins, one that was cut to nothing
(copytruncate) begins again.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from agent_shim.host import files

RATE: Final = 256 * 1024
"""Bytes a second of a file that go on to a stream; what is more is left out, and how much that was is told."""
PERIOD: Final = 0.5
"""Seconds between looks."""
SEARCH: Final = 2.0
"""Seconds between searches for new files."""
LONGEST: Final = 16 * 1024
"""Bytes of a line; the rest of it comes as the next one."""
MOST_FILES: Final = 500
JOB_FILES: Final = (".log", ".out", ".err")
"""Endings of files that are being written; rotated ones have others."""
AGENT_FILES: Final = ("current",)
_CHUNK: Final = 64 * 1024


class Line(NamedTuple):
    """``file`` is the path below the directory of the job."""

    job: str
    file: str
    text: str

    def plain(self) -> str:
        """For people: ``job/file | text``."""
        return f"{self.job}/{self.file} | {self.text}"

    def as_json(self) -> str:
        """For collectors, beside the JSON lines of the agent."""
        members = {"logger": "job", "job": self.job, "file": self.file, "message": self.text}
        return json.dumps(members, ensure_ascii=False)


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

    With a ``rate`` (bytes a second) only so much of a file is passed on.
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
        self._searched_at = float("-inf")
        self._looked_at = clock()

    def last(self, count: int) -> Iterator[Line]:
        """The last ``count`` lines of each file, file by file; what comes after them is for ``poll``."""
        self._search(at_end=True)
        for name in sorted(self._files):
            one = self._files[name]
            tail = _tail(one.descriptor, one.position, count)
            yield from (self._line(name, text) for text in tail)

    def poll(self) -> Iterator[Line]:
        """What was written since the last look. A file that is new is read from its beginning."""
        now = self._clock()
        elapsed, self._looked_at = now - self._looked_at, now
        if now - self._searched_at >= SEARCH:
            self._search(at_end=False)
        allowed = None if self._rate is None else int(self._rate * max(elapsed, PERIOD))
        for name in list(self._files):
            for text in self._news(name, allowed):
                yield self._line(name, text)

    def begin_at_end(self) -> None:
        """Pass over what is there already."""
        self._search(at_end=True)

    def close(self) -> None:
        """Let all files go."""
        for one in self._files.values():
            os.close(one.descriptor)
        self._files.clear()

    def _line(self, name: str, text: bytes) -> Line:
        job, _, file = name.partition("/")
        return Line(job, file, text.decode(errors="replace").rstrip("\r"))

    def _search(self, *, at_end: bool) -> None:
        self._searched_at = self._clock()
        for name in self._found():
            if name not in self._files and len(self._files) < MOST_FILES:
                self._open(name, at_end=at_end)

    def _found(self) -> Iterator[str]:
        """Paths below the directory: ``job/file`` or deeper."""
        top = self._directory / self._job if self._job else self._directory
        for where, _, names in os.walk(top):
            for name in sorted(names):
                if name.endswith(self._names):
                    path = (Path(where) / name).relative_to(self._directory)
                    if len(path.parts) > 1:
                        yield str(path)

    def _open(self, name: str, *, at_end: bool) -> None:
        with suppress(OSError):
            top = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # A fifo that nobody writes to must not hold us.
                descriptor = files.open_beneath(top, name, os.O_RDONLY | os.O_NONBLOCK)
            finally:
                os.close(top)
            known = os.fstat(descriptor)
            if not stat.S_ISREG(known.st_mode):
                os.close(descriptor)
                return
            self._files[name] = _File(descriptor, known.st_size if at_end else 0)

    def _news(self, name: str, allowed: int | None) -> Iterator[bytes]:
        one = self._files[name]
        yield from _read(one, allowed)
        if self._is_another(name, one):
            yield from _read(one, None)
            if one.rest:
                yield one.rest
            os.close(one.descriptor)
            del self._files[name]
            self._open(name, at_end=False)
            if name in self._files:
                yield from _read(self._files[name], allowed)

    def _is_another(self, name: str, one: _File) -> bool:
        """Whether the name leads elsewhere now, or nowhere."""
        try:
            found = (self._directory / name).lstat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != one.identity


def _read(one: _File, allowed: int | None) -> Iterator[bytes]:
    """Whole lines from where we were; what is beyond ``allowed`` bytes is passed over and told."""
    size = os.fstat(one.descriptor).st_size
    if size < one.position:
        one.position, one.rest = 0, b""
    if allowed is not None and size - one.position > allowed:
        left_out = size - one.position - allowed
        yield one.rest + f"({left_out} bytes are left out here: more than may pass in a second)".encode()
        one.position, one.rest = size - allowed, b""
    while one.position < size and (chunk := os.pread(one.descriptor, _CHUNK, one.position)):
        one.position += len(chunk)
        *lines, one.rest = (one.rest + chunk).split(b"\n")
        yield from lines
        while len(one.rest) > LONGEST:
            yield one.rest[:LONGEST]
            one.rest = one.rest[LONGEST:]


def _tail(descriptor: int, size: int, count: int) -> list[bytes]:
    """The last ``count`` lines before ``size``, of at most a chunk for ten of them."""
    begin = max(0, size - _CHUNK * (1 + count // 10))
    lines = os.pread(descriptor, size - begin, begin).split(b"\n")
    if begin:
        del lines[0]
    if lines and not lines[-1]:
        del lines[-1]
    return lines[-count:] if count else []


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
                    data = f"{line.as_json() if as_json else line.plain()}\n".encode()
                    while data:
                        data = data[raw.write(data) or 0 :]

    threading.Thread(target=run, name="job logs", daemon=True).start()
