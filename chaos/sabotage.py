"""``./dev chaos --sabotage ROW``: make one named, wrong change to the agent, and check that the row fails.

A row that holds although its own subject is broken in the agent proves nothing. The change is made in a scratch copy of
the project, and the case is played there, in its own namespaces.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos import namespaces
from chaos.scorecard import Row, earlier

ROOT: Final = Path(__file__).parents[1]
CAUGHT: Final = "caught"
INVARIANTS: Final = tuple(f"I{number}" for number in range(1, 11))
"""Those with a saboteur of their own."""
WITNESSED: Final = tuple(f"I{number}" for number in range(11, 19))
"""Those that general saboteurs break."""
RAN: Final = 'open(__file__ + ".ran", "w").close()'
"""Statement of a general saboteur: its wrong code has run."""
NOT_RUN: Final = "did not run"
HELD: Final = "held"


class SabotageError(Exception):
    """A saboteur cannot be applied: its text is not in the agent, or is there more than once."""


@dataclass(frozen=True)
class Saboteur:
    """A wrong change of the agent: ``before`` becomes ``after`` in one file."""

    row: str
    """Case (``N-02``) or invariant (``I6``) that must fail under it. ``G-01`` for a general one, of all cases."""
    does: str
    """Wrong behaviour, as a sentence about the agent."""
    path: str
    """File, from the top of the project."""
    before: str
    """Text that occurs in the file exactly once."""
    after: str
    shows: str
    """Regular expression that the figures of the failed row must match, so that it fails for the right reason."""
    case: str = ""
    """For an invariant: the case after which it is checked."""

    @property
    def played(self) -> str:
        """The case to play."""
        return self.case or self.row

    def applied(self, text: str) -> str:
        """Return ``text`` with the change. Raises ``SabotageError`` unless ``before`` occurs exactly once."""
        count = text.count(self.before)
        if count != 1:
            raise SabotageError(f"cannot sabotage {self.row}: its text is {count} times in {self.path}")
        return text.replace(self.before, self.after)


def play(saboteur: Saboteur, keep_log: Path | None = None) -> tuple[bool, bool, str]:
    """Play the case with the change. Return if the row failed as it must, if the wrong code ran, and the figures."""
    with tempfile.TemporaryDirectory(prefix="agent-shim-sabotage-", ignore_cleanup_errors=True) as name:
        copy = Path(name)
        _copy(copy)
        target = copy / saboteur.path
        target.write_text(saboteur.applied(target.read_text()))
        into = copy / "rows.md"
        environment = {key: value for key, value in os.environ.items() if key != namespaces.INSIDE}
        environment["PYTHONPATH"] = str(copy)
        argv = [sys.executable, "-m", "chaos", saboteur.played, "--into", str(into)]
        done = subprocess.run(argv, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if keep_log is not None:
            keep_log.write_text(done.stdout + done.stderr)
        rows = earlier(into.read_text()) if into.exists() else {}
        has_run = target.with_name(f"{target.name}.ran").exists()
    row = rows.get(saboteur.played)
    if row is None:
        return False, has_run, f"the case was not played: {done.stderr.strip().rpartition(chr(10))[2]}"
    return is_caught(saboteur, row), has_run, f"{row.verdict}: {row.figures}"


def is_caught(saboteur: Saboteur, row: Row) -> bool:
    """Return True if a row failed, and for the reason of its saboteur."""
    return row.verdict == "not held" and re.search(saboteur.shows, row.figures) is not None


def _copy(target: Path) -> None:
    """Copy the files that git tracks or would add into a new repository: the virtual machine packs the files that git
    lists.
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


def report(saboteur: Saboteur, logs: Path | None = None) -> str:
    """Play one and report on standard error.

    Return ``caught 2026-11-22`` or ``NOT CAUGHT 2026-11-22``, and for a general one ``caught``, ``did not run`` or
    ``held``.
    """
    begun_at = time.monotonic()
    name = f"{saboteur.row} {saboteur.case}".strip()
    try:
        caught, has_run, figures = play(saboteur, logs / f"{name}.log" if logs is not None else None)
    except SabotageError as exc:
        caught, has_run, figures = False, True, str(exc)
    took = time.monotonic() - begun_at
    if saboteur.row.startswith("G"):
        word = cell = (CAUGHT if caught else HELD) if has_run else NOT_RUN
    else:
        word = CAUGHT if caught else "NOT CAUGHT"
        cell = f"{word} {time.strftime('%Y-%m-%d')}"
    sys.stderr.write(f"{name} {word} {took:.0f} s  {saboteur.does} -> {figures}\n")
    return cell
