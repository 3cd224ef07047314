"""Code and docs have no more of the habits in ``language.HABITS`` than the baseline allows. Each file may only lose."""

from __future__ import annotations

import pytest

from tests.structure import language
from tests.structure.language import HABITS, Text


def test_no_file_gains_a_habit() -> None:
    """``python -m tests.structure.language FILE`` prints the better wording beside each habit."""
    now = {name: len(found) for name, found in language.counted().items()}
    there = frozenset(name for name, _ in language.files())

    assert language.excess(now, language.allowed(), there) == {}


@pytest.mark.parametrize(
    ("habit", "kind", "text"),
    [
        ("opens with who or what", "docstring", "What the process was started with."),
        ("opens with who or what", "page", "It restarts. Who has stayed up for 30 seconds begins again."),
        ("opens with who or what", "page", "| key | What it takes |"),
        ("opens with of", "docstring", "Of the end of each file."),
        ("opens with whether", "docstring", "Whether it runs."),
        ("people", "string", "cannot stop web: nobody knows its pid"),
        ("told", "comment", "the end is told to the Director"),
        ("what is", "page", "It removes what\nis left."),
        ("anew", "comment", "is read anew"),
        ("begun", "value", "Times that a task was begun."),
        ("had", "string", "no thread was to be had"),
        ("stands in", "comment", "a key that stands twice"),
        ("goes on", "docstring", "The restart goes on."),
        ("for want of", "page", "killed for want of memory"),
        ("of late", "comment", "a kill of late"),
        ("who", "docstring", "Kept for who asks."),
    ],
)
def test_a_habit_is_found(habit: str, kind: str, text: str) -> None:
    """Each of them, in the kinds of text in which it is one."""
    assert [one.habit for one in language.findings(iter([Text(kind, 1, text)]))] == [habit]


def test_every_habit_is_tried() -> None:
    """By an example above."""
    (mark,) = test_a_habit_is_found.pytestmark  # type: ignore[attr-defined]

    assert {habit for habit, _, _ in mark.args[1]} == set(HABITS)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("page", "What is a tier? One of four manifests."),
        ("page", "Run it as the user `nobody`; `what is` is a query."),
        ("page", "Of course it stops. Of these, two are files."),
        ("value", "Whether the link is up."),
        ("docstring", "Return the process that owns the socket, or None."),
        ("comment", "The bus is down: retry with a longer delay, for the caller that waits."),
        ("string", "cannot mount /a on /b: permission denied"),
    ],
)
def test_plain_english_passes(kind: str, text: str) -> None:
    """Questions, code spans and values of truth are no habit."""
    assert list(language.findings(iter([Text(kind, 1, text)]))) == []


def test_places_of_prose_are_known() -> None:
    """Docstrings, comments in one piece, strings where they are wanted. Neither headings nor code blocks."""
    module = '"""One."""\n\nLIMIT = 3\n"""Two."""\n# three\n# four\nlog("five of six", f"seven {LIMIT} eight")\n'

    assert [(one.kind, one.line, one.text) for one in language.python(module, with_strings=True)] == [
        ("docstring", 1, "One."),
        ("value", 4, "Two."),
        ("string", 7, "five of six"),
        ("string", 7, "seven … eight"),
        ("comment", 5, "three\nfour"),
    ]
    assert len(list(language.python(module, with_strings=False))) == 3
    assert list(language.findings(language.markdown("# What is it\n\n```\nwhat is\n```\n\nA tier.\n"))) == []
    assert [one.line for one in language.findings(language.markdown("# A\n\n```\nx\n```\n\nWhat it is.\n"))] == [7]
    assert [one.text for one in language.hashed("a: 1\n# one\n# two\nb: 2  # three\n")] == ["one\ntwo"]


def test_figures_only_fall() -> None:
    """A renamed file brings its figure along, a new one has none."""
    there = frozenset({"a", "b"})

    assert language.excess({"a": 3}, {"a": 3}, there) == {}
    assert language.excess({"a": 4}, {"a": 3}, there) == {"a": 1}
    assert language.excess({"a": 3, "b": 2}, {"a": 3, "gone": 2}, there) == {}
    assert language.excess({"a": 3, "b": 2}, {"a": 3, "gone": 1}, there) == {"b": 2}
    assert language.excess({"a": 2, "b": 1}, {"a": 3}, there) == {"b": 1}
