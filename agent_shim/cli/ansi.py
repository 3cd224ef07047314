"""Colours, for people at a terminal; whoever reads a pipe gets plain text. Pure but for the question who reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TextIO

Paint = Callable[[str, str], str]
"""Gives a text a colour of ``CODES``."""

CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
"""To the upper left corner, and nothing is shown."""
CODES: Final = {"good": "32", "limited": "33", "wrong": "1;31", "faint": "2", "strong": "1"}


def is_for_people(stream: TextIO) -> bool:
    """True for a terminal, unless its user wants no colours (NO_COLOR) or it has none."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain(text: str, colour: str) -> str:  # noqa: ARG001 - a Paint
    """The text as it is."""
    return text


def coloured(text: str, colour: str) -> str:
    """The text between the sequences of ECMA-48; without a colour ("") as it is."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if colour else text


def paint_for(stream: TextIO) -> Paint:
    """What suits who reads ``stream``."""
    return coloured if is_for_people(stream) else plain
