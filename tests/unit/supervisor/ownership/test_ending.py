"""Tests how a process's exit is described and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.supervisor.ownership import ending


@pytest.mark.parametrize(
    ("how", "text", "kind"),
    [
        (ending.of_status(0), "exit 0", "success"),
        (ending.of_status(1), "exit 1", "error"),
        (ending.of_status(128), "exit 128", "error"),
        (ending.of_status(137), "SIGKILL", "signal"),
        (ending.of_status(255), "exit 255", "error"),
        (ending.of_status(None), "unknown", "unknown"),
    ],
)
def test_process_exit_is_described_for_operators_and_classified_for_metrics(
    how: ending.Exit, text: str, kind: str
) -> None:
    """The kind of exit is a metric label, so it must be one of a few fixed values."""
    assert str(how) == text
    assert how.kind == kind
    assert kind in ending.KINDS


def test_missing_processes_and_paths_are_described_for_operators() -> None:
    assert str(ending.PathMissing(Path("/a"))) == "/a is missing"
    assert str(ending.NoPid()) == "its pidfile names no process"
