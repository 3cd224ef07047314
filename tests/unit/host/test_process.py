"""Tests process groups and handles with simulated process tables. ``integration/test_process.py`` runs programs."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator

import pytest

from agent_shim.host import proc, process
from agent_shim.host.process import Process

LEADER = proc.Stat(4_000_010, "S", 1, 4_000_010, 10, 0, 1000, 0)
"""The leader of a process group. Its pid is above every kernel's limit, so no real process has it."""


@pytest.fixture
async def leader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    """Provide a running group leader that has no pidfd and is identified only by its pid and start time."""
    monkeypatch.setattr(proc, "stat", lambda pid: LEADER if pid == LEADER.pid else None)
    made = Process(LEADER, None, leads=True)
    yield made
    made.release()


def member(pid: int, start: int, state: str = "S", group: int = LEADER.pid) -> proc.Stat:
    return proc.Stat(pid, state, 1, group, 10, 0, start, 0)


@pytest.mark.parametrize(("start", "is_alive"), [(1000, True), (1001, False)])
async def test_process_without_a_pidfd_is_identified_by_its_start_time(
    leader: Process, monkeypatch: pytest.MonkeyPatch, start: int, is_alive: bool
) -> None:
    """Another process that has been given the same pid must not be signalled."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(proc, "stat", lambda pid: member(pid, start))

    def send(identity: tuple[int, int], _: int) -> bool:
        sent.append(identity)
        return True

    monkeypatch.setattr(process, "send", send)

    assert leader.is_alive is is_alive
    assert leader.send(signal.SIGTERM) is is_alive
    assert sent == [LEADER.identity] * is_alive


def test_adopting_a_process_with_a_different_start_time_leaks_no_descriptor() -> None:
    """The agent repeatedly tries to adopt the process named in an outdated pidfile. The fixture in conftest.py detects
    a leak.
    """
    us = proc.stat(os.getpid())
    assert us is not None
    assert process.adopt(us.pid, us.start_ticks + 1) is None
    assert process.send((us.pid, us.start_ticks + 1), signal.SIGKILL) is False


def test_core_limit_of_zero_is_kept_for_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core limit of one byte would disable core dumps to a pipe as well, but an ordinary user cannot raise a hard
    limit of zero.
    """
    limits = [(0, 0)]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > wanted[1] or wanted[1] > limits[-1][1]:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)

    process.disable_core_dumps()

    assert limits[-1] == (0, 0)
