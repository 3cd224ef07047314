"""Measures the duration of a deploy as seen by the Director, which queries a task immediately and then once per second.

The same requests are also measured without pauses between the queries, which shows the time that the agent needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from tests.support.instance import AGENT, RunningAgent, world
from tools.bench.measuring import MB, Figures, figure

INSTANCES: Final = 20
JOBS: Final = 5
PACKAGES: Final = 6
POLL_S: Final = 1.0
"""Seconds between two of the Director's queries for a task."""
ROUNDS: Final = 3
Steps = dict[str, list[float]]
"""For each request in a deploy, by name: its durations in seconds, or the numbers of queries for its task."""
KEEP: Final = dict.fromkeys(("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep")


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure deploys.

    ``scale`` multiplies the number of instances that are deployed one after the other. They are simulated by deploying
    the same agent repeatedly.
    """
    async with world(command) as w:
        await w.start_agent()
        await update(w, "first", POLL_S)
        polled, bare, nothing = [], [], []
        steps: Steps = {}
        turns: Steps = {}
        for number in range(ROUNDS):
            polled.append(await update(w, f"polled-{number}", POLL_S, turns=turns))
            bare.append(await update(w, f"bare-{number}", 0, steps))
            nothing.append(await no_op(w))
        floor_is = "the same requests without pauses between them"
        found["deploy_of_one_instance_as_the_director_polls"] = figure(polled, "s", floor=bare, floor_is=floor_is)
        found["deploy_without_changes"] = figure(nothing, "s")
        for name, seconds in steps.items():
            found[f"deploy_step_{name}"] = figure(seconds, "s")
        for name, counts in turns.items():
            found[f"deploy_queries_of_{name}"] = figure(counts, "queries")
        begun_at = time.monotonic()
        instances = max(2, int(INSTANCES * scale))
        row = [await update(w, f"row-{number}", POLL_S) for number in range(instances)]
        whole = time.monotonic() - begun_at
    found["each_of_20_instances_one_after_the_other"] = figure(row, "s", floor=bare, floor_is=floor_is)
    found["20_instances_one_after_the_other"] = figure([whole / instances * INSTANCES], "s")


async def update(
    w: RunningAgent, version: str, poll: float, steps: Steps | None = None, *, turns: Steps | None = None
) -> float:
    """Deploy an instance with new jobs and packages, in the order of the Director's instance updater.

    Adds the duration of each step to ``steps`` and the number of queries for each task to ``turns``. Returns the
    duration of the whole deploy in seconds.
    """
    spec = w.spec(JOBS, PACKAGES, MB, version=version)
    ask = _request_recorder(w, poll, {} if steps is None else steps, {} if turns is None else turns)
    begun_at = time.monotonic()
    await ask("prepare", spec)
    await ask("run_script", "pre-stop", {"env": KEEP})
    await ask("drain", "update", spec)
    await ask("stop")
    await ask("run_script", "post-stop", {})
    await ask("update_settings", {"trusted_certs": "", "disk_associations": []})
    await ask("apply", spec)
    await ask("run_script", "pre-start", {})
    await ask("start")
    started_at = time.monotonic()
    while (await w.director.value(AGENT, "get_state"))["job_state"] != "running":
        await asyncio.sleep(poll or 0.002)
    if steps is not None:
        steps.setdefault("get_state_until_running", []).append(time.monotonic() - started_at)
    await ask("run_script", "post-start", {})
    return time.monotonic() - begun_at


async def no_op(w: RunningAgent) -> float:
    """Send the requests for a deploy without changes, and return the duration in seconds.

    These requests query the instance's state and then ping it.
    """
    begun_at = time.monotonic()
    await w.director.value(AGENT, "get_state", "full")
    await w.director.value(AGENT, "ping")
    return time.monotonic() - begun_at


def _request_recorder(w: RunningAgent, poll: float, steps: Steps, turns: Steps) -> Callable[..., Awaitable[Any]]:
    w.director.poll = poll

    async def ask(method: str, *arguments: Any) -> Any:
        name = arguments[0] if method == "run_script" else method
        begun_at, before = time.monotonic(), w.director.polls
        result = await w.director.run(AGENT, method, *arguments)
        steps.setdefault(name, []).append(time.monotonic() - begun_at)
        turns.setdefault(name, []).append(w.director.polls - before)
        return result

    return ask
