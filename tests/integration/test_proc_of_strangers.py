"""Reading /proc of processes that are hard to read, which must neither block the agent nor exhaust its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent_shim.host import proc, process
from tests.support import descriptors
from tests.support.programs import argv, number_in
from tests.support.waiting import until


async def test_process_arguments_are_read_up_to_a_limit(tmp_path: Path) -> None:
    """A process needs no privileges to make its arguments and environment appear as large as its address space."""
    huge = process.spawn(argv("huge_environ.py", tmp_path / "pid"), env={"MARK": "web"})
    await until(lambda: number_in(tmp_path / "pid"))

    assert len(proc.command_line(huge.pid)) <= proc.MAX_COMMAND_LINE_BYTES
    await huge.terminate(1)


@pytest.mark.attack("a job hides a process so that stopping the job misses it")
async def test_process_without_its_main_thread_is_read_through_another_thread(tmp_path: Path) -> None:
    """After the main thread has exited, the kernel shows memory, files and environment of the process only under the
    ids of its other threads.
    """
    headless = process.spawn(argv("leaderless.py", tmp_path / "pid"), env={"MARK": "web"}, cwd=tmp_path)
    await until(lambda: number_in(tmp_path / "pid"))
    found = proc.stat(headless.pid)

    assert found is not None
    assert (found.state, found.is_alive) == ("Z", True)
    assert proc.table()[headless.pid].is_alive
    assert found.resident_kb > 64 << 10
    assert proc.proportional_kb(headless.pid) > 64 << 10
    assert "leaderless.py" in proc.command_line(headless.pid)
    assert proc.open_files(headless.pid) > 2
    with descriptors.none_free():
        again = proc.stat(headless.pid)
    assert again is not None
    assert again.resident_kb > 64 << 10
    device = tmp_path.stat().st_dev
    used = proc.uses([headless.pid], lambda path: path.startswith(str(tmp_path)), {device})[headless.pid]
    assert {each.kind for each in used} == {"cwd", "fd"}
    adopted = process.adopt(headless.pid)
    assert adopted is not None
    adopted.release()
    await headless.terminate(1)
    assert proc.stat(headless.pid) is None


def test_process_that_blocks_proc_reads_is_skipped_until_the_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reads the other processes, and does not try to read the blocked one again before the first read has
    ended.
    """
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


def test_number_of_blocked_proc_readers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thousand processes block their readers, the agent uses only a few threads for them and leaves out the data
    of the remaining processes.
    """
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


def test_files_in_use_are_reported(tmp_path: Path) -> None:
    """Only the paths in question are reported, and only on the given devices."""
    opened = tmp_path / "opened"
    with opened.open("w"):
        found = proc.uses([os.getpid()], lambda path: path == str(opened), {tmp_path.stat().st_dev})
        elsewhere = proc.uses([os.getpid()], lambda path: path == str(opened), set())

    assert found == {os.getpid(): [proc.Use("fd", str(opened))]}
    assert elsewhere == {os.getpid(): []}


@pytest.mark.skipif(not Path("/proc/self/fd").stat().st_size, reason="a kernel that counts no descriptors")
def test_files_in_use_are_found_among_many_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job can open millions of descriptors at no cost, so the agent must not read all of their links."""
    looked_at: list[str] = []

    def wanted(path: str) -> bool:
        looked_at.append(path)
        return True

    crowd = "import os, time; [os.dup(0) for _ in range(900)]; print(flush=True); time.sleep(600)"
    with (tmp_path / "file").open("w") as file:
        running = [
            subprocess.Popen([sys.executable, "-c", crowd], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE),
            subprocess.Popen(["sleep", "600"], stdout=file),
        ]
    try:
        assert running[0].stdout is not None
        running[0].stdout.readline()
        monkeypatch.setattr(proc, "MAX_LINKS", 100)
        found = proc.uses([one.pid for one in running], wanted, {tmp_path.stat().st_dev})
    finally:
        for one in running:
            one.kill()
            one.communicate()

    assert proc.Use("fd", str(tmp_path / "file")) in found[running[1].pid]
    assert len(looked_at) < 200
