"""Figures, cycles and complaints of rules; ``integration/test_rule_engine.py`` checks real processes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.host import clock, proc
from agent_shim.supervisor import rule_engine
from agent_shim.supervisor.monit.ast import ALERT, Limit, Rate, Rule
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.rule_counter import Finding
from agent_shim.supervisor.rule_engine import RuleEngine
from agent_shim.supervisor.state import State

ENGINE = RuleEngine(tuple, lambda: 8192 * 1024, 10.0)
RULE = Rule(Limit("memory", ">", 5), ALERT, Rate(), ALERT, Rate(2, 2))


def service(**changes: Any) -> Any:
    async def react(*_: object) -> None:
        """Alerts do nothing."""

    members = {
        "name": "web",
        "spec": ProcessSpec("web", "web", rules=(RULE,)),
        "process": SimpleNamespace(identity=(10, 1000)),
        "state": State.RUNNING,
        "up_at": 500.0,
        "complaints": {},
        "responses": {},
        "is_checked": False,
        "notify": lambda *_: None,
        "react": react,
    }
    return SimpleNamespace(**members | changes)


def stat(pid: int, ticks: int, kb: int = 0, start: int = 1000) -> proc.Stat:
    return proc.Stat(pid, "S", 1, pid, pid, ticks, start, kb)


def table(*tree: proc.Stat, at: float = 0.0) -> Any:
    return SimpleNamespace(at=at, processes={each.pid: each for each in tree}, tree=lambda _: list(tree))


def watch(**changes: Any) -> Any:
    return rule_engine._Watch(service(**changes), 0.0)


def test_figures_are_bytes_and_shares_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's need two looks; a process that came meanwhile counts with all of its time."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(clock, "TICKS", 100)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 2.0, 3.0))
    loads = {"loadavg1": 1.0, "loadavg5": 2.0, "loadavg15": 3.0}
    one = watch()

    first = ENGINE._figures(one, table(stat(10, 300, 1024), at=100.0))
    second = ENGINE._figures(one, table(stat(10, 500, 1024), stat(11, 100, 2048), at=110.0))

    assert first == {
        "memory": 1 << 20,
        "totalmemory": 1 << 20,
        "memory %": 12.5,
        "totalmemory %": 12.5,
        "children": 0,
        **loads,
    }
    assert second == {
        "memory": 1 << 20,
        "totalmemory": 3 << 20,
        "memory %": 12.5,
        "totalmemory %": 37.5,
        "children": 1,
        "cpu %": 10.0,
        "totalcpu %": 15.0,
        **loads,
    }


def test_a_process_that_is_gone_has_no_figures() -> None:
    """Nor has another one with its number."""
    assert ENGINE._figures(watch(), table()) == {}
    assert ENGINE._figures(watch(), table(stat(10, 0, start=1001))) == {}


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (1, [True, False, True, True, True]),
        (2, [True, False, False, True, False]),
        (3, [True, False, False, False, True]),
    ],
)
def test_checks_are_due_each_cycle_or_each_so_many(
    monkeypatch: pytest.MonkeyPatch, every: int, due: list[bool]
) -> None:
    """A cycle that was missed is not made up for."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one = rule_engine._Watch(service(spec=ProcessSpec("web", "web", every=every)), 1000.0)
    found = []
    for then in (1000.0, 1009.0, 1010.0, 1045.0, 1050.0):
        now[0] = then
        found.append(one.is_due(10.0))

    assert found == due


def test_a_watch_is_of_one_process_and_one_set_of_rules() -> None:
    """A new process starts from scratch."""
    ours = service()
    one = rule_engine._Watch(ours, 0.0)

    assert one.is_of(ours)
    assert not one.is_of(service(spec=ours.spec, process=SimpleNamespace(identity=(10, 1001))))
    assert not one.is_of(service(spec=ours.spec, process=None))
    assert not one.is_of(service(spec=ProcessSpec("web", "web")))
    assert rule_engine._Watch(service(process=None), 0.0).identity == (0, 0)


