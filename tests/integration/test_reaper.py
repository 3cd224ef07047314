"""Tests the reaper, which adopts and reaps orphans. ``test_process.py`` has further tests for it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time

import pytest

from agent_shim.host import proc, process, reaper


def _is_subreaper() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(answer.value)


async def test_reaper_restores_the_subreaper_flag_and_signal_handler_on_exit() -> None:
    with reaper.reaping():
        assert _is_subreaper()
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL

    assert not _is_subreaper()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD) is False


async def test_reaper_reaps_all_dead_children_including_earlier_ones() -> None:
    """A single SIGCHLD may announce several exits. Exits before the handler was set are not announced at all."""
    children = [subprocess.Popen(["/bin/true"]) for _ in range(3)]  # noqa: ASYNC220 - it does not wait
    while any((found := proc.stat(child.pid)) and found.is_alive for child in children):
        time.sleep(0.01)  # noqa: ASYNC251 - the loop must not run
    with reaper.reaping():
        assert [proc.stat(child.pid) for child in children] == [None] * 3
    for child in children:
        child.returncode = 0  # Otherwise, subprocess would wait for it.


async def test_many_child_exits_do_not_displace_other_signals(capfd: pytest.CaptureFixture[str]) -> None:
    """Thousands of SIGCHLD signals must not fill asyncio's wake-up pipe. If they did, SIGTERM would be lost."""
    before, heard = signal.getsignal(signal.SIGTERM), asyncio.Event()
    process.on_signal(signal.SIGTERM, heard.set)
    try:
        with reaper.reaping():
            for _ in range(5000):
                os.kill(os.getpid(), signal.SIGCHLD)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(heard.wait(), 10)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert "wakeup" not in capfd.readouterr().err
