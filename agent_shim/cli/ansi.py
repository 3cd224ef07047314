"""Colours for terminals, plain text for pipes. Pure except for the test of the stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TextIO

Paint = Callable[[str, str], str]
"""Add a colour of ``CODES`` to a text."""

CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
"""Clears the screen and moves the cursor to the upper left corner."""
CODES: Final = {"good": "32", "limited": "33", "wrong": "1;31", "faint": "2", "strong": "1"}


def is_for_people(stream: TextIO) -> bool:
    """True for a terminal with colours, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain(text: str, colour: str) -> str:  # noqa: ARG001 - a Paint
    """The unchanged text."""
    return text


def coloured(text: str, colour: str) -> str:
    """The text between sequences of ECMA-48; unchanged for the colour ""."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if colour else text


def paint_for(stream: TextIO) -> Paint:
    """The paint function for ``stream``: colours for a terminal, else plain text."""
    return coloured if is_for_people(stream) else plain