def test_the_first_check_is_a_cycle_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process counts; the first look of another check is now."""
    monkeypatch.setattr(time, "monotonic", lambda: 700.0)
    other = ProcessSpec("web", "web", kind="file", rules=(RULE,))

    assert ENGINE._watch(service())._next_at == 510.0
    assert ENGINE._watch(service(spec=other))._next_at == 700.0


def test_a_watch_lasts_as_long_as_the_process() -> None:
    engine, ours = RuleEngine(tuple, lambda: 0, 10.0), service()
    engine._watches["web"] = one = rule_engine._Watch(ours, 0.0)

    assert engine._watch(ours) is one
    ours.process = SimpleNamespace(identity=(11, 1001))
    assert engine._watch(ours) is not one


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [(State.DOWN, True), (State.BOUNCING, True), (State.STOPPED, False), (State.UNMONITORED, False)],
)
async def test_a_missing_path_keeps_what_was_seen_of_it(state: State, is_kept: bool) -> None:
    """A file that another replaces is a changed one; after a stop nothing is remembered, as after monit's reload."""
    spec = ProcessSpec("web", "web", kind="file", path=Path("/x"), rules=(RULE,))
    ours = service(state=state, spec=spec, process=None)
    engine = RuleEngine(lambda: [ours], lambda: 0, 10.0)
    engine._watches["web"] = one = rule_engine._Watch(ours, 0.0)

    await engine._step()

    assert engine._watches == ({"web": one} if is_kept else {})


async def test_a_complaint_stands_until_its_rule_has_recovered() -> None:
    """And of a service that is no longer up nothing is concluded."""
    ours = service()
    one = rule_engine._Watch(ours, 0.0)
    complaints = []
    for fails in (False, True, False, False):
        await ENGINE._conclude(ours, one, [(0, Finding(fails, "too much"))])
        complaints.append(sorted(ours.complaints))
    assert complaints == [[], [0], [0], []]

    ours.state = State.DOWN
    await ENGINE._conclude(ours, one, [(0, Finding(True, "too much"))])
    ours.state, ours.process = State.RUNNING, SimpleNamespace(identity=(11, 1001))
    await ENGINE._conclude(ours, one, [(0, Finding(True, "too much"))])
    assert ours.complaints == {}


async def test_a_file_system_is_measured_where_its_path_can_be_read(tmp_path: Path) -> None:
    """An unreadable one is no fault."""
    rule, engine = Rule(Limit("space", ">", -1), ALERT), RuleEngine(tuple, lambda: 0, 10.0)
    for path, complaints in ((tmp_path, [0]), (tmp_path / "absent", [])):
        ours = service(spec=ProcessSpec("web", "web", kind="filesystem", path=path, rules=(rule,)), process=None)
        engine._look_at(ours, rule_engine._Watch(ours, 0.0), None)
        await asyncio.gather(*engine._looks)
        engine._looks.clear()
        assert list(ours.complaints) == complaints


async def test_a_bug_in_a_check_ends_the_engine() -> None:
    """Its caller logs the bug and runs it again."""
    ours = service(state=State.DOWN)
    engine = RuleEngine(lambda: [ours], lambda: 0, 0.001)

    async def fail() -> None:
        raise RuntimeError("a bug")

    engine._spawn(fail())
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(30):
            await engine.run()


async def test_only_checks_at_work_are_kept_and_they_end_with_the_engine() -> None:
    """A result is not followed once the agent ends."""
    ours = service(state=State.DOWN)
    engine = RuleEngine(lambda: [ours], lambda: 0, 0.001)

    async def end() -> None:
        """A check that is over."""

    engine._spawn(end())
    engine._spawn(cast("Any", asyncio.Event().wait()))
    running = asyncio.create_task(engine.run())
    async with asyncio.timeout(10):
        while len(engine._looks) > 1:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])

    await asyncio.wait(engine._looks, timeout=10)
    assert [look.cancelled() for look in engine._looks] == [True]
