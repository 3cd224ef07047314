"""Logging: one line per fact, JSON for collectors or text for a terminal, never a secret.

INFO is a timeline for operators; WARNING needs attention if it repeats; ERROR needs an operator.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import logging
import os
import re
import select
import stat
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.core import safetext
from agent_shim.core.errors import HostError, ShimError

logger = logging.getLogger(__name__)

LARGEST: Final = 10_000_000
"""Size at which a log file is rotated; one older file is kept."""

MAX_WAITING_BYTES: Final = 2 * 1024 * 1024
"""Bound of the lines that wait for a reader of stderr."""
RETRY_S: Final = 0.1
"""Interval of the attempts meanwhile."""
MAX_TURN_LINES: Final = 100
"""Lines of one turn of the event loop that are written at once."""
FLUSH_TIMEOUT_S: Final = 1.0
"""For waiting lines to be written at exit."""

LEVELS: Final = ("debug", "info", "warning", "error")

_SECRETS: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
    re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"),
    re.compile(r"(?<=\?)[^\s\"'>]+(?=[\s\"'>]|$)"),
)
"""Private keys, ``user:password`` of a URL, query strings (signed links carry their signature there)."""

_lenient: Final = json.JSONEncoder(ensure_ascii=False).encode


def _encode(value: Any) -> str:
    """Encode as JSON: by msgspec in a fifth of the time, but for what it refuses (lone surrogates, huge numbers)."""
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, OverflowError):
        return _lenient(value)


def redacted(text: str) -> str:
    """Remove secrets from a text; a safety net, as no secret should be logged."""
    if "?" in text or "://" in text or "-----BEGIN " in text:  # each has one of these, most lines have none
        for pattern in _SECRETS:
            text = pattern.sub("<redacted>", text)
    return text


def _members(record: logging.LogRecord) -> dict[str, Any]:
    """Return the extra members of a line: ``logger.info(text, extra={"members": {…}})``."""
    members: dict[str, Any] = getattr(record, "members", {})
    return {name: redacted(value) if isinstance(value, str) else value for name, value in members.items()}


def _trace(error: BaseException | None) -> str:
    """Describe an error and its causes by location. Only our own errors have a text: any other may contain a secret."""
    parts: list[str] = []
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        places = "".join(traceback.format_tb(error.__traceback__))
        text = f": {error}" if isinstance(error, ShimError | HostError) else ""
        number = f" [Errno {error.errno}]" if isinstance(error, OSError) and error.errno else ""
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        within = "".join(f"\n{_trace(each)}" for each in inner)
        module = f"{type(error).__module__}.".removeprefix("builtins.")
        parts.append(f"{places}{module}{type(error).__qualname__}{number}{text}{within}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(reversed(parts))


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        return safetext.line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "  | " + safetext.lines(_trace(ei[1])).replace("\n", "\n  | ")

    def format(self, record: logging.LogRecord) -> str:
        members = "".join(f" {name}={_encode(value)}" for name, value in _members(record).items())
        return redacted(super().format(record)) + safetext.line(members)


class _Json(logging.Formatter):
    _second = (0, "")

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second[0]:
            self._second = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        at, level = f"{self._second[1]}.{int(record.msecs):03d}Z", record.levelname.lower()
        message = redacted(record.getMessage())
        line = {"time": at, "level": level, "logger": record.name, "message": message, **_members(record)}
        if record.exc_info:
            line["traceback"] = redacted(_trace(record.exc_info[1]))
        return safetext.line(_encode(line))


class _File:
    """A file that one handler appends to; a large one is renamed and kept for a while.

    Failed writes (a full disk, a missing directory) are ignored: standard error has the line too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0

    def write(self, lines: bytes) -> None:
        with suppress(OSError):
            if self._fd >= 0 and self._size + len(lines) > LARGEST:
                self.close()
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._fd = os.open(self._path, flags, 0o640)
                self._size = os.fstat(self._fd).st_size
            self._size += os.write(self._fd, lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Stderr:
    """Standard error, whose reader may be slow: a line waits until the descriptor takes ``PIPE_BUF`` bytes at once.

    It may be shared, so it stays blocking. Lines beyond ``MAX_WAITING_BYTES`` are dropped and counted.
    """

    def __init__(self) -> None:
        self._fd = sys.stderr.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self.waiting = bytearray()
        self.dropped = 0

    def write(self, lines: bytes, timeout_s: float = 0.0) -> None:
        """Write what waits and these lines, as far as the reader takes them within the time."""
        if len(self.waiting) + len(lines) > MAX_WAITING_BYTES:
            self.dropped += lines.count(b"\n")
        else:
            self.waiting += lines
        while self.waiting and self._poll.poll(timeout_s * 1000):
            end = self.waiting.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            try:
                del self.waiting[: os.write(self._fd, self.waiting[:end])]
            except OSError:
                self.waiting.clear()


class _Lines(logging.Handler):
    """Writes lines to stderr and a file: those of one turn of the event loop in one write, before its replies leave.

    A warning, and a line of another thread, is written immediately, with those before it.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = _File(file) if file else None
        self._stderr = _Stderr()
        self._lines: list[str] = []
        self._flushed_by: asyncio.AbstractEventLoop | None = None
        """Event loop that flushes at its next turn."""
        self._retried_by: asyncio.AbstractEventLoop | None = None
        """Event loop that flushes after ``RETRY_S``, as lines wait for a reader."""
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
            loop = asyncio.get_running_loop()
        except (TypeError, ValueError, LookupError):
            self.handleError(record)
        except RuntimeError:
            self.flush()
        else:
            if record.levelno > logging.INFO or len(self._lines) > MAX_TURN_LINES:
                self.flush()
            elif self._flushed_by is not loop:
                self._flushed_by = loop
                loop.call_soon(self.flush)

    def flush(self) -> None:
        dropped = 0
        self.acquire()
        try:
            lines, self._lines, self._flushed_by = self._lines, [], None
            text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
            if self._file is not None and text:
                self._file.write(text)
            self._stderr.write(text)
            if self._stderr.waiting:
                self._retry_later()
            else:
                dropped, self._stderr.dropped = self._stderr.dropped, 0
        finally:
            self.release()
        if dropped:
            logger.warning("%d lines were dropped: the reader of stderr is too slow", dropped)

    def _retry_later(self) -> None:
        """Without an event loop the next line is the next attempt."""
        with suppress(RuntimeError):
            if (loop := asyncio.get_running_loop()) is not self._retried_by:
                self._retried_by = loop
                loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retried_by = None
        self.flush()

    def close(self) -> None:
        """Wait briefly for the reader of the remaining lines."""
        self.flush()
        self._stderr.write(b"", FLUSH_TIMEOUT_S)
        if self._file is not None:
            self._file.close()
        super().close()


def is_json(form: str) -> bool:
    """Return True for JSON lines; without a ``form`` a terminal gets text and anything else JSON."""
    return form == "json" or (form != "text" and not sys.stderr.isatty())


def turn(steps: int) -> None:
    """Log more (``steps`` below 0) or less; errors are always logged."""
    root = logging.getLogger()
    names = [name.upper() for name in LEVELS]
    now = names.index(logging.getLevelName(root.level))
    name = names[min(len(names) - 1, max(0, now + steps))]
    logger.log(max(root.level, logging.getLevelName(name)), "the level of the log is %s now", name.lower())
    root.setLevel(name)


def _is_svlogds(directory: Path) -> bool:
    """Return True if stderr is a pipe and a svlogd holds the lock of the directory, as it does while it runs."""
    try:
        if not stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
            return False
        lock = os.open(directory / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False
    return False


def setup(*, level: str = "info", form: str = "", file: Path | None = None) -> None:
    """Send all logging to stderr and, if given, to ``file``; ``form`` is json, text or "" (``is_json``).

    Not to ``file`` where a svlogd writes our stderr into its directory, as on a stemcell with runit.
    """
    handler = _Lines(file if file is not None and not _is_svlogds(file.parent) else None)
    handler.setFormatter(_Json() if is_json(form) else _Text())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, _Lines):
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("nats").setLevel("ERROR")
    logging.raiseExceptions = False  # a full disk must not cause tracebacks on stderr
    # No line shows these, and their look-up costs as much as the format.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001 - documented in the logging HOWTO
