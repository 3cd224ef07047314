"""Parse monit files from public BOSH releases, compare the verdicts with those of monit 5.2.5, and render the files
again.
"""

from __future__ import annotations

import pytest

from agent_shim.cli import check
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import JobFile
from agent_shim.supervisor.plan import plan
from tests.support import corpus, monit_render

ENTRIES = corpus.entries("monit")
ACCEPTED = [entry for entry in ENTRIES if entry.is_accepted]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_check_command_agrees_with_monit_on_corpus_files(
    entry: corpus.CorpusEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = check.main([entry.path], "monit")

    out, errors = capsys.readouterr()
    if entry.is_accepted:
        assert (verdict, out) == (check.GOOD, f"{entry.path}: good (monit)\n"), errors
    else:
        assert (verdict, out) == (check.WRONG, "")
        assert errors.startswith(f"cannot read {entry.path}: line ")


@pytest.mark.parametrize("entry", ACCEPTED, ids=str)
def test_rendered_corpus_monit_file_is_equivalent_to_the_original(entry: corpus.CorpusEntry) -> None:
    file = parser.parse(entry.text, origin=entry.file)

    rendered = monit_render.render(file)

    assert parser.parse(rendered, origin="rendered") == file
    # Plans with a missing dependency are not compared, because they contain its line number, which rendering changes.
    if "stub-dep" not in entry.verdict:
        assert plan([JobFile("job", "", rendered)]) == plan([JobFile("job", "", entry.text)])


@pytest.mark.parametrize("entry", ACCEPTED, ids=str)
def test_corpus_monit_files_have_no_problems_except_known_missing_dependencies(entry: corpus.CorpusEntry) -> None:
    """A "stub-dep" verdict in the corpus index means that the file depends on a service in another job."""
    problems = parser.problems([parser.parse(entry.text, origin=entry.file)])

    assert {problem.kind for problem in problems} == ({"missing"} if "stub-dep" in entry.verdict else set())


def test_every_corpus_monit_process_can_be_supervised() -> None:
    files = [parser.parse(entry.text, origin=entry.file) for entry in ACCEPTED]
    processes = [check for file in files for check in file.services if check.kind == "process"]

    assert len(processes) > 100
    assert all(check.pidfile or check.matching for check in processes)
    assert all(check.start and check.start.argv[0].startswith("/") for check in processes)
