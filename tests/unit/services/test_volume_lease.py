"""Tests locks and leases on volumes. A second agent waits until the first can no longer be running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import clock as clock_of_agent
from agent_shim.host import guarded, mounts
from agent_shim.services import volume_lease
from agent_shim.services.volume_lease import Lease, LeasePace, VolumeLeases
from tests.support.waiting import until

SHORT = LeasePace(period=0.02, patience=0.15, restart=0.08)


def leases(host: str = "pod-0", boot: str = "kernel 1", agent_id: str = "a-1") -> VolumeLeases:
    made = VolumeLeases(pace=SHORT, host=host, boot=boot)
    made.introduce(agent_id)
    return made


def kill(one: VolumeLeases) -> None:
    """Release the agent's locks as if its process had been killed, without any cleanup."""
    for hold in one.held.values():
        os.close(hold.descriptor)
    one.held.clear()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a network file system on two machines whose kernels do not see each other's locks."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(mounts, "is_local", lambda _: False)


class Clock:
    """A stand-in for the ``time`` module with a clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(volume_lease, "time", made)
    return made


def lease(directory: Path) -> Lease:
    return msgspec.json.decode((directory / volume_lease.NAME).read_bytes(), type=Lease)


async def until_held(one: VolumeLeases, directory: Path) -> float:
    """Retry until the lease is acquired, and return how many seconds that took."""
    begun_at = asyncio.get_running_loop().time()
    await until(lambda: not one.hold(directory))
    return asyncio.get_running_loop().time() - begun_at


def test_lease_cannot_be_acquired_from_an_agent_that_keeps_renewing_it(tmp_path: Path) -> None:
    volume = tmp_path / "private"
    first, second = leases(), leases("pod-0b", agent_id="a-1")
    assert first.hold(volume) == first.hold(volume) == ""
    before = (volume / volume_lease.NAME).read_bytes()

    assert [second.hold(volume), second.hold(volume)] == ["agent a-1 on pod-0"] * 2

    assert (volume / volume_lease.NAME).read_bytes() == before
    assert first.renew(volume) == ""


def test_lease_can_be_acquired_after_a_failed_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = leases()

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "it fails")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        with pytest.raises(HostError, match=r"^cannot take .*: it fails$"):
            one.hold(tmp_path)

    assert one.hold(tmp_path) == ""


def test_lease_file_is_private_and_created_if_needed(tmp_path: Path) -> None:
    assert leases().hold(tmp_path / "private") == ""

    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "private" / volume_lease.NAME).stat().st_mode & 0o777 == 0o600


def test_lease_of_a_killed_agent_is_acquired_immediately(tmp_path: Path) -> None:
    first, second = leases(), leases()
    first.hold(tmp_path)
    kill(first)

    assert second.hold(tmp_path) == ""


def test_lease_from_another_boot_is_acquired_immediately_on_a_local_file_system(tmp_path: Path) -> None:
    """LXD gives a container a new boot id at each start, so the lease seems to belong to another machine. On a local
    file system, however, a free lock shows that the holder has exited.
    """
    first, second = leases(boot="start 1"), leases(boot="start 2")
    first.hold(tmp_path)
    assert second.hold(tmp_path) == "agent a-1 on pod-0"
    kill(first)

    assert leases(boot="start 3").hold(tmp_path) == ""


def test_agent_waits_for_a_lease_from_another_boot_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A free lock does not show that the holder has exited, because another machine's kernel manages its own locks."""
    monkeypatch.setattr(mounts, "is_local", lambda _: False)
    first, second = leases(boot="kernel 1"), leases(boot="kernel 2")
    first.hold(tmp_path)
    kill(first)

    assert second.hold(tmp_path) == "agent a-1 on pod-0"
    clock.now += SHORT.patience * 1.1
    assert second.hold(tmp_path) == ""


def test_agent_waits_until_a_lease_from_another_machine_expires(
    tmp_path: Path, without_locks: None, clock: Clock
) -> None:
    """Only lease renewals show that an agent on another machine is still running."""
    first, second = leases("pod-0"), leases("pod-0", "kernel 2")
    first.hold(tmp_path)
    for _ in range(20):
        assert second.hold(tmp_path) == "agent a-1 on pod-0"
        clock.now += SHORT.patience * 0.9
        assert second.hold(tmp_path) == "agent a-1 on pod-0"
        assert first.renew(tmp_path) == ""

    assert second.hold(tmp_path)
    clock.now += SHORT.patience * 1.1
    assert second.hold(tmp_path) == ""


async def test_released_lease_can_be_acquired_immediately(tmp_path: Path, without_locks: None) -> None:
    first, second = leases("pod-0"), leases("pod-1", "kernel 2")
    first.hold(tmp_path)
    assert second.hold(tmp_path)

    first.release_all()

    assert second.hold(tmp_path) == ""


def test_waiting_agent_does_not_acquire_the_lease_while_its_holder_restarts(tmp_path: Path, clock: Clock) -> None:
    """While an agent restarts, its lock is free for a moment, but its jobs still use the volume."""
    first, waiting = leases(), leases("pod-1")
    first.hold(tmp_path)
    assert waiting.hold(tmp_path)
    kill(first)
    assert waiting.hold(tmp_path)
    successor = leases()

    assert successor.hold(tmp_path) == ""
    assert waiting.hold(tmp_path)
    kill(successor)
    clock.now += SHORT.restart * 0.9
    assert waiting.hold(tmp_path)
    clock.now += SHORT.restart * 0.2
    assert waiting.hold(tmp_path) == ""


