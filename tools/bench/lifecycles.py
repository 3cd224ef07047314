"""Measures how long it takes to start five jobs, to query their status, to replace a killed process and to stop them.

The floor for the start is the time that the jobs' start scripts take when the benchmark runs them directly.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from agent_shim.host import proc
from tests.support.instance import AGENT, RunningAgent, world
from tools.bench.measuring import Figures, figure, timed

ROUNDS: Final = 5
JOBS: Final = 5
LOOKS: Final = 50
PAUSES: Final = (1.3, 7.9, 4.1, 9.6, 2.2)
"""Seconds before each kill. They are not all equal, so that the kills hit a polling supervisor at different points of
its cycle.
"""
SCRIPT: Final = "running the start program directly until its pidfile exists"


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure several times how long it takes to start, query, restart and stop jobs. ``scale`` is ignored."""
    async with world(command) as w:
        await w.start_agent()
        await w.run("apply", w.spec(JOBS, 1))
        starts, runnings, stops = [], [], []
        by_hand: list[float] = []
        for _ in range(ROUNDS):
            starts.append(await w.run("start"))
            runnings.append(starts[-1] + await w.until_running())
            stops.append(await w.run("stop"))
            await start_by_hand(w, by_hand)
        found["start_answered"] = figure(starts, "s")
        found["start_until_5_running"] = figure(runnings, "s", floor=by_hand, floor_is=f"{SCRIPT}, {JOBS} times")
        found["stop_of_5"] = figure(stops, "s")
        await w.run("start")
        await w.until_running()
        states: list[float] = []
        pings: list[float] = []
        passes: list[float] = []
        for _ in range(LOOKS):
            with timed(states):
                await w.director.value(AGENT, "get_state", "full")
            with timed(pings):
                await w.director.value(AGENT, "ping")
            with timed(passes):
                proc.table()
        floors = [ping + one_pass for ping, one_pass in zip(pings, passes, strict=True)]
        found["get_state_full"] = figure(states, "s", floor=floors, floor_is="a ping and one pass over /proc")
        each_by_hand = [each / JOBS for each in by_hand]
        found["restart_of_a_killed_process"] = figure(await killed(w), "s", floor=each_by_hand, floor_is=SCRIPT)


async def start_by_hand(w: RunningAgent, into: list[float]) -> None:
    """Run the start scripts and wait until all pidfiles exist. Append the duration to ``into``, then kill the
    processes.
    """
    before = w.starts()
    with timed(into):
        started = [
            subprocess.Popen([w.base / f"jobs/job{number}/bin/ctl", "start"], start_new_session=True)
            for number in range(JOBS)
        ]
        while sum(map(len, w.starts().values())) < sum(map(len, before.values())) + JOBS:
            await asyncio.sleep(0.0005)
    for each in started:
        each.kill()
        each.wait()
    for path in (w.base / "data/sys/run").glob("job*/*.pid"):
        path.unlink()


async def killed(w: RunningAgent) -> list[float]:
    """Kill each job's process. For each job, return the seconds until a new process has replaced it.

    Each job is killed only once, so every kill counts as a first failure.
    """
    samples = []
    for (job, pid), pause in zip(sorted(w.pids().items()), PAUSES, strict=True):
        await w.until_running()
        await asyncio.sleep(pause)
        begun_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while w.pids().get(job) in (None, pid) or not Path(f"/proc/{w.pids()[job]}").exists():
                await asyncio.sleep(0.0005)
        samples.append(time.monotonic() - begun_at)
    await w.until_running()
    return samples
