"""Generates the list of attacks and their tests for docs/attacks.md from the ``attack`` markers in the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from tests.support.source import ROOT

ATTACKERS: Final[Mapping[str, str]] = {
    "a job": "A job, as the user `vcap`",
    "a bpm process": "A bpm process",
    "root in a container": "Root in a container",
    "another agent": "Another agent on the bus",
    "a neighbour": "A neighbour on the network",
    "a blobstore": "A blobstore",
    "text from a job": "Text that a job writes",
    "an SSH user": "A user created by `bosh ssh`",
    "a reader": "A reader of logs, metrics and replies",
    "a request": "Errors in requests",
    "settings": "Errors in settings",
    "a worker": "Worker defects",
}
"""Maps each phrase that can begin an attack's description to the heading of the attack's section."""


@cache
def attacks() -> Mapping[str, set[str]]:
    """Map each attack to the names of the tests and chaos cases that perform it.

    The source files are parsed, not imported.
    """
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, attack in marks_in(path.read_text()):
            found.setdefault(attack, set()).add(name)
    return found


def marks_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each ``attack`` marker in ``source``: the name of the test or case, and the attack.

    Raises ``ValueError`` if the marker's argument is not a string literal.
    """
    if "attack" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in (each for each in node.decorator_list if isinstance(each, ast.Call)):
            if ast.unparse(call.func) == "pytest.mark.attack":
                yield node.name, _text(call.args[0])
            elif ast.unparse(call.func) == "case":
                yield from ((_text(call.args[0]), _text(word.value)) for word in call.keywords if word.arg == "attack")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"line {node.lineno}: the attack must be written out, because no test is run here")


def attacker(attack: str) -> str:
    """Return the entry of ``ATTACKERS`` that ``attack`` begins with, or ""."""
    return next((words for words in ATTACKERS if re.match(rf"{words}\b", attack)), "")


def sections() -> str:
    """Return the attacks grouped by attacker, each with its tests and cases."""
    lines: list[str] = []
    for words, heading in ATTACKERS.items():
        lines += [f"### {heading}", ""]
        for attack, names in sorted(attacks().items()):
            if attacker(attack) == words:
                shown = (f"`{name}`" if name.startswith("test_") else name for name in sorted(names))
                lines.append(f"- {attack[0].upper()}{attack[1:]}: {', '.join(shown)}")
        lines.append("")
    return "\n".join(lines)
