"""Finds the failure messages that a case can produce, without running the case.

A saboteur counts as caught only if the failed case's message matches the saboteur's pattern. Running all saboteurs
takes hours, so a pattern that no longer matches a changed message would go unnoticed for a long time. Comparing the
patterns with the messages in the source takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from agent_shim.core.wire import TOO_LONG
from tests.chaos.cases import MODULES
from tests.support.source import ROOT

HELPERS: Final = (
    "tests/support/stand.py",
    "tests/support/stand_jobs.py",
    "tests/support/kills.py",
    "tests/support/instance.py",
    "agent_shim/demo/director.py",
)
"""Files with functions that cases call to check something, and that raise an error if the check fails."""
WITNESS: Final = "tests/support/witness.py"
MESSAGE: Final = {"expect": 1, "until": 2, "at_most": 2}
"""Functions that fail with a message, and the position of the message among their arguments."""
NOT_FAILURES: Final = ("CannotInjectError",)
SAMPLES: Final = (
    "0", "1", "running", "failing", "unknown", "restart", "TimeoutError", "{'exit_code': 0}",
    "jobs/job0/monit", "data/jobs/x", "settings.json",
)  # fmt: skip
"""Sample values for the variable parts of messages. A message is rendered once for each sample, which replaces all its
variable parts.
"""
ELSEWHERE: Final = (
    "TimeoutError: ",
    "TimeoutExpired: Command",
    "RpcRemoteError: cannot ",
    f"RpcRemoteError: {TOO_LONG}",
)
"""Beginnings of messages that no case contains, because they come from a time limit or from an agent error."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def messages(case: str) -> frozenset[str]:
    """Return the failure messages that a case, or one of the invariants checked after it, can produce.

    The functions that the case calls are found by name. If several functions have the same name, the messages of all of
    them are included.
    """
    function, known = _cases()[case]
    found, seen, waiting = set[str](), set[Function](), [function]
    while waiting:
        if (each := waiting.pop()) in seen:
            continue
        seen.add(each)
        found.update(_messages(each))
        names = {one.id for one in ast.walk(each) if isinstance(one, ast.Name)}
        names |= {one.attr for one in ast.walk(each) if isinstance(one, ast.Attribute)}
        waiting += [one for name in names for one in known.get(name, ())]
    return frozenset({*found, *_of_witness(), *ELSEWHERE})


def alternatives(pattern: str) -> list[str]:
    """Split a regular expression at each ``|`` that is not in parentheses."""
    return re.split(r"\|(?![^(]*\))", pattern)


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def _of_witness() -> frozenset[str]:
    """Return the witness's reports of violated invariants, such as ``I4: …``."""
    texts = {text for node in ast.walk(_tree(WITNESS)) if _is_text(node) for text in _rendered(node, {})}
    return frozenset(text for text in texts if re.match(r"I\d+: ", text))


@cache
def _cases() -> dict[str, tuple[Function, Mapping[str, list[Function]]]]:
    """Map each case to its function and to a dict of the functions that it can call, keyed by name."""
    found: dict[str, tuple[Function, Mapping[str, list[Function]]]] = {}
    for module in MODULES:
        path = str(Path(module.__file__ or "").relative_to(ROOT))
        known = dict[str, list[Function]]()
        for tree in map(_tree, (path, *HELPERS)):
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    known.setdefault(node.name, []).append(node)
        for function in (node for node in _tree(path).body if isinstance(node, Function)):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "case":
                    found[ast.literal_eval(mark.args[0])] = function, known
    return found


def _messages(function: Function) -> Iterator[str]:
    """Yield the failure messages that a function can produce, rendered once for each sample."""
    assigned = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name = node.func.id
        if name in MESSAGE and len(node.args) > MESSAGE[name]:
            yield from _rendered(node.args[MESSAGE[name]], assigned)
        elif name.endswith("Error") and name not in NOT_FAILURES and node.args:
            for text in _rendered(node.args[0], assigned):
                yield text if name == "NotHeldError" else f"{name}: {text}"


def _rendered(node: ast.AST, assigned: Mapping[str, ast.AST]) -> Iterator[str]:
    """Yield a message once for each of ``SAMPLES``, with the sample in place of each variable part.

    Yield nothing if the message has no constant part.
    """
    parts = list(_parts(node, assigned))
    for sample in SAMPLES if any(parts) else ():
        yield "".join(sample if part is None else part for part in parts)


def _parts(node: ast.AST, assigned: Mapping[str, ast.AST]) -> Iterator[str | None]:
    """Yield the constant parts of a message, and None for each variable part."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _parts(value, assigned)
        case ast.FormattedValue(value=ast.Name() as value):
            yield from _parts(value, assigned)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _parts(left, assigned)
            yield from _parts(right, assigned)
        case ast.Name(id=name) if name in assigned and _is_text(assigned[name]):
            yield from _parts(assigned[name], {})
        case _:
            yield None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
