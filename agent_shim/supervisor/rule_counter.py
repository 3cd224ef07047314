"""When a rule has failed, and when it has recovered: monit's counting of cycles (monit 5.2.5 event.c). Pure."""

from __future__ import annotations

import enum
from typing import Final

from agent_shim.supervisor.monit.ast import Changed, Limit, Match, Rule

REMEMBERED: Final = (1 << 64) - 1


class RuleTransition(enum.Enum):
    """What follows from one look."""

    NOTHING = "nothing"
    FAILED = "failed"
    """From now on it counts as failed: tell, and act."""
    STILL = "still failed"
    """Failed again while it counts as failed: act again, as monit does at every such cycle."""
    RECOVERED = "recovered"
    """It counts as failed no longer: tell, and act as the rule says for that."""


class RuleCounter:
    """What one rule has found, look by look; of 64 looks at most.

    It counts as failed once ``count`` of the last ``cycles`` looks have failed, and as recovered once that many (of the
    recovery's rate) have not. What happens at a moment (``changed``, ``match``) has no state: it fails each time that
    the rate is reached.
    """

    def __init__(self, rule: Rule) -> None:
        self.has_failed = False
        self._rule = rule
        self._is_momentary = isinstance(rule.test, Changed | Match)
        self._looks = 0
        self._failures = 0
        """A bit for each look, the latest the lowest."""

    def add(self, *, fails: bool) -> RuleTransition:
        """Count one look."""
        self._failures = (self._failures << 1 | fails) & REMEMBERED
        self._looks += 1
        rate, recovery = self._rule.rate, self._rule.recovery_rate
        bad = (self._failures & (1 << rate.cycles) - 1).bit_count()
        seen = min(self._looks, recovery.cycles)
        good = seen - (self._failures & (1 << seen) - 1).bit_count()
        if self._is_momentary:
            return RuleTransition.FAILED if fails and bad >= rate.count else RuleTransition.NOTHING
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
    """Whether a figure is what the limit complains about: ``> 5`` means that more than 5 is bad."""
    match limit.operator:
        case ">":
            return value > limit.limit
        case "<":
            return value < limit.limit
        case "=":
            return value == limit.limit
        case "!=":
            return value != limit.limit


def percent(part: float, whole: float) -> float:
    """In steps of a tenth, as monit compares it: an equality can be met."""
    return round(100 * part / whole, 1) if whole > 0 else 0.0
