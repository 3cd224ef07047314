"""If an errand or a drain is cancelled, every process that it started is terminated too."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.programs import is_alive, number_in
from tests.support.waiting import until
from tests.support.world import LocalAgent

FAMILY = "#!/bin/sh\nsh -c 'sleep 600; sleep 600' & sleep 600 & echo $! >{started}; wait\n"
"""A script that starts children and a grandchild in its process group."""


@pytest.fixture
def started(world: LocalAgent) -> Path:
    """Return the file to which a test's script writes a pid."""
    return world.paths.base / "started"


async def deployed(world: LocalAgent, **scripts: str) -> None:
    """Apply a ``web`` job whose only files are ``scripts`` and an empty monit file."""
    store = Path(world.agent.settings.current.blobstore.options["blobstore_path"])
    files = {f"bin/{name.replace('_', '-')}": text for name, text in scripts.items()}
    assert await world.value("apply", jobs.spec(store, {"web": {"monit": "", **files}})) == "applied"


async def cancelled(world: LocalAgent, task_id: str) -> Any:
    """Cancel a task that would otherwise run for ten minutes, and return its result."""
    assert await world.value("cancel_task", task_id) == "canceled"
    return await world.value("get_task", task_id)


async def task_of(asked: Awaitable[dict[str, Any]]) -> str:
    task_id: str = (await asked)["value"]["agent_task_id"]
    return task_id


async def test_a15_cancelling_an_errand_terminates_all_its_processes(world: LocalAgent, started: Path) -> None:
    await deployed(world, run=FAMILY.format(started=started))
    task_id = await task_of(world.call("run_errand"))
    child = await until(lambda: number_in(started))

    assert (await cancelled(world, task_id))["exit_code"] == 143
    assert not is_alive(child)


async def test_a13_cancelling_a_drain_terminates_all_its_processes(world: LocalAgent, started: Path) -> None:
    await deployed(world, drain=FAMILY.format(started=started))
    task_id = await task_of(world.call("drain", "shutdown"))
    child = await until(lambda: number_in(started))

    assert await cancelled(world, task_id) == 0
    assert not is_alive(child)


@pytest.mark.parametrize("seconds", ["600", "-600", "-999999999999999999"])
async def test_a13_cancelled_drain_stops_waiting(world: LocalAgent, started: Path, seconds: str) -> None:
    """A drain script prints how many seconds the agent must wait. If the number is negative, the agent then runs the
    script again. After a cancellation, the agent must do neither.
    """
    await deployed(world, drain=f"#!/bin/sh\necho $$ >{started}; echo {seconds}\n")
    task_id = await task_of(world.call("drain", "shutdown"))
    script = await until(lambda: number_in(started))
    await until(lambda: not is_alive(script))

    assert await cancelled(world, task_id) == 0


async def test_e10_errand_cancelled_while_queued_never_runs(world: LocalAgent, started: Path) -> None:
    begun, gate = started.with_name("begun"), started.with_name("gate")
    pre_start = f"#!/bin/sh\necho $$ >{started}; until [ -e {gate} ]; do sleep 0.02; done\n"
    await deployed(world, run=f"#!/bin/sh\necho $$ >>{begun}\n", pre_start=pre_start)
    ahead = await task_of(world.call("run_script", "pre-start", {}))
    await until(lambda: number_in(started))
    waiting = await task_of(world.call("run_errand"))
    behind = await task_of(world.call("run_script", "nothing", {}))

    assert await world.value("cancel_task", waiting) == "canceled"
    assert (await world.error("get_task", waiting)).endswith("result: cancelled before it began")
    assert world.agent.tasks.find(ahead).state == "running"
    gate.touch()
    assert await world.run("get_task", ahead) == {"value": {}}
    assert await world.run("get_task", behind) == {"value": {}}
    assert not begun.exists()
    assert (await world.error("get_task", waiting)).endswith("result: cancelled before it began")
