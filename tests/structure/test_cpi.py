"""The house of the CPI: its floors, its libraries, and what it does not call. It shares nothing with the agent."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.structure.source import ROOT, Module, imports, uses

PACKAGE = "kubernetes_cpi"

FLOORS: Mapping[int, frozenset[str]] = {
    8: frozenset({"__main__", "reference"}),
    7: frozenset({"door", "commands"}),
    6: frozenset({"methods", "doctor", "leftovers"}),
    5: frozenset({"vms", "disks", "snapshots", "stemcells"}),
    4: frozenset({"recreation", "budgets", "services"}),
    3: frozenset({"pods", "claims", "attachments"}),
    2: frozenset({"session", "manifests", "networks"}),
    1: frozenset({"client", "credentials", "records"}),
    0: frozenset({"", "errors", "log", "schema", "config", "properties", "names", "attachment_program"}),
}
"""Imports go down, or to a neighbour that does not import back."""

LIBRARIES: Mapping[str, frozenset[str]] = {
    "msgspec": frozenset(name for floor in FLOORS.values() for name in floor) - {"attachment_program"},
    "yaml": frozenset({"credentials"}),
}
"""Nothing else from outside: each operation of a Director starts two processes."""

EARLY = frozenset({"__main__", "door", "errors", "log"})
"""All that `info` loads: they import the others late."""

BANNED: Mapping[str, tuple[str, frozenset[str]]] = {
    "print": ("standard output is the response's", frozenset({"attachment_program"})),
    "sys.stdout": ("standard output is the response's", frozenset({"__main__", "reference", "commands"})),
    "subprocess": ("only credential plugins and the bosh CLI are run", frozenset({"credentials", "records"})),
    "time.time": (
        "clocks of cluster and Director differ: intervals are monotonic",
        frozenset({"attachment_program"}),
    ),
    "datetime": ("clocks of cluster and Director differ: intervals are monotonic", frozenset()),
    "ssl": ("requests are the client's", frozenset({"client"})),
    "http": (
        "requests are the client's",
        frozenset({"client"})
        | {"pods", "claims", "attachments", "recreation", "budgets", "services", "vms", "disks", "snapshots"}
        | {"doctor"},
    ),
    "eval": ("runs what it reads", frozenset()),
    "exec": ("runs what it reads", frozenset()),
    "pickle": ("runs what it reads", frozenset()),
}
"""Imports for some modules only, with the reason."""


def modules() -> dict[str, Module]:
    """Every module of the CPI by name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).glob("*.py")):
        name = "" if path.stem == "__init__" else path.stem
        found[name] = Module(name, path.read_text())
    return found


def floor_of(name: str) -> int:
    """The floor of a module; -1 when the table does not know it."""
    return next((floor for floor, names in FLOORS.items() if name in names), -1)


def violations(module: Module) -> Iterator[str]:
    """Return the violations of a module."""
    if floor_of(module.name) < 0:
        yield f"{module.name} is on no floor: give it one in FLOORS"
    late = _late_lines(module)
    for target, line in imports(module):
        library, _, inner = target.partition(".")
        name = inner.partition(".")[0]
        if library == PACKAGE:
            if floor_of(name) > floor_of(module.name):
                yield f"{module.name}:{line} imports {name}, which is above it"
            if module.name in EARLY and name not in EARLY and line not in late:
                yield f"{module.name}:{line} imports {name} early: `info` would load it"
        elif library not in sys.stdlib_module_names and module.name not in LIBRARIES.get(library, frozenset()):
            yield f"{module.name}:{line} imports {library}, which belongs elsewhere"
    for name, line in sorted(set(uses(module)), key=lambda use: use[1]):
        for banned, (why, places) in BANNED.items():
            if (name == banned or name.startswith(f"{banned}.")) and module.name not in places:
                yield f"{module.name}:{line} uses {name}: {why}"
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler) and module.name != "door" and _is_broad(node):
            yield f"{module.name}:{node.lineno} catches everything: only the door does"


def _late_lines(module: Module) -> set[int]:
    functions = [node for node in module.nodes if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def circles(of: Mapping[str, Module]) -> Iterator[str]:
    """Neighbours that import each other, directly or around others."""
    graph = {
        name: {target.split(".")[1] for target, _ in imports(module) if target.startswith(f"{PACKAGE}.")}
        for name, module in of.items()
    }
    for start, targets in graph.items():
        seen: set[str] = set()
        waiting = set(targets)
        while waiting:
            name = waiting.pop()
            if name == start:
                yield start
            if name not in seen:
                seen.add(name)
                waiting |= graph.get(name, set())


def test_cpi_modules_follow_the_import_rules() -> None:
    assert [wrong for module in modules().values() for wrong in violations(module)] == []


def test_cpi_modules_have_no_import_cycles() -> None:
    assert list(circles(modules())) == []


def test_cpi_import_table_names_existing_modules() -> None:
    assert {name for names in FLOORS.values() for name in names} == set(modules())


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("novelty", "", "on no floor"),
        ("pods", "from kubernetes_cpi import vms", "imports vms, which is above it"),
        ("door", "from kubernetes_cpi import client", "`info` would load it"),
        ("log", "import yaml", "imports yaml"),
        ("vms", "import lightkube", "imports lightkube"),
        ("vms", "from agent_shim import errors", "imports agent_shim"),
        ("vms", "print('x')", "uses print"),
        ("log", "import sys\nsys.stdout.write('x')", "uses sys.stdout"),
        ("pods", "import time\ntime.time()", "uses time.time"),
        ("disks", "import subprocess", "uses subprocess"),
        ("vms", "try:\n    f()\nexcept Exception:\n    pass", "catches everything"),
    ],
)
def test_forbidden_import_in_the_cpi_is_detected(name: str, text: str, complaint: str) -> None:
    found = list(violations(Module(name, text)))

    assert any(complaint in one for one in found), found


def test_import_cycle_in_the_cpi_is_detected() -> None:
    one = Module("pods", "from kubernetes_cpi import claims")
    other = Module("claims", "def f():\n    from kubernetes_cpi import pods")

    assert set(circles({"pods": one, "claims": other})) == {"pods", "claims"}
