"""Fixtures and hooks for all tests.

Processes that tests start get default signal dispositions, however pytest itself was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import io
import os
import signal
import subprocess
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from agent_shim.core.paths import Paths
from agent_shim.host import process
from agent_shim.supervisor.ownership.keepers import Keepers
from tests.support.differences import differences, has_structs
from tests.support.programs import argv
from tests.support.programs.end_left import end_kept, end_left
from tests.support.programs.jobs import JobTree
from tests.support.residue import remove_cgroups

GUARDED_START = str(Path(__file__).parent / "support/guarded_start")
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default action for SIGINT, and build the keeper.

    A pytest process that runs in the background ignores SIGINT. If the processes that it starts inherited this, tests
    that interrupt a process would fail.
    """
    process.default_signals()
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        # Shorten the scratch directories' paths, because a Unix socket's path can be at most 107 bytes long.
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker.removeprefix("gw")))
    else:
        from hatch_build import build_keeper_of_checkout  # Only the main process needs hatchling.

        build_keeper_of_checkout()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [GUARDED_START, os.environ.get("PYTHONPATH")]))
    # Set no time limit for Hypothesis examples, because slow machines would exceed it. Quick runs try a fifth of the
    # usual number of examples.
    hypothesis.settings.register_profile("daily", deadline=None)
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "daily")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that are marked as ``early`` first."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch off garbage collection while tests are collected.

    Afterwards, exempt the collected tests from it, because they consist of half a million objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixtures know whether the test has failed.

    Also escape captured output that could not be sent to another process.
    """
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        report.sections += [("waiting", stack) for stack in _waiting(item)]
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """List the fields in which two structs differ, instead of printing both structs."""
    if op != "==" or not (has_structs(left) and has_structs(right)):
        return None
    return [f"{type(left).__name__} == {type(right).__name__}, but", *differences(left, right)]


def _waiting(item: pytest.Item) -> Iterator[str]:
    """Yield the stacks of the tasks that were still pending when a coroutine test was interrupted."""
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            for task in asyncio.all_tasks(asyncio.get_event_loop()):
                task.print_stack(file=(text := io.StringIO()))
                yield text.getvalue()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[JobTree]:
    """Provide a scratch directory for jobs. Afterwards, kill the jobs' processes."""
    world = JobTree(tmp_path / "w")
    yield world
    world.end()


@pytest.fixture
async def keepers_are_closed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """At the end of a test, close all connections to keepers that are still open."""
    made: list[Keepers] = []
    real = Keepers.__init__

    def init(self: Keepers, paths: Paths) -> None:
        real(self, paths)
        made.append(self)

    monkeypatch.setattr(Keepers, "__init__", init)
    yield
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def held_loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Guard the event loop of each agent that a test starts.

    Yield the directory to which the guards write their reports. Only the daily tests are guarded, because other tests
    overload the machine on purpose.
    """
    directory = tmp_path_factory.mktemp("held")
    ring = request.config.getoption("markexpr")
    if not ring or "not slow" in ring:
        os.environ["AGENT_SHIM_LOOP_REPORTS"] = str(directory)
    yield directory
    os.environ.pop("AGENT_SHIM_LOOP_REPORTS", None)


@pytest.fixture(autouse=True)
def no_loop_is_held(request: pytest.FixtureRequest, held_loops: Path) -> Iterator[None]:
    """Fail a test whose agent has blocked its event loop, unless the test is marked ``loop_may_be_held`` because it
    blocks the loop on purpose.
    """
    yield
    found = {path: path.read_text() for path in held_loops.iterdir()}
    for path in found:
        path.unlink()
    if request.node.get_closest_marker("loop_may_be_held") is None:
        assert list(found.values()) == []


@pytest.fixture(scope="session", autouse=True)
def no_empty_cgroups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the job cgroups of agents that were killed before they could remove them."""
    yield
    remove_cgroups(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """At the end of the test run, kill the processes that tests have left behind, and fail if that is not possible.

    Without this, a program that keeps forking would occupy a CPU long after the test run. If pytest itself is killed, a
    separate program kills the processes.
    """
    base = str(tmp_path_factory.getbasetemp())
    with subprocess.Popen([*argv("end_left.py", base, os.getpid())], start_new_session=True) as beside:
        yield
        beside.kill()
    assert end_left(base) == [], "tests left processes that cannot be killed"


@pytest.fixture(autouse=True)
def no_child_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, kill its children and the descendants of its keepers.

    If the test has failed, kill everything that it started.
    """
    scratch: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = set(_children())
    yield
    for depth in range(3):
        for directory in scratch.glob(f"{'*/' * depth}bosh/keepers") if scratch else ():
            end_kept(str(directory))
    for pid in set(_children()) - before:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if scratch and FAILED in request.node.stash:
        end_left(str(scratch))


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found
