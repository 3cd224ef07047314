"""A context manager that closes a file descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close ``descriptor`` at the end of the block, even if the block fails."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
