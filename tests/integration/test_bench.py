"""Tests ``./dev bench`` with fake benchmarks, and with a failing program instead of an agent."""

from __future__ import annotations

import pytest

from agent_shim.core.errors import HostError
from tests.support.instance import world
from tools.bench.__main__ import measure
from tools.bench.measuring import Figures, figure


async def good(command: str, scale: float, found: Figures) -> None:
    found["good"] = figure([scale], "s")


async def half(command: str, scale: float, found: Figures) -> None:
    found["half"] = figure([scale], "s")
    raise TimeoutError


async def test_failing_benchmark_keeps_its_figures_and_does_not_stop_other_benchmarks() -> None:
    figures, missing = await measure("agent", {"half": half, "good": good}, 1.0)
    assert {name: found["part"] for name, found in figures.items()} == {"half": "half", "good": "good"}
    assert missing == {"half": "TimeoutError in __main__.measure"}


async def test_benchmark_reports_the_output_of_an_agent_that_exits_immediately() -> None:
    with pytest.raises(HostError, match="it has exited: no such bus"):
        async with world("sh -c 'echo no such bus >&2; exit 1'") as w:
            await w.start_agent()
