"""A pytest plugin of ``tools.chaos.mutate`` that tries mutants in forks of one process that has all tests loaded.

Each fork replaces the code of the mutant's function and runs the tests that reach its line, until one fails. Agents
that tests start as processes of their own are not mutated, so a survivor may still be noticed by such tests.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import resource
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final, TypeAlias

import pytest

from agent_shim.host import mounts
from tools.chaos import confined
from tools.chaos.mutate import ROOT, Mutant

TASKS: Final = "SHIM_MUTATE_TASKS"
"""Names a file with a list of ``[mutant, {node id of a test: its seconds under coverage, …}]``."""
RESULTS: Final = "SHIM_MUTATE_RESULTS"
"""Names the file to which a line of JSON is written for each mutant: key, outcome, number of tests, the failed test."""
TIMEOUT_S: Final = 5.0
"""Time limit of one test, in addition to four times its duration under coverage. A mutant may make it wait forever."""
PROCESSOR_S: Final = 5
MAX_MEMORY: Final = 3 << 30
"""Memory limits of one test and of a fork. The same tests must pass without the mutant."""
TMP: Final = Path("/tmp/mutant")
"""A fresh tmpfs for each fork. The base of pytest's temporary directories is in it."""

_Functions: TypeAlias = dict[tuple[str, str], list[FunctionType]]

_SOUND_AFTER: Final = 2
"""How often a test must fail with a mutant and pass without one before it is no longer run without one."""
_NOTICED: Final = 1
_NOT_TRIED: Final = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Replace pytest's loop over the tests."""
    items = {item.nodeid: item for item in session.items}
    gc.unfreeze()  # tests/conftest.py froze the collected objects, which hides them from the search below
    functions = _functions()
    tasks = json.loads(Path(os.environ[TASKS]).read_text())
    TMP.mkdir(exist_ok=True)
    gc.collect()
    gc.freeze()  # the forks share the pages
    with Path(os.environ[RESULTS]).open("a", buffering=1) as results:
        for members, seconds in tasks:
            mutant = Mutant(**members)
            tests = _likely_first([items[name] for name in seconds if name in items], mutant)
            outcome, by, tried = _try(mutant, tests, functions, seconds)
            results.write(json.dumps([mutant.key, outcome, tried, by]) + "\n")
    return True


class _FirstFailure:
    """A pytest plugin for forks, which ends the fork with the first test that fails or hangs.

    The name of each test is written to the pipe before it runs, so the last name is that of the test that failed.
    """

    def __init__(self, to: int, seconds: Mapping[str, float]) -> None:
        self._to = to
        self._seconds = seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the start of a test for its time limit."""
        os.write(self._to, nodeid.encode()[:200] + b"\n")
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + PROCESSOR_S, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S + 4 * self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Handle the report on one phase of a test."""
        if report.failed:
            os._exit(_NOTICED)


_broken: Final[set[str]] = set()
"""Tests that fail in a fork even without a mutant. They prove nothing and are left out."""
_sound: Final[Counter[str]] = Counter()
"""How often a test failed with a mutant and passed without one."""
_noticing: Final[dict[str, Counter[str]]] = defaultdict(Counter)
"""By file, how often a test noticed one of its mutants."""


def _likely_first(items: list[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
    """Sort the tests: first those that noticed other mutants of the file, then those named after the module; otherwise
    keep the order.
    """
    module = Path(mutant.path).stem
    noticed = _noticing[mutant.path]
    return sorted(items, key=lambda item: (-noticed[item.nodeid], module not in item.path.stem))


def _try(
    mutant: Mutant, items: list[pytest.Item], functions: _Functions, seconds: Mapping[str, float]
) -> tuple[str, str, int]:
    """Return ``noticed``, ``survived`` or ``not tried``; the test that failed or the reason; and the number of
    tests.
    """
    while items := [item for item in items if item.nodeid not in _broken]:
        code, by = _forked(lambda: exchange(mutant, functions), items, seconds)
        if code in {0, _NOT_TRIED}:
            return ("not tried" if code else "survived"), by, len(items)
        suspects = [item for item in items if item.nodeid == by]
        if _sound[by] >= _SOUND_AFTER or _forked(lambda: None, suspects or items, seconds)[0] == 0:
            _sound[by] += 1
            _noticing[mutant.path][by] += 1
            return "noticed", by, len(items)
        if not suspects:
            return "not tried", f"{by}, without the mutant too", len(items)
        _broken.add(by)
    return "not tried", "its tests fail in a fork without it", 0


def _forked(change: Callable[[], None], items: list[pytest.Item], seconds: Mapping[str, float]) -> tuple[int, str]:
    """Make a change in a fork and run tests there. Return the fork's exit code, and the last test or why none was run.

    The fork has pid and mount namespaces of its own, which contain whatever its tests start, kill or mount.
    """
    reading, writing = os.pipe()
    pid = confined.fork()
    if pid == 0:
        os.close(reading)
        _in_fork(change, items, writing, seconds)
    os.close(writing)
    try:
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    written = os.read(reading, 1 << 16).decode(errors="replace").splitlines()
    os.close(reading)
    code = os.waitstatus_to_exitcode(status)
    return code, written[-1] if written and code != 0 else ""


def _in_fork(change: Callable[[], None], items: list[pytest.Item], to: int, seconds: Mapping[str, float]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    mounts.mount_tmpfs(TMP, "mode=1777")
    try:
        change()
    except (LookupError, ValueError) as error:
        os.write(to, str(error).encode())
        os._exit(_NOT_TRIED)
    items[0].config.pluginmanager.register(_FirstFailure(to, seconds))
    try:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(0)
    finally:
        os._exit(_NOTICED)


def exchange(mutant: Mutant, functions: _Functions) -> None:
    """Replace the code of the loaded functions by the mutant's.

    Raises LookupError if no loaded function changes (because the code runs on import), and ValueError if the variables
    of a closure change.
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
    """Yield the pairs of functions that differ between two versions of a module, from the outside in."""
    if old.co_flags & inspect.CO_OPTIMIZED and old != new:
        yield old, new
    inner, others = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new))
    if len(inner) == len(others):  # a removed statement may have contained a lambda
        for one, other in zip(inner, others, strict=True):
            if one != other:
                yield from _changed(one, other)


def _functions() -> _Functions:
    """Return all functions of the agent that are loaded, by file and qualified name."""
    found: _Functions = defaultdict(list)
    inside = str(ROOT / "agent_shim"), str(ROOT / "kubernetes_cpi")
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(inside):
            found[one.__code__.co_filename, one.__code__.co_qualname].append(one)
    return found
