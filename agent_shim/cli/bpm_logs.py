"""The logs of a process as ``bpm logs`` and ``bpm run`` show them.

The process can replace a log by any file, so ``host.guarded`` opens it instead of ``tail``: it follows no link below
``sys/log`` and waits for no pipe. All functions block.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
import time

from agent_shim.core import safetext
from agent_shim.host import guarded
from agent_shim.host.descriptors import closing
from agent_shim.services.logs import log_file

TYPE_CHECKING = False  # without loading ``typing``
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO, Final

POLL_S: Final = 0.1
"""Pause between two reads."""


class Log:
    """One log file; ``root`` is the directory below which no link is followed."""

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        self._root = root
        self._place = 0
        """Offset of the next read: bytes already shown or skipped."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        """Holds an incomplete character until its end is written."""

    def open(self) -> bool:
        """Open the file and seek to its end; False if it is missing. Raises ``OSError`` if it is not a regular file."""
        try:
            self._place = guarded.status(self.path, self._root).st_size
            os.close(guarded.open_file(self.path, self._root))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return False
            raise OSError(exc.errno, f"cannot read {self.path}: {exc.strerror or exc}") from exc
        return True

    def last(self, count: int) -> list[bytes]:
        """The last ``count`` lines before the end that :meth:`open` found."""
        with closing(guarded.open_file(self.path, self._root)) as descriptor:
            return list(log_file.last_lines(descriptor, self._place, count))

    def news(self) -> Iterator[bytes]:
        """Bytes written since the last read, without holes; from the beginning of a truncated file."""
        try:
            descriptor = guarded.open_file(self.path, self._root)
        except OSError:
            return
        with closing(descriptor):
            size = os.fstat(descriptor).st_size
            begin, self._place = self._place if self._place <= size else 0, size
            for _, chunk in guarded.chunks(descriptor, begin, size):
                yield chunk

    def shown(self, data: bytes, out: BinaryIO) -> bytes:
        """Format the next bytes for ``out``: escape sequences made visible for a terminal, else unchanged."""
        return safetext.lines(self._decoder.decode(data)).encode() if out.isatty() else data


def copy(log: Log, out: BinaryIO) -> None:
    """Write bytes since the last read to ``out``."""
    out.writelines(log.shown(chunk, out) for chunk in log.news())
    out.flush()


def show(logs: Sequence[Log], count: int, *, is_named: bool, follows: bool) -> None:
    """Print the last ``count`` lines of each file with headers as by ``tail``, then follow them until interrupted."""
    out = sys.stdout.buffer
    latest: Log | None = None
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the regular end
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
