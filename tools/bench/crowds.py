"""Measures how an agent supervises 10, 50, 200 and 500 processes: the cost when idle, and the time to restart all
processes after they were killed.

A restart is complete when the new pidfile has been written. This time is read from the file's mtime, so the measurement
does not have to poll.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.support.instance import AGENT, ENVIRONMENT, RunningAgent, world
from tools.bench.measuring import Figures, Stopwatch, figure

SIZES: Final = (10, 50, 200, 500)
ROUNDS: Final = 3
KILLED: Final = 200
IDLE_S: Final = 30.0
"""Seconds between two heartbeats. The idle CPU usage is measured over one such interval, or over two if the figure has
a budget.
"""
PINGED_S: Final = 15.0
CALM_S: Final = 6.0
FIRST_FAILURE_S: Final = 32.0
"""If a process exits at least this many seconds after its last restart, the agent treats the exit as a first failure
and restarts the process immediately.
"""


async def measure(command: str, scale: float, found: Figures) -> None:
    """Take the measurements for each number of processes. ``scale`` multiplies the numbers and the idle time."""
    slower = max(scale, 0.2)
    async with world(command) as w:
        await w.start_agent()
        await asyncio.sleep(CALM_S)
        alone = await share(w, IDLE_S * slower)
    for size in SIZES:
        await crowd(command, max(2, int(size * scale)), size, slower, alone, found)


async def crowd(command: str, jobs: int, size: int, slower: float, alone: float, found: Figures) -> None:
    """Add the figures for ``jobs`` processes to ``found``.

    ``size`` is the unscaled number of processes, which appears in the figures' names. ``slower`` multiplies the
    durations. ``alone`` is the CPU usage of an agent without processes.
    """
    async with world(command) as w:
        await w.start_agent()
        await asyncio.sleep(CALM_S)
        empty = w.own_memory()
        await w.director.run(AGENT, "apply", w.spec(jobs, 0))
        begun_at = time.monotonic()
        await w.run("start")
        await running(w, jobs, 1)
        started = time.monotonic() - begun_at
        await w.until_running()
        await asyncio.sleep(CALM_S)
        cpu = await share(w, (2 if size == KILLED else 1) * IDLE_S * slower)
        lags: list[float] = []
        pinging = asyncio.create_task(ping(w, lags))
        await asyncio.sleep(PINGED_S * slower)
        pinging.cancel()
        await asyncio.wait([pinging])
        name = f"{size}_processes"
        found[f"{name}_started"] = figure([started], "s")
        found[f"{name}_idle_cpu"] = figure([cpu], "%", floor=[alone], floor_is="the agent without processes")
        found[f"{name}_memory_added"] = figure([w.own_memory() - empty], "MB")
        found[f"{name}_slowest_ping"] = figure([max(lags)], "s")
        if size == KILLED:
            firsts, lasts, floors = [], [], []
            for number in range(ROUNDS):
                await asyncio.sleep(FIRST_FAILURE_S if number else 0)
                first, last = await killed(w, jobs, number + 2)
                firsts.append(first)
                lasts.append(last)
                floors.append(await spawned(jobs))
            found[f"{name}_killed_first_back"] = figure(firsts, "s")
            found[f"{name}_killed_last_back"] = figure(
                lasts, "s", floor=floors, floor_is="the same number of processes spawned one after the other"
            )


async def share(w: RunningAgent, seconds: float) -> float:
    """Return the agent's CPU usage over the next ``seconds``, as a percentage of one core."""
    used, watch = w.cpu_seconds(), Stopwatch()
    await asyncio.sleep(seconds)
    return (w.cpu_seconds() - used) / watch.seconds * 100


async def ping(w: RunningAgent, into: list[float]) -> None:
    """Ping twice a second. More pings would add to the load that is being measured."""
    while True:
        watch = Stopwatch()
        await w.director.value(AGENT, "ping")
        into.append(watch.seconds)
        await asyncio.sleep(0.5)


async def running(w: RunningAgent, jobs: int, starts: int) -> None:
    """Wait until each job has been started ``starts`` times and its pidfile names a running process."""
    async with asyncio.timeout(300):
        while True:
            known = w.starts()
            if len(known) == jobs and all(len(pids) == starts for pids in known.values()):
                pids = w.pids()
                if all(pids.get(job) == known[job][-1] and Path(f"/proc/{pids[job]}").exists() for job in known):
                    return
            await asyncio.sleep(0.2)


async def killed(w: RunningAgent, jobs: int, starts: int) -> tuple[float, float]:
    """Kill all processes at the same time.

    Return the seconds until the first and until the last of the restarted processes has written its pidfile.
    """
    pids = w.pids().values()
    begun_at = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await running(w, jobs, starts)
    back_at = [path.stat().st_mtime - begun_at for path in (w.base / "data/sys/run").glob("job*/*.pid")]
    return min(back_at), max(back_at)


async def spawned(jobs: int) -> float:
    """Return the seconds that it takes to run ``jobs`` shells one after the other."""

    def spawn() -> float:

        watch = Stopwatch()
        for _ in range(jobs):
            subprocess.run(["/bin/sh", "-c", ":"], env=ENVIRONMENT, check=True)
        return watch.seconds

    return await asyncio.to_thread(spawn)
