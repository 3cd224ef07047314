"""Extended regular expressions: what the C library says, and the same matches."""

from __future__ import annotations

import ctypes
import platform
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_shim.supervisor import posix_regex

REG_EXTENDED, REG_NOSUB = 1, 8


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("rpc.statd", "/sbin/rpc.statd -F", "rpcstatd"),
        ("^/bin/x( |$)", "/bin/x -a", "/usr/bin/x"),
        ("a|b$", "xb", "xby"),
        ("^a{10}$", "a" * 10, "a" * 9),
        ("^a{,2}$", "", "aaa"),
        ("^a*+{2}b$", "aab", "ac"),
        ("[]x-]+$", "a-", "a"),
        ("[^a\\]", "b", "a\\"),
        ("^[[:digit:][:space:]]{2,3}$", "1 2", "1a"),
        ("^(ab)*\\1$", "abab", "aba"),
        ("^a)}$", "a)}", "a"),
        ("^.$", "\n", ""),
        ("a$", "a", "a\n"),
        ("\\<x\\>", "a x b", "axb"),
        ("^\\d\\.$", "d.", "1."),
        ("", "", None),
    ],
)
def test_dialect(pattern: str, matching: str, other: str | None) -> None:
    """It differs from Python's in brackets, anchors and escapes."""
    compiled = posix_regex.compiled(pattern)

    assert compiled.search(matching)
    assert other is None or not compiled.search(other)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("*a", "nothing to repeat before '*'"),
        ("a|+b", "nothing to repeat before '+'"),
        ("^*", "nothing to repeat before '*'"),
        ("a{", "a broken interval after '{'"),
        ("a{x}", "a broken interval after '{'"),
        ("a{2,1}", "an interval from 2 to 1"),
        ("a{99999}", "more than 32767 repetitions"),
        ("a{9999999}", "more than 32767 repetitions"),
        ("(a", "'(' without ')'"),
        ("[a", "'[' without ']'"),
        ("[[:alpha:", "'[' without ']'"),
        ("[[:word:]]", "no class 'word'"),
        ("[[=ab=]]", "no class 'ab'"),
        ("[[.dash.]]", "no character 'dash'"),
        ("[z-a]", "a range from 'z' to 'a'"),
        ("[a-b-c]", "a range without a beginning"),
        ("[a-[:digit:]]", "a class at the end of a range"),
        ("a\\", "a backslash at the end"),
        ("(a\\1)", "'\\1' without a group before it"),
        ("(" * 60 + ")" * 60, "more than 50 parentheses inside each other"),
    ],
)
def test_refusals(pattern: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
        posix_regex.compiled(pattern)


def c_library(pattern: str, texts: list[str]) -> list[bool] | None:
    """Which of the texts ``regcomp`` and ``regexec`` find; None if the pattern is refused."""
    library = ctypes.CDLL(None)
    compiled = ctypes.create_string_buffer(1024)
    if library.regcomp(compiled, pattern.encode(), REG_EXTENDED | REG_NOSUB):
        return None
    found = [library.regexec(compiled, text.encode(), 0, None, 0) == 0 for text in texts]
    library.regfree(compiled)
    return found


def found_by_ours(pattern: str, texts: list[str]) -> list[bool] | None:
    """The same of our own."""
    try:
        compiled = posix_regex.compiled(pattern)
    except ValueError:
        return None
    return [compiled.search(text) is not None for text in texts]


PIECES = ("[:alpha:]", "[[:digit:]]", "[a-c]", "[=a=]", "[.-.]", "{1,2}", "{,2}", "{2,1}", "\\1", "\\<", "\\w", "\\.")
SIGNS = tuple("abc-][^$()|*+?{}1,\\.=:")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES + SIGNS), max_size=9).map("".join),
    st.lists(st.text("abc-]1 {}()\\^$*.,=:", max_size=6), max_size=8),
)
def test_agrees_with_the_c_library(pattern: str, texts: list[str]) -> None:
    """The same patterns are refused, and the others find the same."""
    assert found_by_ours(pattern, texts) == c_library(pattern, texts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@pytest.mark.parametrize("name", "alnum alpha blank cntrl digit graph lower print punct space upper xdigit".split(" "))
def test_classes_are_those_of_the_c_library(name: str) -> None:
    """For every character of ASCII."""
    characters = [chr(code) for code in range(1, 128)]

    assert found_by_ours(f"[[:{name}:]]", characters) == c_library(f"[[:{name}:]]", characters)
