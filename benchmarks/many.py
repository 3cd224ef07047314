"""``./dev run python -m benchmarks.many``: an agent with 200 supervised processes; prints one JSON.

What it costs while nothing happens, how soon all of them are back when they are killed at once, and that the end of
the agent ends or starts none. When a process was back is read off its pidfile, so that nobody polls meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.__main__ import cpu_seconds, pss
from benchmarks.world import AGENT, COMMAND, World, world

JOBS: Final = 200
ROUNDS: Final = 3
IDLE: Final = 30.0


async def running(w: World, starts: int) -> None:
    """Until each job was started so often and its pidfile names a living process."""
    async with asyncio.timeout(120):
        while True:
            known = w.starts()
            if len(known) == JOBS and all(len(pids) == starts for pids in known.values()):
                pids = w.pids()
                if all(pids.get(job) == known[job][-1] and Path(f"/proc/{pids[job]}").exists() for job in known):
                    return
            await asyncio.sleep(0.2)


async def idle(w: World) -> dict[str, float]:
    """Processor time in percent of one core and memory in MB, with nothing to do."""
    await asyncio.sleep(3)
    used, begun_at = cpu_seconds(w.pid), time.monotonic()
    await asyncio.sleep(IDLE)
    share = (cpu_seconds(w.pid) - used) / (time.monotonic() - begun_at) * 100
    return {"cpu_percent": round(share, 3), "pss_mb": round(pss(w.pid), 1)}


async def killed(w: World, starts: int) -> tuple[float, float]:
    """Kill all at once; seconds until the first and until the last successor has written its pidfile."""
    pids = w.pids().values()
    begun_at = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await running(w, starts)
    back_at = [path.stat().st_mtime - begun_at for path in (w.base / "data/sys/run").glob("job*/*.pid")]
    return min(back_at), max(back_at)


async def measure() -> dict[str, Any]:
    """All figures."""
    async with world(COMMAND) as w:
        await w.start_agent()
        await asyncio.sleep(3)
        before = pss(w.pid)
        await w.director.run(AGENT, "apply", w.spec(JOBS, 0))
        await w.run("start")
        await running(w, 1)
        quiet = await idle(w)
        firsts, lasts = [], []
        for number in range(ROUNDS):
            # Long enough that the next death is a first one again.
            await asyncio.sleep(35 if number else 0)
            first, last = await killed(w, number + 2)
            firsts.append(first)
            lasts.append(last)
        starts, pids = w.starts(), w.pids()
        await w.kill_agent()
        await asyncio.sleep(1)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids.values()), "the end of the agent has ended a job"
        await w.start_agent()
        await asyncio.sleep(3)
        return {
            "processes": JOBS,
            "idle": quiet | {"pss_before_mb": round(before, 1)},
            "first_back_s": [round(first, 3) for first in sorted(firsts)],
            "last_back_s": [round(last, 3) for last in sorted(lasts)],
            "median_last_back_s": round(statistics.median(lasts), 3),
            "restarted_by_the_end_of_the_agent": sum(w.starts()[job] != starts[job] for job in starts),
        }


if __name__ == "__main__":
    json.dump(asyncio.run(measure()), sys.stdout, indent=2)
    print()
