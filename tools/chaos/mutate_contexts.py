"""A pytest plugin of ``tools.chaos.mutate`` that tells coverage which test is running, and records how long each
took.
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
    """Measure the processes that tests start, too."""
    if config := os.environ.get("SHIM_MUTATE_CHILDREN"):
        os.environ["COVERAGE_PROCESS_START"] = config


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set the context for lines that run in this process."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record only tests that passed, because others say nothing about a mutant."""
    if report.when == "call" and report.passed:
        _seconds[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    """Write the durations for ``tools.chaos.mutate``."""
    Path(os.environ["SHIM_MUTATE_DURATIONS"]).write_text(json.dumps(_seconds))
