"""A single finding of the doctor, and the report of all. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Self

from agent_shim.cli.ansi import Paint, plain
from agent_shim.core import safetext

Verdict = Literal["good", "limited", "wrong"]

GOOD: Final[Verdict] = "good"
LIMITED: Final[Verdict] = "limited"
"""A feature works with limits; jobs may never notice."""
WRONG: Final[Verdict] = "wrong"
"""A required feature does not work."""

WIDTH: Final = 120
"""Maximum columns of a line."""
SHOWN: Final = {GOOD: "ok", LIMITED: "limited", WRONG: "WRONG"}


Runtime = Literal["pod", "cpi", "warden", "engine"]
"""The creator of the container, and thus the place of a change: a pod's manifest, ``cloud_properties`` of a CPI outside
of Kubernetes, the host of Garden, options of ``docker run`` and ``podman run``."""

CLOUD_PROPERTIES: Final = "cloud_properties of the VM"
ON_HOST: Final = "the host of Garden: the warden CPI has no cloud property but ports"


class Change(str):
    """The change for a pod's manifest; ``cpi`` and ``engine`` are the same change for the others."""

    __slots__ = ("cpi", "engine")

    cpi: str
    engine: str

    def __new__(cls, pod: str, *, cpi: str, engine: str) -> Self:
        made = super().__new__(cls, pod)
        made.cpi, made.engine = cpi, engine
        return made

    def words(self, runtime: Runtime) -> str:
        warden = ON_HOST if self.cpi.startswith(CLOUD_PROPERTIES) else self.cpi
        return {"pod": str(self), "cpi": self.cpi, "warden": warden, "engine": self.engine}[runtime]


class Finding(NamedTuple):
    """One result: ``found`` is the observation, ``follows`` its consequence, ``change`` the remedy and its place."""

    topic: str
    verdict: Verdict
    found: str
    follows: str = ""
    change: str = ""

    def for_runtime(self, runtime: Runtime) -> Finding:
        """A copy with the change for ``runtime``; a change common to all runtimes stays."""
        return self._replace(change=self.change.words(runtime)) if isinstance(self.change, Change) else self


class Report(NamedTuple):
    """All findings; ``tier`` is the kind of this container."""

    tier: str
    findings: Sequence[Finding]

    @property
    def is_clean(self) -> bool:
        return all(finding.verdict != WRONG for finding in self.findings)


def table(report: Report, paint: Paint = plain) -> str:
    """The report as text: one line for each finding, its consequence and change below."""
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
    """``label`` followed by wrapped ``text``."""
    margin = " " * (indent + 8)
    wrapped = textwrap.wrap(text, max(40, WIDTH - len(margin)), break_long_words=False, break_on_hyphens=False)
    first = f"{' ' * indent}{paint(f'{label:<7}', 'faint')} {wrapped[0]}"
    return [first, *(f"{margin}{line}" for line in wrapped[1:])]
