"""Close a file descriptor at the end of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close ``descriptor`` at the end of the block, whatever happens in it."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
