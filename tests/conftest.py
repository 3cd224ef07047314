"""For all tests: the processes they start have the signals of a terminal, whatever started the tests."""

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
from tests.support.programs.jobs import World
from tests.support.residue import remove_cgroups

GUARDED_START = str(Path(__file__).parent / "support/guarded_start")
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Undo the ignored SIGINT of a background run. Every process that a test interrupts would inherit it."""
    process.default_signals()
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        # A path of a socket has 107 bytes.
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker.removeprefix("gw")))
    else:
        from hatch_build import build_keeper_of_checkout  # late: workers of pytest do without hatchling

        build_keeper_of_checkout()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [GUARDED_START, os.environ.get("PYTHONPATH")]))
    # A slow machine fails no example. The daily tests try five times as many examples as the unit ring.
    hypothesis.settings.register_profile("daily", deadline=None)
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "daily")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collected tests, half a million objects, out of each pass of the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a failure for the fixtures. Let all that was printed pass to another process."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        report.sections += [("waiting", stack) for stack in _waiting(item)]
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Name the fields in which two structs differ. Pytest prints both as a whole."""
    if op != "==" or not (has_structs(left) and has_structs(right)):
        return None
    return [f"{type(left).__name__} == {type(right).__name__}, but", *differences(left, right)]


def _waiting(item: pytest.Item) -> Iterator[str]:
    """Stacks of the tasks that a coroutine test was waiting for when it was interrupted."""
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            for task in asyncio.all_tasks(asyncio.get_event_loop()):
                task.print_stack(file=(text := io.StringIO()))
                yield text.getvalue()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A scratch tree, emptied of processes afterwards."""
    world = World(tmp_path / "w")
    yield world
    world.end()


@pytest.fixture
async def keepers_are_closed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Disconnect at the end of the test from the keepers that no supervisor disconnects from."""
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
    """Guard the event loop of each agent that gets the environment of the tests. Reports are files in here.

    Only in the daily tests: other rings fill machines on purpose.
    """
    directory = tmp_path_factory.mktemp("held")
    ring = request.config.getoption("markexpr")
    if not ring or "not slow" in ring:
        os.environ["AGENT_SHIM_LOOP_REPORTS"] = str(directory)
    yield directory
    os.environ.pop("AGENT_SHIM_LOOP_REPORTS", None)


@pytest.fixture(autouse=True)
def no_loop_is_held(request: pytest.FixtureRequest, held_loops: Path) -> Iterator[None]:
    """Fail a test whose agent held its event loop, but for tests of that fault (``loop_may_be_held``)."""
    yield
    found = {path: path.read_text() for path in held_loops.iterdir()}
    for path in found:
        path.unlink()
    if request.node.get_closest_marker("loop_may_be_held") is None:
        assert list(found.values()) == []


@pytest.fixture(scope="session", autouse=True)
def no_empty_cgroups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove cgroups of jobs below our scratch directories that no agent was there to remove."""
    yield
    remove_cgroups(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kill what tests leave, and fail if that cannot be killed. A program beside us does so if we are killed.

    A program that forks and exits without end would take a processor from all later tests of this machine.
    """
    base = str(tmp_path_factory.getbasetemp())
    with subprocess.Popen([*argv("end_left.py", base, os.getpid())], start_new_session=True) as beside:
        yield
        beside.kill()
    assert end_left(base) == [], "tests left processes that cannot be killed"


@pytest.fixture(autouse=True)
def no_child_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children of a test die with it, and so does what is below keepers. After a failure, so do all its programs."""
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
