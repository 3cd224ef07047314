"""Gives tests access to the project's source as syntax trees.

A module is identified by its dotted name below ``agent_shim``, such as ``host.files``. A package is identified in the
same way, such as ``supervisor``, and the top package by ``""``. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "agent_shim"
DEMO = "demo"
NOT_OURS = frozenset(
    {
        ".git",
        ".arm64",
        ".arm64-kernel",
        ".guest",
        ".mutate",
        ".venv",
        ".tools",
        ".hypothesis",
        "__pycache__",
        "dist",
        "build",
    }
)


@dataclass(frozen=True, eq=False)
class Module:
    """One of the agent's modules: its dotted name, its text and its syntax tree."""

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
        """Name of the package to which the module's relative imports refer."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def top(self) -> str:
        """The first part of the module's name."""
        return self.name.partition(".")[0]


@cache
def modules() -> Mapping[str, Module]:
    """Return the agent's modules, keyed by name. The demo's modules, which imitate a Director, are left out."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        if parts[0] == DEMO:
            continue
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path.read_text(), is_package)
    return found


def floors() -> Iterator[tuple[int, str]]:
    """Yield each package with the number of its floor, from the top floor down, as configured for the import linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("id") == "floors")
    for number, layer in zip(reversed(range(len(layers))), layers, strict=True):
        for folder in re.findall(r"\w+", layer):
            yield number, folder


def texts() -> Iterator[tuple[str, str]]:
    """Yield each of the project's text files with its name. Binary files are skipped."""
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
