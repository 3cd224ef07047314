"""The source of the project as syntax trees, for the tests that read it.

A module is known by its dotted name below ``agent_shim``: ``host.files``; a package by its own: ``supervisor``; the
top package is ``""``. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "agent_shim"
DEMO = "demo"
FLOORS: Mapping[str, int] = {
    "__main__": 7,
    "cli": 7,
    "daemon": 6,
    "edges": 5,
    "actions": 4,
    "services": 3,
    "supervisor": 3,
    "bulk": 2,
    "host": 1,
    "core": 0,
    "": 0,
}
"""The floor of each package. Docs/architecture.md shows the table."""
NOT_OURS = frozenset({".git", ".guest", ".mutate", ".venv", ".tools", ".hypothesis", "__pycache__", "dist", "build"})


@dataclass(frozen=True, eq=False)
class Module:
    """One module: its name below the package, its text, its tree."""

    name: str
    text: str
    is_package: bool = False
    tree: ast.Module = field(init=False)
    nodes: list[ast.AST] = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.text))
        object.__setattr__(self, "nodes", list(ast.walk(self.tree)))
        object.__setattr__(self, "lines", self.text.splitlines())

    @property
    def package(self) -> str:
        """The package whose parts it reaches by a leading dot."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def top(self) -> str:
        """The first part of its name: what the floor table speaks of."""
        return self.name.partition(".")[0]


@cache
def modules() -> Mapping[str, Module]:
    """Every module of the agent, by name, without the demo, which plays the Director beside it."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        if parts[0] == DEMO:
            continue
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path.read_text(), is_package)
    return found


def texts() -> Iterator[tuple[str, str]]:
    """Every text file of the project with its name. Binary files are passed over."""
    for directory, below, files in os.walk(ROOT):
        below[:] = [
            name
            for name in below
            if name not in NOT_OURS and not name.startswith(".venv-") and not name.endswith(("_cache", ".egg-info"))
        ]
        for name in files:
            path = Path(directory, name)
            raw = path.read_bytes() if path.is_file() else b""
            if b"\0" not in raw:
                yield str(path.relative_to(ROOT)), raw.decode(errors="replace")


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Every import with its line, wherever it stands: ``nats.errors``, ``agent_shim.host.files.write_atomic``.

    A name taken from a module is reported below it, because it may be a module itself.
    """
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            for alias in node.names:
                yield f"{origin}.{alias.name}", node.lineno


@cache
def uses(module: Module) -> Sequence[tuple[str, int]]:
    """Every name that leads outside the module, as the full name behind its aliases, with its line.

    ``import os as o; o.kill`` and ``from os import kill`` both give ``os.kill``; builtins keep their own name.
    """
    return list(_uses(module))


def _uses(module: Module) -> Iterator[tuple[str, int]]:
    aliases = {name: name for name in dir(builtins)}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{_origin(module, node)}.{alias.name}"
    yield from imports(module)
    parts = {id(node.value) for node in module.nodes if isinstance(node, ast.Attribute)}
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in parts:
            first, dot, rest = _dotted(node).partition(".")
            if first in aliases:
                yield aliases[first] + dot + rest, node.lineno


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *filter(None, module.package.split("."))]
    here = here[: len(here) - (node.level - 1)]
    return ".".join([*here, *filter(None, [node.module])])


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names. "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""
