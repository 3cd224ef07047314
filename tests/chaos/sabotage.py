"""``./dev sabotage``: makes one change at a time that breaks the agent, and checks that the matching scorecard row
fails.

A case that passes although the behaviour that it tests is broken proves nothing. The change is made in a scratch copy
of the project, and the case runs there, in its own namespaces.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.scorecard import Row, earlier
from tests.support import namespaces

ROOT: Final = Path(__file__).parents[2]
CAUGHT: Final = "caught"
INVARIANTS: Final = tuple(f"I{number}" for number in range(1, 11))
"""Invariants that have their own saboteurs."""
WITNESSED: Final = tuple(f"I{number}" for number in range(11, 19))
"""Invariants that have no saboteur of their own, but are broken by general saboteurs."""
RAN: Final = 'open(__file__ + ".ran", "w").close()'
"""Statement that general saboteurs insert to record that their code has run."""
NOT_RUN: Final = "did not run"
HELD: Final = "held"


class SabotageError(Exception):
    """The change cannot be made, because the text to replace does not occur in the agent exactly once."""


@dataclass(frozen=True)
class Saboteur:
    """A change that breaks the agent: ``before`` is replaced by ``after`` in one file."""

    row: str
    """The case (such as ``N-02``) or invariant (``I6``) that must fail, or the id of a general saboteur (``G-01``)."""
    does: str
    """The wrong behaviour, as a predicate whose subject is the agent."""
    path: str
    """Path of the file, relative to the project."""
    before: str
    """Text that occurs in the file exactly once."""
    after: str
    shows: str
    """Regular expression that the figures of the failed row must match, as proof that it failed for the expected
    reason. Each of its alternatives must match a message in ``tests.chaos.failures``.
    """
    case: str = ""
    """For an invariant, the case after which it is checked."""
    mark: str = ""
    """Regular expression for the report of a violated invariant. No other general saboteur causes this report, so it
    shows which saboteur was caught when several are active.
    """

    @property
    def played(self) -> str:
        """The id of the case to run."""
        return self.case or self.row

    def applied(self, text: str) -> str:
        """Return ``text`` with the change applied. Raises ``SabotageError`` unless ``before`` occurs exactly once."""
        count = text.count(self.before)
        if count != 1:
            raise SabotageError(
                f"cannot sabotage {self.row}: the text to replace occurs {count} times in {self.path}, not once"
            )
        return text.replace(self.before, self.after.replace('".ran"', f'".{self.row}"'))


def play(playing: Sequence[Saboteur]) -> tuple[Row | None, list[Saboteur], str]:
    """Run a case with the changes of all saboteurs in ``playing``.

    Return the row, the saboteurs whose code ran, and the figures. The row is None if the case was not run.
    """
    case = playing[0].played
    with tempfile.TemporaryDirectory(prefix="agent-shim-sabotage-", ignore_cleanup_errors=True) as name:
        copy = Path(name)
        _copy(copy)
        for one in playing:
            (copy / one.path).write_text(one.applied((copy / one.path).read_text()))
        into = copy / "rows.md"
        environment = {key: value for key, value in os.environ.items() if key != namespaces.INSIDE}
        environment["PYTHONPATH"] = str(copy)
        argv = [sys.executable, "-m", "tests.chaos", case, "--into", str(into)]
        done = subprocess.run(argv, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        sys.stdout.write(done.stdout + done.stderr)
        row = earlier(into.read_text()).get(case) if into.exists() else None
        ran = [one for one in playing if Path(f"{copy / one.path}.{one.row}").exists()]
    if row is None:
        return None, ran, f"the case was not run: {done.stderr.strip().rpartition(chr(10))[2]}"
    return row, ran, f"{row.verdict}: {row.figures}"


def is_caught(saboteur: Saboteur, row: Row) -> bool:
    """Return True if a row failed for the reason that the saboteur's ``shows`` describes."""
    return row.verdict == "not held" and re.search(saboteur.shows, row.figures) is not None


def is_marked(saboteur: Saboteur, row: Row) -> bool:
    """Return True if a row failed with an observation that only this saboteur causes."""
    return row.verdict == "not held" and bool(saboteur.mark) and re.search(saboteur.mark, row.figures) is not None


def _copy(target: Path) -> None:
    """Copy this project's files (tracked by git, or new and not ignored) into a new repository, because the virtual
    machine packs the files that git lists.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(
        ["tar", "--null", "--files-from=-", "-cf", str(target / "copy.tar"), "--ignore-failed-read"],
        cwd=ROOT,
        input=names,
        check=True,
    )
    subprocess.run(["tar", "-xf", "copy.tar"], cwd=target, check=True)
    (target / "copy.tar").unlink()
    if (ROOT / ".guest").exists():
        (target / ".guest").symlink_to(ROOT / ".guest")
    for argv in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(argv, cwd=target, check=True)


def report(saboteur: Saboteur) -> str:
    """Run one saboteur and report the result on standard error.

    Return ``caught 2026-11-22`` or ``NOT CAUGHT 2026-11-22`` with today's date, or "" if the case could not be run.
    """
    begun_at = time.monotonic()
    name = f"{saboteur.row} {saboteur.case}".strip()
    try:
        row, _, figures = play([saboteur])
    except SabotageError as exc:
        row, figures = None, str(exc)
    is_played = row is not None and row.verdict != "not run"
    word = CAUGHT if row is not None and is_caught(saboteur, row) else "NOT CAUGHT" if is_played else "NOT RUN"
    sys.stderr.write(f"{name} {word} {time.monotonic() - begun_at:.0f} s  {saboteur.does} -> {figures}\n")
    return f"{word} {time.strftime('%Y-%m-%d')}" if is_played else ""


def tell(playing: Sequence[Saboteur], enter: Callable[[Saboteur, str], None]) -> int:
    """Run general saboteurs in one case, and pass each result (``caught``, ``did not run`` or ``held``) to ``enter``.

    The first run applies all changes together. If the case passes and none of the changed code ran, all results are
    ``did not run``. A saboteur is caught if its mark is in the figures. Each other saboteur whose code ran is then run
    alone. The saboteurs whose code did not run are run together once more.

    Return the number of saboteurs that were not caught or gave no result.
    """
    begun_at = time.monotonic()
    name = f"{' '.join(one.row for one in playing)} {playing[0].case}"
    row, ran, figures = play(playing)
    took = f"{time.monotonic() - begun_at:.0f} s"
    if len(playing) > 1 and ran:
        marked = [one for one in ran if row is not None and is_marked(one, row)]
        sys.stderr.write(f"{name} ran {_named(ran)}, caught {_named(marked)} {took} -> {figures}\n")
        for one in marked:
            enter(one, CAUGHT)
        rest = [one for one in playing if one not in ran]
        alone = [[one] for one in ran if one not in marked]
        return sum(tell(each, enter) for each in ([rest] if rest else []) + alone)
    if row is None or row.verdict == "not run" or (not ran and row.verdict != "held"):
        sys.stderr.write(f"{name} NOT RUN {took}  {figures}\n")
        return len(playing)
    word = NOT_RUN if not ran else CAUGHT if is_caught(ran[0], row) else HELD
    sys.stderr.write(f"{name} {word} {took}  {'; '.join(one.does for one in playing)} -> {figures}\n")
    for one in playing:
        enter(one, word)
    return int(word == HELD)


def _named(ones: Sequence[Saboteur]) -> str:
    return " ".join(one.row for one in ones) or "none"
