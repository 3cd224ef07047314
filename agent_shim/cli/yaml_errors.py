"""Formats YAML errors in one line, with the position in the file."""

from __future__ import annotations

import yaml


def in_a_line(exc: Exception) -> str:
    """Return the text of an error in one line. PyYAML's own text has several lines and calls every file a string."""
    if isinstance(exc, yaml.MarkedYAMLError) and (mark := exc.problem_mark or exc.context_mark):
        return f"line {mark.line + 1} column {mark.column + 1}: {exc.problem or exc.context}"
    if isinstance(exc, yaml.reader.ReaderError):
        return f"character {exc.position + 1}: {exc.reason}"
    return str(exc)
