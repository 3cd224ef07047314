"""Measures memory growth after 10 000 actions, after 1000 process restarts, and after 1000 reconnects to the bus.

A complete agent would need seconds for each reconnect. Reconnects are therefore measured in a process that contains
only the agent's bus module and pauses for only milliseconds between attempts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from agent_shim.core.settings import Mbus
from agent_shim.edges.bus.nats import BusTiming, NatsBus
from tests.support.broker import NatsServer
from tests.support.instance import AGENT, COMMAND, RunningAgent, world
from tests.support.readings import own_memory
from tools.bench.crowds import FIRST_FAILURE_S
from tools.bench.measuring import Figure, Figures, figure

ACTIONS: Final = 10_000
RESTARTS: Final = 1000
RECONNECTS: Final = 1000
JOBS: Final = 200
CALM_S: Final = 5.0


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure how much memory grows with repeated actions, restarts and reconnects. ``scale`` multiplies the
    repetitions.
    """
    async with world(command) as w:
        await w.start_agent()
        await w.run("apply", w.spec(5, 1))
        await w.run("start")
        await w.until_running()
        await act(w, 200)
        found["growth_after_10000_actions"] = await grown(w, act(w, int(ACTIONS * scale)))
    async with world(command) as w:
        await w.start_agent()
        await w.run("apply", w.spec(JOBS, 0))
        await w.run("start")
        await w.until_running()
        await restart(w, JOBS)  # The first round allocates memory that all later rounds use again.
        found["growth_after_1000_restarts"] = await grown(w, restart(w, max(JOBS, int(RESTARTS * scale))))
    if command == COMMAND:
        found["growth_after_1000_reconnects"] = await reconnects(max(20, int(RECONNECTS * scale)))


async def grown(w: RunningAgent, work: object) -> Figure:
    """Return the growth of the agent's memory in MB while ``work`` runs."""
    await asyncio.sleep(CALM_S)
    before = w.own_memory()
    await work  # type: ignore[misc]
    await asyncio.sleep(CALM_S)
    return figure([w.own_memory() - before], "MB")


async def act(w: RunningAgent, count: int) -> None:
    """Send ``count`` requests in roughly the same proportions as a real Director. One in a hundred starts a task."""
    spec = w.spec(5, 1)
    for number in range(count // 10):
        await asyncio.gather(*(w.director.value(AGENT, "ping") for _ in range(6)))
        await w.director.value(AGENT, "get_state", "full")
        await w.director.value(AGENT, "get_state")
        await w.director.value(AGENT, "info")
        if number % 10:
            await w.director.value(AGENT, "list_disk")
        else:
            await w.director.run(AGENT, "apply" if number % 100 else "prepare", spec)


async def restart(w: RunningAgent, count: int) -> None:
    """Kill all processes repeatedly until there have been ``count`` restarts. The pauses between the kills are long
    enough for the agent to treat each kill as a first failure.
    """
    for _ in range(count // JOBS):
        await asyncio.sleep(FIRST_FAILURE_S)
        before = w.pids()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(300):
            while any(w.pids().get(job) in (None, pid) for job, pid in before.items()):
                await asyncio.sleep(0.5)
            await w.until_running()


async def reconnects(count: int) -> Figure:
    """Return the memory growth of a process that loses its connection to the bus ``count`` times."""
    with tempfile.TemporaryDirectory() as scratch:
        async with NatsServer(Path(scratch)) as server:
            await server.add_agent(AGENT)
            mbus = server.mbus(AGENT)
            own = {"urls": list(mbus.urls), "ca": mbus.ca, "cert": mbus.certificate, "key": mbus.private_key}
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tools.bench.ageing", str(count)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            said, _ = await child.communicate(json.dumps(own).encode())
            return figure([json.loads(said)], "MB")


async def lose_links(own: dict[str, object], count: int) -> float:
    """Connect to the bus and drop the connection ``count`` times.

    Return by how many MB this process's memory grew from the first tenth of the connections to the last.
    """

    async def nobody(_: bytes) -> None:
        return None

    mbus = Mbus(tuple(own["urls"]), str(own["ca"]), str(own["cert"]), str(own["key"]))  # type: ignore[arg-type]
    bus = NatsBus(AGENT, mbus, nobody, timing=BusTiming(step=0.001, longest=0.002, early_step=0.001))
    running = asyncio.create_task(bus.run())
    before = 0.0
    while bus.stats.connects < count:
        await bus.wait_connected()
        if bus.stats.connects >= count // 10 and not before:
            before = own_memory(os.getpid())
        cut(bus)
        while bus.is_connected:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    return own_memory(os.getpid()) - before


def cut(bus: NatsBus) -> None:
    """Drop the connection without closing it, as if the server had vanished."""
    link = bus._link  # noqa: SLF001 - a server could only end all links at once
    if link is not None:
        link.end("cut")


if __name__ == "__main__":
    json.dump(asyncio.run(lose_links(json.load(sys.stdin), int(sys.argv[1]))), sys.stdout)
