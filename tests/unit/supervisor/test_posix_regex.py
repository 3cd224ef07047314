"""Extended regular expressions: what the C library says, and the same matches."""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import threading
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
def test_dialect(pattern: str, matching: str, other: str | None) -> None:
    """It differs from Python's in brackets, anchors and escapes."""
    compiled = posix_regex.compiled(pattern)

    assert compiled.search(matching)
    assert other is None or not compiled.search(other)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("*a", "Invalid preceding regular expression"),
        ("a{", r"Unmatched \{"),
        ("a{2,1}", r"Invalid content of \{\}"),
        ("x" * 5000, "more than 4096 bytes"),
        ("(a", r"Unmatched ( or \("),
        ("[a", "Unmatched [, [^, [:, [., or [="),
        ("[[:word:]]", "Invalid character class name"),
        ("[z-a]", "Invalid range end"),
        ("a\\", "Trailing backslash"),
        ("(a)\\1", "a back reference: matching it may take forever"),
        ("a\0b", "a null byte"),
    ],
)
def test_refusals(pattern: str, complaint: str) -> None:
    """In the words of the library, or for what the library would not survive."""
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
        posix_regex.compiled(pattern)


def test_a_pattern_of_the_largest_size_is_compiled() -> None:
    assert not posix_regex.Pattern("x" * posix_regex.MAX_PATTERN_BYTES).search("x")


def test_the_locale_of_the_thread_stays() -> None:
    """It is C only while a pattern is compiled."""
    libc = ctypes.CDLL(None)
    libc.uselocale.restype = ctypes.c_void_p

    def compiling() -> tuple[int, int]:
        before = libc.uselocale(None)
        posix_regex.Pattern("a")
        return before, libc.uselocale(None)

    with futures.ThreadPoolExecutor(1) as thread:  # new: its locale is that of the process
        before, after = thread.submit(compiling).result()
    assert before == after


def test_memory_of_the_library_is_given_back_with_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_hostile_texts_take_no_longer_than_others(pattern: str) -> None:
    """A backtracking matcher needs years for the first, and the library, left to try each place, a thousand times more.

    A hundred thousand texts would take that a day.
    """
    compiled = posix_regex.compiled(pattern)
    texts = ["a" * 4096, "x" * 4096, "ad" * 2048]

    for _ in range(300):
        assert not any(compiled.search(text) for text in texts)


def test_a_text_is_searched_to_its_bound() -> None:
    """A command line of 450 KB is cut as monit cuts it."""
    assert posix_regex.compiled("end").search("x" * 4000 + "end")
    assert not posix_regex.compiled("end").search("x" * 450_000 + "end")


def test_the_lock_of_the_interpreter_is_free_meanwhile() -> None:
    """Others run while a thread matches: here for as long as the library is left to try each place."""
    slow = posix_regex.Pattern("(a+)+b)")  # the ")" that closes nothing keeps it from being told where to begin
    done = threading.Event()

    def match() -> None:
        for _ in range(5):
            slow.search("a" * posix_regex.MAX_TEXT_BYTES)
        done.set()

    thread = threading.Thread(target=match)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


def c_library(pattern: str, texts: list[str]) -> list[bool] | None:
    """Which of the texts ``regcomp`` and ``regexec`` find. None if the pattern is refused."""
    library = ctypes.CDLL(None)
    compiled = ctypes.create_string_buffer(1024)
    if library.regcomp(compiled, pattern.encode(), REG_EXTENDED | REG_NOSUB):
        return None
    found = [library.regexec(compiled, text.encode(), 0, None, 0) == 0 for text in texts]
    library.regfree(compiled)
    return found


def found_by_ours(pattern: str, texts: list[str]) -> list[bool] | None:
    """The same of our own. Skips back references, which the library takes."""
    try:
        compiled = posix_regex.compiled(pattern)
    except ValueError as refusal:
        assume("back reference" not in str(refusal))
        return None
    return [compiled.search(text) for text in texts]


PIECES = ("[:alpha:]", "[[:digit:]]", "[a-c]", "[=a=]", "[.-.]", "{1,2}", "{,2}", "{2,1}", "\\1", "\\<", "\\w", "\\.")
SIGNS = tuple("abc-][^$()|*+?{}1,\\.=:")


@pytest.mark.parametrize("pattern", ["\\\\1", "[\\1]", "[[:alpha:]\\1]"])
def test_a_digit_after_a_plain_backslash_is_no_back_reference(pattern: str) -> None:
    assert posix_regex.compiled(pattern).search("\\1")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@given(
    st.lists(st.sampled_from(PIECES + SIGNS), max_size=9).map("".join),
    st.lists(st.text("abc-]1 {}()\\^$*.,=:", max_size=6), max_size=8),
)
def test_agrees_with_the_c_library(pattern: str, texts: list[str]) -> None:
    """The same patterns are refused, and the others find the same."""
    assert found_by_ours(pattern, texts) == c_library(pattern, texts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library speaks another dialect")
@pytest.mark.parametrize("name", "alnum alpha blank cntrl digit graph lower print punct space upper xdigit".split(" "))
def test_classes_equal_the_c_library(name: str) -> None:
    """For every character of ASCII."""
    characters = [chr(code) for code in range(1, 128)]

    assert found_by_ours(f"[[:{name}:]]", characters) == c_library(f"[[:{name}:]]", characters)
