"""Subjects of commits say what changes, in the imperative and in 72 characters."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.structure.source import ROOT

SINCE = "2026-11-27"
"""The rule holds for commits from this day on."""

SUBJECT = re.compile(r"(?!(?!Bring|Embed|Feed|Speed)\w+(?:ed|ing|s)\b(?<!ss))(?=.{10,72}$)[A-Z][a-z]+ .*[^.]")


def test_subjects_of_new_commits_are_short_and_imperative() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("there is no history here")
    log = ["git", "-C", str(ROOT), "log", f"--since={SINCE}", "--no-merges", "--format=%s"]
    subjects = subprocess.run(log, capture_output=True, check=True, text=True).stdout.splitlines()

    assert [one for one in subjects if not SUBJECT.fullmatch(one)] == []


@pytest.mark.parametrize(
    ("subject", "is_right"),
    [
        ("Wait for facts in tests by one function", True),
        ("Pass the deadline to the worker", True),
        ("Bring the deadline to the worker", True),
        ("Fixed the deadline of the worker", False),
        ("Fixes the deadline of the worker", False),
        ("Waiting for facts", False),
        ("wait for facts in tests", False),
        ("Wait for facts in tests.", False),
        (f"Wait {'x' * 70}", False),
    ],
)
def test_a_subject_is_imperative(subject: str, is_right: bool) -> None:
    assert (SUBJECT.fullmatch(subject) is not None) == is_right
