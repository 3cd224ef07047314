"""Tests the list of a service's latest events."""

from __future__ import annotations

from agent_shim.supervisor.history import History


def test_history_keeps_the_last_ten_events_and_counts_repetitions() -> None:
    history = History()
    for number in range(12):
        history.add("web", f"event {number}")
    history.add("web", "event 11")
    events = history.of("web")

    assert [event.text for event in events] == [f"event {number}" for number in range(2, 12)]
    assert [event.count for event in events] == [1] * 9 + [2]
    assert history.of("other") == []
