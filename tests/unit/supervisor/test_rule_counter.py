"""Tests in which cycles rules fail and recover, as in monit."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.monit.ast import ALERT, Limit, Rate, Rule
from agent_shim.supervisor.rule_counter import Cycles, RuleCounter, RuleTransition, exceeds, percent

LIMIT = Limit("memory", ">", 5)
LETTERS = {
    RuleTransition.NOTHING: ".",
    RuleTransition.FAILED: "F",
    RuleTransition.STILL: "f",
    RuleTransition.RECOVERED: "r",
}


@pytest.mark.parametrize(
    ("rate", "recovery", "looks", "turns"),
    [
        (Rate(), Rate(), "x.x", "FrF"),
        (Rate(), Rate(), "xxx..", "Fffr."),
        (Rate(3, 3), Rate(), "xx.xxxx.", ".....Ffr"),
        (Rate(2, 4), Rate(), "x..xx.x", "...FfrF"),
        (Rate(2, 4), Rate(), "x...x", "....."),
        (Rate(), Rate(3, 3), "x..x...", "F..f..r"),
        (Rate(), Rate(2, 3), "x..", "F.r"),
        (Rate(64, 64), Rate(), "x" * 65, "." * 63 + "Ff"),
    ],
)
def test_rule_fails_after_n_failures_in_m_cycles(rate: Rate, recovery: Rate, looks: str, turns: str) -> None:
    """Once the rule has failed, each further failed cycle runs its action. The rule recovers after as many successful
    cycles as its recovery rate requires.
    """
    tally = RuleCounter(Rule(LIMIT, ALERT, rate, ALERT, recovery))

    assert "".join(LETTERS[tally.add(fails=look == "x")] for look in looks) == turns


@pytest.mark.parametrize(
    ("operator", "bad"), [(">", [False, False, True]), ("<", [True, False, False]), ("=", [False, True, False])]
)
def test_limit_rule_compares_values_with_its_operator(operator: str, bad: list[bool]) -> None:
    limit = Limit("memory", operator, 5)  # type: ignore[arg-type]

    assert [exceeds(value, limit) for value in (4, 5, 6)] == bad
    assert [exceeds(value, Limit("memory", "!=", 5)) for value in (4, 5, 6)] == [True, False, True]


def test_percentages_in_rules_are_rounded_to_tenths() -> None:
    """Without rounding, a rule with the ``=`` operator would hardly ever match."""
    assert percent(1, 3) == 33.3
    assert percent(1, 1) == 100
    assert percent(1, 0) == 0


@pytest.mark.parametrize(
    ("every", "due"), [(1, [10.0, 20.1, 30.2, 65.0, 70.0, 80.0]), (2, [10.0, 30.2, 70.0]), (3, [10.0, 65.0])]
)
def test_check_that_runs_every_n_cycles_skips_missed_cycles(every: int, due: list[float]) -> None:
    cycles = Cycles(10.0, 10.0, every)
    times = (9.9, 10.0, 11.0, 20.1, 29.0, 30.2, 65.0, 69.9, 70.0, 80.0)

    assert [now for now in times if cycles.is_due(now)] == due
