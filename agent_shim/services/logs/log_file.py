"""Lines of one open log file: the latest, and the new ones since the last read."""

from __future__ import annotations

# Each call of ``bpm logs`` loads this: without typing.
import os

from agent_shim.host import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

MAX_LINE_BYTES: Final = 16 * 1024
"""Limit of a line; the rest follows as the next one."""
MAX_TAIL_BYTES: Final = 16 * 1024 * 1024
"""Part at the end of a file in which the last lines are searched."""


class LogFile:
    """An open log file; ``position`` is the offset of the next read."""

    def __init__(self, descriptor: int, position: int) -> None:
        self.descriptor = descriptor
        self.position = position
        self.rest = b""
        """Last line, still without a line break."""

    @property
    def identity(self) -> tuple[int, int]:
        known = os.fstat(self.descriptor)
        return known.st_dev, known.st_ino


def read(one: LogFile, allowed: int | None) -> Iterator[bytes]:
    """Yield whole lines from the last position; skips and reports an excess over ``allowed`` bytes, skips holes."""
    size = os.fstat(one.descriptor).st_size
    if size < one.position:
        one.position, one.rest = 0, b""
    if allowed is not None and size - one.position > allowed:
        left_out = size - one.position - allowed
        yield one.rest + f"({left_out} bytes left out here: over the limit per second)".encode()
        one.position, one.rest = size - allowed, b""
    yield from _lines(one, size)


def _lines(one: LogFile, end: int) -> Iterator[bytes]:
    """Yield whole lines up to ``end`` and keep the start of the next one; long lines are split, holes skipped."""
    for place, chunk in guarded.chunks(one.descriptor, one.position, end):
        one.position = place + len(chunk)
        *lines, one.rest = (one.rest + chunk).split(b"\n")
        yield from lines
        while len(one.rest) > MAX_LINE_BYTES:
            yield one.rest[:MAX_LINE_BYTES]
            one.rest = one.rest[MAX_LINE_BYTES:]
    one.position = max(one.position, end)


def last_lines(descriptor: int, size: int, count: int) -> Iterator[bytes]:
    """Yield the last ``count`` lines of the first ``size`` bytes of a file, searched in at most ``MAX_TAIL_BYTES``."""
    one = LogFile(descriptor, _begin_of_last(descriptor, size, count))
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
