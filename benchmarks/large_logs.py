"""``./dev run python -m benchmarks.large_logs [GB [FILES]]``: what many logs cost; 10 GB in 20000 files unless told.

The Director fetches them over the bus, into a local blobstore; the CLI has them bundled; meanwhile somebody pings, and
a job writes and rotates. Prints one JSON: seconds, memory of the agent and of its worker, the slowest ping.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.world import AGENT, COMMAND, World, world

POOL = 4 << 20


def line(chance: random.Random) -> str:
    """Something like an access log: two thirds of it can be guessed."""
    return (
        f"2026-11-20T13:{chance.randrange(60):02}:{chance.randrange(60):02}.{chance.randrange(10**6):06}Z "
        f"[{chance.choice(['INFO', 'WARN', 'DEBUG'])}] web.{chance.randrange(9)} request "
        f"id={chance.getrandbits(64):016x} path=/v2/apps/{chance.getrandbits(32):08x} took={chance.random():.4f}s\n"
    )


def fill(root: Path, files: int, size: int) -> None:
    """``files`` logs of ``size`` bytes each, of a hundred jobs."""
    chance = random.Random(1)
    pool = "".join(line(chance) for _ in range(POOL // 110)).encode()
    for number in range(files):
        path = root / f"job{number % 100}" / f"{number}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = chance.randrange(len(pool) // 2)
        with path.open("wb") as out:
            for _ in range(size // (POOL // 2)):
                out.write(pool[begin : begin + POOL // 2])
            out.write(pool[begin : begin + size % (POOL // 2)])


def memory(pid: int, name: str) -> float:
    """A value of a process in MB: ``VmRSS`` is now, ``VmHWM`` the most; 0 when it has gone."""
    with contextlib.suppress(OSError):
        for text in Path(f"/proc/{pid}/status").read_text().splitlines():
            if text.startswith(f"{name}:"):
                return int(text.split()[1]) / 1024
    return 0.0


@dataclass
class Watch:
    """What is seen from outside while something goes on."""

    pings: list[float] = field(default_factory=list)
    workers: dict[str, float] = field(default_factory=dict)

    async def ping(self, w: World) -> None:
        while True:
            begun_at = time.monotonic()
            await w.director.value(AGENT, "ping")
            self.pings.append(time.monotonic() - begun_at)
            await asyncio.sleep(0.01)

    async def look(self, w: World) -> None:
        while True:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{w.pid}/task/{w.pid}/children").read_text().split()
                self.workers |= {pid: max(self.workers.get(pid, 0), memory(int(pid), "VmHWM")) for pid in children}
            await asyncio.sleep(0.05)


async def write(log: Path) -> None:
    """A job that writes ten times a second and rotates once."""
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        for _ in range(10):
            with log.open("a") as out:
                out.write("x" * 1000 + "\n")
            await asyncio.sleep(0.1)
        log.replace(log.with_name(f"{log.name}.1"))


@asynccontextmanager
async def watched(w: World, log: Path) -> AsyncIterator[Watch]:
    """Pings, looks and writes for the length of the block."""
    watch = Watch()
    going = [asyncio.create_task(work) for work in (watch.ping(w), watch.look(w), write(log))]
    try:
        yield watch
    finally:
        for task in going:
            task.cancel()
        await asyncio.wait(going)


async def measure(gigabytes: float, files: int) -> dict[str, Any]:
    """All figures."""
    async with world(COMMAND) as w:
        await w.start_agent()
        logs = w.base / "data/sys/log"
        await asyncio.to_thread(fill, logs, files, int(gigabytes * 1e9 / files))
        figures = {}
        for method, arguments in (("fetch_logs", ["job", None]), ("bundle_logs", [{"log_type": "job"}])):
            before, begun_at = memory(w.pid, "VmRSS"), time.monotonic()
            async with watched(w, logs / "busy/busy.log") as watch:
                if method == "fetch_logs":
                    await w.director.run(AGENT, method, *arguments)
                else:
                    await w.director.value(AGENT, method, *arguments, timeout=600)
            seconds = time.monotonic() - begun_at
            figures[method] = {
                "seconds": round(seconds, 1),
                "MB_per_second": round(gigabytes * 1000 / seconds),
                "agent_MB_before": round(before, 1),
                "agent_MB_most": round(memory(w.pid, "VmHWM"), 1),
                "worker_MB_most": round(max(watch.workers.values(), default=0), 1),
                "slowest_ping_ms": round(max(watch.pings) * 1000, 1),
                "pings": len(watch.pings),
            }
        return figures


if __name__ == "__main__":
    wanted = [float(word) for word in sys.argv[1:]]
    gb, count = (wanted + [10.0, 20_000.0][len(wanted) :])[:2]
    print(json.dumps({"GB": gb, "files": int(count)} | asyncio.run(measure(gb, int(count))), indent=2))
