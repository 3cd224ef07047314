"""For all tests: the processes they start have the signals of a terminal, whatever started the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from agent_shim.host import cgroups, job_cgroups, process
from tests.support.programs.jobs import World
from tests.support.residue import remove_cgroups

GUARDED_START = str(Path(__file__).parent / "support/guarded_start")


def pytest_configure(config: pytest.Config) -> None:
    """Undo the ignored SIGINT of a background run; every process that a test interrupts would inherit it."""
    process.default_signals()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [GUARDED_START, os.environ.get("PYTHONPATH")]))
    # A slow machine fails no example. The daily tests try five times as many examples as the unit ring.
    hypothesis.settings.register_profile("daily", deadline=None)
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "daily")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A scratch tree, emptied of processes afterwards."""
    world = World(tmp_path / "w")
    yield world
    world.end()


@pytest.fixture(scope="session")
def held_loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Guard the event loop of each agent that gets the environment of the tests; reports are files in here.

    Only in the daily tests: those of other rings fill machines on purpose.
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


@pytest.fixture(params=["the best", "freezer", "pids", "none"])
def cgroups_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> cgroups.Tree | None:
    """Once with each hierarchy that this machine lets us use, and once without: then it is known by descent alone."""
    best = job_cgroups.tracker()
    there = {"the best": best} | {tree.controller: tree for tree in (cgroups.trees() if best else ())}
    found = there.get(request.param)
    monkeypatch.setattr(job_cgroups, "tracker", lambda: found)
    return found


@pytest.fixture(scope="session", autouse=True)
def no_empty_cgroups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove those of jobs below our scratch directories that no agent was there to remove."""
    yield
    remove_cgroups(tmp_path_factory.getbasetemp())


MAX_ENVIRON_BYTES = 1 << 20
EXIT_WAIT_S = 10


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kill what tests leave, and fail if that cannot be killed.

    A program that forks and exits without end would take a processor from all later tests of this machine.
    """
    yield
    base = os.fsencode(tmp_path_factory.getbasetemp()) + b"/"  # or pytest-1 would end processes of pytest-10
    give_up_at = time.monotonic() + EXIT_WAIT_S
    while (left := _processes_of(base)) and time.monotonic() < give_up_at:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    assert not left, f"tests left processes that cannot be killed: {left}"


def _processes_of(base: bytes) -> dict[int, str]:
    """Command lines of the living processes, others than this one, with ``base`` in command line or environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()[:MAX_ENVIRON_BYTES]
            with (entry / "environ").open("rb") as stream:
                environ = stream.read(MAX_ENVIRON_BYTES)
            if int(entry.name) != os.getpid() and (base in command or base in environ):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found
