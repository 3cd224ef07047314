"""Groups and handles of processes, from tables as they are given. ``integration/test_process.py`` runs programs."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import AsyncIterator

import pytest

from agent_shim.host import clock, proc, process
from agent_shim.host.process import Process

LEADER = proc.Stat(4_000_010, "S", 1, 4_000_010, 10, 0, 1000, 0)
"""Its number is above all that a kernel gives."""


@pytest.fixture
async def leader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    """Alive, and known by its number and start alone."""
    monkeypatch.setattr(proc, "stat", lambda pid: LEADER if pid == LEADER.pid else None)
    monkeypatch.setattr(clock, "boot_ticks", lambda: 1500)
    made = Process(LEADER, None, leads=True)
    yield made
    made.release()


def member(pid: int, start: int, state: str = "S", group: int = LEADER.pid) -> proc.Stat:
    return proc.Stat(pid, state, 1, group, 10, 0, start, 0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Receivers of signals, by kind and number."""
    found: list[str] = []
    monkeypatch.setattr(process, "send", lambda identity, _: found.append(f"process {identity[0]}"))
    monkeypatch.setattr(os, "killpg", lambda group, _: found.append(f"group {group}"))
    return found


@pytest.mark.parametrize(
    ("table", "seen", "found"),
    [
        ([member(1, 1000)], 1001, {1}),
        ([member(1, 1001)], 1001, set()),
        ([member(1, 1000), member(2, 5000)], 1001, {1, 2}),
        ([member(1, 999)], 1001, set()),
        ([member(1, 1000, "Z"), member(2, 5000)], 1001, {2}),
        ([member(1, 1000, group=9), member(2, 5000)], 1001, set()),
        ([LEADER, member(2, 5000)], 1000, {LEADER.pid, 2}),
    ],
)
async def test_group_of_a_dead_leader_is_recognized_by_a_known_member(
    leader: Process,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[str],
    table: list[proc.Stat],
    seen: int,
    found: set[int],
) -> None:
    """Once the group was empty, its number may name another group."""
    monkeypatch.setattr(proc, "stat", lambda _: None)
    monkeypatch.setattr(proc, "table", lambda: {each.pid: each for each in table})
    leader.seen_ticks = seen

    leader.send_group(signal.SIGTERM)
    assert set(sent) == {f"process {pid}" for pid in found}


@pytest.mark.parametrize(("leads", "receiver"), [(True, f"group {LEADER.pid}"), (False, f"process {LEADER.pid}")])
async def test_group_of_a_living_leader_is_signalled_at_once(
    leader: Process, sent: list[str], leads: bool, receiver: str
) -> None:
    """A process that does not lead its group is signalled alone."""
    one = Process(LEADER, None, leads=leads)
    one.send_group(signal.SIGTERM)
    one.release()
    assert sent == [receiver]


@pytest.mark.parametrize(("start", "is_alive"), [(1000, True), (1001, False)])
async def test_process_without_a_pidfd_is_identified_by_its_start_time(
    leader: Process, monkeypatch: pytest.MonkeyPatch, start: int, is_alive: bool
) -> None:
    """Another process with its number gets no signal."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(proc, "stat", lambda pid: member(pid, start))
    monkeypatch.setattr(clock, "boot_ticks", lambda: 1600)

    def send(identity: tuple[int, int], _: int) -> bool:
        sent.append(identity)
        return True

    monkeypatch.setattr(process, "send", send)

    assert leader.is_alive is is_alive
    assert leader.send(signal.SIGTERM) is is_alive
    assert sent == [LEADER.identity] * is_alive
    assert leader.seen_ticks == (1600 if is_alive else 1500)


def test_adopting_a_process_with_another_start_time_leaks_no_descriptor() -> None:
    """A number from an old file is checked repeatedly."""
    us = proc.stat(os.getpid())
    assert us is not None
    assert process.adopt(us.pid, us.start_ticks + 1) is None
    assert process.send((us.pid, us.start_ticks + 1), signal.SIGKILL) is False


async def test_group_members_are_found_if_no_thread_can_be_started(
    leader: Process, monkeypatch: pytest.MonkeyPatch, sent: list[str]
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(proc, "stat", lambda _: None)
    monkeypatch.setattr(proc, "table", lambda: {7: member(7, 1000)})

    await leader.terminate(0.0)

    assert "process 7" in sent


def test_core_limit_of_an_ordinary_user_without_core_files_stays_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hard limit is below the one that a pipe respects."""
    limits = [(0, 0)]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > wanted[1] or wanted[1] > limits[-1][1]:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)

    process.disable_core_dumps()

    assert limits[-1] == (0, 0)
