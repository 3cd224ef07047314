"""Tests process statistics with simulated process tables. ``integration/test_process_stats.py`` reads real
processes.
"""

from __future__ import annotations

import threading
import time
from collections import ChainMap
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agent_shim.host import clock, proc
from agent_shim.supervisor import process_stats
from agent_shim.supervisor.event_kinds import CONNECTION, RESOURCE, Complaint
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_stats import ProcessStats
from agent_shim.supervisor.service import ServiceRecord
from agent_shim.supervisor.state import State

TABLE = {
    10: proc.Stat(10, "S", 5, 10, 10, 300, 1000, 2048, 3, 50),
    11: proc.Stat(11, "S", 10, 10, 10, 100, 1001, 1024, 2, 0),
    12: proc.Stat(12, "S", 1, 12, 12, 900, 1002, 9999, 1, 0),
}


def service(**changes: Any) -> Any:
    process = SimpleNamespace(pid=10, identity=(10, 1000), start_ticks=1000, is_alive=True)
    complaints = {0: Complaint(RESOURCE, "too much"), 1: Complaint(CONNECTION, "no answer")}
    members = {
        "name": "web",
        "reported": "failing",
        "process": process,
        "state": State.RUNNING,
        "complaints": complaints,
        "spec": ProcessSpec("web", "job"),
        "record": ServiceRecord(reason="it ended"),
        "retry_at": None,
    }
    return SimpleNamespace(**members | changes)


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> ProcessStats:
    """Return statistics for a machine with 8 MiB of memory and two processors. Processes are 100 seconds old."""
    monkeypatch.setattr(proc, "small_table", lambda *_: dict(TABLE))
    monkeypatch.setattr(clock, "uptime_of", lambda _: 100)
    monkeypatch.setattr(clock, "wall_time_of", lambda ticks: 1e9 + ticks)
    monkeypatch.setattr(clock, "TICKS", 100)
    monkeypatch.setattr(process_stats, "PROCESSORS", 2)
    made = ProcessStats()
    made.memory_total = lambda: 8192 * 1024
    return made


def test_process_statistics_cover_the_process_tree_and_the_process_alone(stats: ProcessStats) -> None:
    (found,) = stats.describe([service()])

    assert (found.process.mem_kb, found.process.mem_percent, found.process.cpu_total) == (3072, 37.5, 2.0)
    assert (found.own_mem_kb, found.own_mem_percent, found.own_cpu) == (2048, 25.0, 1.5)
    assert (found.pid, found.parent, found.children, found.threads, found.cpu_seconds) == (10, 5, 1, 5, 4.5)
    assert (found.process.uptime_secs, found.started_at) == (100, 1e9 + 1000)


def test_rule_failures_are_ordered_as_in_monit_and_listed_only_while_the_service_runs(stats: ProcessStats) -> None:
    up, down = stats.describe([service(), service(state=State.DOWN)])

    assert up.faults == ("Connection failed", "Resource limit matched")
    assert up.reason == "it ended; no answer; too much"
    assert (down.faults, down.reason) == ((), "it ended")


@pytest.mark.parametrize(
    "changes",
    [
        {"process": None},
        {"state": State.UNMONITORED},
        {"process": SimpleNamespace(pid=99, identity=(99, 1), start_ticks=1, is_alive=True)},
        {"process": SimpleNamespace(pid=10, identity=(10, 1000), start_ticks=1000, is_alive=False)},
    ],
    ids=["none", "unmonitored", "gone", "dead"],
)
def test_service_without_a_monitored_process_has_no_statistics(stats: ProcessStats, changes: dict[str, Any]) -> None:
    (found,) = stats.describe([service(**changes)])

    assert (found.process.mem_kb, found.own_cpu, found.threads, found.children) == (0, 0, 0, 0)


def test_cpu_share_is_measured_since_the_last_query(stats: ProcessStats, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def share(ticks: int, start: int = 1000) -> float:
        root = replace(TABLE[10], start_ticks=start, cpu_ticks=ticks)
        monkeypatch.setattr(proc, "small_table", lambda _: {10: root})
        monkeypatch.setattr(proc, "stat", {10: root}.get)
        process = SimpleNamespace(pid=10, identity=(10, start), start_ticks=start, is_alive=True)
        (found,) = stats.describe([service(process=process)])
        assert found.own_cpu == found.process.cpu_total
        return found.process.cpu_total

    assert share(400) == 2.0
    now[0] += 0.5
    assert share(800) == 2.0
    now[0] += 9.5
    assert share(1400) == 50.0
    now[0] += 10
    assert share(1300) == 0.0
    now[0] += 1
    assert share(99_999) == 100.0
    assert share(400, 1001) == 2.0


def test_statistics_for_many_processes_are_read_in_a_thread(
    stats: ProcessStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answers cover only each service's main process. A single thread reads the descendants for later
    answers, at a limited rate.
    """
    reads: list[int] = []
    go = threading.Event()

    def table() -> dict[int, proc.Stat]:
        reads.append(1)
        go.wait()
        return dict(TABLE)

    monkeypatch.setattr(proc, "small_table", lambda *_: None)
    monkeypatch.setattr(proc, "table", table)
    monkeypatch.setattr(proc, "stat", TABLE.get)
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(3):
        (found,) = stats.describe([service()])
        assert (found.own_mem_kb, found.children) == (2048, 0)
    go.set()
    while stats.describe([service()])[0].children != 1:
        pass
    assert reads == [1]

    now[0] += 60
    while len(reads) == 1:
        stats.describe([service()])
    now[0] += 60

    monkeypatch.setattr(proc, "small_table", lambda *_: {10: TABLE[10]})
    while stats.describe([service()])[0].children:
        pass


def test_process_statistics_in_an_answer_come_from_a_single_pass(
    stats: ProcessStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child found in one pass over the process table may be missing from another, which would cause an error."""
    go = threading.Event()

    def table() -> dict[int, proc.Stat]:
        go.wait()
        return dict(TABLE)

    def finish_pass(*maps: Any) -> Any:
        go.set()
        for thread in threading.enumerate():
            if thread.name == "many processes":
                thread.join()
        return ChainMap(*maps)

    monkeypatch.setattr(proc, "small_table", lambda *_: None)
    monkeypatch.setattr(proc, "table", table)
    monkeypatch.setattr(proc, "stat", TABLE.get)
    monkeypatch.setattr(process_stats, "ChainMap", finish_pass)

    assert [stats.describe([service()])[0].children for _ in range(2)] == [0, 1]


def test_process_statistics_limit_table_reads_to_a_share_of_the_cpu(
    stats: ProcessStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who can reach the readiness endpoint may query it thousands of times. Each query reads the main process,
    but the table of all processes is read again only after a pause.
    """
    now, used, passes = [1000.0], [0.0], []

    def small_table(_: int) -> dict[int, proc.Stat]:
        passes.append(now[0])
        used[0] += 0.02
        return dict(TABLE)

    monkeypatch.setattr(proc, "small_table", small_table)
    monkeypatch.setattr(proc, "stat", {10: replace(TABLE[10], resident_kb=1)}.get)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    for _ in range(100):
        (found,) = stats.describe([service()])
        now[0] += 0.01

    assert passes == pytest.approx([1000.0, 1000.4, 1000.8], abs=0.03)
    assert (found.own_mem_kb, found.children) == (1, 1)
