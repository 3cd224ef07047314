"""Groups and handles of processes, from tables as they are given; ``integration/test_process.py`` runs programs."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

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
async def test_members_of_a_group_are_known_by_one_that_its_leader_knew(
    leader: Process, monkeypatch: pytest.MonkeyPatch, table: list[proc.Stat], seen: int, found: set[int]
) -> None:
    """Once the group was empty, its number may be that of another."""
    monkeypatch.setattr(proc, "table", lambda: {each.pid: each for each in table})
    leader.seen_ticks = seen

    assert {each.pid for each in leader._members()} == found


@pytest.mark.parametrize(
    ("leads", "holds", "sent"),
    [
        (True, True, ["group 4000010"]),
        (True, False, ["member 7"]),
        (False, True, ["itself"]),
        (False, False, ["itself"]),
    ],
)
async def test_a_group_is_signalled_as_one_while_its_number_is_reserved(
    leader: Process, monkeypatch: pytest.MonkeyPatch, leads: bool, holds: bool, sent: list[str]
) -> None:
    """Later each member alone; of a group that another process leads none."""
    found: list[str] = []
    monkeypatch.setattr(Process, "_holds_pid", holds)
    monkeypatch.setattr(Process, "_members", lambda _: [member(7, 1000)])
    monkeypatch.setattr(Process, "send", lambda *_: found.append("itself"))
    monkeypatch.setattr(process, "send", lambda identity, _: found.append(f"member {identity[0]}"))
    monkeypatch.setattr(os, "killpg", lambda group, _: found.append(f"group {group}"))
    leader._leads = leads

    leader.send_group(signal.SIGTERM)
    await leader._signal_group(signal.SIGTERM)

    assert found == sent * 2


async def test_of_two_handles_each_is_given_back_alone(leader: Process) -> None:
    """A process is watched while one is left."""
    other = Process(LEADER, None, leads=True)
    other.release()
    assert process.is_watched(LEADER.pid)
    other.release()
    assert process.is_watched(LEADER.pid)

    leader.release()
    assert not process.is_watched(LEADER.pid)


@pytest.mark.parametrize(("start", "is_alive"), [(1000, True), (1001, False)])
async def test_without_a_descriptor_a_process_is_known_by_its_start(
    leader: Process, monkeypatch: pytest.MonkeyPatch, start: int, is_alive: bool
) -> None:
    """Another one with its number gets no signal."""
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


async def test_the_session_of_an_ended_process_is_its_last(leader: Process) -> None:
    leader._finish(3, 2000, 77)
    assert (leader.session, leader.seen_ticks, leader.is_over, await leader.wait()) == (77, 2000, True, 3)

    other = Process(LEADER, None, leads=True)
    other._finish(None, 5)
    assert (other.session, other.seen_ticks) == (10, 1500)
    assert process.reap(LEADER.pid) is False


def test_who_is_not_meant_costs_no_descriptor() -> None:
    """A number from an old file is looked at again and again."""
    us = proc.stat(os.getpid())
    assert us is not None
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(100):
        assert process.adopt(us.pid, us.start_ticks + 1) is None
        assert process.send((us.pid, us.start_ticks + 1), signal.SIGKILL) is False
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50  # threads of other tests may end meanwhile


def test_what_is_no_child_and_no_group_is_told() -> None:
    assert not process._has_child(os.P_PID, LEADER.pid)
    assert not process._send(None, LEADER.pid, signal.SIGTERM)
    assert not process._group_exists(LEADER.pid)
    assert process._group_exists(os.getpgrp())
    assert not process.is_spawned(LEADER.identity)
    process._spawned[LEADER.pid] = LEADER.start_ticks
    assert process.is_spawned(LEADER.identity)
    assert not process.is_spawned((LEADER.pid, 1001))
    del process._spawned[LEADER.pid]


async def test_a_number_that_no_child_holds_may_be_that_of_another(
    leader: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent has reaped it, and its end is not noticed yet."""
    assert leader._holds_pid
    monkeypatch.setattr(proc, "stat", lambda _: None)

    assert not leader.is_over
    assert not leader._holds_pid


async def test_members_are_found_without_a_further_thread_too(leader: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(Process, "_holds_pid", False)
    monkeypatch.setattr(proc, "table", lambda: {7: member(7, 1000)})
    monkeypatch.setattr(process, "send", lambda identity, _: sent.append(identity))

    await leader._signal_group(signal.SIGTERM)

    assert sent == [(7, 1000)]


def test_the_group_of_an_orphan_is_killed_unless_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *sent: killed.append(sent))

    process.kill_group_of(member(7, 1000, "Z"))
    process.kill_group_of(member(8, 1000, "Z", group=os.getpgrp()))

    assert killed == [(LEADER.pid, signal.SIGKILL)]


def test_an_ordinary_user_without_core_files_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
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
