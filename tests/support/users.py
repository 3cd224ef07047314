"""Lets tests that run as root act as another user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def as_ordinary_user(*own: Path) -> Iterator[None]:
    """Act as an ordinary user during the block if the tests run as root. That user becomes the owner of ``own``."""
    if os.geteuid() != 0:
        yield
        return
    for path in own:
        os.chown(path, 1000, 1000)
    os.seteuid(1000)
    try:
        yield
    finally:
        os.seteuid(0)
