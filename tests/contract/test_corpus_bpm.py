"""Parse and check bpm.yml files from public BOSH releases."""

from __future__ import annotations

import pytest

from agent_shim.cli import check
from agent_shim.supervisor.bpm import config
from tests.support import corpus

ENTRIES = corpus.entries("bpm")


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_corpus_bpm_files_get_the_expected_verdict(
    entry: corpus.CorpusEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = check.main([entry.path], "bpm")

    out, errors = capsys.readouterr()
    if entry.is_accepted:
        assert (verdict, out) == (check.GOOD, f"{entry.path}: good (bpm)\n"), errors
    else:
        assert (verdict, out) == (check.WRONG, "")
        assert errors.startswith(f"cannot read {entry.path}: line ")


def test_every_process_in_the_bpm_corpus_has_a_name_and_an_executable() -> None:
    files = [config.parse(entry.text, origin=entry.file) for entry in ENTRIES if entry.is_accepted]
    processes = [process for file in files for process in file.processes]

    assert len(processes) > 50
    assert all(process.name and process.executable for process in processes)
