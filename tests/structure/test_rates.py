"""The rates of habits of language only fall. STYLE.md has their limits."""

from __future__ import annotations

import pytest

from tests.structure import rates
from tests.structure.source import texts


def test_no_rate_is_above_its_limit() -> None:
    now = rates.measured(texts())

    over = {
        f"{habit} in {column}": (now[habit][column], limit)
        for habit, row in rates.limits(rates.STYLE.read_text()).items()
        for column, limit in row.items()
        if now[habit][column] > limit
    }
    assert over == {}


def test_rates_are_per_ten_thousand_words_without_code() -> None:
    found = rates.rates(["The end of a job and that of a process; one that ends early: it is counted.", "`; ; ;`"])

    assert {name: round(rate * 17 / 10_000) for name, rate in found.items()} == {
        "`that of`, `those of`": 1,
        "`one` or `another` without a noun": 1,
        "semicolons": 1,
        "colon before a clause": 1,
        "opens with As, Nor, Also, It, Not, For, With": 0,
    }


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("test_a_job_restarts_after_a_kill", True),
        ("test_nobody_listens", False),
        ("test_what_is_not_there_cannot_be_bound", False),
        ("test_not_even_as_root", False),
        ("test_settings_of_one_that_waits_are_kept", False),
    ],
)
def test_a_name_is_a_plain_fact(name: str, is_plain: bool) -> None:
    assert (rates.RIDDLE.search(name) is None) == is_plain


def test_limits_only_fall() -> None:
    style = rates.STYLE.read_text()
    limits = rates.limits(style)
    lower = {habit: dict.fromkeys(row, 0.5) for habit, row in limits.items()}
    higher = {habit: dict.fromkeys(row, 1e6) for habit, row in limits.items()}

    assert rates.limits(rates.lowered(style, lower)) == {
        habit: dict.fromkeys(row, 1.0) for habit, row in limits.items()
    }
    assert rates.lowered(style, higher) == style
