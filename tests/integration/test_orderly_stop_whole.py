"""The whole orderly stop as Kubernetes asks for it: three jobs that drain for eight seconds, with grace and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.test_standalone import Place

pytestmark = pytest.mark.slow

NAMES = ("one", "three", "two")
DRAIN = """#!/bin/sh
echo {name} begins >>{trace}
sleep 8
for other in {others}; do kill -0 $(cat {run}/$other/$other.pid) && echo {name} sees $other >>{trace}; done
echo {name} ends >>{trace}
echo 0
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """An agent with three running jobs."""
    made = Place(tmp_path)
    for name in NAMES:
        made.job(name)
        text = DRAIN.format(name=name, others=" ".join(NAMES), run=made.paths.run, trace=made.scratch / "trace")
        made.lay(f"jobs/{name}", {"bin/drain": text})
    made.start()
    try:
        await made.until_ready()
        yield made
    finally:
        await made.ask("drain", "--timeout", "1")
        await made.end()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def drained(place: Place, grace: int) -> tuple[int | None, str, float]:
    """Return exit code, output and duration in seconds."""
    begun_at = time.monotonic()
    async with asyncio.timeout(100):
        code, said = await place.ask("drain", "--timeout", str(grace))
    return code, said, time.monotonic() - begun_at


async def test_all_jobs_stop_within_thirty_seconds_and_no_process_is_killed_early(place: Place) -> None:
    pids = [place.pid(name) for name in NAMES]

    code, said, seconds = await drained(place, 30)

    assert (code, said) == (0, "all jobs stopped in order")
    # Until the last drain has ended every process was up.
    lines = [line for line in place.trace if " sees " in line]
    assert sorted(lines) == [f"{name} sees {other}" for name in NAMES for other in NAMES]
    assert [name for name in NAMES if f"{name} pre-stop" in place.trace] == list(NAMES)
    assert [name for name in NAMES if f"{name} post-stop" in place.trace] == list(NAMES)
    assert alive(pids) == []
    assert seconds >= 8


async def test_the_jobs_come_back_with_the_agent(place: Place) -> None:
    """Nothing of an orderly stop may persist as a wanted state."""
    await drained(place, 30)
    await place.end()
    place.start()

    await place.until_ready()
    assert alive([place.pid(name) for name in NAMES])
