"""Tests updates of a canary instance, which the tests poll like a Director until the manifest's watch time is over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from tests.support import jobs
from tests.support.instance import AGENT, RunningAgent

WATCH = (5.0, 15.0)
"""Shortest and longest wait in seconds, from ``canary_watch_time: 5000-15000``."""
INTERVALS = 10
"""The Director divides the watch time into this number of polls (``instance_updater/starter.rb``), which are 1 to 15
seconds apart.
"""


class NotRunningError(Exception):
    """Raised if the instance is not running when the watch time is over. The message names the failed
    processes.
    """


async def wait_until_running(instance: RunningAgent) -> int:
    """Poll the instance until it is running, as the Director does, and return the number of polls.

    Raises ``NotRunningError`` if the instance is still not running when the watch time ends.
    """
    least, most = WATCH
    step = min(15.0, max(1.0, (most - least) / INTERVALS))
    begun_at = time.monotonic()
    await asyncio.sleep(least)
    looks = 1
    while (state := await instance.director.value(AGENT, "get_state"))["job_state"] != "running":
        if time.monotonic() - begun_at + step > most:
            failed = [each["name"] for each in state.get("processes", []) if each["state"] != "running"]
            review = f" Review logs for failed jobs: {', '.join(failed)}" if failed else ""
            raise NotRunningError(f"'{AGENT}' is not running after update.{review}")
        await asyncio.sleep(step)
        looks += 1
    return looks


def canary(instance: RunningAgent, lasts: str) -> dict[str, Any]:
    """Return the spec for a job whose process exits after ``lasts`` seconds."""
    process = jobs.process(Paths(instance.base), "job0", f"echo $$ >$pidfile; exec sleep {lasts}")
    return jobs.spec(instance.store, {"job0": process})


@pytest.mark.slow
async def test_canary_that_crashes_every_two_seconds_fails_the_deploy(instance: RunningAgent) -> None:
    """The job must never be reported as running, even though a process exists at nearly every poll."""
    await instance.start_agent()
    await instance.director.run(AGENT, "apply", canary(instance, "2"))
    await instance.director.run(AGENT, "start")

    with pytest.raises(NotRunningError, match="is not running after update. Review logs for failed jobs: job0"):
        await wait_until_running(instance)


@pytest.mark.slow
async def test_healthy_canary_passes_at_the_first_check(instance: RunningAgent) -> None:
    await instance.start_agent()
    await instance.director.run(AGENT, "apply", canary(instance, "1000"))
    await instance.director.run(AGENT, "start")

    assert await wait_until_running(instance) == 1
