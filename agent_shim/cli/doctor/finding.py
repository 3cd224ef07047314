"""Defines the doctor's findings and the report that contains them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from agent_shim.cli.ansi import Paint, plain
from agent_shim.core import safetext

GOOD: Final = "good"
LIMITED: Final = "limited"
"""Verdict on a feature that is limited. Whether this matters depends on the jobs."""
WRONG: Final = "wrong"
"""Verdict on a required feature that does not work."""

WIDTH: Final = 120
"""Maximum width in columns if the output is a pipe or file."""
SHOWN: Final = {GOOD: "ok", LIMITED: "limited", WRONG: "WRONG"}

Runtime = Literal["pod", "cpi", "warden", "lxd", "engine"]
"""What created the container. It determines where a change is made: in a pod's manifest, in a CPI's
``cloud_properties``, on Garden's host, in LXD's configuration, or in the options of ``docker run`` or ``podman run``.
"""

CLOUD_PROPERTIES: Final = "cloud_properties of the VM"
NO_PATCH: Final[Mapping[str, Any]] = {}
ON_HOST: Final = "the host of Garden: the warden CPI has no cloud property but ports"


class Consequence(NamedTuple):
    """The consequence of a limit, and the change for each kind of container (``Runtime``). If ``cpi`` or ``engine`` is
    "", the change is the same as for a pod. If ``lxd`` is "", it is the same as for a CPI.

    ``patch`` is the change as a part of a pod's ``spec``, in which ``container`` is a placeholder for the agent's
    container. Strings in the patch may contain placeholders such as ``{name}``.
    """

    verdict: str
    follows: str
    pod: str = ""
    cpi: str = ""
    engine: str = ""
    lxd: str = ""
    patch: Mapping[str, Any] = NO_PATCH

    def change(self, runtime: Runtime) -> str:
        """Return the change for a kind of container. The warden CPI has no suitable ``cloud_properties``, so its
        change is made on the host.
        """
        cpi = self.cpi or self.pod
        warden = ON_HOST if cpi.startswith(CLOUD_PROPERTIES) else cpi
        engine, lxd = self.engine or self.pod, self.lxd or cpi
        return {"pod": self.pod, "cpi": cpi, "warden": warden, "lxd": lxd, "engine": engine}[runtime]


def filled(patch: Any, words: Mapping[str, str]) -> Any:
    """Return a patch with the placeholders in its strings replaced by ``words``."""
    if isinstance(patch, Mapping):
        return {name: filled(value, words) for name, value in patch.items()}
    if isinstance(patch, list):
        return [filled(value, words) for value in patch]
    return patch.format(**words) if isinstance(patch, str) else patch


class Finding(NamedTuple):
    """One result: ``found`` is what was observed, ``follows`` is the consequence, and ``change`` says what to change
    and where.
    """

    topic: str
    verdict: str
    found: str
    follows: str = ""
    change: str = ""
    patch: Mapping[str, Any] = NO_PATCH
    """The change as a part of a pod's manifest, if changing the manifest is sufficient."""


class Report(NamedTuple):
    """All findings. ``tier`` describes how privileged the container is."""

    tier: str
    findings: Sequence[Finding]

    @property
    def is_clean(self) -> bool:
        return all(finding.verdict != WRONG for finding in self.findings)


def table(report: Report, paint: Paint = plain, columns: int = 0) -> str:
    """Format the report for a terminal that is ``columns`` wide (0 for a pipe). Each finding is followed by its
    consequence and the suggested change.
    """
    lines = [f"This container is {report.tier}.", ""]  # for example "privileged"
    width = max(len(finding.topic) for finding in report.findings)
    margin = " " * (9 + width + 2)  # as wide as the verdict, the topic and the spaces after them
    room = (columns or WIDTH) - len(margin)
    for finding in report.findings:
        word = paint(f"{SHOWN[finding.verdict]:<8}", finding.verdict)
        first, *further = _wrapped(finding.found, room) or [""]
        lines += [f"{word} {finding.topic:<{width}}  {first}", *(f"{margin}{line}" for line in further)]
        for label, text in (("so:", finding.follows), ("change:", finding.change)):
            wrapped = _wrapped(text, room - 8)
            heads = [paint(f"{label:<7}", "faint"), *[" " * 7] * (len(wrapped) - 1)]
            # An empty string has no lines, so ``heads`` may be longer than ``wrapped``.
            lines += [f"{margin}{head} {line}" for head, line in zip(heads, wrapped, strict=False)]
    counts = [sum(finding.verdict == verdict for finding in report.findings) for verdict in SHOWN]
    lines += ["", f"{counts[0]} ok, {counts[1]} limited, {counts[2]} wrong"]
    return "\n".join(lines)


def _wrapped(text: str, columns: int) -> list[str]:
    """Break text between words. A word that is longer than a line is not broken, so that it can be copied."""
    return textwrap.wrap(safetext.line(text), max(30, columns), break_long_words=False, break_on_hyphens=False)
