"""What the doctor says of one thing, and of all of them together. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from agent_shim.terminal import Paint, plain

Verdict = Literal["good", "limited", "wrong"]

GOOD: Final[Verdict] = "good"
LIMITED: Final[Verdict] = "limited"
"""Something does less than it could; jobs may never notice."""
WRONG: Final[Verdict] = "wrong"
"""Something that is relied on does not work."""

WIDTH: Final = 120
"""Columns of a line at most."""
SHOWN: Final = {GOOD: "ok", LIMITED: "limited", WRONG: "WRONG"}


class Finding(NamedTuple):
    """``found`` is what was seen, ``follows`` what it means, ``change`` what to write in the manifest."""

    topic: str
    verdict: Verdict
    found: str
    follows: str = ""
    change: str = ""


class Report(NamedTuple):
    """All findings; ``tier`` is the kind of container this is."""

    tier: str
    findings: Sequence[Finding]

    @property
    def is_clean(self) -> bool:
        return all(finding.verdict != WRONG for finding in self.findings)


def table(report: Report, paint: Paint = plain) -> str:
    """Lines for people: one a finding, and below it what follows and what to change."""
    lines = [f"This container is {report.tier}.", ""]
    width = max(len(finding.topic) for finding in report.findings)
    for finding in report.findings:
        word = paint(f"{SHOWN[finding.verdict]:<8}", finding.verdict)
        lines.append(f"{word} {finding.topic:<{width}}  {finding.found}")
        for label, text in (("so", finding.follows), ("change", finding.change)):
            if text:
                lines += _hanging(f"{label}:", text, 9 + width + 2, paint)
    counts = [sum(finding.verdict == verdict for finding in report.findings) for verdict in SHOWN]
    lines += ["", f"{counts[0]} ok, {counts[1]} limited, {counts[2]} wrong"]
    return "\n".join(lines)


def _hanging(label: str, text: str, indent: int, paint: Paint) -> list[str]:
    """``label`` and behind it ``text``, wrapped, one below the other."""
    margin = " " * (indent + 8)
    wrapped = textwrap.wrap(text, max(40, WIDTH - len(margin)), break_long_words=False, break_on_hyphens=False)
    first = f"{' ' * indent}{paint(f'{label:<7}', 'faint')} {wrapped[0]}"
    return [first, *(f"{margin}{line}" for line in wrapped[1:])]
