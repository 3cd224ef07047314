"""Writes each log record on one line, without secrets, as JSON for log collectors or as text for a terminal.

INFO lines are a timeline of normal events, a WARNING needs attention if it repeats, and an ERROR needs an operator.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import logging.handlers
import os
import re
import select
import stat
import sys
import threading
import time
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from agent_shim.core import safetext
from agent_shim.core.errors import HostError, ShimError

logger = logging.getLogger(__name__)

LARGEST: Final = 10_000_000
"""Size in bytes at which a log file is rotated. One older file is kept."""

MAX_WAITING_BYTES: Final = 2 * 1024 * 1024
"""Maximum total size of the lines that are buffered until stderr accepts them."""
FLUSH_TIMEOUT_S: Final = 1.0
"""How many seconds to wait at exit until stderr accepts the buffered lines."""

LEVELS: Final = ("debug", "info", "warning", "error")

_SECRETS: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
    re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"),
    re.compile(r"(?<=\?)[^\s\"'>]+(?=[\s\"'>]|$)"),
)
"""Patterns for private keys, ``user:password`` in a URL, and query strings (which contain the signature of signed
URLs).
"""


def redacted(text: str) -> str:
    """Remove secrets from text. This is a safety net, because no secret should be logged in the first place."""
    if "?" in text or "://" in text or "-----BEGIN " in text:  # for speed, because most lines contain none of these
        for pattern in _SECRETS:
            text = pattern.sub("<redacted>", text)
    return text


_encode: Final = json.JSONEncoder(ensure_ascii=False, default=str).encode


def _members(record: logging.LogRecord) -> dict[str, Any]:
    """Return the additional JSON members that the caller has passed for a log line, as in ``logger.info(text,
    extra={"members": {…}})``.
    """
    members: dict[str, Any] = getattr(record, "members", {})
    return {name: redacted(value) if isinstance(value, str) else value for name, value in members.items()}


def _trace(error: BaseException | None) -> str:
    """Return the stack frames of an error and its causes. Only our own errors are logged with their messages, because
    any other message may contain a secret.
    """
    parts: list[str] = []
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:  # causes may form a cycle
        seen_ids.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        text = f": {error}" if isinstance(error, ShimError | HostError) else ""
        number = f" [Errno {error.errno}]" if isinstance(error, OSError) and error.errno else ""
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        within = "".join(f"\n{_trace(each)}" for each in inner)
        module = f"{type(error).__module__}.".removeprefix("builtins.")
        parts.append(f"{frames}{module}{type(error).__qualname__}{number}{text}{within}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(reversed(parts))


class TextLines(logging.Formatter):
    """Formats records as text for a terminal. The lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides a method of logging
        return safetext.line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "  | " + safetext.lines(_trace(ei[1])).replace("\n", "\n  | ")

    def format(self, record: logging.LogRecord) -> str:
        members = "".join(f" {name}={_encode(value)}" for name, value in _members(record).items())
        return redacted(super().format(record)) + safetext.line(members)


class JsonLines(logging.Formatter):
    """Formats records as JSON for log collectors. Times are in UTC."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **_members(record),
        }
        if record.exc_info:
            line["traceback"] = redacted(_trace(record.exc_info[1]))
        return safetext.line(_encode(line))


class _File(logging.handlers.RotatingFileHandler):
    """A log file that is never opened through a symlink. A file larger than ``LARGEST`` is rotated: it is renamed and
    replaces the previously rotated file.

    Failed writes (full disk, missing directory) are ignored, because every line is also written to standard error.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST, backupCount=1, encoding="utf-8", errors="replace", delay=True)

    def _open(self) -> TextIOWrapper:
        # If this path is a FIFO without a reader, O_NONBLOCK makes the open fail instead of blocking the agent.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return open(os.open(self.baseFilename, flags, 0o640), "a", encoding=self.encoding, errors=self.errors)


