"""Shows a process's logs for ``bpm logs`` and ``bpm run``.

All functions block.
"""

from __future__ import annotations

import codecs
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO, Final

from agent_shim.core import safetext
from agent_shim.services.logs.log_file import LogFile

POLL_S: Final = 0.1
"""Pause in seconds between two reads of the log files."""


class Log(LogFile):
    """One log file, formatted for a terminal or a pipe."""

    def __init__(self, path: str, root: str) -> None:
        super().__init__(path, root)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        """Keeps the bytes of an incomplete character until the rest of the character has been written."""

    def open(self, *, at_end: bool = True) -> bool:
        """Do the same as ``LogFile.open``, but raise errors whose message contains the path."""
        try:
            return super().open(at_end=at_end)
        except OSError as exc:
            raise OSError(exc.errno, f"cannot read {self.path}: {exc.strerror or exc}") from exc

    def shown(self, data: bytes, out: BinaryIO) -> bytes:
        """Format ``data`` for ``out``. For a terminal, escape sequences are made visible; otherwise the bytes are
        unchanged.
        """
        if not out.isatty():
            return data
        return safetext.lines(self._decoder.decode(data)).encode(sys.stdout.encoding, sys.stdout.errors or "strict")


def copy(log: Log, out: BinaryIO) -> None:
    """Write to ``out`` the bytes that were added to the log since the last call, or since it was opened."""
    out.writelines(log.shown(chunk, out) for chunk in log.chunks())
    out.flush()


def show(logs: Sequence[Log], count: int, *, is_named: bool, follows: bool) -> None:
    """Print the last ``count`` lines of each file. If ``is_named`` is set, print a header with the file's name above
    its lines, as ``tail`` does. If ``follows`` is set, also print new lines, until interrupted.
    """
    out = sys.stdout.buffer
    latest: Log | None = None
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to stop following a log
        for log in logs:
            latest = _head(out, log, latest) if is_named else log
            out.write(log.shown(b"".join(line + b"\n" for line in log.last(count)), out))
        while follows:
            out.flush()
            time.sleep(POLL_S)  # noqa: TID251 a command has no event loop
            for log in logs:
                for chunk in filter(None, log.chunks()):  # an empty chunk only marks the end of a renamed file
                    latest = _head(out, log, latest) if is_named else log
                    out.write(log.shown(chunk, out))
    out.flush()


def _head(out: BinaryIO, log: Log, latest: Log | None) -> Log:
    """Write the header of ``log`` unless ``latest``, the log that was printed last, is the same one. Return ``log``."""
    if log is not latest:
        out.write(b"\n" * (latest is not None) + f"==> {log.path} <==\n".encode())
    return log
