"""Formats each YAML error on one line, with the position in the file."""

from __future__ import annotations

import yaml


def in_a_line(exc: Exception) -> str:
    """Return an error message on one line. PyYAML's own message has several lines and contains "<unicode string>"
    instead of the file's name.
    """
    if isinstance(exc, yaml.MarkedYAMLError) and (mark := exc.problem_mark or exc.context_mark):
        return f"line {mark.line + 1} column {mark.column + 1}: {exc.problem or exc.context}"
    if isinstance(exc, yaml.reader.ReaderError):
        return f"character {exc.position + 1}: {exc.reason}"
    return str(exc)
