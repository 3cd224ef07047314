"""Tests the pool of worker processes: when a worker is reused, and what happens if a worker cannot start or dies."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from agent_shim.bulk import worker, workers
from agent_shim.bulk.protocol import BlobRef, CopyTree, Get, Pack, Put, Tree
from agent_shim.bulk.workers import Transfers, Workers
from agent_shim.core.errors import ActionError
from agent_shim.core.settings import Blobstore
from agent_shim.host import process
from tests.support.waiting import until


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    made = Transfers()
    monkeypatch.setattr(workers, "transfers", made)
    return made


def packing(tmp_path: Path, name: str = "archive") -> Pack:
    (tmp_path / "tree").mkdir(exist_ok=True)
    return Pack([Tree(str(tmp_path / "tree"))], str(tmp_path / name))


async def test_worker_is_reused_for_later_requests(tmp_path: Path, started: list[process.Process]) -> None:
    async with Workers() as pool:
        await pool.execute(packing(tmp_path))
        with pytest.raises(ActionError):
            await pool.execute(Pack([Tree("/missing")], str(tmp_path / "none")))
        await pool.execute(packing(tmp_path, "second"))
        assert [each.is_alive for each in started] == [True]

    assert not started[0].is_alive
    assert (tmp_path / "second").exists()


async def test_concurrent_requests_use_separate_workers(tmp_path: Path, started: list[process.Process]) -> None:
    async with Workers() as pool:
        await asyncio.gather(pool.execute(packing(tmp_path)), pool.execute(packing(tmp_path, "second")))
        assert len(started) == 2
        (stays,) = [each for each in started if each.is_alive]

        stays.send(signal.SIGKILL)
        await stays.wait()
        await pool.execute(packing(tmp_path))
        assert len(started) == 3

        await pool.execute(packing(tmp_path), nice=5)
        assert len(started) == 4


async def test_idle_worker_exits(
    tmp_path: Path, started: list[process.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "STAY_S", 0.0)
    async with Workers() as pool:
        await pool.execute(packing(tmp_path))
        await until(lambda: not started[0].is_alive)
        await pool.execute(packing(tmp_path))

    assert len(started) == 2


async def test_worker_that_dies_on_wakeup_leaves_no_open_descriptor(
    tmp_path: Path, started: list[process.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When memory is short, the kernel may kill an idle worker right before it gets a request."""

    def opened() -> int:
        return sum("memfd:errors" in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())

    before = opened()
    async with Workers() as pool:
        await pool.execute(packing(tmp_path))
        looks = iter([True])
        with monkeypatch.context() as patched:
            patched.setattr(process.Process, "is_alive", property(lambda _: next(looks, False)))
            await pool.execute(packing(tmp_path))

    assert opened() == before


async def test_worker_that_cannot_be_started_fails_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ActionError, match="^cannot run /nowhere/python: No such file or directory$"):
        await workers.execute(Pack([], "/nowhere/archive"))


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
async def test_worker_start_without_free_descriptors_fails_the_action_and_leaks_no_descriptor(room: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(room):
            os.close(taken.pop())
        with pytest.raises(ActionError, match="^cannot .*: Too many open files$"):
            await workers.execute(Pack([], "/nowhere/archive"))
        taken += [os.open("/dev/null", os.O_RDONLY) for _ in range(room)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


async def test_cancelled_worker_is_killed_and_its_files_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stubborn, left = tmp_path / "python", tmp_path / ".archive.tmp-00000000"
    stubborn.write_text("#!/bin/sh\nexec sleep 600\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    left.touch()
    working = asyncio.create_task(workers.execute(Pack([], str(tmp_path / "archive"))))
    await asyncio.sleep(0)

    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not left.exists()


def test_worker_exits_if_its_parent_died_before_the_parent_death_signal_was_set() -> None:
    """The worker asks the kernel for a signal when its parent dies, but the parent may be dead before it asks."""
    with pytest.raises(SystemExit) as caught:
        worker.become_worker(1)

    assert caught.value.code == 143


async def test_blob_transfers_are_counted_by_outcome(counted: Transfers, tmp_path: Path) -> None:
    base, path = str(tmp_path), tmp_path / "blob"
    path.write_bytes(b"12345")
    await workers.execute(Put(base, Blobstore(), str(path)))
    for request in (Get(base, Blobstore(), BlobRef("id", digest="00"), f"{path}2"), CopyTree("/missing", base, [])):
        with pytest.raises(ActionError):
            await workers.execute(request)

    assert dict(counted.counts) == {("put", "done"): 1, ("get", "failed"): 1}
    assert counted.sizes["put"] == 5
