"""Checks that passwords are compared in constant time."""

from __future__ import annotations

import ast

import pytest

from tests.support.source import PACKAGE, ROOT

MODULES = ("edges/bus/https.py", "edges/monit_http.py")
"""Modules that check a caller's password."""


@pytest.mark.attack("a neighbour calls the create-env endpoint without the password")
@pytest.mark.parametrize("module", MODULES)
def test_passwords_are_compared_only_with_compare_digest(module: str) -> None:
    checks = [
        node
        for node in ast.walk(ast.parse((ROOT / PACKAGE / module).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in ("_is_authorized", "_rights")
    ]
    assert len(checks) == 1

    calls = [ast.unparse(node.func) for node in ast.walk(checks[0]) if isinstance(node, ast.Call)]
    assert "hmac.compare_digest" in calls
    compared = [ast.unparse(node) for node in ast.walk(checks[0]) if isinstance(node, ast.Compare)]
    assert [text for text in compared if any(word in text for word in ("expected", "given", "caller", "decode"))] == []
