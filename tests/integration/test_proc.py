"""Trees of real processes, as the kernel lists their children."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest

from agent_shim.host import proc, process
from tests.support.programs import kill
from tests.support.waiting import until

LIMIT = 1000

FAMILY = """
import ctypes, os, subprocess, sys, threading
threading.Thread(target=lambda: subprocess.run(["sh", "-c", "sleep 600 & wait"])).start()
if sys.argv[1] == "headless":
    ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
"""
"""Its second thread has a child, a shell, which has one too; its first waits for the second, or ends."""


def _descent(pid: int) -> set[int]:
    return proc.descent(proc.children(proc.table()), [pid])


@pytest.fixture(params=["whole", "headless"])
async def leader(request: pytest.FixtureRequest) -> AsyncIterator[process.Process]:
    """A process with a child and a grandchild."""
    family = process.spawn([sys.executable, "-S", "-E", "-c", FAMILY, request.param], env={})
    await until(lambda: len(_descent(family.pid)) == 3)
    await until(lambda: request.param == "whole" or getattr(proc.stat(family.pid), "state", "") == "Z")
    yield family
    await family.terminate(1)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``trees`` see a thousand other processes, all ended: only lists of children lead to a descendant."""
    pids = proc._pids
    monkeypatch.setattr(
        proc, "_pids", lambda limit=None: pids() if limit is None else range(1 << 22, (1 << 22) + LIMIT)
    )


@pytest.mark.usefixtures("crowd")
async def test_children_of_any_thread_and_theirs_are_of_the_tree(leader: process.Process) -> None:
    found = proc.trees([leader.pid, leader.pid], LIMIT)

    assert found is not None
    assert len(found) == 3
    assert found.keys() == proc.descent(proc.children(found), [leader.pid]) == _descent(leader.pid)


@pytest.mark.usefixtures("crowd")
async def test_what_has_ended_leads_to_nothing(leader: process.Process) -> None:
    """Neither its children, which have another parent, nor itself once it is reaped."""
    (grandchild,) = {pid for pid in _descent(leader.pid) if not proc.children(proc.table()).get(pid)}
    kill(next(iter(proc.children(proc.table())[leader.pid])))
    await until(lambda: grandchild not in (proc.trees([leader.pid], LIMIT) or {}))
    await leader.terminate(1)

    assert proc.trees([leader.pid], LIMIT) == {}


async def test_a_kernel_that_lists_no_children_shows_all_processes(
    leader: process.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "_has_lists", lambda: False)
    found = proc.trees([leader.pid], 1 << 22)

    assert found is not None
    assert {*_descent(leader.pid), os.getpid()} <= found.keys()


async def test_a_tree_beyond_the_limit_is_none(leader: process.Process) -> None:
    assert proc.trees([leader.pid], 2) is None


async def test_of_thousands_of_children_no_more_are_listed_than_are_asked_for() -> None:
    """The kernel takes tens of milliseconds for a list of them all."""
    parent = process.spawn(["/bin/sh", "-c", "for each in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; wait"], env={})
    await until(lambda: len(_descent(parent.pid)) == 10)
    found = proc.stat(parent.pid)
    assert found is not None

    some, every = proc._listed(found, 2), proc._listed(found, 9)
    await parent.terminate(1)

    assert 2 <= len(some) < len(every) == 9
