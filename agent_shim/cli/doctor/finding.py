"""What the doctor says of one thing, and of all of them together. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Self

from agent_shim.cli.ansi import Paint, plain
from agent_shim.core import safetext

Verdict = Literal["good", "limited", "wrong"]

GOOD: Final[Verdict] = "good"
LIMITED: Final[Verdict] = "limited"
"""Something does less than it could; jobs may never notice."""
WRONG: Final[Verdict] = "wrong"
"""Something that is relied on does not work."""

WIDTH: Final = 120
"""Columns of a line at most."""
SHOWN: Final = {GOOD: "ok", LIMITED: "limited", WRONG: "WRONG"}


Runtime = Literal["pod", "cpi", "engine"]
"""What made the container, and so where a change is written: a pod's manifest, ``cloud_properties`` of a CPI outside
of Kubernetes, options of ``docker run`` and ``podman run``."""


class Change(str):
    """What to change, in the words of a pod's manifest; ``cpi`` and ``engine`` are the same in the other two."""

    __slots__ = ("cpi", "engine")

    cpi: str
    engine: str

    def __new__(cls, pod: str, *, cpi: str, engine: str) -> Self:
        made = super().__new__(cls, pod)
        made.cpi, made.engine = cpi, engine
        return made

    def words(self, runtime: Runtime) -> str:
        return {"pod": str(self), "cpi": self.cpi, "engine": self.engine}[runtime]


class Finding(NamedTuple):
    """``found`` is what was seen, ``follows`` what it means, ``change`` what to write, and where."""

    topic: str
    verdict: Verdict
    found: str
    follows: str = ""
    change: str = ""

    def told(self, runtime: Runtime) -> Finding:
        """With the change in the words of the runtime at hand; one that is the same in all of them stays."""
        return self._replace(change=self.change.words(runtime)) if isinstance(self.change, Change) else self


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
        lines.append(f"{word} {finding.topic:<{width}}  {safetext.line(finding.found)}")
        for label, text in (("so", finding.follows), ("change", finding.change)):
            if text:
                lines += _hanging(f"{label}:", safetext.line(text), 9 + width + 2, paint)
    counts = [sum(finding.verdict == verdict for finding in report.findings) for verdict in SHOWN]
    lines += ["", f"{counts[0]} ok, {counts[1]} limited, {counts[2]} wrong"]
    return "\n".join(lines)


def _hanging(label: str, text: str, indent: int, paint: Paint) -> list[str]:
    """``label`` and behind it ``text``, wrapped, one below the other."""
    margin = " " * (indent + 8)
    wrapped = textwrap.wrap(text, max(40, WIDTH - len(margin)), break_long_words=False, break_on_hyphens=False)
    first = f"{' ' * indent}{paint(f'{label:<7}', 'faint')} {wrapped[0]}"
    return [first, *(f"{margin}{line}" for line in wrapped[1:])]
