"""Readings of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from agent_shim.host import proc

LINE = (
    "%s S 7 41 40 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 1 0 98765 1000000 250 18446744073709551615 1 1 0 0 0 0 0 0 0\n"
)


@pytest.mark.parametrize("name", ["(cat)", "(a b)", "(a) S 1 (b)", "()", "(tmux: server)", "())"])
def test_name_does_not_shift_the_fields(name: str) -> None:
    """A process may call itself anything."""
    stat = proc.parse((LINE % f"41 {name}").encode())

    assert stat == proc.Stat(41, "S", 7, 41, 40, 33, 98765, 250 * proc.PAGE_KB, threads=1, reaped_ticks=77)


@pytest.mark.parametrize(("state", "is_alive"), [("R", True), ("S", True), ("D", True), ("T", True), ("Z", False)])
def test_zombie_is_dead(state: str, is_alive: bool) -> None:
    """It only waits to be reaped."""
    assert proc.Stat(1, state, 0, 1, 1, 0, 0, 0).is_alive is is_alive


def test_own_line_is_found() -> None:
    """The table and a single look agree."""
    own = proc.stat(os.getpid())

    assert own is not None
    assert own.parent == os.getppid()
    assert proc.table()[os.getpid()].identity == own.identity


def test_nobody_is_none() -> None:
    """A number without a process is no error, nor are its attributes."""
    beyond = 2**22 + 1

    assert proc.stat(beyond) is None
    assert proc.command_line(beyond) == ""
    assert proc.variable(beyond, "PATH") is None


def test_command_line_is_joined_by_blanks() -> None:
    """As monit matches it."""
    assert "pytest" in proc.command_line(os.getpid())
    assert "\0" not in proc.command_line(os.getpid())


def test_variable_is_the_one_at_the_start() -> None:
    """A name is matched whole."""
    assert proc.variable(os.getpid(), "PATH")
    assert proc.variable(os.getpid(), "PAT") is None


@pytest.mark.parametrize(
    ("parents", "roots", "found"),
    [
        ({2: 1, 3: 2, 4: 2, 5: 1}, [2], {2, 3, 4}),
        ({2: 1, 3: 2}, [3], {3}),
        ({2: 1, 3: 1}, [2, 3], {2, 3}),
        ({2: 1}, [], set()),
        ({2: 3, 3: 2}, [2], {2, 3}),
    ],
)
def test_descent(parents: Mapping[int, int], roots: list[int], found: set[int]) -> None:
    """Children, grandchildren and so on; a circle, which numbers used again can make, ends."""
    processes = {pid: proc.Stat(pid, "S", parent, 0, 0, 0, 0, 0) for pid, parent in parents.items()}

    assert proc.descent(proc.children(processes), roots) == found


def test_incarnation_stays_while_we_live() -> None:
    """The same for every question, and not empty on Linux."""
    assert proc.incarnation() == proc.incarnation()
    assert "/" in proc.incarnation()


def test_container_that_gets_the_namespace_number_of_another_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives a free number again; the first process of the two is not of the same age."""
    first = proc.stat(os.getpid())
    assert first is not None
    before = proc.incarnation()
    monkeypatch.setattr(proc, "stat", lambda pid: first if pid == 1 else None)

    assert proc.incarnation() != before
    assert proc.incarnation().rpartition("/")[0] == before.rpartition("/")[0]


def test_census_finds_marks() -> None:
    """A process that was started with a variable is found by its value."""
    found = proc.census("PATH")

    assert os.getpid() in found.marked[proc.variable(os.getpid(), "PATH") or ""]
    assert os.getpid() in found.children[os.getppid()]
