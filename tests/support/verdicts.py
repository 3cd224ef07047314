"""Yields mutated documents with the Go agent's verdicts on them, which are recorded in ``go_verdicts.json``.

The verdicts were recorded with ``json.Unmarshal`` into ``settings.Settings`` and ``settings.UpdateSettings``, and with
``agent/action/runner.go``, at the cloudfoundry/bosh-agent commit named in the file. Each row is about one member of a
document and contains one letter for each value that was tried for that member.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TABLE: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("go_verdicts.json").read_text())
ABSENT: Final = "<absent>"
"""Stands for a value if the member is to be removed."""

VERDICTS: Final = {"o": "ok", "r": "refused", "d": "dropped", "u": "unknown", "p": "panic"}


def mutated(document: Any, path: list[str | int], value: Any) -> Any:
    """Return ``document`` with ``value`` at ``path``."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    at = changed
    for step in path[:-1]:
        at = at[step]
    if value == ABSENT:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


def cases(kind: str, name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield each mutated document with a description of the change and the Go agent's verdict."""
    part = TABLE[kind][name]
    for path, letters in part["verdicts"].items():
        for value, letter in zip(TABLE["values"], letters, strict=True):
            if letter != "-":
                steps = json.loads(path)
                yield f"{name} {path} = {value!r}", mutated(part["document"], steps, value), VERDICTS[letter]
