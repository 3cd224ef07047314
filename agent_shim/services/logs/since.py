"""Selects log lines written at or after a given time.

The timestamp is read from the line itself, in the format of RFC 3339, Go's log package or nginx. In a JSON line, it is
read from a field and may also be a Unix time. A line without a timestamp has the timestamp of the preceding line. If a
file contains no timestamps, its modification time is used. Timestamps without a time zone are UTC, as on stemcells.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

MAX_HEAD_BYTES: Final = 512
"""How many bytes at the start of a line are searched for a time."""

_DURATION: Final = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_CLOCK: Final = re.compile(r"\d\d:\d\d(:\d\d)?", re.ASCII)

_DATED: Final = re.compile(
    rb"(?<![\d.])(\d{4})([-/])(\d\d)\2(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|UTC|[+-]\d\d:?\d\d)?"
)
_NGINX: Final = re.compile(rb"\[(\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4})\]")
_SECONDS: Final = re.compile(rb'"(?:timestamp|@timestamp|time|ts)":\s*"?(\d{10}(?:\.\d+)?)"?\s*[,}]')


def moment(text: str, now: float) -> float:
    """Parse a duration before ``now`` (``2h30m``), a time of day (``14:00``) or a date, and return it in seconds since
    1970. Raises ``ValueError``.
    """
    found = _DURATION.fullmatch(text)
    if found and text:  # the pattern also matches an empty string
        days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
        return now - (days * 86400 + hours * 3600 + minutes * 60 + seconds)
    if _CLOCK.fullmatch(text):
        text = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}T{text}"
    try:
        return _utc(datetime.fromisoformat(text)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text} is neither a time nor a duration (10m, 2h30m, 14:00, 2026-11-22T14:00)") from None


def written_at(line: bytes) -> float | None:
    """Return the time that a log line contains, in seconds since 1970, or None if it contains none."""
    head = line[:MAX_HEAD_BYTES]
    try:
        if found := _DATED.search(head):
            return _of_parts(found)
        if found := _NGINX.search(head):
            return datetime.strptime(found[1].decode(), "%d/%b/%Y:%H:%M:%S %z").timestamp()
        if found := _SECONDS.search(head):
            return float(found[1])
    except (ValueError, OverflowError):  # an invalid date
        pass
    return None


def _of_parts(found: re.Match[bytes]) -> float:
    """Return the time in a match of ``_DATED``, in seconds since 1970."""
    year, _separator, *clock, fraction, zone = (part.decode() if part else "" for part in found.groups())
    text = f"{year}-{clock[0]}-{clock[1]}T{':'.join(clock[2:])}"
    at = _utc(datetime.fromisoformat(text + ("" if zone in ("", "UTC") else zone)))
    return at.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _utc(at: datetime) -> datetime:
    """Return a time without a zone as UTC, and any other time unchanged."""
    return at if at.tzinfo else at.replace(tzinfo=UTC)


class Since:
    """Decides which lines of several files were written at or after ``moment`` (seconds since 1970)."""

    def __init__(self, moment: float) -> None:
        self._moment = moment
        self._is_wanted: dict[str, bool] = {}
        """The last answer for each file, which also applies to the following lines without a timestamp."""

    def is_wanted(self, file: str, line: bytes, changed_at: Callable[[], float]) -> bool:
        """Return True if a line of ``file`` was written at or after ``moment``. ``changed_at`` returns the file's
        modification time, which is used for the lines before the first one with a timestamp.
        """
        at = written_at(line)
        if at is not None:
            self._is_wanted[file] = at >= self._moment
        elif file not in self._is_wanted:
            self._is_wanted[file] = changed_at() >= self._moment
        return self._is_wanted[file]
