"""Follows a job's log file by name, as ``tail -F`` does: reads its last lines, then the lines written since the last
read.

Jobs may create any kind of file below ``sys/log``. Therefore, links are not followed in any part of a path, and opening
a pipe does not block (``host.guarded``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Final

from agent_shim.host import guarded

MAX_LINE_BYTES: Final = 16 * 1024
"""Maximum length of a line. The rest of a longer line is returned as the next line."""
MAX_TAIL_BYTES: Final = 16 * 1024 * 1024
"""How many bytes, counted back from the end of a file, are searched for the last lines."""


class LogFile:
    """The log at ``path`` below the directory ``root``. It is closed until :meth:`open` succeeds.

    If an open file is renamed, the rest of it is read before the new file at ``path`` is opened. If the open file is
    truncated (copytruncate), it is read from the start again.
    """

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        self._root = root
        self._descriptor = -1
        self._place = 0
        """Offset of the next read."""
        self._rest = b""
        """The beginning of the last line, whose line break has not been read yet."""

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def open(self, *, at_end: bool = True) -> bool:
        """Open the file. Reading begins at its end if ``at_end`` is set, otherwise at its start. Return False if the
        file is missing. Raises ``OSError`` if the file must not be read, for example because it is a link.
        """
        try:
            self._descriptor = guarded.open_file(self.path, self._root)
        except OSError as exc:
            if exc.errno != errno.ENOENT:
                raise
            return False
        self._place = os.fstat(self._descriptor).st_size if at_end else 0
        return True

    def close(self) -> None:
        """Close the file."""
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1

    def changed_at(self) -> float:
        """Return the modification time of the open file."""
        return os.fstat(self._descriptor).st_mtime

    def last(self, count: int) -> Iterator[bytes]:
        """Yield the last ``count`` lines before the read position, at most ``MAX_TAIL_BYTES`` in total."""
        found = guarded.chunks(self._descriptor, self._begin_of_last(count), self._place)
        # The empty chunk makes ``_split`` yield the last line even if it has no line break yet.
        yield from self._split(chain((chunk for _, chunk in found), [b""]))

    def lines(self, allowed: int | None = None) -> Iterator[bytes]:
        """Yield complete lines written since the last read. Long lines are split. If more than ``allowed`` bytes were
        written, the oldest bytes are skipped, and an extra line says how many.
        """
        yield from self._split(self.chunks(allowed))

    def _split(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the lines in ``chunks``. An incomplete last line is kept until the next call."""
        for chunk in chunks:
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if not chunk and self._rest:  # an empty chunk marks the end of this file
                lines, self._rest = [self._rest], b""
            yield from lines
            while len(self._rest) > MAX_LINE_BYTES:
                yield self._rest[:MAX_LINE_BYTES]
                self._rest = self._rest[MAX_LINE_BYTES:]

    def chunks(self, allowed: int | None = None) -> Iterator[bytes]:
        """Yield the bytes written since the last read, skipping the holes in sparse files. An empty chunk marks the end
        of a file that was renamed, removed or truncated. If more than ``allowed`` bytes were written, the oldest bytes
        are skipped, and an extra line says how many.
        """
        if self.is_open:
            yield from self._written(allowed)
            if not self._is_another():
                return
            yield from self._written(allowed)  # the job may have written more before the file was replaced
            yield b""
            self.close()
        with suppress(OSError):
            if self.open(at_end=False):
                yield from self._written(allowed)

    def _written(self, allowed: int | None) -> Iterator[bytes]:
        """Yield the unread bytes of the open file: all of them if ``allowed`` is None, otherwise at most the last
        ``allowed`` bytes. If the file was truncated, first yield b"" (see :meth:`chunks`).
        """
        size = os.fstat(self._descriptor).st_size
        if size < self._place:  # the file was truncated
            yield b""
            self._place = 0
        if allowed is not None and size - self._place > allowed:
            yield b"(%d bytes left out here: over the limit per second)\n" % (size - self._place - allowed)
            self._place = size - allowed
        begin, self._place = self._place, size
        for _, chunk in guarded.chunks(self._descriptor, begin, size):
            yield chunk

    def _is_another(self) -> bool:
        """Return True if the open file is no longer the one at ``path``, because it was renamed or removed."""
        try:
            found = guarded.status(self.path, self._root)
        except OSError:
            return True
        return not os.path.samestat(found, os.fstat(self._descriptor))

    def _begin_of_last(self, count: int) -> int:
        """Return the offset at which the last ``count`` lines before the read position begin. Only the last
        ``MAX_TAIL_BYTES`` before that position are searched.
        """
        end_offset = self._place
        lowest = max(0, end_offset - MAX_TAIL_BYTES)
        if not count or not end_offset:
            return end_offset
        # The line break at the end of the last line does not begin another line.
        wanted = count + (os.pread(self._descriptor, 1, end_offset - 1) == b"\n")
        at = end_offset
        while at > lowest:
            begin = max(lowest, at - guarded.CHUNK_BYTES)
            chunk = os.pread(self._descriptor, at - begin, begin)
            end = len(chunk)
            while (end := chunk.rfind(b"\n", 0, end)) >= 0:
                wanted -= 1
                if not wanted:
                    return begin + end + 1
            at = begin
        return lowest
