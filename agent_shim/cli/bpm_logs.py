"""The logs of a process as ``bpm logs`` and ``bpm run`` show them.

The process may have put anything into the place of a log, so ``tail`` does not look: files are opened by
``host.guarded``, which follows no link below ``sys/log`` and waits for no pipe. All of this blocks.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from agent_shim.core import safetext
from agent_shim.host import guarded
from agent_shim.services.logs import tail

POLL_S: Final = 0.1
"""Between looks at what is written."""


class Log:
    """One log file; ``root`` is the directory below which no link is followed."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._root = root
        self._place = 0
        """Bytes that were shown, or were there before."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        """Keeps the beginning of a character whose end is not written yet."""

    def open(self) -> bool:
        """Go to its end; False when there is none. Raises ``OSError`` for what is no log file."""
        try:
            self._place = guarded.status(self.path, self._root).st_size
            os.close(guarded.open_file(self.path, self._root))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return False
            raise OSError(exc.errno, f"cannot read {self.path}: {exc.strerror or exc}") from exc
        return True

    def last(self, count: int) -> list[bytes]:
        """The last ``count`` lines before the place that :meth:`open` went to."""
        descriptor = guarded.open_file(self.path, self._root)
        try:
            return list(tail.last_lines(descriptor, self._place, count))
        finally:
            os.close(descriptor)

    def news(self) -> Iterator[bytes]:
        """What was written since the last look, without holes; from the beginning where the file was cut."""
        try:
            descriptor = guarded.open_file(self.path, self._root)
        except OSError:
            return
        try:
            size = os.fstat(descriptor).st_size
            begin, self._place = self._place if self._place <= size else 0, size
            for _, chunk in guarded.chunks(descriptor, begin, size):
                yield chunk
        finally:
            os.close(descriptor)

    def shown(self, data: bytes, out: BinaryIO) -> bytes:
        """The next bytes of it for ``out``: safe text for a terminal, which would obey escape sequences, else as is."""
        return safetext.lines(self._decoder.decode(data)).encode() if out.isatty() else data


def copy(log: Log, out: BinaryIO) -> None:
    """Write to ``out`` what has come since the last look."""
    out.writelines(log.shown(chunk, out) for chunk in log.news())
    out.flush()


def show(logs: Sequence[Log], count: int, *, is_named: bool, follows: bool) -> None:
    """Print the last ``count`` lines of each, with names as ``tail`` has them, and what comes, until interrupted."""
    out = sys.stdout.buffer
    latest: Log | None = None
    with contextlib.suppress(KeyboardInterrupt):  # enough was seen
        for log in logs:
            latest = _head(out, log, latest) if is_named else log
            out.write(log.shown(b"".join(line + b"\n" for line in log.last(count)), out))
        while follows:
            out.flush()
            time.sleep(POLL_S)
            for log in logs:
                for chunk in log.news():
                    latest = _head(out, log, latest) if is_named else log
                    out.write(log.shown(chunk, out))
    out.flush()


def _head(out: BinaryIO, log: Log, latest: Log | None) -> Log:
    if log is not latest:
        out.write(b"\n" * (latest is not None) + f"==> {log.path} <==\n".encode())
    return log
