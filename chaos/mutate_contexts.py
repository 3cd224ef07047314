"""A pytest plugin of ``chaos.mutate``: says which test runs, to coverage, and how long each took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import coverage
import pytest

from chaos.mutate import STORE

_seconds: Final[dict[str, float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The context of the lines that run in this process."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Only a test that passed says anything about a mutant."""
    if report.when == "call" and report.passed:
        _seconds[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    """Leave the durations for ``chaos.mutate``."""
    (STORE / "durations.json").write_text(json.dumps(_seconds))
