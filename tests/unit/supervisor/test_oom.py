"""Tests how process exits are attributed to OOM kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.host import cgroups
from agent_shim.supervisor.oom import Kills


def test_each_oom_kill_is_attributed_to_only_one_exit() -> None:
    kills = [3]
    counted = Kills(lambda: kills[0])

    assert not counted.claim()
    kills[0] = 5
    assert [counted.claim(), counted.claim(), counted.claim()] == [True, True, False]


def test_late_exit_is_attributed_to_an_already_counted_oom_kill() -> None:
    """The kernel counts a kill before the agent notices the exit. The agent may read the counter between these two
    moments.
    """
    kills = [0]
    counted = Kills(lambda: kills[0])
    kills[0] = 1
    counted.count()

    assert counted.claim()


def test_oom_kills_are_not_counted_again_after_the_counter_could_not_be_read() -> None:
    readings: list[int | None] = [None, 3, None, 3]
    counted = Kills(lambda: readings.pop(0))

    assert [counted.claim(), counted.claim(), counted.claim()] == [False, False, False]


def test_oom_kills_are_read_from_the_container_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.Cgroup(memory=hierarchy))
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 3\n")
    counted = Kills()
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 4\n")

    assert [counted.claim(), counted.claim()] == [True, False]
    monkeypatch.setattr(cgroups, "find", cgroups.Cgroup)
    assert not Kills().claim()


def test_no_exit_is_attributed_to_oom_on_kernels_without_a_kill_counter() -> None:
    assert not Kills(lambda: None).claim()
