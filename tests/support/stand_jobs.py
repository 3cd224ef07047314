"""Creates jobs with custom monit files for chaos cases, and reads what the agent reports about them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from agent_shim.demo.release import archive
from tests.support.instance import NETWORKS
from tests.support.stand import Stand, expect

SLEEPER: Final = "exec sleep 100000"


def spec(stand: Stand, monits: dict[str, tuple[str, dict[str, str]]], version: str = "1") -> dict[str, Any]:
    """Return a spec for the jobs in ``monits``, which maps each name to a monit file and the job's programs.

    In all files, ``{base}`` is replaced with the agent's base directory.
    """
    base = stand.world.base
    files: dict[str, str | bytes] = {}
    for name, (monit, programs) in monits.items():
        files[f"{name}/monit"] = monit.replace("{base}", str(base))
        files |= {f"{name}/bin/{word}": text.replace("{base}", str(base)) for word, text in programs.items()}
    templates = [{"name": name, "version": version} for name in monits]
    first = next(iter(monits))
    return {
        "deployment": "chaos",
        "job": {"name": "chaos", "template": first, "version": version, "templates": templates},
        "index": 0,
        "id": "chaos-instance",
        "name": "chaos",
        "az": "z1",
        "networks": NETWORKS,
        "packages": {},
        "configuration_hash": version,
        "persistent_disk": 0,
        "rendered_templates_archive": stand.world.blob(f"chaos-{version}", archive(files)),
    }


def checked(
    name: str, start: str, stop: str = "kill $(cat {run}/{name}.pid)", rules: str = ""
) -> tuple[str, dict[str, str]]:
    """Return the monit file and the programs of a job with one process. Its ctl script records each start, because the
    invariant checks need to know all starts.
    """
    run = "{base}/data/sys/run/" + name
    words = {"run": run, "name": name}
    for old, new in words.items():
        start, stop = start.replace("{" + old + "}", new), stop.replace("{" + old + "}", new)
    monit = f"""
check process {name} with pidfile {run}/{name}.pid
  start program "{{base}}/jobs/{name}/bin/ctl start" with timeout 3 seconds
  stop program "{{base}}/jobs/{name}/bin/ctl stop" with timeout 3 seconds
  group vcap
  {rules}
"""
    record = f"mkdir -p {{base}}/data/{name}; echo $$ >> {{base}}/data/{name}/starts"
    script = f"#!/bin/sh\nmkdir -p {run}\ncase $1 in\nstart)\n{record}\n{start}\n;;\nstop)\n{stop}\n;;\nesac\n"
    return monit, {"ctl": script}


def simple(name: str) -> tuple[str, dict[str, str]]:
    """Return the monit file and the programs of a job that sleeps."""
    return checked(name, f"echo $$ > {{run}}/{name}.pid\n{SLEEPER}")


async def deployed(stand: Stand, monits: dict[str, tuple[str, dict[str, str]]]) -> None:
    """Apply the spec and start the jobs, without waiting until they are running."""
    wanted = spec(stand, monits)
    for method, *arguments in (("prepare", wanted), ("stop",), ("apply", wanted), ("start",)):
        await stand.world.run(method, *arguments)


async def process_states(stand: Stand) -> dict[str, str]:
    """Return the state of each process in the reply to ``get_state full``."""
    state = await stand.call("get_state", "full")
    return {one["name"]: one["state"] for one in state["processes"]}


async def reaches(stand: Stand, name: str, state: str, within: float) -> float:
    """Wait until the agent reports the process ``name`` in ``state``. Return how many seconds that took."""
    begun_at = time.monotonic()
    seen = ""
    while time.monotonic() - begun_at < within:
        seen = (await process_states(stand)).get(name, "unknown")
        if seen == state:
            return time.monotonic() - begun_at
        await asyncio.sleep(0.02)
    expect(False, f"{name} is {seen} after {within:g} s, but should be {state}")
    return within
