"""Tests the loop guard: which blocked event loops it reports, and which it ignores."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import loop_guard


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Path]:
    loop_guard.install(tmp_path)
    yield tmp_path
    loop_guard.remove()
    loop_guard.violations.clear()


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def open_pipe(path: Path) -> None:
    os.mkfifo(path)
    threading.Timer(0.3, lambda: os.close(os.open(path, os.O_WRONLY))).start()
    os.close(os.open(path, os.O_RDONLY))


def wait_for_thread(_path: Path) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    thread.join()


HOLDING = {
    "a computation": lambda _path: spin(0.08),
    "a sleep": lambda _path: time.sleep(0.3),
    "a wait for a thread": wait_for_thread,
    "a program that is waited for": lambda _path: subprocess.run(["sleep", "0.3"], check=True),
    "a pipe that is opened": open_pipe,
}


@pytest.mark.parametrize("hold", HOLDING.values(), ids=HOLDING)
async def test_loop_guard_reports_a_blocked_loop_with_its_stack(guard: Path, tmp_path: Path, hold: object) -> None:
    assert callable(hold)
    asyncio.get_running_loop().call_soon(hold, tmp_path / "pipe")
    await asyncio.sleep(0)

    (report,) = guard.glob(f"{os.getpid()}.*")
    assert "the event loop was blocked: a callback" in report.read_text()


async def test_loop_guard_ignores_a_busy_machine(guard: Path) -> None:
    """The loop may be waiting for the CPU or for another thread that holds the GIL."""
    spin_for_ever = [sys.executable, "-c", "while True: pass"]
    # Start the children in threads, because Popen waits for exec, which would block the loop on a busy machine.
    children = [await asyncio.to_thread(subprocess.Popen, spin_for_ever) for _ in range(4)]
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            spin(0.01)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(10):
            await asyncio.sleep(0.001)
            spin(0.01)
    finally:
        over.set()
        for child in children:
            child.kill()
            await asyncio.to_thread(child.wait)

    assert loop_guard.violations == []


async def test_loop_guard_does_not_add_program_start_time_to_a_wait_for_the_gil(guard: Path) -> None:
    """The guard ignores the time that it takes to start a program, so it must not count this time as part of the
    following wait either.
    """

    def start_and_wait() -> None:
        with loop_guard.spawning():
            time.sleep(0.1)
        other = threading.Thread(target=sum, args=(range(3_000_000),))  # this sum never releases the GIL
        other.start()
        while other.is_alive():
            pass

    asyncio.get_running_loop().call_soon(start_and_wait)
    await asyncio.sleep(0)

    assert loop_guard.violations == []


async def test_loop_guard_ignores_waiting_for_events(guard: Path) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        asyncio.get_running_loop().call_later(0.2, right.send, b"x")

        assert await asyncio.get_running_loop().sock_recv(left, 1) == b"x"
    assert loop_guard.violations == []
