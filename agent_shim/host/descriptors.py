"""Close a file descriptor at the end of a block, or of the last of several blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close ``descriptor`` at the end of the block, whatever happens in it."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Shared:
    """A descriptor that is closed at the end of the last block that uses it, in whichever thread.

    A block that would begin later raises ``ValueError``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def __enter__(self) -> int:
        with self._lock:
            if self._is_closed:
                raise ValueError("the descriptor is closed")
            self._users += 1
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._is_closed = True
                os.close(self._descriptor)
