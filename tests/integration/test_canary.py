"""A deploy of one canary by a Director that polls as the real one does, with the watch times of a manifest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agent_shim.demo.director import NotRunningError
from agent_shim.demo.release import archive
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made

WATCH = (5.0, 15.0)
"""``canary_watch_time: 5000-15000``."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with made(COMMAND) as one:
        await one.start_agent()
        yield one


def canary(world: World, lasts: str) -> dict[str, object]:
    """A spec of one job whose process ends after some time."""
    run = world.base / "data/sys/run/job0"
    files: dict[str, str | bytes] = {
        "job0/monit": f"""
            check process job0 with pidfile {run}/job0.pid
              start program "{world.base}/jobs/job0/bin/ctl"
              stop program "/bin/sh -c 'kill $(cat {run}/job0.pid)'"
              group vcap
        """,
        "job0/bin/ctl": f"#!/bin/sh\nmkdir -p {run}\necho $$ >{run}/job0.pid\nexec sleep {lasts}\n",
    }
    return {**world.spec(1, 0), "rendered_templates_archive": world.blob("canary", archive(files))}


@pytest.mark.slow
async def test_canary_that_crashes_every_two_seconds_fails_the_deploy(world: World) -> None:
    """Whenever the Director looks, it is not running, though a process lives nearly always."""
    await world.director.run(AGENT, "apply", canary(world, "2"))
    await world.director.run(AGENT, "start")

    with pytest.raises(NotRunningError, match="is not running after update. Review logs for failed jobs: job0"):
        await world.director.wait_until_running(AGENT, *WATCH)


@pytest.mark.slow
async def test_healthy_canary_is_believed_at_the_first_look(world: World) -> None:
    """The least watch time is all that the Director waits."""
    await world.director.run(AGENT, "apply", canary(world, "1000"))
    await world.director.run(AGENT, "start")

    assert await world.director.wait_until_running(AGENT, *WATCH) == 1
