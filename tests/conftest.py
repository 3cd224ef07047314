"""For all tests: the processes they start have the signals of a terminal, whatever started the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import hypothesis
import pytest

from agent_shim.host import cgroups, job_cgroups, process


def pytest_configure() -> None:
    """Undo the ignored SIGINT of a background run; every process that a test interrupts would inherit it."""
    process.default_signals()
    # A slow machine fails no example.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")


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
    with contextlib.suppress(OSError):
        base = str(tmp_path_factory.getbasetemp()).replace("/", "%2f")
        for tree in cgroups.trees():
            for directory in (job_cgroups.place(tree.hierarchy) / "agent_shim").glob(f"*@{base}*"):
                with contextlib.suppress(OSError):
                    directory.rmdir()
