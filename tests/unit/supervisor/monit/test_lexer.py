"""Tests splitting monit files into tokens, including cases that line-based patterns would get wrong."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_shim.supervisor.monit.lexer import (
    KEYWORDS,
    NO_NAME,
    NOISE,
    SYNONYMS,
    UNCLOSED,
    lex,
    unescape,
)


def words(text: str) -> list[str]:
    """Return the tokens in ``text``: keywords as they are, values as ``KIND:value``, and no end token."""
    return [f"{token.kind}:{token.value}" if token.value else token.kind for token in lex(text)[:-1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("IF Failed pOrT 80", ["if", "failed", "port", "NUMBER:80"]),
        ("does not exist", ["not", "exist"]),
        ("3 restarts within 5 cycles", ["NUMBER:3", "restart", "NUMBER:5", "cycle"]),
        ("a;b,(c)\t\r\n", ["STRING:a", "b", "STRING:c"]),
        ("set # everything\ndaemon", ["set", "daemon"]),
        ("set \\\ndaemon", ["set", "daemon"]),
        ("set # no line end", ["set", "STRING:#", "STRING:no", "STRING:line", "STRING:end"]),
        ("1.5 1. .5 1.2.3 10x", ["REAL:1.5", "STRING:1.", "STRING:.5", "STRING:1.2.3", "STRING:10x"]),
        ("500 Mb 500Mb 80%", ["NUMBER:500", "mb", "STRING:500Mb", "NUMBER:80", "%"]),
        (">= >5 a!=b", ["STRING:>=", "STRING:>5", "STRING:a", "!=", "b"]),
        ("a@b a@b@c", ["MAIL:a@b", "MAIL:a@b", "@", "STRING:c"]),
        ("/a/b / a:b", ["PATH:/a/b", "PATH:/", "STRING:a", ":", "b"]),
        ('"/a b" "a/b" "/a\nb"', ["PATH:/a b", "STRING:a/b", "STRING:/a\nb"]),
        ("'it is' \"it's\"", ["STRING:it is", "STRING:it's"]),
        ('"abc\\" x', ["STRING:abc\\", "STRING:x"]),
        ('set "x', ["set", f"BAD:{UNCLOSED}", "STRING:x"]),
        ("loadavg loadavg (5min) loadavg(15) loadavg(1m)", ["loadavg1", "loadavg5", "loadavg15", "loadavg1"]),
        ("loadavg (7) loadavgs", ["loadavg1", "NUMBER:7", "STRING:loadavgs"]),
        (
            "cpu usage (user) cpu(sys) cpu ( wait ) cpu () cpu",
            ["cpu user", "cpu system", "cpu wait", "cpu user", "cpu"],
        ),
        ("url http://a:b@c/d;e) x", ["url", "URL:http://a:b@c/d;e)", "STRING:x"]),
        ("http://a", ["http", ":", "PATH://a"]),
        ("from: a@b subject: x y\nmessage: z\n}", ["FROM:a@b", "SUBJECT:x y", "MESSAGE:z", "}"]),
        ("include /a/*.rc if", ["INCLUDE:/a/*.rc", "if"]),
        ("include\n '/a b' if", ["INCLUDE:/a b", "if"]),
        ("include", []),
    ],
)
def test_lexer_splits_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('start program "/a b"', ["start", "STRING:/a", "STRING:b"]),
        ('start program = "/a b" c', ["start", "STRING:/a", "STRING:b", "STRING:c"]),
        ('start = "/a"', ["start", "STRING:/a"]),
        ('start program="/a b"', ["start", "STRING:program=", "PATH:/a b"]),
        ('start program\n"/a b"', ["start", "PATH:/a b"]),
        ("start program '/a b'", ["start", "PATH:/a b"]),
        ("stop program /a b", ["stop", "PATH:/a", "b"]),
        ('EXECUTE "/a"', ["exec", "STRING:/a"]),
        (
            "stop \"/a -c 'b  c' d'e f' ''\"",
            ["stop", "STRING:/a", "STRING:-c", "STRING:b  c", "STRING:d'e", "STRING:f'", "STRING"],
        ),
        ("stop \"/a 'b\\tc' d\\te #f\"", ["stop", "STRING:/a", "STRING:b\tc", "STRING:d\\te", "STRING:#f"]),
        ('stop "/a\n  b"', ["stop", "STRING:/a", "STRING:b"]),
        ('stop "/a \'b" \'c" d', ["stop", "STRING:/a", 'STRING:b" ', "STRING:c", "STRING:d"]),
        ('stop "/a \' b"', ["stop", "STRING:/a", f"BAD:{UNCLOSED}", "STRING:b"]),
        ('stop "/a', ["stop", "STRING:/a"]),
    ],
)
def test_lexer_splits_program_arguments(text: str, expected: list[str]) -> None:
    """A command is split into arguments only if it is in double quotes on the same line as the keyword. Within the
    double quotes, a single quote has a special meaning only at the start of an argument.
    """
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("check process if with pidfile", ["check process", "NAME:if", "pidfile"]),
        ("check x path", ["check process", "NAME:x", "path"]),
        ('CHECK Device "a" path', ["check filesystem", "NAME:a", "path"]),
        ("check fileserver", ["check file", "NAME:server"]),
        ("check\nfile x", ["STRING:check", "STRING:file", "STRING:x"]),
        ("check process\n a", ["check process", "NAME:process", "STRING:a"]),
        (
            'check host "a c"',
            ["check host", f"BAD:{NO_NAME}", "STRING:a", "STRING:c", f"BAD:{UNCLOSED}"],
        ),
        ("check host %", ["check host", "%"]),
        ("check system", ["check system"]),
        ("group vcap#x", ["group", "NAME:vcap#x"]),
        ("group 'if'", ["group", "NAME:if"]),
        ("group \nvcap", ["group", "NAME:vcap"]),
        ("group \n vcap", ["group", " ", "STRING:vcap"]),
        ("group\nvcap", ["STRING:group", "STRING:vcap"]),
    ],
)
def test_lexer_reads_any_word_after_check_and_group_as_a_name(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("depends on a, b,c", ["depends", "NAME:a", "NAME:b", "NAME:c"]),
        ("depend a\n,b if", ["depends", "NAME:a", "NAME:b", "if"]),
        ("depends on a,\n b\nif", ["depends", "NAME:a", "NAME:b", "if"]),
        ("depends on a\n\n,b", ["depends", "NAME:a", "b"]),
        ("depends on a b", ["depends", "NAME:a", "b"]),
        ("depends on a # x\nif", ["depends", "NAME:a", "if"]),
        ("depends on a \n", ["depends", "NAME:a"]),
        ("depends once", ["depends", "NAME:ce"]),
        ('depends on "a"', ["depends", "STRING:a"]),
        ("depends\non a", ["STRING:depends", "STRING:a"]),
    ],
)
def test_lexer_reads_dependency_lists(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\rd\ e\\f", "a\nb\tc\rd e\\f"),
        (r"\x \" \\n", r"\x \" " + "\\n"),
        (r"\0x41\0x7a", "Az"),
        (r"\0x00 \0xZZ \0x4", r"\0x00 \0xZZ \0x4"),
        (r"\0xc3\0xa9", "\udcc3\udca9"),
    ],
)
def test_lexer_decodes_only_known_escapes(text: str, expected: str) -> None:
    assert unescape(text) == expected


def test_lexer_records_token_offsets() -> None:
    text = "set  daemon\n'x'"

    assert [text[token.start : token.end] for token in lex(text)] == ["set", "daemon", "'x'", ""]
    text = 'start "/x" check host %z'
    assert [text[token.start : token.end] for token in lex(text)] == ["start ", "/x", "check host", "%", "z", ""]


SPELLINGS = [(SYNONYMS.get(word, word), "", word) for word in sorted((KEYWORDS | set(SYNONYMS)) - {"include"})]
BLANKS = st.sampled_from(
    ["\n", "\n\t", "\r\n", "\n; ", ' # it\'s "any" text\n', "\n(", "\n) ", "\n\\\n", *(f"\n{word} " for word in NOISE)]
)
"""Separators between words. Each contains a line break, because a quote on the same line as ``exec`` would begin its
arguments.
"""

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\"'\\\n"))
SPELLED = st.one_of(
    st.sampled_from(SPELLINGS),
    st.sampled_from(SPELLINGS).map(lambda found: (found[0], "", found[2].upper())),
    st.from_regex("[0-9]+", fullmatch=True).map(lambda text: ("NUMBER", text, text)),
    st.from_regex(r"[0-9]+\.[0-9]+", fullmatch=True).map(lambda text: ("REAL", text, text)),
    st.from_regex("[a-z.]+@[a-z.]+", fullmatch=True).map(lambda text: ("MAIL", text, text)),
    PLAIN.map(lambda text: ("PATH", f"/{text}", f"'/{text}'")),
    PLAIN.filter(lambda text: text[:1] != "/").map(lambda text: ("STRING", text, f'"{text}"')),
)
"""Generates a word as a tuple of its token kind, its value, and its spelling in the file."""


@given(st.lists(st.tuples(SPELLED, BLANKS)))
@settings(max_examples=50)
def test_lexer_recognizes_words_in_any_case_and_spacing(spelled: list[tuple[tuple[str, str, str], str]]) -> None:
    text = "".join(word + blank for (_, _, word), blank in spelled)

    assert [token[:2] for token in lex(text)] == [*(found[:2] for found, _ in spelled), ("END", "")]


@given(st.text())
def test_lexer_splits_any_text_into_ordered_tokens(text: str) -> None:
    tokens = lex(text)

    assert tokens[-1].kind == "END"
    assert all(before.end <= after.start for before, after in pairwise(tokens))
