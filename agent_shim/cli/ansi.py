"""Formats text with colours for terminals, and without colours for pipes."""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from collections.abc import Callable
from itertools import chain
from typing import Final, TextIO

Paint = Callable[[str, str], str]
"""A function that colours text. The colour is a key of ``CODES``, or "" for none."""

BEGIN_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
"""Switches to the alternate screen, which preserves the scrollback, and hides the cursor."""
END_SCREEN: Final = "\x1b[?25h\x1b[?1049l"
_COLOUR: Final = re.compile("(\x1b\\[[0-9;]*m)")
CODES: Final = {"good": "32", "limited": "33", "wrong": "1;31", "faint": "2", "strong": "1"}


def is_for_people(stream: TextIO) -> bool:
    """Return True if ``stream`` is a terminal that supports colours and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain(text: str, colour: str) -> str:  # noqa: ARG001 - has the type Paint
    """Return the text unchanged. This is the ``Paint`` function for outputs without colours."""
    return text


def coloured(text: str, colour: str) -> str:
    """Return ``text`` between the ECMA-48 sequences for ``colour``, or unchanged if ``colour`` is ""."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if colour else text


def paint_for(stream: TextIO) -> Paint:
    """Return the paint function for ``stream``: colours for a terminal, plain text otherwise."""
    return coloured if is_for_people(stream) else plain


def screen(page: str) -> str:
    """Return the sequence that fills the screen with a page. To avoid flickering, it does not clear the screen first,
    but overwrites each line and erases the rest of it.
    """
    return "\x1b[H" + "\x1b[K\r\n".join(page.splitlines()) + "\x1b[K\x1b[J"


def width(text: str) -> int:
    """Return the number of terminal columns that a string occupies. The string must not contain colour sequences. A
    wide character takes two columns, and a combining character takes none.
    """
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def wrapped(text: str, columns: int, indent: str) -> list[str]:
    """Break the text into indented lines of at most ``columns``, where 0 means no limit. Words are broken only if they
    are longer than a line. On a very narrow terminal, lines may be too long.

    Colour sequences take no columns.
    """
    if not columns:
        return [f"{indent}{text}"]
    lines, room = [indent], max(columns - len(indent), 20)
    # A coloured word is never broken, because the break could be in the middle of a colour sequence.
    words = [[word] if _COLOUR.search(word) else textwrap.wrap(word, room) for word in text.split()]
    for word in chain.from_iterable(words):
        longer = lines[-1] + word if lines[-1] == indent else f"{lines[-1]} {word}"
        if lines[-1] == indent or width(_COLOUR.sub("", longer)) <= columns:
            lines[-1] = longer
        else:
            lines.append(indent + word)
    return lines


def clipped(line: str, columns: int) -> str:
    """Return the line, cut off with an ellipsis if it is too long.

    Colour sequences take no columns. If there are any before the cut, the colour is reset at the end of the line.
    """
    if width(_COLOUR.sub("", line)) <= columns:
        return line
    kept, room = "", columns - 1
    for number, part in enumerate(_COLOUR.split(line)):
        if number % 2:  # re.split returns the colour sequences at odd positions
            kept += part
            continue
        for char in part:
            if (room := room - width(char)) < 0:
                return f"{kept}…" + ("\x1b[0m" if _COLOUR.search(kept) else "")
            kept += char
    return kept  # never reached, because the line is too long
