"""bpm.yml files of public BOSH releases: read and judged."""

from __future__ import annotations

import pytest

from agent_shim.errors import ConfigError
from agent_shim.supervisor import bpm
from tests.support import corpus

ENTRIES = corpus.entries("bpm")

pytestmark = corpus.needs_corpus


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_verdict_is_that_of_the_index(entry: corpus.Entry) -> None:
    """A valid file gives its processes; another is refused with the place."""
    try:
        bpm.parse(entry.text, origin=entry.file)
    except ConfigError as exc:
        assert not entry.is_accepted, exc
        assert str(exc).startswith(f"cannot read {entry.file}: line ")
    else:
        assert entry.is_accepted


def test_processes_say_what_to_run() -> None:
    """Executables are paths, or lie in the PATH of the job."""
    files = [bpm.parse(entry.text, origin=entry.file) for entry in ENTRIES if entry.is_accepted]
    processes = [process for file in files for process in file.processes]

    assert len(processes) > 50
    assert all(process.name and process.executable for process in processes)
