"""Exhausts a process's file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def none_free() -> Iterator[Callable[[], bool]]:
    """Use up this process's file descriptors. During the block, their number is limited to 200.

    Yields a function that uses up any descriptors that have become free since then, and returns True.
    """
    taken: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up() -> bool:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        return True

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        use_up()
        yield use_up
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
