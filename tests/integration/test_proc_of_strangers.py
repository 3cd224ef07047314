"""Processes whose /proc entries are hard to read must neither block the agent nor exhaust its memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from agent_shim.host import proc, process
from tests.support.programs import argv, number_in
from tests.support.waiting import until


async def test_process_arguments_are_read_up_to_a_limit(tmp_path: Path) -> None:
    """A process needs no privileges to make its arguments and environment appear as large as its address space."""
    huge = process.spawn(argv("huge_environ.py", tmp_path / "pid"), env={"MARK": "web"})
    await until(lambda: number_in(tmp_path / "pid"))

    assert len(proc.command_line(huge.pid)) <= proc.MAX_COMMAND_LINE_BYTES
    await huge.terminate(1)


def test_process_that_blocks_proc_reads_is_skipped_until_the_read_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "READ_TIMEOUT_S", 0.2)
    let_go = threading.Event()
    looked_at = []

    def work(pid: int) -> int:
        looked_at.append(pid)
        return let_go.wait(60) if pid == 2 else pid

    assert proc.of_each([1, 2, 3], work) == {1: 1, 3: 3}
    assert proc.of_each([1, 2, 3], work) == {1: 1, 3: 3}
    assert looked_at == [1, 2, 3, 1, 3]
    let_go.set()
    deadline = time.monotonic() + 10
    while 2 not in proc.of_each([2], lambda pid: pid):
        assert time.monotonic() < deadline


def test_number_of_threads_blocked_by_proc_reads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "READ_TIMEOUT_S", 0.05)
    let_go = threading.Event()
    before = threading.active_count()
    try:
        assert proc.of_each(range(1000), lambda _: let_go.wait(60)) == {}
        assert proc.of_each([5000], lambda pid: pid) == {}
        assert threading.active_count() - before <= proc.MAX_HUNG_READS
    finally:
        let_go.set()
    while threading.active_count() > before:
        time.sleep(0.01)


def test_open_files_with_a_requested_path_and_device_are_reported(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    with opened.open("w"):
        found = proc.uses([os.getpid()], lambda path: path == str(opened), {tmp_path.stat().st_dev})
        elsewhere = proc.uses([os.getpid()], lambda path: path == str(opened), set())

    assert found == {os.getpid(): [proc.Use("fd", str(opened))]}
    assert elsewhere == {os.getpid(): []}
