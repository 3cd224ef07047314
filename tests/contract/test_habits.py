"""The monit files of ``tests/releases`` are parsed. Testing their effects takes root and minutes."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.monit import parser
from tests.releases import test_releases as played

JOBS = {
    name: mark.kwargs["files"]["monit"]
    for name, test in vars(played).items()
    for mark in getattr(test, "pytestmark", ())
    if name.startswith("test_") and mark.name == "release"
}


def test_corpus_of_release_habits_has_twenty_entries() -> None:
    assert len(JOBS) >= 20


@pytest.mark.parametrize("name", JOBS)
def test_each_statement_of_the_release_habits_has_an_effect(name: str) -> None:
    """None is read and then ignored, and none is an error."""
    read = parser.parse(JOBS[name], origin=name)

    assert read.ignored == ()
    assert parser.problems([read]) == []
