"""No function is in two places under different names, and no two places share more than twelve lines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.structure.source import Module, modules, texts

SMALLEST = 45
"""Syntax nodes below which two alike functions are no copy: a property, a one-line wrapper."""


class _Plain(ast.NodeTransformer):
    """Numbers the local names in order of appearance and drops what says nothing: docstrings, annotations."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.setdefault(node.id, f"n{len(self.names)}"), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.names.setdefault(node.arg, f"n{len(self.names)}"), None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return self.generic_visit(ast.Assign([node.target], node.value)) if node.value else None


def shape(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the body of a function without names. "" if it is too small to matter."""
    if sum(1 for _ in ast.walk(function)) < SMALLEST:
        return ""
    # Parsed again: the transformer writes into the tree, which other tests share.
    own = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)
    own.name, own.returns, own.decorator_list = "", None, []
    if ast.get_docstring(own) is not None:
        del own.body[0]
    return ast.dump(_Plain().visit(own))


def outline(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """The kinds of its statements: equal wherever the shape is equal, and far cheaper."""
    kinds = []
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            kinds += ["Assign"] if node.value else []
        elif isinstance(node, ast.stmt) and node is not function:
            kinds.append(type(node).__name__)
    return tuple(kinds[1:] if ast.get_docstring(function) is not None else kinds)


def duplicates(of: Iterable[Module]) -> list[list[str]]:
    """Groups of functions that do the same, as ``module.function:line``."""
    alike = defaultdict(list)
    for module in of:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                alike[outline(node)].append((node, f"{module.name}.{node.name}:{node.lineno}"))
    groups = defaultdict(list)
    for candidates in alike.values():
        for node, place in candidates if len(candidates) > 1 else ():
            if key := shape(node):
                groups[key].append(place)
    return [places for places in groups.values() if len(places) > 1]


def test_twelve_alike_lines_are_found_once() -> None:
    """Code that two modules need is written once, on a floor below both."""
    assert duplicates(modules().values()) == []


SHARED_LINES = 12


def runs(files: Iterable[tuple[str, str]]) -> list[str]:
    """Places of more than ``SHARED_LINES`` equal lines, without blank lines, comments and imports, as ``file:line``."""
    found = defaultdict(list)
    for name, text in files:
        numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        lines = [(number, line) for number, line in numbered if line and not line.startswith(("#", "from ", "import "))]
        for first in range(len(lines) - SHARED_LINES):
            run = lines[first : first + SHARED_LINES + 1]
            found[tuple(line for _, line in run)].append(f"{name}:{run[0][0]}")
    return [" = ".join(places) for places in found.values() if len(places) > 1]


def test_no_two_places_share_more_than_twelve_lines() -> None:
    """In tests, too."""
    assert runs((name, text) for name, text in texts() if name.endswith(".py")) == []


def test_a_long_run_of_equal_lines_is_found() -> None:
    lines = "".join(f"x{number} = {number}\n" for number in range(SHARED_LINES + 1))

    assert runs([("a.py", lines), ("b.py", f"import os\n\n{lines}")]) == ["a.py:1 = b.py:3"]
    assert runs([("a.py", lines), ("b.py", lines.replace("x7", "y7"))]) == []


COPY = '''
def {name}({text}: str, limit: int = 3) -> list[str]:
    """{doc}"""
    {found}: list[str] = []
    for line in {text}.splitlines():
        if len(line) > limit and line not in {found}:
            {found}.append(line.strip().lower())
    return {found}
'''


def test_copy_is_found() -> None:
    """Other names and another docstring do not hide a copy."""
    here = Module("services.dns", COPY.format(name="long_lines", text="text", found="found", doc="One."))
    there = Module("services.logs.archives", COPY.format(name="pick", text="raw", found="kept", doc="Two."))

    assert duplicates([here, there]) == [["services.dns.long_lines:2", "services.logs.archives.pick:2"]]


def test_another_constant_is_no_copy() -> None:
    """Two functions that differ in what they do are two functions."""
    here = COPY.format(name="long_lines", text="text", found="found", doc="One.")

    assert (
        duplicates([Module("services.dns", here), Module("services.logs.archives", here.replace("lower", "upper"))])
        == []
    )
