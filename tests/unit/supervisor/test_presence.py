"""How an end is described; the rest of presence is in test_supervisor."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.presence import describe


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit 0"), (1, "exit 1"), (128, "exit 128"), (137, "SIGKILL"), (255, "exit 255"), (None, "unknown")],
)
def test_how_it_ended(status: int | None, text: str) -> None:
    """For people."""
    assert describe(status) == text
