"""Tests the values of ``--since``, and timestamps in log lines in the formats that programs use."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from agent_shim.services.logs.since import Since, moment, written_at

NOON = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h30m", 9000),
        ("1d", 86400),
        ("11:30", 1800),
        ("11:59:30", 30),
        ("2026-11-22T11:00:00Z", 3600),
        ("2026-11-22 12:00:00+01:00", 3600),
        ("2026-11-22", 43200),
    ],
)
def test_since_accepts_a_duration_a_time_or_a_date(text: str, ago: float) -> None:
    assert NOON - moment(text, NOON) == ago


@pytest.mark.parametrize("text", ["", "soon", "10", "-5m", "10m ago", "25:00", "2026-13-01", "9" * 30 + "d", "٣m"])
def test_since_rejects_an_invalid_time(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a time nor a duration"):
        moment(text, NOON)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-22T12:00:00Z up",
        "2026-11-22T12:00:00.000000Z up",
        "2026-11-22 13:00:00,000 +0100 up",
        "[2026-11-22 12:00:00+0000] up",
        "2026/11/22 12:00:00 up",
        "2026-11-22 12:00:00 UTC LOG:  up",
        '10.0.0.1 - - [22/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200',
        '{"timestamp":"2026-11-22T12:00:00.000000000Z","message":"up"}',
        '{"level":"info","ts":1795348800.0,"msg":"up"}',
        '{"timestamp":"1795348800.000000000","source":"rep"}',
        "I web/0815 2026-11-22T14:00:00+02:00 up",
    ],
)
def test_log_line_timestamp_is_parsed_in_common_formats(line: str) -> None:
    assert written_at(line.encode()) == NOON


@pytest.mark.parametrize(
    "line", ["up", "", "version 1.2026-11", "2026-02-30T12:00:00Z no such day", "\x00\xff 12:00:00"]
)
def test_log_line_without_a_valid_timestamp_has_no_time(line: str) -> None:
    assert written_at(line.encode(errors="replace")) is None


def test_log_line_without_a_timestamp_gets_the_time_of_the_preceding_line() -> None:
    since = Since(NOON)
    lines = ["start", "2026-11-22T11:59:59Z old", "  old too", "2026-11-22T12:00:00Z new", "  new too"]

    assert [since.is_wanted("a", line.encode(), lambda: NOON - 1) for line in lines] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(("changed_at", "is_wanted"), [(NOON - 1, False), (NOON, True)])
def test_lines_get_the_modification_time_of_a_log_file_without_timestamps(changed_at: float, is_wanted: bool) -> None:
    assert Since(NOON).is_wanted("a", b"up", lambda: changed_at) is is_wanted


def test_since_handles_each_log_file_separately() -> None:
    since = Since(NOON)

    assert since.is_wanted("a", b"2026-11-22T12:00:00Z new", lambda: 0.0)
    assert not since.is_wanted("b", b"up", lambda: 0.0)
