"""A pytest plugin for ``tools.chaos.mutate`` that tries mutants in forks of a process that has loaded all tests.

Each fork replaces the code of the mutant's function and runs the tests that reach the mutant's line until one fails.
Agents that tests start as separate processes are not mutated. A mutant that survives here may therefore still be
noticed in the next stage.
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
"""Environment variable with the path of a JSON file that lists the mutants to try. Each entry is a mutant and an object
that maps the node ids of its tests to their durations under coverage in seconds.
"""
RESULTS: Final = "SHIM_MUTATE_RESULTS"
"""Environment variable with the path of the output. For each mutant, a line is added with a JSON list of the mutant's
key, the outcome, the number of tests, and the failed test or the reason why the mutant was not tried.
"""
TIMEOUT_S: Final = 5.0
"""Fixed part of each test's time limit in seconds. Four times the test's duration under coverage is added to it. The
limit is necessary because a mutant may loop forever.
"""
PROCESSOR_S: Final = 5
"""Limit on a test's CPU time in seconds. Without a mutant, no test exceeds it."""
MAX_MEMORY: Final = 3 << 30
"""Limit on a fork's memory in bytes. Without a mutant, no fork exceeds it."""
TMP: Final = Path("/tmp/mutant")
"""Mount point of the tmpfs that each fork gets for pytest's temporary directories."""

_Functions: TypeAlias = dict[tuple[str, str], list[FunctionType]]

_SOUND_AFTER: Final = 2
"""When a test fails with a mutant, it is rerun without the mutant to confirm that the mutant is the reason. After this
many confirmations, the test's failures are trusted without a rerun.
"""
_NOTICED: Final = 1
_NOT_TRIED: Final = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try all mutants instead of running the tests once."""
    items = {item.nodeid: item for item in session.items}
    gc.unfreeze()  # tests/conftest.py has frozen the collected objects, but gc must find their functions.
    functions = _functions()
    tasks = json.loads(Path(os.environ[TASKS]).read_text())
    TMP.mkdir(exist_ok=True)
    gc.collect()
    gc.freeze()  # Frozen objects stay on memory pages that the forks share.
    with Path(os.environ[RESULTS]).open("a", buffering=1) as results:
        for members, seconds in tasks:
            mutant = Mutant(**members)
            tests = _likely_first([items[name] for name in seconds if name in items], mutant)
            outcome, by, tried = _try(mutant, tests, functions, seconds)
            results.write(json.dumps([mutant.key, outcome, tried, by]) + "\n")
    return True


class _FirstFailure:
    """A pytest plugin for forks that exits when the first test fails or hangs.

    It writes the name of each test to a pipe before the test runs, so the last name is that of the failed test.
    """

    def __init__(self, to: int, seconds: Mapping[str, float]) -> None:
        self._to = to
        self._seconds = seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write the name of the test and set its time limits."""
        os.write(self._to, nodeid.encode()[:200] + b"\n")
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + PROCESSOR_S, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S + 4 * self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Exit if a phase of a test has failed."""
        if report.failed:
            os._exit(_NOTICED)


_broken: Final[set[str]] = set()
"""Tests that fail in a fork even without a mutant. They are left out, because their failure proves nothing."""
_sound: Final[Counter[str]] = Counter()
"""For each test, how many times it has failed with a mutant and then passed without the mutant."""
_noticing: Final[dict[str, Counter[str]]] = defaultdict(Counter)
"""For each file, how many of its mutants each test has noticed."""


def _likely_first(items: list[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
    """Sort the tests so that those most likely to fail come first.

    These are the tests that noticed other mutants in the file, followed by those in files that are named after the
    module.
    """
    module = Path(mutant.path).stem
    noticed = _noticing[mutant.path]
    return sorted(items, key=lambda item: (-noticed[item.nodeid], module not in item.path.stem))


def _try(
    mutant: Mutant, items: list[pytest.Item], functions: _Functions, seconds: Mapping[str, float]
) -> tuple[str, str, int]:
    """Try a mutant. Return the outcome (``noticed``, ``survived`` or ``not tried``), the failed test or the reason why
    the mutant was not tried, and the number of tests.
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
    """Apply a change in a fork and run tests there.

    Returns the fork's exit code and, unless it is 0, the last test that began, or the reason why none ran. The fork has
    its own PID and mount namespaces, so the tests cannot kill or mount anything outside them.
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
    """Replace the code of loaded functions with the mutant's.

    Raises LookupError if no loaded function changes, for example because the mutated code runs on import. Raises
    ValueError if the new code would need other closure variables.
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
    """Yield the old and the new code of each function that differs between two versions of a module. A function comes
    before the functions that it contains.
    """
    if old.co_flags & inspect.CO_OPTIMIZED and old != new:
        yield old, new
    inner, others = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new))
    if len(inner) == len(others):  # The lengths differ if the mutant has removed a statement with a lambda.
        for one, other in zip(inner, others, strict=True):
            if one != other:
                yield from _changed(one, other)


def _functions() -> _Functions:
    """Return all loaded functions in the agent and the CPI by file and qualified name."""
    found: _Functions = defaultdict(list)
    inside = str(ROOT / "agent_shim"), str(ROOT / "kubernetes_cpi")
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(inside):
            found[one.__code__.co_filename, one.__code__.co_qualname].append(one)
    return found
