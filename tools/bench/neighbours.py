"""Measures the memory (PSS) of several agents that run on one machine and share a bus.

PSS divides the size of shared memory, such as the interpreter and libraries, by the number of processes that share it.
Each agent's PSS is therefore smaller when more agents are running.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from tests.support.instance import RunningAgent, world
from tools.bench.measuring import ECHO, Figures, figure

AGENTS: Final = 8
ROOM_MB: Final = 4096.0
"""A machine's memory of 4 GiB, in MB. One of the figures is the number of agents that fit into it."""
CALM_S: Final = 5.0
IDLE_S: Final = 30.0


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure the memory of agents with one job each. ``scale`` multiplies the idle time."""
    least = await memory(ECHO, jobs=0)
    each = await memory(command, jobs=1, idle=IDLE_S * max(0.2, scale), found=found)
    found["pss_of_each_of_8_agents"] = figure(each, "MB", floor=least, floor_is="a bare nats-py echo")
    found["agents_in_4_GiB"] = figure([ROOM_MB // (sum(each) / len(each))], "agents")


async def memory(command: str, *, jobs: int, idle: float = 0.0, found: Figures | None = None) -> list[float]:
    """Start agents with ``jobs`` jobs each, one after the other. Return the memory of each in MB while all are running.

    If ``found`` is given, also measure the agents' CPU usage for ``idle`` seconds, and add the figure to ``found``.
    """
    async with AsyncExitStack() as opened:
        worlds: list[RunningAgent] = []
        for _ in range(AGENTS):
            w = await opened.enter_async_context(world(command))
            worlds.append(w)
            await w.start_agent()
            if jobs:
                await w.run("apply", w.spec(jobs, 1))
                await w.run("start")
                await w.until_running()
        await asyncio.sleep(CALM_S)
        if found is not None:
            before = [w.cpu_seconds() for w in worlds]
            await asyncio.sleep(idle)
            shares = [(w.cpu_seconds() - used) / idle * 100 for w, used in zip(worlds, before, strict=True)]
            found["idle_cpu_of_each_of_8_agents"] = figure(shares, "%")
        return [w.pss() for w in worlds]
