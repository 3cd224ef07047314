"""Runs programs on pseudo-terminals, and returns what an operator would see there."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
from collections.abc import Callable, Sequence
from typing import Self


class Terminal:
    """A pseudo-terminal. The program under test uses the ``theirs`` end, and ``read`` returns what the program has
    written so far.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._seen = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        os.close(self.theirs)

    def read(self) -> bytes:
        """Return all output so far, without waiting for more."""
        with contextlib.suppress(OSError):
            while select.select([self._ours], [], [], 0)[0]:
                self._seen += os.read(self._ours, 65536)
        return self._seen


def on_terminal(argv: Sequence[str], seen: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """Run a command on a terminal and return its output.

    If the command keeps running, it is killed once ``seen`` returns True for its output.
    """
    with Terminal() as terminal, subprocess.Popen(argv, stdout=terminal.theirs, stderr=terminal.theirs) as child:
        while child.poll() is None and not seen(terminal.read()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.02)
        child.kill()
        return terminal.read()
