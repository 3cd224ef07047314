"""The copy by a worker: the same as the engine's, with progress, and ended with its caller."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agent_shim.bulk.protocol import Progress
from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import proc
from agent_shim.services.disks.service import in_worker
from tests.support.volumes import fill, fingerprint


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(tmp_path / "vcap")
    found.shim_run.mkdir(parents=True)
    return found


def many(directory: Path, number: int) -> None:
    directory.mkdir()
    for name in range(number):
        (directory / str(name)).write_bytes(b"x" * 3000)


def ignore(_: Progress) -> None:
    """A progress callback that does nothing."""


async def test_a_worker_copies_all_but_the_files_of_the_agent(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    fill(source, as_root=os.geteuid() == 0)
    target.mkdir()
    for directory in (source, target):
        (directory / ".agent_shim").mkdir()
        (directory / ".agent_shim" / directory.name).touch()

    await in_worker(source, target, ignore)

    assert fingerprint(target) == fingerprint(source)
    assert [path.name for path in (target / ".agent_shim").iterdir()] == ["to"]


async def test_a_failed_copy_is_reported(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()

    with pytest.raises(ActionError, match=f"cannot copy {tmp_path}/from to {tmp_path}/to: No such file or directory"):
        await in_worker(tmp_path / "from", tmp_path / "to", ignore)


async def test_progress_is_seen(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    many(source, 3000)
    target.mkdir()
    seen: list[Progress] = []

    await in_worker(source, target, seen.append)

    assert seen
    assert {progress.files_total for progress in seen} <= {0, 3000}


async def test_a_cancelled_copy_is_ended(tmp_path: Path) -> None:
    """And at once: a copy of hours must not hold up the end of the agent."""
    source, target = tmp_path / "from", tmp_path / "to"
    many(source, 3000)
    target.mkdir()
    begun = asyncio.Event()
    copy = asyncio.ensure_future(in_worker(source, target, lambda _: begun.set()))
    await begun.wait()
    workers = [pid for pid in proc.table() if "agent_shim.bulk.worker" in proc.command_line(pid)]
    mine = [pid for pid in workers if proc.command_line(pid).endswith(f" {os.getpid()}")]
    assert len(mine) == 1

    copy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copy

    assert proc.command_line(mine[0]) == ""
    await in_worker(source, target, ignore)
    assert fingerprint(target) == fingerprint(source)


def test_how_far_it_is_in_words_and_as_a_share() -> None:
    """During the count the total is unknown."""
    assert (str(Progress("counting", 5, 0, 700)), Progress("counting", 5, 0, 700).share) == (
        "counting: 5 files, 700 bytes",
        0.0,
    )
    copying = Progress("copying", 5, 10, 250, 1000)
    assert (str(copying), copying.share) == ("copying: 5/10 files, 250/1000 bytes", 0.25)
