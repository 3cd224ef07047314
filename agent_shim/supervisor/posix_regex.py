"""Compiles and matches extended regular expressions with the C library, as monit does.

``regcomp`` and ``regexec`` accept exactly monit's dialect, match in time proportional to the text, and release the
interpreter lock. Therefore, a job's log line or command line cannot block the agent, as it could with a backtracking
engine. Back references are rejected, because they make the library backtrack too. As in monit, the "C" locale is used,
in which a character is a byte.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import weakref
from typing import Final

# Constants from the C library's regex.h and locale.h.
_REG_EXTENDED: Final = 1
_REG_NOSUB: Final = 8
_LC_ALL_MASK: Final = 0x1FBF
_REGEX_BYTES: Final = 256
"""Size of the buffer for a ``regex_t``. A ``regex_t`` needs 64 bytes in glibc, and less than this buffer in every other
C library.
"""
_PIECE: Final = rb"(?s)\\.|\[\^?\]?(?:\[[:.=].*?[:.=]\]|[^\]])*\]?|."
"""Matches an escaped character, a bracket expression, or any other character of a pattern."""


class Pattern:
    """A compiled expression. Thread-safe."""

    def __init__(self, text: str) -> None:
        """Compile an expression. Raises ``ValueError`` with the C library's message."""
        self.text = text
        pattern = text.encode(errors="surrogateescape")
        if b"\0" in pattern:
            raise ValueError("a null byte")
        pieces = re.findall(_PIECE, pattern)
        if any(re.fullmatch(rb"\\[1-9]", piece) for piece in pieces):
            raise ValueError("a back reference: matching it may take forever")
        # Compile the original pattern first, so that an error refers to it.
        self._compile(pattern)
        # Anchor the pattern so that the text is read only once. Otherwise, the library would try one start position
        # after the other. A pattern with an unmatched ")" is not anchored, because the added "(" would pair with it.
        depths = list(itertools.accumulate((piece == b"(") - (piece == b")") for piece in pieces))
        if min(depths, default=0) >= 0:
            self._compile(b"^.*(" + pattern + b")")

    def _compile(self, pattern: bytes) -> None:
        """Compile ``pattern`` and store the result. Raises ``ValueError`` if the pattern is invalid."""
        compiled, libc = ctypes.create_string_buffer(_REGEX_BYTES), library()
        before = libc.uselocale(_c_locale())
        try:
            code = libc.regcomp(compiled, pattern, _REG_EXTENDED | _REG_NOSUB)
        finally:
            libc.uselocale(before)
        if code:
            why = ctypes.create_string_buffer(200)
            libc.regerror(code, compiled, why, len(why))
            raise ValueError(why.value.decode(errors="replace"))
        weakref.finalize(self, libc.regfree, compiled)
        self._compiled = compiled

    def search(self, text: str | bytes) -> bool:
        """Return True if the text matches. As in C, the text ends at a null byte."""
        raw = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
        return bool(library().regexec(self._compiled, raw, 0, None, 0) == 0)


@functools.lru_cache(maxsize=256)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern, or return it from the cache. Raises ``ValueError`` with the reason."""
    return Pattern(pattern)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the C library, and declare the functions that are used here."""
    libc = ctypes.CDLL(None)
    libc.newlocale.restype = libc.uselocale.restype = ctypes.c_void_p
    libc.newlocale.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    libc.uselocale.argtypes = (ctypes.c_void_p,)
    libc.regcomp.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    libc.regexec.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int)
    libc.regerror.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    libc.regfree.argtypes = (ctypes.c_char_p,)
    libc.regfree.restype = None
    return libc


@functools.cache
def _c_locale() -> int:
    """Return a handle for the "C" locale, which is never freed."""
    found: int = library().newlocale(_LC_ALL_MASK, b"C", None)
    return found
