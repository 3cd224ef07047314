"""Tests the tables in docs/performance.md that are rendered from benchmark results."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.bench import table
from tools.bench.measuring import figure

MACHINE = {"cores": 2, "kernel": "6.18", "python": "3.11.2", "load_before": 0.1}


def document(agent: str, figures: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = {name: {**values, "part": "boots"} for name, values in figures.items()}
    times = {"date": "2026-11-22", "from": "04:00", "to": "04:20", "scale": 1.0}
    return {"agent": agent, **times, "machine": MACHINE, "figures": made, "missing": {}, **more}


OURS = document("ours", {"ping": figure([0.0003, 0.00031, 0.002], "s", floor=[0.0002], floor_is="an echo")})


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.162016, "s", "162 ms"),
        (0.0104, "s", "10.4 ms"),
        (0.000273, "s", "273 µs"),
        (2.1534, "s", "2.15 s"),
        (0.0, "s", "0 s"),
        (25123.9, "1/s", "25 100 /s"),
        (21.666, "MB", "21.7 MB"),
        (-0.12, "MB", "-0.12 MB"),
    ],
)
def test_benchmark_figure_has_three_digits_and_a_suitable_unit(value: float, unit: str, words: str) -> None:
    assert table.worded(value, unit) == words


def test_benchmark_row_has_spread_floor_ratio_and_budget() -> None:
    text = table.render(OURS, [])
    assert "| ping | 310 µs (300 µs to 2 ms) | 200 µs (1) ×1.55 | 1.2 / 1.1 times the floor, **limit missed** |" in text
    assert "Floors: (1) an echo." in text


@pytest.mark.parametrize(
    ("name", "samples", "verdict"),
    [
        ("pipelined_pings_per_second", figure([69.0], "1/s", floor=[100.0], floor_is="an echo"), "limit missed"),
        ("pipelined_pings_per_second", figure([79.0], "1/s", floor=[100.0], floor_is="an echo"), "target missed"),
        ("pipelined_pings_per_second", figure([81.0], "1/s", floor=[100.0], floor_is="an echo"), ""),
        ("pipelined_pings_per_second", figure([69.0], "1/s"), ""),
        ("fetch_logs_of_400_MB", figure([299.0], "MB/s"), "limit missed"),
        ("fetch_logs_of_400_MB", figure([300.0], "MB/s"), "target missed"),
        ("start_answered", figure([0.0201], "s", floor=[1.0], floor_is="a script"), "limit missed"),
        ("start_answered", figure([0.0199], "s"), "target missed"),
        ("start_answered", figure([0.0099], "s"), ""),
    ],
)
def test_benchmark_budget_is_absolute_or_a_multiple_of_the_floor(name: str, samples: Any, verdict: str) -> None:
    assert table.BUDGETS[name].verdict(samples) == verdict


def test_benchmark_table_shows_another_agent_with_its_ratio() -> None:
    theirs = document("theirs", {"ping": figure([0.0651], "s")}, **{"from": "05:00", "to": "05:40"})
    text = table.render(OURS, [theirs])
    assert "**limit missed** | 65.1 ms (×210) |" in text
    assert "; on the same machine, theirs from 05:00 to 05:40 (load 0.1)." in text


def test_benchmark_table_merges_several_runs_into_one_column() -> None:
    ping = {"ping": {**figure([0.0004], "s"), "part": "pings"}}
    later = {**document("ours", {}), "from": "05:00", "to": "05:01", "machine": {**MACHINE, "load_before": 2.5}}
    runs = [
        document("ours", {"stop_of_5": figure([0.1], "s")}),
        {**later, "figures": ping, "missing": {"idle": "gone"}},
    ]
    [joined] = table.merged(runs)
    text = table.render(joined, [])

    assert "| stop of 5 | 100 ms |" in text
    assert "| ping | 400 µs |" in text
    assert "the `idle` part failed: `gone`" in text
    assert "each part in its own run: ours from 04:00 to 05:01 (load at most 2.5)." in text


def test_benchmark_deploy_steps_have_a_row_for_each_agent() -> None:
    counts = {f"deploy_queries_of_{step}": figure([n], "queries") for step, n in (("stop", 1.0), ("pre-start", 2.0))}
    text = table.render(document("ours", counts), [document("theirs", counts)])

    assert "| step of a deploy | stop | pre-start |\n|---|---|---|\n| `get_task` requests, ours | 1 | 2 |\n" in text
    assert "| `get_task` requests, theirs | 1 | 2 |" in text
    assert "| deploy queries" not in text


def test_benchmark_table_keeps_individual_rows_for_measurements_with_a_budget() -> None:
    crowds = {f"{count}_processes_idle_cpu": figure([0.05], "%") for count in (10, 200)}
    text = table.render(document("ours", crowds), [])

    assert "| CPU time when idle, ours | 0.05 % | 0.05 % |" in text
    assert "| 200 processes idle cpu | 0.05 % |" in text
    assert "| 10 processes idle cpu" not in text


def test_benchmark_table_mentions_runs_on_another_machine() -> None:
    theirs = document("theirs", {}, machine={**MACHINE, "kernel": "5.10"}, scale=0.5)
    text = table.render(OURS, [theirs])
    assert "; on another machine, theirs from 04:00 to 04:20 (load 0.1, at a scale of 0.5)." in text


def test_benchmark_table_gives_the_reason_for_a_missing_figure() -> None:
    theirs = document("theirs", {}, missing={"boots": "HostError: it has exited"})
    text = table.render(OURS, [theirs])
    assert "**limit missed** | not measured |" in text
    assert "Some theirs figures are missing because the `boots` part failed: `HostError: it has exited`" in text


def test_benchmark_table_lists_the_boot_steps_that_ran_as_root() -> None:
    boot = figure([0.2914, 0.267, 0.347], "s", floor=[0.1], floor_is="an interpreter") | {
        "steps_ms": {"own names": 2.5, "ssh server": 7.3}
    }
    text = table.render(document("ours", {"exec_to_first_pong_as_root": boot}), [])

    assert "| 291 ms (267 to 347 ms) | 100 ms (1) ×2.91 | 3 / 2.5 times the floor, **target missed** |" in text
    assert "*exec to first pong as root* that took a millisecond or more: own names 2.5 ms, ssh server 7.3 ms." in text


def test_readme_and_benchmark_page_have_the_same_figures() -> None:
    page = table.PAGE.read_text()

    assert re.search(r"^\\| figure .*\\| Go agent [^|]*\\|$", page, re.MULTILINE)
    assert table.BEGIN + table.in_short(page) + table.END in table.README.read_text()
    assert len(table.in_short(page).splitlines()) == 2 + len(table.IN_SHORT)


def test_benchmark_memory_figures_have_readable_names() -> None:
    text = table.render(document("ours", {"pss_of_an_interpreter": figure([9.96], "MB")}), [])
    assert "| memory (PSS) of an interpreter | 9.96 MB |" in text
