"""Tests POSIX extended regular expressions: matches, error messages and limits."""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import threading
import time
from concurrent import futures

import pytest
from hypothesis import assume, given
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
        ("^a)}$", "a)}", "a"),
        ("^.$", "\n", ""),
        ("a$", "a", "a\n"),
        ("\\<x\\>", "a x b", "axb"),
        ("^\\d\\.$", "d.", "1."),
        ("", "", None),
    ],
)
def test_posix_regex_uses_the_posix_dialect(pattern: str, matching: str, other: str | None) -> None:
    compiled = posix_regex.compiled(pattern)

    assert compiled.search(matching)
    assert other is None or not compiled.search(other)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("*a", "Invalid preceding regular expression"),
        ("a{", r"Unmatched \{"),
        ("a{2,1}", r"Invalid content of \{\}"),
        ("(a", r"Unmatched ( or \("),
        ("[a", "Unmatched [, [^, [:, [., or [="),
        ("[[:word:]]", "Invalid character class name"),
        ("[z-a]", "Invalid range end"),
        ("a\\", "Trailing backslash"),
        ("(a)\\1", "a back reference: matching it may take forever"),
        ("a\0b", "a null byte"),
    ],
)
def test_posix_regex_rejects_invalid_or_dangerous_patterns(pattern: str, complaint: str) -> None:
    """The errors are those of the C library, except for patterns that contain a null byte or need backtracking."""
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
        posix_regex.compiled(pattern)


def test_posix_regex_restores_the_locale_of_the_thread() -> None:
    libc = ctypes.CDLL(None)
    libc.uselocale.restype = ctypes.c_void_p

    def compiling() -> tuple[int, int]:
        before = libc.uselocale(None)
        posix_regex.Pattern("a")
        return before, libc.uselocale(None)

    with futures.ThreadPoolExecutor(1) as thread:  # a new thread begins with the process's locale
        before, after = thread.submit(compiling).result()
    assert before == after


def test_posix_regex_frees_the_memory_of_a_deleted_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    libc = posix_regex.library()
    free = libc.regfree

    def count(compiled: object) -> None:
        freed.append(compiled)
        free(compiled)

    monkeypatch.setattr(libc, "regfree", count)
    pattern = posix_regex.Pattern("a")
    assert freed == []
    del pattern

    gc.collect()
    assert len(freed) == 2


@pytest.mark.parametrize("pattern", ["(a+)+b", "(x+x+)+y", ".*a.*b.*c.*d.*e", "(a|aa|aaa)*b", "a.{900}c"])
def test_posix_regex_matches_hostile_texts_quickly(pattern: str) -> None:
    """For these patterns, a backtracking matcher would need years for the first string.

    The agent anchors patterns, because otherwise the C library would try each start position in turn, which takes a
    thousand times as long.
    """
    compiled = posix_regex.compiled(pattern)
    texts = ["a" * 4096, "x" * 4096, "ad" * 2048]

    for _ in range(300):
        assert not any(compiled.search(text) for text in texts)


def test_posix_regex_releases_the_gil_while_matching() -> None:
    """Other threads must be able to run during a slow match. This pattern is slow because the library tries each start
    position.
    """
    slow = posix_regex.Pattern("(a+)+b)")  # because of the unmatched ")", the pattern is not anchored
    is_enough, matches = threading.Event(), 0

    def match() -> None:
        nonlocal matches
        while not is_enough.is_set():
            slow.search("a" * 4096)
            matches += 1

    thread = threading.Thread(target=match)
    thread.start()
    for _ in range(100):
        time.sleep(0.0001)
    is_enough.set()
    thread.join()
    assert matches < 50


def matches_of_c_library(pattern: str, texts: list[str]) -> list[bool] | None:
    """Return whether the C library finds a match in each string, or None if it rejects the pattern."""
    library = ctypes.CDLL(None)
    compiled = ctypes.create_string_buffer(1024)
    if library.regcomp(compiled, pattern.encode(), REG_EXTENDED | REG_NOSUB):
        return None
    found = [library.regexec(compiled, text.encode(), 0, None, 0) == 0 for text in texts]
    library.regfree(compiled)
    return found


def matches_of_ours(pattern: str, texts: list[str]) -> list[bool] | None:
    """Return whether our implementation finds a match in each string, or None if it rejects the pattern.

    Patterns with back references are skipped, because our implementation rejects them.
    """
    try:
        compiled = posix_regex.compiled(pattern)
    except ValueError as refusal:
        assume("back reference" not in str(refusal))
        return None
    return [compiled.search(text) for text in texts]


PIECES = ("[:alpha:]", "[[:digit:]]", "[a-c]", "[=a=]", "[.-.]", "{1,2}", "{,2}", "{2,1}", "\\1", "\\<", "\\w", "\\.")
SIGNS = tuple("abc-][^$()|*+?{}1,\\.=:")


@pytest.mark.parametrize("pattern", ["\\\\1", "[\\1]", "[[:alpha:]\\1]"])
def test_posix_regex_digit_after_an_escaped_backslash_is_not_a_back_reference(pattern: str) -> None:
    assert posix_regex.compiled(pattern).search("\\1")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@given(
    st.lists(st.sampled_from(PIECES + SIGNS), max_size=9).map("".join),
    st.lists(st.text("abc-]1 {}()\\^$*.,=:", max_size=6), max_size=8),
)
def test_posix_regex_agrees_with_the_c_library(pattern: str, texts: list[str]) -> None:
    assert matches_of_ours(pattern, texts) == matches_of_c_library(pattern, texts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@pytest.mark.parametrize("name", "alnum alpha blank cntrl digit graph lower print punct space upper xdigit".split(" "))
def test_posix_regex_classes_match_the_c_library(name: str) -> None:
    characters = [chr(code) for code in range(1, 128)]

    assert matches_of_ours(f"[[:{name}:]]", characters) == matches_of_c_library(f"[[:{name}:]]", characters)
