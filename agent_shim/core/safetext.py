"""Texts of others made safe to show: for a terminal, a line of a log, JSON, a label of a metric.

Log lines, last words, names of files and processes, titles: a job chooses them. An escape sequence in one speaks to the
terminal of whoever reads it, a line break forges a line, a bidirectional override shows another text than is there,
and a lone surrogate (a byte that was no UTF-8) ends whatever encodes it. Each such character is shown by its number.
"""

from __future__ import annotations

TYPE_CHECKING = False  # without loading ``typing``: each call of bpm loads this
if TYPE_CHECKING:
    from typing import Any, Final

MAX_LABEL_CHARS: Final = 200


def line(text: str) -> str:
    r"""The text in one line, for terminals and logs: what is no printable character as ``\u001b``."""
    return text if text.isprintable() else _escaped(text, "")


def lines(text: str) -> str:
    """The same for a text of several lines, whose line breaks and tabs stay."""
    return text if text.isprintable() else _escaped(text, "\n\t")


def _escaped(text: str, kept: str) -> str:
    return "".join(each if each.isprintable() or each in kept else _number(each) for each in text)


def _number(character: str) -> str:
    """As JSON writes it: the text of a JSON document stays one."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))


def label(text: str) -> str:
    """The text as the value of a label: in one line, and no longer than ``MAX_LABEL_CHARS``."""
    return line(text[:MAX_LABEL_CHARS])


def value(found: Any) -> Any:
    """A value of JSON with each text in it, keys too, made a ``line``: what an agent answers, before it is shown."""
    match found:
        case str():
            return line(found)
        case list() | tuple():
            return [value(each) for each in found]
        case dict():
            return {value(key): value(each) for key, each in found.items()}
    return found
