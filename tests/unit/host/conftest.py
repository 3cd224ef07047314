"""Checks that no test in this directory leaks file descriptors.

The code under test handles descriptors as plain numbers, so the garbage collector would not close a leaked one.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_LOOKS = 200


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = _open()
    yield
    for _ in range(MAX_LOOKS):
        if not (left := _open() - before):
            return
        gc.collect()  # close files that the test has left open
        time.sleep(0.01)  # a thread that the test has started may still be reading
    assert left == set()


def _open() -> set[tuple[str, str]]:
    """Return the number and file of each open descriptor."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is already closed
            found.add((descriptor.name, str(descriptor.readlink())))
    return found
