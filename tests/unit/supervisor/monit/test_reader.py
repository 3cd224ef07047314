"""Tests the token reader and its errors."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.monit.reader import Reader


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1 column 1: found the end of the file"),
        ("set\n", "line 1 column 1: found 'set'"),
        ("\nset", "line 2 column 1: found 'set'"),
        ("\n\n  set", "line 3 column 3: found 'set'"),
        ("é\t'a\nb'", "line 1 column 1: found 'é'"),
        ("# x\r\n 'a\nb'", "line 2 column 2: found ''a...'"),
        ("x" * 50, f"line 1 column 1: found '{'x' * 40}...'"),
        ("#x", "line 1 column 1: found a comment without a line end"),
        ("'x", "line 1 column 1: found a quote that is not closed"),
    ],
)
def test_parser_error_contains_the_line_column_and_token(text: str, expected: str) -> None:
    assert str(Reader(text).error("b")) == f"{expected}, expected b"


def test_reader_returns_the_end_token_repeatedly() -> None:
    reader = Reader("a")

    assert [reader.second.kind, reader.skip().kind, reader.skip().kind, reader.second.kind] == [
        "END",
        "STRING",
        "END",
        "END",
    ]


def test_reader_removes_includes_between_any_tokens() -> None:
    reader = Reader("set include /a daemon include /b")

    assert [token.value for token in reader.includes] == ["/a", "/b"]
    assert [reader.skip().kind for _ in range(3)] == ["set", "daemon", "END"]
