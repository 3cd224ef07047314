"""Reads jobs' log files, across rotations, as one stream of lines. Each line names the file that it comes from."""

from __future__ import annotations

import errno
import heapq
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from agent_shim.core import safetext
from agent_shim.host import guarded
from agent_shim.host.descriptors import closing
from agent_shim.services.logs.log_file import LogFile

RATE_BYTES_PER_S: Final = 256 * 1024
"""Maximum number of bytes per second from one file. Any excess is skipped, and its size is reported."""
POLL_S: Final = 0.5
"""Interval between reads of the followed files."""
SEARCH_PERIOD_S: Final = 2.0
"""Interval between searches for new files."""
MAX_FILES: Final = 500
"""Maximum number of followed files. The number is divided among the jobs, so that one job cannot use up another's
share.
"""
MIN_JOB_FILES: Final = 10
MAX_DEPTH: Final = 8
"""Number of directory levels below a job's directory that are searched."""
MAX_JOB_ENTRIES: Final = 5_000
"""Maximum number of directory entries read per job."""
JOB_FILES: Final = (".log", ".out", ".err")
"""Suffixes of current log files. Rotated files have other suffixes."""
AGENT_FILES: Final = ("current",)


class LogLine(NamedTuple):
    """A log line. ``file`` is the path below the job's directory, and ``raw`` is the line without its line break."""

    job: str
    file: str
    raw: bytes

    @property
    def text(self) -> str:
        """The line with U+FFFD for each byte of invalid UTF-8. It may contain escape sequences, which must not be sent
        to a terminal.
        """
        return self.raw.decode(errors="replace").rstrip("\r")

    def plain(self) -> str:
        """The line in the format for terminals: ``job/file | text``."""
        return safetext.lines(f"{self.job}/{self.file} | {self.text}")

    def as_json(self) -> str:
        """The line as JSON for log collectors, in the same format as the agent's own log."""
        members = {"logger": "job", "job": self.job, "file": self.file, "message": self.text}
        return safetext.line(json.dumps(members, ensure_ascii=False))


