"""Measures the latency of single pings and the throughput of many concurrent ones. The results are compared with those
of ``tools.bench.echo``, the smallest possible agent.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tests.support.instance import AGENT, RunningAgent, world
from tools.bench.measuring import ECHO, Figures, figure, timed

BLOCKS: Final = 5
SERIAL: Final = 100
AT_ONCE: Final = 500


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure the agent and the floor in turn, so that other work on the machine affects both equally. ``scale`` has no
    effect.
    """
    trips: dict[str, list[float]] = {"ours": [], "least": []}
    rates: dict[str, list[float]] = {"ours": [], "least": []}
    async with world(command) as ours, world(ECHO) as least:
        for w in (ours, least):
            await w.start_agent()
        for _ in range(BLOCKS):
            for name, w in (("ours", ours), ("least", least)):
                await serial(w, trips[name])
                rates[name].append(await pipelined(w))
    floor_is = "a bare nats-py echo"
    found["ping"] = figure(trips["ours"], "s", floor=trips["least"], floor_is=floor_is)
    found["pipelined_pings_per_second"] = figure(rates["ours"], "1/s", floor=rates["least"], floor_is=floor_is)


async def serial(w: RunningAgent, into: list[float]) -> None:
    for _ in range(SERIAL):
        with timed(into):
            await w.director.value(AGENT, "ping")


async def pipelined(w: RunningAgent) -> float:
    begun_at = time.monotonic()
    await asyncio.gather(*(w.director.value(AGENT, "ping") for _ in range(AT_ONCE)))
    return AT_ONCE / (time.monotonic() - begun_at)
