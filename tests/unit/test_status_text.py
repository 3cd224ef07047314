"""The status table as text."""

from __future__ import annotations

import pytest

from agent_shim import status_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m 0s"), (3600, "1h 0m"), (90061, "1d 1h"), (86400 * 400, "400d 0h")],
)
def test_durations_have_at_most_two_parts(seconds: int, text: str) -> None:
    assert status_text.duration(seconds) == text
