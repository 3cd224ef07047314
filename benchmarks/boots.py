"""From exec to the first answer, with nothing to do and with jobs to adopt; the floor is ``benchmarks.echo``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Final

from benchmarks.measuring import Figures, figure, timed
from benchmarks.world import AGENT, ECHO, World, world

ROUNDS: Final = 7
JOBS: Final = 5


async def measure(command: str, scale: float, found: Figures) -> None:
    """``scale`` does not matter."""
    async with world(command) as ours, world(ECHO) as least:
        starts: dict[str, list[float]] = {"ours": [], "least": []}
        for _ in range(ROUNDS):
            for name, w in (("ours", ours), ("least", least)):
                starts[name].append(await w.start_agent())
                await w.stop_agent()
        floor_is = "a bare nats-py echo"
        found["exec_to_first_pong"] = figure(starts["ours"], "s", floor=starts["least"], floor_is=floor_is)
        adopted, answered = [], []
        await ours.start_agent()
        await ours.run("apply", ours.spec(JOBS, 0))
        await ours.run("start")
        await ours.until_running()
        for _ in range(ROUNDS):
            await ours.kill_agent()
            begun_at = time.monotonic()
            answered.append(await ours.start_agent())
            await running_again(ours)
            adopted.append(time.monotonic() - begun_at)
        for name, took in (("exec_to_first_pong_with_5_jobs", answered), ("exec_until_5_jobs_are_adopted", adopted)):
            found[name] = figure(took, "s", floor=starts["least"], floor_is=floor_is)
    interpreter: list[float] = []
    for _ in range(ROUNDS):
        with timed(interpreter):
            subprocess.run([sys.executable, "-c", "import asyncio, ssl"], check=True)
    found["interpreter_with_asyncio_and_ssl"] = figure(interpreter, "s")


async def running_again(w: World) -> None:
    """Until the agent says ``running`` with all jobs."""
    async with asyncio.timeout(60):
        while True:
            state = await w.director.value(AGENT, "get_state", "full")
            if state["job_state"] == "running" and len(state.get("processes", ())) == JOBS:
                return
