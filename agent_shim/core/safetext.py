"""Escapes untrusted text for a terminal, a log line, JSON or a metric label.

Jobs choose the text of log lines, program output, file names and process names. In such text, an escape sequence could
control the reader's terminal, a line break could forge a line, a bidirectional override could disguise text, and a lone
surrogate (a byte of invalid UTF-8) could not be encoded. Each such character is replaced by an escape sequence with its
code point.
"""

from __future__ import annotations

from typing import Any, Final

MAX_LABEL_CHARS: Final = 200


def line(text: str) -> str:
    r"""Return the text as one line for terminals and logs, with unsafe characters escaped like ``\u001b``."""
    return text if text.isprintable() else _escaped(text, "")


def lines(text: str) -> str:
    """Return multi-line text with unsafe characters escaped. Line breaks and tabs are preserved."""
    return text if text.isprintable() else _escaped(text, "\n\t")


def _escaped(text: str, kept: str) -> str:
    return "".join(each if each.isprintable() or each in kept else escape(each) for each in text)


def escape(character: str) -> str:
    """Return a character as a JSON escape sequence. This form of escape is used for all output, because it keeps a JSON
    document valid.
    """
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))


def label(text: str) -> str:
    """Return the first ``MAX_LABEL_CHARS`` characters of the text as a label value on one line. The value can be
    longer, because unsafe characters are escaped.
    """
    return line(text[:MAX_LABEL_CHARS])


def value(found: Any) -> Any:
    """Escape every string in a JSON value, including keys, so that an agent's answer can be displayed safely."""
    match found:
        case str():
            return line(found)
        case list() | tuple():
            return [value(each) for each in found]
        case dict():
            return {value(key): value(each) for key, each in found.items()}
    return found
