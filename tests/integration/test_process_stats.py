"""Tests how the services' memory and CPU usage is reported to the Director."""

from __future__ import annotations

import pytest

from agent_shim.host import cgroups, proc
from agent_shim.supervisor import process_stats
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import until


async def test_process_statistics_include_descendants(world: JobTree) -> None:
    start = "sleep 600 & echo $$ >$pidfile; exec sleep 600"
    async with world.supervising(world.job("web", start)) as supervisor:
        found = await in_state(supervisor, "web", "running")
        (told,) = supervisor.processes()

        assert (told.name, told.state) == ("web", "running")
        assert type(told.uptime_secs) is int
        assert told.uptime_secs >= 0
        # Wait until the child has become a sleep process like its parent, so that both use the same amount of memory.
        await until(lambda: supervisor.processes()[0].mem_kb > 1.5 * _stat(found.pid).resident_kb)
        assert 0 < told.mem_percent < 100
        assert 0 <= told.cpu_total <= 100


async def test_memory_percentage_is_relative_to_the_container(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory_total", lambda *_: 1 << 20)
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        (told,) = supervisor.processes()

        assert told.mem_percent == pytest.approx(told.mem_kb / 1024 * 100)


async def test_cpu_percentage_is_measured_since_the_last_query(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stats, "MIN_SAMPLE_S", 0.05)
    busy = world.job("busy", "echo $$ >$pidfile; while :; do :; done", "kill -9 $(cat $pidfile)")
    async with world.supervising(busy, world.job("idle")) as supervisor:
        found = await in_state(supervisor, "busy", "running")
        await in_state(supervisor, "idle", "running")
        supervisor.processes()
        used = _stat(found.pid).cpu_ticks
        await until(lambda: _stat(found.pid).cpu_ticks > used + 10)
        shares = {told.name: told.cpu_total for told in supervisor.processes()}

        assert 0 < shares["busy"] <= 100
        assert shares["idle"] < shares["busy"]


def _stat(pid: int) -> proc.Stat:
    found = proc.stat(pid)
    assert found is not None
    return found


async def test_unmonitored_process_has_no_statistics(world: JobTree) -> None:
    async with world.supervising(world.job("web")) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.unmonitor()
        (told,) = supervisor.processes()

        assert (told.uptime_secs, told.mem_kb, told.mem_percent, told.cpu_total) == (0, 0, 0, 0)
        assert info(supervisor, "web").pid
        await supervisor.stop(wait=True)
        assert info(supervisor, "web").pid == 0
