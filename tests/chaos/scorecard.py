"""Reads and writes the scorecard, which consists of the case tables in ``docs/reliability.md``."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.case import Case

DOCUMENT: Final = Path(__file__).parents[2] / "docs/reliability.md"
BEGIN: Final = "<!-- scorecard -->"
END: Final = "<!-- /scorecard -->"
GROUPS: Final = "CNSDRM"
"""First letters of the case ids, in the order of the tables."""
HELD: Final = "held"
OUTCOMES: Final = ("caught", HELD, "did not run")
"""The possible outcomes of a general saboteur in a case."""
FULL: Final = "in full"
"""Prefix that marks the date of a run at full size."""


@dataclass(frozen=True)
class Row:
    """One line of the scorecard. ``verdict`` is ``held``, ``not held`` or ``not run``."""

    id: str
    fault: str
    verdict: str
    figures: str
    played: str = ""
    """The date of the last run. If the case was repeated, the number of runs precedes it."""
    saboteur: str = ""
    """The date on which the saboteur made the case fail, or a remark that it did not."""

    @property
    def outcome(self) -> str:
        """The text of the outcome cell: the date of the last run, preceded by the verdict unless it is ``held``."""
        if self.verdict == HELD and self.played:
            return self.played
        return f"{self.verdict}, {self.played}" if self.played else self.verdict

    def dated(self, how_often: str) -> Row:
        """Return this row with today's date, preceded by ``how_often`` if given. If the case was not run, return
        the row unchanged.
        """
        if self.verdict == "not run":
            return self
        return replace(self, played=f"{how_often} on {time.strftime('%Y-%m-%d')}".removeprefix(" on "))

    def beside(self, known: Row | None) -> Row:
        """Merge this row with the case's previous row.

        If both have the verdict ``held``, keep the dates of the last reduced run and the last full run.
        """
        if known is None:
            return self
        saboteur = self.saboteur or known.saboteur
        if self.verdict != "held" or known.verdict != "held":
            return replace(self, saboteur=saboteur)
        row = self if self.times or not known.times else known
        return replace(row, saboteur=saboteur, played="; ".join(filter(None, (row.times, self.full or known.full))))

    @property
    def times(self) -> str:
        """The entries in ``played`` about runs at reduced size."""
        return "; ".join(part for part in self.played.split("; ") if not part.startswith(FULL))

    @property
    def full(self) -> str:
        """The entries in ``played`` about runs at full size."""
        return "; ".join(part for part in self.played.split("; ") if part.startswith(FULL))


def row_of(
    case: Case,
    reports: Iterable[pytest.TestReport],
    figures: Iterable[str],
    omitted: Mapping[str, str],
    *,
    is_full: bool = False,
) -> Row:
    """Return a case's row, given pytest's reports on its setup, call and teardown.

    ``omitted`` are the invariants that were not checked, each with the reason. The row of a failed case
    contains only the failure message. Its figures are left out, because they could accidentally match a saboteur's
    pattern.
    """
    for report in reports:
        if not report.passed:
            why = next((str(value) for name, value in report.user_properties if name == "why"), "")
            return Row(case.id, case.fault, "not run" if report.skipped else "not held", why)
    words = "; ".join([*figures, *(f"without {name}: {why}" for name, why in sorted(omitted.items()))])
    return Row(case.id, case.fault, HELD, f"{words} ({case.scale})" if case.scale and not is_full else words)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown tables."""
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("held", "not held", "not run")}
    lines = [
        f"{len(rows)} cases: {count['held']} held, {count['not held']} not held, {count['not run']} not run.",
        "",
        "| case | fault | held | figures | saboteur caught |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.id} | {r.fault} | {r.outcome} | {' '.join(r.figures.replace('|', '/').split())[:300]} | {r.saboteur} |"
        for r in rows
    ]
    return "\n".join(lines)


def earlier(text: str) -> dict[str, Row]:
    """Parse a document and return its rows, keyed by case id."""
    rows = {}
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] not in ("case", "---"):
            number, fault, outcome, figures, saboteur = cells
            is_date = not outcome.startswith((HELD, "not "))
            verdict, _, played = (HELD, "", outcome) if is_date else outcome.partition(", ")
            rows[number] = Row(number, fault, verdict, figures, played, saboteur)
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace ``rows`` in a document, which is created if it does not exist.

    Several processes may call this at the same time.
    """
    with _locked(path):
        text = path.read_text() if path.exists() else ""
        known = earlier(text)
        known |= {row.id: row.beside(known.get(row.id)) for row in rows}
        _replace(path, text, known)


def enter_saboteur(path: Path, case: str, caught: str) -> None:
    """Set the saboteur's cell, the last one in a case's or an invariant's row.

    The cell contains the date on which the saboteur was caught, or ``NOT CAUGHT`` with the date.
    """
    caught = caught.removeprefix("caught ")
    with _locked(path):
        text = path.read_text()
        known = earlier(text)
        if case in known:
            known[case] = replace(known[case], saboteur=caught)
            _replace(path, text, known)
        else:
            path.write_text(re.sub(rf"^(\| {case} \|.*\|)[^|]*\|$", rf"\1 {caught} |", text, flags=re.MULTILINE))


def enter_general(path: Path, saboteur: str, case: str, outcome: str) -> None:
    """Record the ``outcome`` of running ``case`` with a general ``saboteur`` in the table of general saboteurs.

    ``outcome`` is one of ``OUTCOMES``.
    """
    with _locked(path):

        def entered(line: re.Match[str]) -> str:
            cells = [cell.strip() for cell in line[0].strip("|").split("|")]
            position = len(cells) - len(GROUPS) + GROUPS.index(case[0])
            cells[position] = _shown(_outcomes(cells[position]) | {int(case[2:]): outcome})
            return f"| {' | '.join(cells)} |".replace("  ", " ")

        path.write_text(re.sub(rf"^\| {saboteur} \|.*\|$", entered, path.read_text(), flags=re.MULTILINE))


def _outcomes(cell: str) -> dict[int, str]:
    """Parse a cell and return the outcomes, keyed by case number.

    ``3 **4** (1-2 5)`` means that the saboteur was caught in case 3 but not in case 4, and that its code did not run in
    cases 1, 2 and 5.
    """
    caught, _, others = cell.partition("(")
    found = dict[int, str]()
    for words, outcome in ((caught, OUTCOMES[0]), (others.rstrip(")"), OUTCOMES[2])):
        for word in words.split():
            first, _, last = word.strip("*").partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found |= dict.fromkeys(numbers, HELD if word.startswith("*") else outcome)
    return found


def _shown(outcomes: Mapping[int, str]) -> str:
    """Format outcomes as a cell."""
    caught, held, others = ([one for one in sorted(outcomes) if outcomes[one] == name] for name in OUTCOMES)
    parts = [*_ranges(caught), *(f"**{one}**" for one in held), f"({' '.join(_ranges(others))})" if others else ""]
    return " ".join(filter(None, parts))


def _ranges(numbers: Sequence[int]) -> list[str]:
    groups = [
        [one for _, one in ones] for _, ones in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return [f"{ones[0]}-{ones[-1]}" if ones[1:] else f"{ones[0]}" for ones in groups]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _place(case: str) -> tuple[int, str]:
    return GROUPS.index(case[0]), case


def _replace(path: Path, text: str, known: dict[str, Row]) -> None:
    ordered = sorted(known.values(), key=lambda row: _place(row.id))
    head, _, rest = text.partition(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{table(ordered)}\n{END}{rest.partition(END)[2]}")
