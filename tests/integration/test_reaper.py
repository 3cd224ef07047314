"""Orphans come to us; the rest of what the reaper does is in test_process."""

from __future__ import annotations

import asyncio
import ctypes
import signal

from agent_shim.host import reaper


def _is_subreaper() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(answer.value)


async def test_reaping_ends_with_its_block() -> None:
    """Subreaper and SIGCHLD handler are there inside and gone after it."""
    with reaper.reaping():
        assert _is_subreaper()
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL

    assert not _is_subreaper()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD) is False
