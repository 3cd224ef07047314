"""Logging: one line per fact, JSON for collectors or text for a terminal, never a secret.

INFO is a timeline for operators; WARNING needs attention if it repeats; ERROR needs an operator.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import queue
import re
import stat
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agent_shim.core import safetext
from agent_shim.core.errors import HostError, ShimError

logger = logging.getLogger(__name__)

LARGEST: Final = 10_000_000
"""Size at which a log file is rotated; one older file is kept."""

MAX_WAITING: Final = 10_000
"""Limit of lines waiting for a reader of stderr."""
WRITTEN_AT_ONCE: Final = 100
"""Lines in one write to stderr."""
FLUSH_TIMEOUT_S: Final = 1.0
"""For waiting lines to be written at exit."""

LEVELS: Final = ("debug", "info", "warning", "error")

_SECRETS: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
    re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"),
    re.compile(r"(?<=\?)[^\s\"'>]+(?=[\s\"'>]|$)"),
)
"""Private keys, ``user:password`` of a URL, query strings (signed links carry their signature there)."""
_SIGNS: Final = ("-----BEGIN ", "://", "?")
"""Text that each of them contains: most lines have none."""

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode


def redacted(text: str) -> str:
    """Remove secrets from a text; a safety net, as no secret should be logged."""
    if any(sign in text for sign in _SIGNS):
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
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {
            "time": moment,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **_members(record),
        }
        if record.exc_info:
            line["traceback"] = redacted(_trace(record.exc_info[1]))
        return safetext.line(_encode(line))


class _Once(logging.Formatter):
    """Formats a record once for all handlers."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        text: str | None = getattr(record, "formatted", None)
        if text is None:
            text = record.formatted = self._inner.format(record)
        return text


class _File(logging.Handler):
    """Appends to a file as its only writer; a large file is renamed and kept for a while.

    Failed writes (a full disk, a missing directory) are ignored: standard error has the line too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._fd = -1
        self._size = 0

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, TypeError, ValueError):  # the latter from a record that is wrong itself
            line = f"{self.format(record)}\n".encode("utf-8", "replace")
            if self._fd >= 0 and self._size + len(line) > LARGEST:
                os.close(self._fd)
                self._fd = -1
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o640)
                self._size = os.fstat(self._fd).st_size
            self._size += os.write(self._fd, line)


class _Stderr(logging.Handler):
    """Writes lines to stderr from a thread of its own: its reader may block without blocking the event loop.

    Lines beyond a full queue are dropped and counted in the next line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (TypeError, ValueError, LookupError):
            self.handleError(record)
            return
        if self._dropped:
            line += f" ({self._dropped} lines before this one were dropped: the reader is too slow)"
        if self._lines.qsize() < MAX_WAITING:
            self._lines.put(line)
            self._dropped = 0
        else:
            self._dropped += 1

    def close(self) -> None:
        """Wait briefly for the remaining lines."""
        if self._writer.is_alive():
            self._lines.put(None)
            self._writer.join(FLUSH_TIMEOUT_S)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lines = [line]
            with suppress(queue.Empty):
                while len(lines) < WRITTEN_AT_ONCE and (line := self._lines.get_nowait()) is not None:
                    lines.append(line)
            with suppress(OSError, ValueError):
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            if line is None:
                return


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
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False
    return False


def setup(*, level: str = "info", form: str = "", file: Path | None = None) -> None:
    """Send all logging to stderr and, if given, to ``file``; ``form`` is json, text or "" (``is_json``).

    Not to ``file`` where a svlogd writes our stderr into its directory, as on a stemcell with runit.
    """
    handlers: list[logging.Handler] = [_Stderr()]
    if file is not None and not _is_svlogds(file.parent):
        handlers.append(_File(file))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, _Stderr | _File):
            old.close()
    formatter = _Once(_Json() if is_json(form) else _Text())
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("nats").setLevel("ERROR")
    logging.raiseExceptions = False  # a full disk must not cause tracebacks on stderr
