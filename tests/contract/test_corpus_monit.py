"""Monit files of public BOSH releases: read, judged as monit 5.2.5 does, and written back."""

from __future__ import annotations

import pytest

from agent_shim.cli import check
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.plan import JobFile, plan
from tests.support import corpus, monit_render

ENTRIES = corpus.entries("monit")
ACCEPTED = [entry for entry in ENTRIES if entry.is_accepted]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_the_verdict_equals_monits(entry: corpus.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    """``agent-shim check``: what monit loads is read; what it refuses is refused with the place."""
    verdict = check.main([entry.path], "monit")

    out, errors = capsys.readouterr()
    if entry.is_accepted:
        assert (verdict, out) == (check.GOOD, f"{entry.path}: good (monit)\n"), errors
    else:
        assert (verdict, out) == (check.WRONG, "")
        assert errors.startswith(f"cannot read {entry.path}: line ")


@pytest.mark.parametrize("entry", ACCEPTED, ids=str)
def test_written_file_says_the_same(entry: corpus.Entry) -> None:
    """A file and its rendered form have the same values and make the same plan."""
    file = parser.parse(entry.text, origin=entry.file)

    rendered = monit_render.render(file)

    assert parser.parse(rendered, origin="rendered") == file
    # A missing item is reported with its line, which then differs.
    if "stub-dep" not in entry.verdict:
        assert plan([JobFile("job", "", rendered)]) == plan([JobFile("job", "", entry.text)])


@pytest.mark.parametrize("entry", ACCEPTED, ids=str)
def test_services_of_other_jobs_alone_can_be_missing(entry: corpus.Entry) -> None:
    """Alone, a file that monit accepts has no duplicates and no circles, and lacks what the index says it lacks."""
    problems = parser.problems([parser.parse(entry.text, origin=entry.file)])

    assert {problem.kind for problem in problems} == ({"missing"} if "stub-dep" in entry.verdict else set())


def test_every_process_can_be_kept_running() -> None:
    """Each process of a real file has what a supervisor needs."""
    files = [parser.parse(entry.text, origin=entry.file) for entry in ACCEPTED]
    processes = [check for file in files for check in file.services if check.kind == "process"]

    assert len(processes) > 100
    assert all(check.pidfile or check.matching for check in processes)
    assert all(check.start and check.start.argv[0].startswith("/") for check in processes)
