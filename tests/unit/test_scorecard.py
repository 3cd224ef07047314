"""Tests how scorecard rows are updated, and how the results of chaos cases and saboteurs get into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos import sabotage
from tests.chaos.case import Case
from tests.chaos.sabotage import Saboteur
from tests.chaos.scorecard import Row, earlier, enter_general, row_of, write
from tests.support import witness

SCALED = "1 of 1 on 2026-11-20"
LATER = "3 of 3 on 2026-11-21"
FULL = "in full on 2026-11-22"


def row(played: str, verdict: str = "held") -> Row:
    return Row("D-07", "logs", verdict, f"figures of {played}", played)


@pytest.mark.parametrize(
    ("before", "now", "played", "figures"),
    [
        (SCALED, LATER, LATER, LATER),
        (SCALED, FULL, f"{SCALED}; {FULL}", SCALED),
        (f"{SCALED}; {FULL}", LATER, f"{LATER}; {FULL}", LATER),
        (FULL, SCALED, f"{SCALED}; {FULL}", SCALED),
        ("", FULL, FULL, FULL),
        (f"{SCALED}; in full on 2026-11-01", f"{LATER}; {FULL}", f"{LATER}; {FULL}", f"{LATER}; {FULL}"),
    ],
)
def test_scorecard_keeps_the_date_on_which_a_case_last_ran_in_full(
    before: str, now: str, played: str, figures: str
) -> None:
    one = row(now).beside(row(before))

    assert (one.played, one.figures) == (played, f"figures of {figures}")


def test_scorecard_removes_the_date_of_a_failed_case(tmp_path: Path) -> None:
    document = tmp_path / "rows.md"
    for one in (row(f"{SCALED}; {FULL}"), row(LATER, "not held"), row(SCALED)):
        write(document, [one])
        assert earlier(document.read_text()) == {"D-07": one}


def test_scorecard_shows_the_last_outcome_of_each_case(tmp_path: Path) -> None:
    """A cell lists a group's cases, with consecutive numbers as a range. Cases that caught the saboteur are plain,
    cases that passed nevertheless are bold, and cases that did not run the saboteur's code are in parentheses.
    """
    document = tmp_path / "rows.md"
    document.write_text("| G-01 | is deaf | | | | | | |\n| G-02 | is mute | | | | | | |\n")
    for case, outcome in (
        ("S-11", "caught"),
        ("C-07", "held"),
        ("S-08", "caught"),
        *((f"C-0{number}", "did not run") for number in (1, 4, 3, 2, 9)),
        ("C-06", "held"),
        ("C-07", "caught"),
        ("C-09", "did not run"),
        ("S-10", "caught"),
        ("S-09", "caught"),
    ):
        enter_general(document, "G-01", case, outcome)

    first = "| G-01 | is deaf | 7 **6** (1-4 9) | | 8-11 | | | |"
    assert document.read_text() == f"{first}\n| G-02 | is mute | | | | | | |\n"


def test_general_saboteur_not_recognized_in_the_joint_run_is_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks = {"G-01": "I1: deaf", "G-02": "I2: mute", "G-03": "an error", "G-04": ""}
    runs = [*breaks]
    chosen = [
        Saboteur(name, "", "", "", "", "I1|I2|error", "C-01", mark)
        for name, mark in [("G-01", "I1: deaf"), ("G-02", "I2: mute"), ("G-03", ""), ("G-04", ""), ("G-05", "I5")]
    ]
    played, told = list[str](), dict[str, str]()

    def play(playing: Sequence[Saboteur]) -> tuple[Row, list[Saboteur], str]:
        played.append(" ".join(each.row[-1] for each in playing))
        broken = [breaks[each.row] for each in playing if breaks.get(each.row)]
        row = Row("C-01", "", "not held" if broken else "held", "; ".join(broken))
        return row, [each for each in playing if each.row in runs], row.figures

    monkeypatch.setattr(sabotage, "play", play)
    missed = sabotage.tell(chosen, lambda saboteur, outcome: told.update({saboteur.row: outcome}))

    assert played == ["1 2 3 4 5", "5", "3", "4"]
    caught = dict.fromkeys(("G-01", "G-02", "G-03"), "caught")
    assert (told, missed) == ({**caught, "G-04": "held", "G-05": "did not run"}, 1)


@pytest.mark.parametrize("row", [None, Row("C-01", "", "not run", "no machine")])
def test_saboteur_counts_as_missed_if_its_case_does_not_run(monkeypatch: pytest.MonkeyPatch, row: Row | None) -> None:
    saboteur = Saboteur("G-01", "", "", "", "", "I1", "C-01")
    monkeypatch.setattr(sabotage, "play", lambda *_: (row, [saboteur], ""))
    told = list[str]()

    assert sabotage.tell([saboteur], lambda _, outcome: told.append(outcome)) == 1
    assert told == []


def report(outcome: str, why: str = "") -> Any:
    return SimpleNamespace(passed=outcome == "passed", skipped=outcome == "skipped", user_properties=[("why", why)])


def test_scorecard_row_shows_the_broken_invariant_the_skip_reason_or_the_figures() -> None:
    """If the case failed, the figures are left out, because they could happen to contain the text by which a saboteur
    is recognized.
    """
    case, figures, omitted = Case("C-01", "kills", "20 of 100"), ["0 jobs restarted"], {"I2": "all are killed"}

    broken = row_of(
        case,
        [report("passed"), report("failed", "I16: job7 is reported as running without a process")],
        figures,
        omitted,
    )
    assert (broken.verdict, broken.figures) == ("not held", "I16: job7 is reported as running without a process")
    missing = row_of(case, [report("skipped", "needs root")], figures, omitted)
    assert (missing.verdict, missing.figures) == ("not run", "needs root")
    held = row_of(case, [report("passed")], figures, omitted)
    assert (held.verdict, held.figures) == ("held", "0 jobs restarted; without I2: all are killed (20 of 100)")
    assert row_of(case, [report("passed")], figures, {}, is_full=True).figures == "0 jobs restarted"


def test_total_cpu_wait_includes_only_the_slowest_thread_of_each_process() -> None:
    before = {"1": {"1": 5.0, "2": 1.0}, "2": {"2": 7.0}, "3": {}}
    after = {"1": {"1": 5.5, "2": 1.2}, "2": {"2": 7.0, "9": 0.25}, "3": {}}

    assert witness.longest_waits(before, after) == 0.75


def test_changed_file_mode_after_an_unchanged_apply_is_detected(tmp_path: Path) -> None:
    program = tmp_path / "data/jobs/web/1/bin/ctl"
    program.parent.mkdir(parents=True)
    program.touch(0o750)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/web").symlink_to("../data/jobs/web/1")

    def spec() -> dict[str, Any]:
        blob = {"blobstore_id": "none"}
        return {"rendered_templates_archive": blob, "job": {"templates": [{"name": "web"}]}, "packages": {}}

    world = SimpleNamespace(base=tmp_path, kept=tmp_path, applied=spec())
    looks = witness.Witness(cast("Any", SimpleNamespace(world=world, written=set())))
    before: Any = SimpleNamespace(applied=spec(), files={}, modes=looks.modes())
    assert looks.changed(before) == []

    program.chmod(0o777)

    assert looks.changed(before) == ["I13: the mode of jobs/web/bin/ctl has changed"]
