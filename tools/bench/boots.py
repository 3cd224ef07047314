"""Measures the time from exec to the first answer, without jobs and with jobs to adopt. The floor is
``tools.bench.echo``.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import statistics
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.support.instance import AGENT, COMMAND, INTERPRETER, RunningAgent, world
from tools.bench.measuring import ECHO, Figures, figure, timed

ROUNDS: Final = 7
OWN_MACHINE: Final = (
    "mkdir -p /var/vcap $0 && mount --bind $0 /var/vcap && mount -t tmpfs tmpfs /mnt && cp -a /etc /mnt/etc "
    "&& mount --bind /mnt/etc /etc && mount -t tmpfs tmpfs /usr/local/share "
    "&& (getent group vcap >/dev/null || useradd -U -M vcap) && "
)
"""Shell commands to run before an agent that runs as root. They mount directories so that the agent's changes to
/var/vcap, /etc and the CA directory do not affect the machine.
"""
MADE: Final = ".made"
"""Suffix of a file that is created once the commands of ``OWN_MACHINE`` have finished. The boot is measured from the
file's mtime, so it does not include those commands.
"""
STEP: Final = re.compile(r"boot step (.+?): .*\(([0-9.]+) ms\)")
JOBS: Final = 5


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure all kinds of boots; boots as root only for this agent. ``scale`` is ignored."""
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
        for name, took in (
            ("exec_to_first_pong_with_5_jobs", answered),
            ("from_exec_until_5_jobs_are_adopted", adopted),
        ):
            found[name] = figure(took, "s", floor=starts["least"], floor_is=floor_is)
    interpreter: list[float] = []
    for _ in range(ROUNDS):
        with timed(interpreter):
            subprocess.run([INTERPRETER, "-c", "import asyncio, ssl"], check=True)
    found["interpreter_with_asyncio_and_ssl"] = figure(interpreter, "s")
    if command != COMMAND:  # another agent's command may write to other places than its base directory
        return
    if os.geteuid() != 0:
        raise PermissionError("exec to first pong as root: this user is not root")
    await measure_as_root(command, interpreter, found)


async def measure_as_root(command: str, interpreter: list[float], found: Figures) -> None:
    """Measure boots as root with the real ``/var/vcap``, in new mount and UTS namespaces.

    The figure also contains the median duration of each boot step that takes at least a millisecond.
    """
    inside = shlex.quote(f"{OWN_MACHINE}: >$0{MADE} && exec {command.replace('{base}', '/var/vcap')}")
    took: list[float] = []
    steps: dict[str, list[float]] = {}
    async with world(f"unshare --mount --uts sh -c {inside} {{base}}") as ours:
        for number in range(ROUNDS + 1):
            begun_at = time.time()
            seconds = await ours.start_agent()
            await ours.stop_agent()
            if number:  # The first boot does not count, because it creates the directories.
                made_at = Path(f"{ours.base}{MADE}").stat().st_mtime
                took.append(seconds - (made_at - begun_at))
                for name, milliseconds in STEP.findall(ours.log_text()):
                    steps.setdefault(name, []).append(float(milliseconds))
            ours.forget_log()
    shown = {name: statistics.median(each) for name, each in steps.items()}
    floor_is = "an interpreter with asyncio and ssl"
    found["exec_to_first_pong_as_root"] = figure(took, "s", floor=interpreter, floor_is=floor_is) | {
        "steps_ms": {name: round(each, 1) for name, each in shown.items() if each >= 1}
    }


async def running_again(w: RunningAgent) -> None:
    """Wait until the agent reports that all jobs are running."""
    async with asyncio.timeout(60):
        while True:
            state = await w.director.value(AGENT, "get_state", "full")
            if state["job_state"] == "running" and len(state.get("processes", ())) == JOBS:
                return
