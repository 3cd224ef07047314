"""``./dev run python -m tools.bench.coming_back``: time until an instance runs again after a restart. Needs root.

The instance has a disk and five jobs with one pre-start script each, in a container with its own mount and PID
namespaces. Three cases are measured: the container is restarted, the container is recreated with all its volumes, and
only the agent is restarted. Prints one JSON document with times in seconds since the agent's exec.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from tests.support import jobs
from tests.support.pod import PodInstance, pod

JOBS: Final = [f"job{number}" for number in range(5)]
ROUNDS: Final = 7


def job(name: str) -> dict[str, str | bytes]:
    """Return a job with a process that sleeps and a pre-start script that does nothing."""
    return {**jobs.sleeper(Paths(), name), "bin/pre-start": "#!/bin/sh\nexit 0\n"}


async def running(one: PodInstance, begun_at: float) -> float:
    """Wait until the Director sees all jobs running. Return the seconds since ``begun_at`` (monotonic)."""
    await one.until("running")
    return time.monotonic() - begun_at


async def measure() -> dict[str, Any]:
    """Measure the three cases and return the results."""
    found: dict[str, list[float]] = {"restarted in place": [], "made anew": [], "agent restarted": []}
    with tempfile.TemporaryDirectory() as scratch:
        async with pod(Path(scratch)) as one:
            one.attach("disk-1")
            await one.start()
            await one.run("mount_disk", "disk-1")
            await one.run("apply", jobs.spec(one.scratch / "blobs", {name: job(name) for name in JOBS}))
            await one.run("start")
            await one.until("running")
            for number in range(ROUNDS):
                found["restarted in place"].append(await running(one, await one.restart()))
                one.kill()
                one.attach(f"disk-{number + 2}")
                found["made anew"].append(await running(one, await one.start()))
                one.end_agent()
                found["agent restarted"].append(await running(one, await one.start_agent()))
    return {
        name: {"median": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3)}
        for name, times in found.items()
    }


if __name__ == "__main__":
    print(json.dumps({"unit": "s", "rounds": ROUNDS, "jobs": len(JOBS)} | asyncio.run(measure()), indent=2))
