"""Decides when a rule has failed and recovered, like monit's cycle counting (monit 5.2.5 event.c). Pure."""

from __future__ import annotations

import enum
import operator
from typing import Final

from agent_shim.supervisor.monit.ast import Limit, Rule

HISTORY_MASK: Final = (1 << 64) - 1


class RuleTransition(enum.Enum):
    """Consequence of one check."""

    NOTHING = "nothing"
    FAILED = "failed"
    """Newly failed: report, and act."""
    STILL = "still failed"
    """Still failing: act again, as monit does in each such cycle."""
    RECOVERED = "recovered"
    """Recovered: report, and run the recovery action."""


class RuleCounter:
    """History of one rule, up to 64 checks.

    The rule fails once ``count`` of the last ``cycles`` checks have failed, and recovers once that many checks (of the
    recovery's rate) have passed.
    """

    def __init__(self, rule: Rule) -> None:
        self.has_failed = False
        self._rule = rule
        self._looks = 0
        self._failures = 0
        """One bit per check, the latest is the lowest."""

    def add(self, *, fails: bool) -> RuleTransition:
        """Record one check."""
        self._failures = (self._failures << 1 | fails) & HISTORY_MASK
        self._looks += 1
        rate, recovery = self._rule.rate, self._rule.recovery_rate
        bad = (self._failures & (1 << rate.cycles) - 1).bit_count()
        seen = min(self._looks, recovery.cycles)
        good = seen - (self._failures & (1 << seen) - 1).bit_count()
        if self.has_failed:
            if fails:
                return RuleTransition.STILL
            if good >= recovery.count:
                self.has_failed = False
                return RuleTransition.RECOVERED
        elif fails and bad >= rate.count:
            self.has_failed = True
            return RuleTransition.FAILED
        return RuleTransition.NOTHING


def exceeds(value: float, limit: Limit) -> bool:
    """True if the value violates the limit: ``> 5`` rejects more than 5."""
    violates = {">": operator.gt, "<": operator.lt, "=": operator.eq, "!=": operator.ne}[limit.operator]
    return bool(violates(value, limit.limit))


def percent(part: float, whole: float) -> float:
    """Percentage rounded to a tenth, as monit compares it: an equality can match."""
    return round(100 * part / whole, 1) if whole > 0 else 0.0
