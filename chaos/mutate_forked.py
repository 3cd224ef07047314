"""A pytest plugin of ``chaos.mutate``: try mutants within one process that has all tests loaded, a fork for each.

The fork exchanges the code of the mutant's function and runs the tests that reach its line, until one fails. Only the
tests' own process has the mutant: a survivor says nothing yet about tests that start an agent.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import select
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final, TypeAlias

import pytest

from chaos.mutate import ROOT, Mutant

TASKS: Final = "SHIM_MUTATE_TASKS"
"""Names a file with a list of ``[mutant, [node id of a test, …]]``."""
RESULTS: Final = "SHIM_MUTATE_RESULTS"
"""Names the file that takes a line of JSON for each mutant: key, outcome, number of tests, the test that failed."""
TIMEOUT_S: Final = 60.0

_Functions: TypeAlias = dict[tuple[str, str], list[FunctionType]]

_LIBC: Final = ctypes.CDLL(None)
_CLONE_NEWNS: Final = 0x20000
"""Mounts of a mutant end with its fork."""
_NOTICED: Final = 1
_NOT_TRIED: Final = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Take the place of pytest's loop over the tests."""
    items = {item.nodeid: item for item in session.items}
    functions = _functions()
    tasks = json.loads(Path(os.environ[TASKS]).read_text())
    with Path(os.environ[RESULTS]).open("a", buffering=1) as results:
        for members, names in tasks:
            mutant = Mutant(**members)
            outcome, by = _try(mutant, [items[name] for name in names if name in items], functions)
            results.write(json.dumps([mutant.key, outcome, len(names), by]) + "\n")
    return True


class _FirstFailure:
    """The plugin of a fork: end it with the first test that fails, whose name goes into the pipe."""

    def __init__(self, to: int) -> None:
        self._to = to

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the report of one phase of a test."""
        if report.failed:
            os.write(self._to, report.nodeid.encode()[:200])
            os._exit(_NOTICED)


def _try(mutant: Mutant, items: list[pytest.Item], functions: _Functions) -> tuple[str, str]:
    """Return ``noticed``, ``survived`` or ``not tried``, and the test that failed or the reason."""
    code, by = _forked(lambda: exchange(mutant, functions), items)
    if code == _NOT_TRIED:
        return "not tried", by
    if code == 0:
        return "survived", ""
    failed = [item for item in items if item.nodeid == by]
    if failed and _forked(lambda: None, failed)[0] != 0:
        return "not tried", f"{by} fails without the mutant"
    return "noticed", by


def _forked(change: Callable[[], None], items: list[pytest.Item]) -> tuple[int, str]:
    """Make a change in a fork and run tests there; return its exit code, and the test that failed or the reason."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reading)
        _in_fork(change, items, writing)
    os.close(writing)
    try:
        pidfd = os.pidfd_open(pid)
        ended, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
        os.close(pidfd)
    finally:
        # Processes that the tests started end with them; the pid is not reused before it is waited for.
        os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    by = os.read(reading, 4096).decode(errors="replace")
    os.close(reading)
    return os.waitstatus_to_exitcode(status), by if ended else f"took longer than {TIMEOUT_S:g} s"


def _in_fork(change: Callable[[], None], items: list[pytest.Item], to: int) -> None:
    if os.geteuid() == 0 and _LIBC.unshare(_CLONE_NEWNS) != 0:
        os.write(to, b"cannot unshare mounts")
        os._exit(_NOT_TRIED)
    try:
        change()
    except (LookupError, ValueError) as error:
        os.write(to, str(error).encode())
        os._exit(_NOT_TRIED)
    items[0].config.pluginmanager.register(_FirstFailure(to))
    try:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(0)
    finally:
        os._exit(_NOTICED)


def exchange(mutant: Mutant, functions: _Functions) -> None:
    """Give the loaded functions the mutant's code.

    Raises LookupError if no loaded function changes (code that runs at import), ValueError if the variables that a
    closure takes are others.
    """
    text = (ROOT / mutant.path).read_text()
    name = str(ROOT / mutant.path)
    pairs = list(_changed(compile(text, name, "exec"), compile(mutant.applied(text), name, "exec")))
    found = 0
    for old, new in pairs:
        for function in functions.get((old.co_filename, old.co_qualname), ()):
            if function.__code__ == old:
                function.__code__ = new
                found += 1
    if not found:
        raise LookupError("no loaded function has this code")


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Pair the functions of two versions of a module that differ, from outside in."""
    if old.co_flags & inspect.CO_OPTIMIZED and old != new:
        yield old, new
    inner, others = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new))
    if len(inner) == len(others):  # A statement that is gone can take a lambda with it.
        for one, other in zip(inner, others, strict=True):
            if one != other:
                yield from _changed(one, other)


def _functions() -> _Functions:
    """All functions of the agent that are loaded, by file and qualified name."""
    found: _Functions = defaultdict(list)
    inside = str(ROOT / "agent_shim")
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(inside):
            found[one.__code__.co_filename, one.__code__.co_qualname].append(one)
    return found
