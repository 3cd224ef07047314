"""A pytest plugin for ``tools.chaos.mutate``: it sets coverage's context to the running test, and records how long each
test takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import coverage
import pytest

_seconds: Final[dict[str, float]] = {}


def pytest_configure() -> None:
    """Measure coverage in the processes that tests start, too."""
    if config := os.environ.get("SHIM_MUTATE_CHILDREN"):
        os.environ["COVERAGE_PROCESS_START"] = config


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set coverage's context to the running test."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the duration of each test that passes. Tests that fail even without a mutant are not used."""
    if report.when == "call" and report.passed:
        _seconds[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    """Write the durations to the file that ``tools.chaos.mutate`` reads."""
    Path(os.environ["SHIM_MUTATE_DURATIONS"]).write_text(json.dumps(_seconds))
