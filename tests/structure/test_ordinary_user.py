"""Checks that daily tests run as an ordinary user. Tests that need root have the ``root`` marker."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.structure.test_workflows import read
from tests.support.source import ROOT

RINGS = ("unit", "structure", "contract", "cpi", "integration")
ASKS = re.compile(r"\bget(e|res)?uid\b")


def skips(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the syntax nodes in a module that skip tests depending on which user runs them."""
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and ASKS.search(ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def asks(node: ast.expr) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return bool(ASKS.search(ast.unparse(node)) or names & constants)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("skipif") and any(map(asks, node.args)):
            yield node
        if isinstance(node, ast.If) and asks(node.test) and "skip(" in ast.unparse(node):
            yield node


def test_no_daily_test_is_skipped_for_an_ordinary_user() -> None:
    """A test that needs root must have the ``root`` marker. It then runs in ``./dev test-root``, where a skip is
    noticed.
    """
    files = [path for ring in RINGS for path in (ROOT / "tests" / ring).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in files
        for node in skips(ast.parse(path.read_text()))
    ]

    assert files
    assert found == []


def test_skipping_a_test_because_of_the_user_is_detected() -> None:
    for text in (
        "@pytest.mark.skipif(os.geteuid() != 0, reason='')\ndef test(): ...",
        "ROOT = os.getuid() == 0\nx = pytest.mark.skipif(not ROOT, reason='')",
        "def test():\n    if os.geteuid():\n        pytest.skip('needs root')",
    ):
        assert list(skips(ast.parse(text))), text
    assert list(skips(ast.parse("is_root = os.geteuid() == 0\nif is_root:\n    os.chown('a', 1, 1)"))) == []


def test_ci_runs_the_daily_tests_as_an_ordinary_user() -> None:
    """``.ci/run`` switches to an ordinary user for these tests if root has started it. The CI service runs steps as an
    ordinary user unless they use sudo.
    """
    steps = [step.get("run", "") for job in read("ci.yml")["jobs"].values() for step in job["steps"]]

    assert '\n            test) (as_ordinary_user "$task") ;;\n' in (ROOT / "dev").read_text()
    assert "./dev test" in steps
