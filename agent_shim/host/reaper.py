"""Reaps this process's children, and the orphans that it inherits as a child subreaper.

Job processes stay under their keepers. The orphans that this process inherits come from killed keepers and from other
programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import Final

from agent_shim.host import process

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER: Final = 36  # from include/uapi/linux/prctl.h


@contextlib.contextmanager
def reaping() -> Iterator[None]:
    """For the duration of the block, adopt orphans of our descendants and reap every child that exits.

    The exit statuses of watched children are passed to ``host.process``. Must be called on the main thread, with a
    running event loop.
    """
    loop = asyncio.get_running_loop()
    if not _subreaper(on=True):
        logger.warning("cannot adopt orphans: processes of a killed keeper go to PID 1")
    loop.add_signal_handler(signal.SIGCHLD, _reap_all)
    # Do not warn when thousands of exits fill the loop's signal buffer, because one signal in the buffer is enough.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    _reap_all()  # reap children that exited before the handler was installed
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
        _subreaper(on=False)


def _reap_all() -> None:
    """Reap all dead children, because one SIGCHLD may announce several."""
    with contextlib.suppress(ChildProcessError):
        # Get the status first and reap the process afterwards, so that its pid cannot be reused before the status is
        # delivered.
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            process.reap(dead.si_pid)


def _subreaper(*, on: bool) -> bool:
    """Start or stop adopting orphaned descendants (prctl(2)). Return True on success."""
    import ctypes  # imported late, because it takes half a megabyte

    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0)