class _Stderr(logging.Handler):
    """A handler for standard error, whose reader may be slow. Lines that cannot be written immediately are written
    later by a thread.

    The descriptor may be shared with other processes, so it must stay in blocking mode, and data is written only when
    the kernel reports space for ``PIPE_BUF`` bytes. Lines beyond ``MAX_WAITING_BYTES`` are dropped and counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fd = sys.stderr.fileno()
        self._waiting = bytearray()
        self._dropped = 0
        self._has_thread = False
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if standard error accepts it at once. Otherwise let a thread write it."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "replace")
        except (TypeError, ValueError, LookupError):  # the arguments do not fit the format string
            return self.handleError(record)
        if len(self._waiting) + len(line) > MAX_WAITING_BYTES:
            self._dropped += 1
            return None
        self._waiting += line
        self._write(0.0)
        if self._waiting and not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._write_later, daemon=True).start()  # noqa: TID251 - logging has no loop
        return None

    def _has_room(self, timeout_s: float | None) -> bool:
        """Wait until stderr accepts ``PIPE_BUF`` bytes. Return False on a timeout. None means no timeout."""
        return bool(select.select((), (self._fd,), (), timeout_s)[1])

    def _write(self, timeout_s: float) -> None:
        """Write buffered lines until none are left or the reader has accepted nothing for ``timeout_s`` seconds. The
        caller holds the handler's lock.
        """
        while self._waiting and self._has_room(timeout_s):
            # Write only whole lines unless the first line is longer than ``PIPE_BUF``.
            end = self._waiting.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            try:
                del self._waiting[: os.write(self._fd, self._waiting[:end])]
            except OSError:
                self._waiting.clear()  # the reader is gone

    def _write_later(self) -> None:
        """Write lines whenever stderr accepts data, until none are left. Then log how many were dropped, if any."""
        while self._has_thread:
            self._has_room(None)
            self.acquire()
            self._write(0.0)
            self._has_thread = bool(self._waiting)
            self.release()
        dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning("%d lines were dropped: the reader of stderr is too slow", dropped)

    def close(self) -> None:
        """Write the remaining lines, waiting up to ``FLUSH_TIMEOUT_S`` for the reader."""
        self.acquire()
        self._write(FLUSH_TIMEOUT_S)
        self.release()
        super().close()


def is_json(form: str) -> bool:
    """Return True if log lines should be JSON. If ``form`` is "", they are JSON unless stderr is a terminal."""
    return form == "json" or (form != "text" and not sys.stderr.isatty())


def turn(steps: int) -> None:
    """Change the log level by ``steps``, which is -1 for SIGUSR1 and 1 for SIGUSR2. A negative number lowers the level,
    so that more is logged. Errors are logged at every level.
    """
    root = logging.getLogger()
    names = [name.upper() for name in LEVELS]
    index = names.index(logging.getLevelName(root.level)) + steps
    name = names[min(len(names) - 1, max(0, index))]
    # Log the change at the higher of the two levels, so that it is not filtered out.
    logger.log(max(root.level, logging.getLevelName(name)), "the level of the log is %s now", name.lower())
    root.setLevel(name)


def _is_written_by_svlogd(directory: Path) -> bool:
    """Return True if a running svlogd writes our stderr to ``directory``. This is assumed if stderr is a pipe and the
    directory's lock is held.
    """
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
    """Send all logging to stderr and, if given, to ``file``. ``form`` is json, text or "" (see ``is_json``).

    If svlogd already writes our stderr to the directory of ``file``, as on a stemcell with runit, ``file`` is not
    used.
    """
    handlers: list[logging.Handler] = [_Stderr()]
    if file is not None and not _is_written_by_svlogd(file.parent):
        handlers.append(_File(file))
    for handler in handlers:
        handler.setFormatter(JsonLines() if is_json(form) else TextLines())
    logging.basicConfig(handlers=handlers, level=level.upper(), force=True)
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("nats").setLevel("ERROR")
    logging.raiseExceptions = False  # a full disk must not cause tracebacks on stderr