async def test_suspended_agent_detects_that_its_lease_was_taken_over(tmp_path: Path, without_locks: None) -> None:
    first, second = leases(), leases("pod-1", "kernel 2")
    first.hold(tmp_path)
    await until_held(second, tmp_path)
    lost: list[str] = []
    keeping = asyncio.create_task(first.keep(lost.append))

    await until(lambda: lost)
    assert set(lost) == {f"{tmp_path.parent} was taken over by agent a-1 on pod-1"}
    assert lease(tmp_path).host == "pod-1"
    keeping.cancel()


def test_replaced_agent_does_not_remove_the_lease_of_its_successor(tmp_path: Path, without_locks: None) -> None:
    """If the replaced agent removed the lease, its successor would conclude that it had lost the lease, and exit as
    well.
    """
    first, second = leases("pod-0"), leases("pod-1")
    first.hold(tmp_path)
    second.hold(tmp_path)
    raw = (tmp_path / volume_lease.NAME).read_bytes()

    first.release_all()

    assert (tmp_path / volume_lease.NAME).read_bytes() == raw
    assert second.renew(tmp_path) == ""


def test_lease_of_an_agent_killed_during_a_write_is_acquired_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is killed after it has written its lease but before it truncates the file. The lease must still be
    readable, although the file ends with a part of the previous, longer lease.
    """

    def killed(*_: object) -> None:
        raise SystemExit

    before = leases(agent_id="an agent with a name of some length")
    assert before.hold(tmp_path) == ""
    kill(before)
    first = VolumeLeases(pace=SHORT, host="pod-0", boot="kernel 1")
    with monkeypatch.context() as patched:
        for call in ("ftruncate", "fdatasync", "fsync"):
            patched.setattr(os, call, killed)
        with pytest.raises(SystemExit):
            first.hold(tmp_path)
    kill(first)

    assert lease(tmp_path).agent_id == ""
    assert leases().hold(tmp_path) == ""


@pytest.mark.parametrize("raw", [b"{ half", b"\0" * 100, b"[]", b'{"schema": 1}'])
async def test_unreadable_lease_is_watched_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    """An agent on another machine may be writing the lease at this moment, so an unreadable lease does not mean that
    the volume is free.
    """
    monkeypatch.setattr(mounts, "is_local", lambda _: False)
    (tmp_path / volume_lease.NAME).write_bytes(raw)
    one = leases()
    assert one.hold(tmp_path) == "an agent that does not identify itself"

    await until_held(one, tmp_path)

    assert lease(tmp_path).host == "pod-0"


def test_empty_lease_file_can_be_acquired(tmp_path: Path) -> None:
    """Another agent has created the file but has not written a lease to it yet."""
    (tmp_path / volume_lease.NAME).touch()

    assert leases().hold(tmp_path) == ""


@pytest.mark.attack("a job replaces the marker or the lease on its disk with a link or a FIFO")
def test_taking_a_lease_follows_no_symlink_and_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for trap in ("link to a file", "link to a directory", "pipe"):
        volume = tmp_path / trap
        volume.mkdir()
        if trap == "link to a file":
            (volume / volume_lease.NAME).symlink_to(victim)
        elif trap == "link to a directory":
            volume.rmdir()
            volume.symlink_to(tmp_path)
        else:
            os.mkfifo(volume / volume_lease.NAME)

        with pytest.raises(HostError):
            leases().hold(volume)

    assert victim.read_text() == "precious"


def test_read_only_volume_needs_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents cannot damage a volume to which neither can write."""

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(guarded, "open_beneath", refuse)

    assert leases().hold(tmp_path) == ""


@pytest.mark.parametrize("is_local", [True, False])
async def test_unchanged_lease_is_renewed_only_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """On a network file system, the lease is renewed in each period. On a local file system, it is renewed only if
    the file has changed, which may mean that another agent has taken over the volume.
    """
    monkeypatch.setattr(mounts, "is_local", lambda _: is_local)
    one, beats = leases(), asyncio.Semaphore(0)
    one.hold(tmp_path)

    def until_beat(_: float) -> float:
        beats.release()
        return 0.005

    monkeypatch.setattr(clock_of_agent, "until_beat", until_beat)
    keeping = asyncio.create_task(one.keep(pytest.fail))

    async def after_some_beats() -> int:
        async with asyncio.timeout(60):
            for _ in range(12):
                await beats.acquire()
        return (await until(read)).count

    def read() -> Lease | None:
        """Return the lease, or None while it is being written."""
        with contextlib.suppress(msgspec.DecodeError):
            return lease(tmp_path)
        return None

    count = await after_some_beats()
    assert (count == 0) is is_local
    (tmp_path / volume_lease.NAME).touch()
    assert await after_some_beats() > count
    keeping.cancel()


async def test_hanging_volume_does_not_delay_other_lease_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "is_local", lambda _: False)
    one = leases()
    good, bad = tmp_path / "good", tmp_path / "bad"
    one.hold(bad)
    one.hold(good)
    real, asked, go_on = one.renew, [], threading.Event()

    def renew(directory: Path) -> str:
        asked.append(directory)
        if directory == bad:
            go_on.wait(10)
        return real(directory)

    monkeypatch.setattr(one, "renew", renew)
    keeping = asyncio.create_task(one.keep(pytest.fail))
    await until(lambda: lease(good).count >= 3)

    assert asked.count(bad) == 1
    go_on.set()
    keeping.cancel()
