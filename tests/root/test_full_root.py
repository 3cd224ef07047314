"""Tests agents on a small, real file system that is full or read-only: the root file system or the data volume."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent_shim.demo.director import RpcRemoteError
from tests.support.instance import AGENT, COMMAND, RunningAgent, world
from tests.support.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture
async def instance() -> AsyncIterator[RunningAgent]:
    """Provide an instance without a running agent."""
    async with world(COMMAND) as made:
        yield made


@pytest.fixture
def mounted(instance: RunningAgent) -> Iterator[Callable[[str], Path]]:
    """Provide a function that moves one of the instance's directories to its own small ext4 file system."""
    places = []

    def mount(name: str) -> Path:
        place = instance.base / name if name else instance.base
        image = instance.scratch / f"{name or 'root'}.image"
        place.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(16 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, place], check=True)
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path) -> None:
    """Fill a file system completely."""
    with (place / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def make_read_only(place: Path) -> None:
    """Make a file system read-only, as the kernel does after a disk error."""
    device = Path(f"/sys/dev/block/{os.major(place.stat().st_dev)}:{os.minor(place.stat().st_dev)}").resolve().name
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")


async def test_agent_starts_on_a_full_root_file_system(instance: RunningAgent, mounted: Callable[[str], Path]) -> None:
    """Once there is space again, the agent must write the stamp by which the next agent recognizes the container.
    Without it, the next agent would start the jobs again.
    """
    root, data = mounted(""), mounted("data")
    await instance.start_agent()
    await instance.stop_agent()
    for path in (root / "bosh").iterdir():
        if path.is_file() or path.is_socket():
            path.unlink()
    for path in (data / "bosh").iterdir():
        path.unlink()
    instance.forget_log()
    fill(root)
    await instance.start_agent()
    (root / "filler").unlink()
    assert "Traceback" not in instance.log_text()
    pids = await instance.deploy(1)
    stamp = root / "bosh/agent_shim.json"
    # Wait until the agent has retried the write that failed.
    await until(lambda: stamp.exists() and stamp.stat().st_size)
    await instance.kill_agent()

    await instance.start_agent()

    assert (await instance.director.value(AGENT, "get_state"))["job_state"] == "running"
    assert {name: [pid] for name, pid in pids.items()} == instance.starts()
    await instance.run("stop")


@pytest.mark.parametrize("fault", [fill, make_read_only])
async def test_stopped_jobs_stay_stopped_after_a_restart_on_a_full_or_read_only_disk(
    instance: RunningAgent, mounted: Callable[[str], Path], fault: Callable[[Path], None]
) -> None:
    data = mounted("data")
    pids = await instance.deploy(1)
    fault(data)
    await instance.run("stop")
    await instance.kill_agent()
    if fault is fill:
        # The disk is no longer full, because the stop has removed the pidfile. In addition, the agent may have been
        # saving its state while the disk was filled, and has since removed its temporary file. Fill the disk again.
        fill(data)
    await instance.start_agent()
    with pytest.raises(RpcRemoteError, match=r"cannot write .*supervisor\.json"):
        await instance.run("start")
    await instance.kill_agent()
    if fault is fill:
        (data / "filler").unlink()
    await instance.start_agent()
    await until(lambda: instance.log_text().count("boot step jobs that ran before") >= 3)

    assert (await instance.director.value(AGENT, "get_state"))["job_state"] == "stopped"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert {name: [pid] for name, pid in pids.items()} == instance.starts()
    if fault is fill:
        await instance.run("start")
        await instance.until_running()
        await instance.run("stop")
