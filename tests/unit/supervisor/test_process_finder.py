"""How an end is described; the rest of presence is in test_supervisor."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.process_finder import KINDS, describe, kind_of


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit 0"), (1, "exit 1"), (128, "exit 128"), (137, "SIGKILL"), (255, "exit 255"), (None, "unknown")],
)
def test_how_it_ended(status: int | None, text: str) -> None:
    """For people."""
    assert describe(status) == text


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("exit 0", "success"),
        ("exit 1", "error"),
        ("SIGKILL", "signal"),
        ("unknown", "unknown"),
        ("/a is missing", "error"),
    ],
)
def test_kinds_of_ends_are_few(how: str, kind: str) -> None:
    """They are labels of a metric."""
    assert kind_of(how) == kind
    assert kind in KINDS
