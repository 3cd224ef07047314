"""Tests rules for simulated services. ``integration/test_rule_engine.py`` checks real processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_shim.host import proc
from agent_shim.supervisor import rule_engine
from agent_shim.supervisor.monit.ast import ALERT, Changed, Limit, Rate, Rule
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.rule_engine import RuleEngine
from agent_shim.supervisor.state import State
from tests.support.waiting import until

PERIOD_S = 0.01


def service(path: Path, *rules: Rule, **changes: Any) -> Any:
    async def react(*_: object) -> None:
        """Ignore a rule's action, which is always ``alert`` here."""

    events: list[str] = []
    members = {
        "name": "web",
        "spec": ProcessSpec("web", "web", kind="file", path=path, rules=rules),
        "process": None,
        "state": State.RUNNING,
        "complaints": {},
        "is_checked": False,
        "awaits_answers": False,
        "events": events,
        "notify": lambda event, *_: events.append(event),
        "react": react,
    }
    return SimpleNamespace(**members | changes)


@pytest.mark.parametrize(
    ("state", "is_compared"),
    [(State.DOWN, True), (State.BOUNCING, True), (State.STOPPED, False), (State.UNMONITORED, False)],
)
async def test_change_check_forgets_its_last_value_after_a_stop(
    tmp_path: Path, state: State, is_compared: bool
) -> None:
    """A change while the service is stopped or unmonitored is not reported."""
    path = tmp_path / "file"
    path.write_text("1")
    ours = service(path, Rule(Changed("size"), ALERT), Rule(Limit("size", ">", 1), ALERT))
    steps: list[Any] = []

    def services() -> list[Any]:
        steps.append(1)
        return [ours]

    running = asyncio.create_task(RuleEngine(services, lambda: 0, PERIOD_S).run())
    await until(lambda: ours.is_checked)
    ours.state = state
    before = len(steps)
    await until(lambda: len(steps) > before + 3)
    path.write_text("22")
    ours.state = State.RUNNING
    await until(lambda: 1 in ours.complaints)
    running.cancel()
    await asyncio.wait([running])

    # The change rule fails for only one cycle, so "Size succeeded" may follow at any time.
    assert sorted(set(ours.events) - {"Size succeeded"}) == (["Size changed"] if is_compared else []) + ["Size failed"]


async def test_rule_failure_is_kept_until_the_recovery_condition_is_met(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("22")
    ours = service(path, Rule(Limit("size", ">", 1), ALERT, Rate(), ALERT, Rate(3, 3)))
    running = asyncio.create_task(RuleEngine(lambda: [ours], lambda: 0, PERIOD_S).run())
    await until(lambda: ours.complaints)
    path.write_text("1")
    await until(lambda: "Size succeeded" in ours.events)
    assert not ours.complaints
    running.cancel()
    await asyncio.wait([running])

    assert ours.events == ["Size failed", "Size succeeded"]


async def test_exception_in_a_check_stops_the_rule_engine(tmp_path: Path) -> None:
    """Such an exception is caused by a bug. The caller logs it and restarts the engine."""

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    ours = service(tmp_path, Rule(Limit("timestamp", ">", -1), ALERT), react=fail)
    ours.spec = ProcessSpec("web", "web", kind="directory", path=tmp_path, rules=ours.spec.rules)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(30):
            await RuleEngine(lambda: [ours], lambda: 0, PERIOD_S).run()

    assert [str(bug) for bug in raised.value.exceptions] == ["a bug"]


async def test_rule_engine_pauses_after_an_expensive_process_table_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule engine may read the whole process table ten times per cycle. Without a pause after each expensive read,
    reading tens of thousands of processes would take a whole CPU.
    """
    pauses: list[float] = []
    turn, used = asyncio.sleep, itertools.count()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await turn(min(seconds, PERIOD_S))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(proc, "table", dict)
    monkeypatch.setattr(time, "thread_time", lambda: next(used))
    rule = Rule(Limit("totalmemory", ">", 1), ALERT)
    ours = service(Path(), spec=ProcessSpec("web", "web", rules=(rule,)), up_at=time.monotonic() - 60)
    running = asyncio.create_task(RuleEngine(lambda: [ours], lambda: 0, PERIOD_S).run())
    await until(lambda: max(pauses, default=0) > 0.9 / rule_engine.PASS_SHARE)
    running.cancel()
    await asyncio.wait([running])