class Follower:
    """Follows the log files below ``directory``: those of ``job``, or those of all jobs if ``job`` is "". The methods
    block, so call them only in a thread or a command.

    If ``rate`` is set, at most that many bytes per second from each file are returned, and the rest is skipped. Files
    are identified by their paths below the directory, with surrogates for invalid UTF-8.
    """

    def __init__(
        self,
        directory: Path,
        job: str = "",
        *,
        names: tuple[str, ...] = JOB_FILES,
        rate: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str, str], object] = lambda _path, _why: None,
    ) -> None:
        """Follow files whose names end in one of ``names``. ``refused`` is called with each path that is not read, and
        the reason.
        """
        self._refused = refused
        self._directory = directory
        self._job = job
        self._names = names
        self._rate = rate
        self._clock = clock
        self._files: dict[str, LogFile] = {}
        self._crowded: set[str] = set()
        """Jobs with too many files to follow, for which a line has already reported this."""
        self._searched_at = float("-inf")
        self._looked_at = clock()

    def last(self, count: int) -> Iterator[LogLine]:
        """Yield the last ``count`` lines of each file, file by file. ``poll`` continues after them. If a job has
        too many files to follow, a line at the beginning says so.
        """
        yield from self._search(at_end=True)
        for name in sorted(self._files):
            yield from (self._line(name, text) for text in self._files[name].last(count))

    def poll(self) -> Iterator[LogLine]:
        """Yield the lines written since the last call. New files are read from the start. If a job has too many files,
        a line that says so is yielded once.
        """
        now = self._clock()
        elapsed, self._looked_at = now - self._looked_at, now
        if now - self._searched_at >= SEARCH_PERIOD_S:
            yield from self._search(at_end=False)
        # Allow at least the bytes of one poll interval, because the first call may come right after the constructor.
        allowed = None if self._rate is None else int(self._rate * max(elapsed, POLL_S))
        for name in list(self._files):
            yield from (self._line(name, text) for text in self._files[name].lines(allowed))
            if not self._files[name].is_open:
                del self._files[name]

    def changed_at(self, line: LogLine) -> float:
        """Return the modification time of the line's file, in seconds since 1970. For a line that comes from no file,
        return the current time.
        """
        for name, log in self._files.items():
            if self._line(name, b"")[:2] == line[:2]:  # the same job and file
                return log.changed_at()
        return time.time()  # noqa: TID251 - file times are wall time

    def close(self) -> None:
        """Close all files."""
        for log in self._files.values():
            log.close()
        self._files.clear()

    def _line(self, name: str, text: bytes) -> LogLine:
        """Return ``text`` as a line of the file ``name``, a path of the form JOB/FILE."""
        job, _, file = name.partition("/")
        return LogLine(job, guarded.shown(file), text)

    def _search(self, *, at_end: bool) -> Iterator[LogLine]:
        """Open files that are not followed yet, at their end if ``at_end`` is set, otherwise at their start. If a job
        has too many files, only the most recently written ones are opened, and a line that says so is yielded once.
        """
        self._searched_at = self._clock()
        with self._refusing(self._job), guarded.held(self._directory) as top:
            jobs = [self._job] if self._job else self._jobs(top)
            share = max(MIN_JOB_FILES, MAX_FILES // max(1, len(jobs)))
            for job in jobs:
                found = guarded.walk(top, job, depth=MAX_DEPTH, limit=MAX_JOB_ENTRIES, skipped=self._skip)
                room = share - sum(name.startswith(f"{job}/") for name in self._files)
                new = (each for each in found if each.path.endswith(self._names) and each.path not in self._files)
                # Take one file more than can be followed, to find out whether there are too many.
                wanted = heapq.nlargest(max(0, room) + 1, new, key=lambda each: each.status.st_mtime_ns)
                for each in sorted(wanted[: max(0, room)]):
                    self._open(each.path, at_end=at_end)
                if len(wanted) > max(0, room) and job not in self._crowded:
                    self._crowded.add(job)
                    yield LogLine(job, "*", b"(only %d files of this job are followed: it has more)" % share)

    def _jobs(self, top: int) -> list[str]:
        """Return all names in the directory. Those that are not directories are reported to ``refused`` later."""
        with closing(guarded.open_directory(top, "")) as directory:
            return sorted(guarded.names(directory))

    def _open(self, name: str, *, at_end: bool) -> None:
        """Start following a file. A file that must not be read is reported to ``refused``."""
        log = LogFile(str(self._directory / name), str(self._directory))
        with self._refusing(name):
            if log.open(at_end=at_end):
                self._files[name] = log

    def _skip(self, path: str, why: OSError | None) -> None:
        """Report to ``refused`` that a directory could not be read or, if ``why`` is None, has too many entries."""
        self._refused(guarded.shown(path), why.strerror or str(why) if why else f"over {MAX_JOB_ENTRIES} entries")

    @contextmanager
    def _refusing(self, path: str) -> Iterator[None]:
        """Report an ``OSError`` in the block to ``refused``, as the reason why ``path`` is not read."""
        try:
            yield
        except OSError as exc:
            if exc.errno != errno.ENOENT:  # ENOENT means that the file was removed after the search
                self._refused(guarded.shown(path), exc.strerror or str(exc))


def stream(directory: Path, *, as_json: bool, out: TextIO) -> None:
    """Write the jobs' new log lines to ``out``, in a daemon thread, because a slow reader may block the write."""
    # Do not use a buffered file. The thread would hold the buffer's lock while a write blocks, and the interpreter
    # needs that lock at exit.
    raw = open(out.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - for as long as the process lives

    def run() -> None:
        follower = Follower(directory, rate=RATE_BYTES_PER_S)
        list(follower.last(0))  # skip the existing content
        pause = threading.Event()
        with suppress(OSError, ValueError):  # stop when the reader is gone
            while not pause.wait(POLL_S):
                for line in follower.poll():
                    data = f"{line.as_json() if as_json else line.plain()}\n".encode(errors="backslashreplace")
                    while data:  # a write may be incomplete
                        data = data[raw.write(data) or 0 :]

    threading.Thread(target=run, name="job logs", daemon=True).start()  # noqa: TID251 - runs until the exit
