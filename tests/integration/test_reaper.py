"""Orphans come to us. The rest of what the reaper does is in test_process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path

import pytest

from agent_shim.host import proc, process, reaper
from tests.support.programs import is_alive, number_in
from tests.support.waiting import until


def _is_subreaper() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(answer.value)


async def test_reaping_ends_with_its_block() -> None:
    """Subreaper and SIGCHLD handler are there inside and gone after it."""
    with reaper.reaping():
        assert _is_subreaper()
        taken = [process.takes_orphans]
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL

    assert not _is_subreaper()
    assert [*taken, process.takes_orphans] == [True, False]
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD) is False


async def test_one_turn_of_the_loop_reaps_a_limited_number() -> None:
    """Hundreds that end together leave turns to others. A living child is no reason to look again."""
    children = [process.spawn(["/bin/true"], env={}) for _ in range(reaper.MAX_REAPED + 3)]
    while any((found := proc.stat(child.pid)) and found.is_alive for child in children):
        time.sleep(0.01)  # noqa: ASYNC251 - the loop shall not turn

    assert reaper.reap_some()
    assert len([child for child in children if proc.stat(child.pid)]) == 3
    while reaper.reap_some():
        pass
    living = process.spawn(["/bin/sleep", "600"], env={})
    assert not reaper.reap_some()
    await living.terminate(0)


async def test_the_dead_are_reaped_from_the_start_and_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One signal may stand for many ends, and those before the block have sent theirs."""
    answers = [True, True, False]
    monkeypatch.setattr(reaper, "reap_some", lambda: answers.pop(0))
    with reaper.reaping():
        for _ in range(5):
            await asyncio.sleep(0)

    assert answers == []


async def test_the_end_of_an_orphan_reaches_the_heirs_and_that_of_a_child_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor ends the process group of an orphan before the number can be used again."""
    heard: list[proc.Stat] = []
    monkeypatch.setattr(reaper, "heirs", [heard.append])
    with reaper.reaping():
        child = process.spawn(["/bin/sh", "-c", f"sleep 0.1 & echo $! >{tmp_path}/pid"], env={"PATH": "/bin:/usr/bin"})
        await child.wait()
        await until(lambda: heard)

    assert [(stat.pid, stat.is_alive) for stat in heard] == [(number_in(tmp_path / "pid"), False)]


async def test_a_member_that_outlives_its_leader_is_still_of_the_group(tmp_path: Path) -> None:
    """It was forked in the leader's last moment and has come to us."""
    with reaper.reaping():
        child = process.spawn(
            ["/bin/sh", "-c", f"trap '' TERM; sleep 600 & echo $! >{tmp_path}/pid"],
            env={"PATH": "/bin:/usr/bin"},
        )
        await child.wait()
        member = number_in(tmp_path / "pid")
        assert member is not None
        assert is_alive(member)

        await child.terminate(0.05)

        assert not is_alive(member)


async def test_a_storm_of_ends_takes_no_place_from_another_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """It writes no message for each either."""
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
