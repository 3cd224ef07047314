"""Parse the monit files from ``tests/releases`` without running the tests there, which need root and take minutes."""

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


def test_release_tests_contain_at_least_twenty_monit_files() -> None:
    assert len(JOBS) >= 20


@pytest.mark.parametrize("name", JOBS)
def test_monit_files_with_common_release_idioms_are_parsed_completely(name: str) -> None:
    read = parser.parse(JOBS[name], origin=name)

    assert read.ignored == ()
    assert parser.problems([read]) == []
