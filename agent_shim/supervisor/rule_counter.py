"""Decides when a rule has failed or recovered, with monit's cycle counting (monit 5.2.5 event.c). Does no I/O."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent_shim.supervisor.monit.ast import CHANGES, Limit, Rule

MAX_HISTORY: Final = 64
"""Maximum number of a rule's checks that are remembered."""
HISTORY_MASK: Final = (1 << MAX_HISTORY) - 1


class CheckResult(NamedTuple):
    """The result of one test, with a description."""

    fails: bool
    text: str


class RuleTransition(enum.Enum):
    """The consequence of checking a rule once."""

    NOTHING = "nothing"
    FAILED = "failed"
    """The rule has just failed, or a value has changed again. Report it and act."""
    STILL = "still failed"
    """The rule is still failing. Act again, as monit does in each such cycle."""
    RECOVERED = "recovered"
    """The rule has recovered. Report it and run the recovery action."""


class RuleCounter:
    """The history of one rule, up to 64 checks.

    The rule fails once ``count`` of the last ``cycles`` checks have failed. The recovery rate determines in the same
    way how many checks must pass before the rule recovers.
    """

    def __init__(self, rule: Rule) -> None:
        self.has_failed = False
        self._rule = rule
        self._checks = 0
        self._failures = 0
        """One bit per check, which is set if the check failed. The lowest bit is the latest check."""

    def add(self, *, fails: bool) -> RuleTransition:
        """Record the result of one check and return its consequence. If the rule tests for a change, each further
        change counts as a new failure.
        """
        self._failures = (self._failures << 1 | fails) & HISTORY_MASK
        self._checks += 1
        rate, recovery = self._rule.rate, self._rule.recovery_rate
        bad = (self._failures & (1 << rate.cycles) - 1).bit_count()
        seen = min(self._checks, recovery.cycles)  # do not count the zeros before the first check as passed checks
        good = seen - (self._failures & (1 << seen) - 1).bit_count()
        if self.has_failed:
            if fails:
                is_new_event = isinstance(self._rule.test, CHANGES) and bad >= rate.count
                return RuleTransition.FAILED if is_new_event else RuleTransition.STILL
            if good >= recovery.count:
                self.has_failed = False
                return RuleTransition.RECOVERED
        elif fails and bad >= rate.count:
            self.has_failed = True
            return RuleTransition.FAILED
        return RuleTransition.NOTHING


class Cycles:
    """Counts the cycles of one service. The first cycle begins at ``first_at``, and each takes ``period`` seconds.
    Missed cycles are skipped.
    """

    def __init__(self, first_at: float, period: float, every: int) -> None:
        self._next_at, self._period, self._every = first_at, period, every
        self._number = 0

    def is_due(self, now: float) -> bool:
        """Return True if a check is due now. The service is checked only in the first of every ``every`` cycles."""
        late = now - self._next_at
        if late < 0:
            return False
        self._next_at += self._period * (1 + late // self._period)
        self._number += 1
        return (self._number - 1) % self._every == 0


def exceeds(value: float, limit: Limit) -> bool:
    """Return True if the value makes the rule fail. For example, the limit ``> 5`` fails for 6."""
    violates = {">": operator.gt, "<": operator.lt, "=": operator.eq, "!=": operator.ne}[limit.operator]
    return bool(violates(value, limit.limit))


def percent(part: float, whole: float) -> float:
    """Return a percentage, rounded to one decimal place. monit rounds before it compares, so tests for equality can
    match.
    """
    return round(100 * part / whole, 1) if whole > 0 else 0.0


def judge(rules: Iterable[Rule], figures: Mapping[str, float]) -> Iterator[tuple[int, CheckResult]]:
    """Compare the figures with the limits in the rules. Yield the number and the result of each rule whose figure is
    known. ``figures`` maps ``METRIC`` to an absolute value, and ``METRIC %`` to a percentage.
    """
    for number, rule in enumerate(rules):
        if not isinstance(test := rule.test, Limit):
            continue
        value = figures.get(f"{test.metric} %" if test.percent else test.metric)
        if value is None:
            continue
        bad = exceeds(value, test)
        figure, limit = (_worded(each, test) for each in (value, test.limit))
        verb = "matches" if bad else "does not match"
        yield number, CheckResult(bad, f"{test.metric} of {figure} {verb} the resource limit {test.operator} {limit}")


_UNITS: Final = {"size": " B", "timestamp": " seconds"}


def _worded(value: float, test: Limit) -> str:
    """Format a figure or a limit with its unit."""
    if test.percent:
        return f"{value:.1f}%"
    if test.metric.endswith(("memory", "space", "swap")):
        return f"{value / 1024:.0f} kB"
    return f"{value:.12g}{_UNITS.get(test.metric, '')}"
