"""Tests know the product by its public names: its inside may change without them."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure.source import ROOT, modules

OTHERS = ("kubernetes_cpi", "tools/cpi_release", "tools/release", "stemcell_overlay")
"""The product is these packages and the agent."""
FREE = ("tests/unit/core", "tests/structure")
"""``core`` is functions of values, each tested by itself; tests of the structure read the source."""
OF_PYTHON = {
    "tests/support/commands_page.py": {"_actions"},  # argparse lists its arguments nowhere else
    "tests/support/loop_guard.py": {"_run"},  # what asyncio calls for each callback
}
WAYS = frozenset({"setattr", "getattr", "delattr", "hasattr", "object"})
"""Functions whose second argument is a name; ``object`` is that of ``mock.patch``."""
WORD = re.compile(r"(?<!self\.)(?<!cls\.)\b_[A-Za-z]\w*")
IN_TEXT = re.compile(r"\b(?!self\.)\w+\.(_[A-Za-z]\w*)")
"""A name in a program that a string holds, or in a path that a patch takes."""


@cache
def of_product() -> frozenset[str]:
    """Private names of modules, classes and objects of the product."""
    found: set[str] = set()
    paths = (path for package in OTHERS for path in (ROOT / package).rglob("*.py"))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    for node in itertools.chain(nodes, *(module.nodes for module in modules().values())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(filter(WORD.fullmatch, found))


def used(text: str) -> set[str]:
    """Private names of the product that a text takes from others than itself."""
    if of_product().isdisjoint(WORD.findall(text)):
        return set()  # soon: most have none
    return set(_names(ast.parse(text))) & of_product()


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.Call(
                func=ast.Attribute(attr=way) | ast.Name(id=way), args=[_, ast.Constant(value=str(name)), *_]
            ) if way in WAYS:
                yield name
            case ast.Constant(value=str(string)):
                yield from IN_TEXT.findall(string)


def test_tests_use_no_private_names_of_the_product() -> None:
    """Test the behaviour by a public name, or make the constant or the function public under a good one."""
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    found = {path: used(Path(ROOT, path).read_text()) for path in paths if not path.startswith(FREE)}

    assert {path: names for path, names in found.items() if names} == OF_PYTHON


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("bus._retiring.cancel()", {"_retiring"}),
        ("self._retiring = cls._retiring", set()),
        ("bus._asdict()", set()),
        ("from agent_shim.host.proc import _read", {"_read"}),
        ("patch.setattr(proc, '_read', 1)", {"_read"}),
        ("mock.patch.object(proc, '_read')", {"_read"}),
        ("getattr(proc, '_read')", {"_read"}),
        ("patch.setattr('agent_shim.host.proc._read', 1)", {"_read"}),
        ("PROGRAM = '''\nproc._read(1)\nself._retiring\n'''", {"_read"}),
        ("('_read', 'a_read')", set()),
    ],
)
def test_use_of_a_private_name_is_detected(text: str, names: set[str]) -> None:
    assert used(text) == names
