"""reuse.py BASE ROUNDS SEED: kill job processes and reuse their pids for unrelated processes. Needs a new PID
namespace.

Writes one JSON document: ``rounds``, ``taken`` (how many pids were reused), and ``signalled`` (the signals that the
unrelated processes received).
"""

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from agent_shim.host import clock, proc, process, reaper
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs import argv, number_in
from tests.support.programs.jobs import FAST, JobTree, in_state, info
from tests.support.waiting import until

LASTING: Final = "sleep 100000"
HURRY: Final = replace(FAST, backoff_first=0.001, backoff_limit=0.01, settle=0.05)
STARTS: Final = {
    "itself": f"echo $$ >$pidfile.starter; echo $$ >$pidfile; exec {LASTING}",
    "beside": f"echo $$ >$pidfile.starter; {LASTING} & echo $! >$pidfile",
    "apart": f"echo $$ >$pidfile.starter; setsid sh -c 'echo $$ >'$pidfile'; exec {LASTING}' & "
    "while [ ! -s $pidfile ]; do sleep 0.001; done",
    "bare": f"echo $$ >$pidfile.starter; env -i setsid sh -c 'echo $$ >'$pidfile'; exec {LASTING}' & "
    "while [ ! -s $pidfile ]; do sleep 0.001; done",
}
"""Scripts of start programs, by how the daemon is started. In ``itself``, the start program becomes the daemon. In the
others it exits and leaves a daemon behind: in the same session (``beside``), in another session (``apart``), or in
another session and without the marker variable in its environment (``bare``).
"""


logger = logging.getLogger("reuse")


class Strangers:
    """The program ``strangers.py``, which is controlled through pipes."""

    def __init__(self) -> None:
        self._maker = subprocess.Popen(
            argv("strangers.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
        )

    async def take(self, pid: int, how: str) -> int:
        return int(await self._ask(f"take {pid} {how}"))

    async def end(self, pid: int) -> str:
        return (await self._ask(f"end {pid}")).strip()

    async def _ask(self, line: str) -> str:
        maker = self._maker
        assert maker.stdin is not None
        assert maker.stdout is not None
        maker.stdin.write(f"{line}\n")
        maker.stdin.flush()
        return await asyncio.to_thread(maker.stdout.readline)


class Rounds:
    """Supervises the same jobs with one supervisor after another."""

    def __init__(self, base: Path, seed: int) -> None:
        self.world = JobTree(base, HURRY)
        self.random = random.Random(seed)
        self.strangers = Strangers()
        self.files: list[JobFile] = [
            self.world.job(name, f"rm -f $pidfile; {start}", None, "if does not exist then start")
            for name, start in STARTS.items()
        ]
        self.supervisor: Supervisor
        self.taken = 0
        self.signalled: list[str] = []

    async def run(self, rounds: int) -> None:
        await self.begin()
        for number in range(rounds):
            await self.round()
            if number % 100 == 99:
                logger.warning("%d rounds, %d numbers taken: %s", number + 1, self.taken, self.signalled)
        await self.supervisor.stop(wait=True)
        await self.supervisor.close()

    async def begin(self) -> None:
        self.supervisor = await self.world.supervisor().__aenter__()  # A round may close it early.
        await self.supervisor.recover()
        await self.supervisor.configure(self.files)

    async def round(self) -> None:
        """Kill a job's process, and give its pid or its start program's pid to an unrelated process. Then stop or
        restart the service, or have the next supervisor adopt it.
        """
        name = self.random.choice(list(STARTS))
        which = self.random.choice(["process", "starter"])
        how = self.random.choice(["plain", "leader", "member"])
        then = self.random.choice(["stop", "restart", "next agent"])
        await self.supervisor.start_one(name)
        found = await in_state(self.supervisor, name, "running", "settling")
        while not found.pid:  # The process has exited in the meantime.
            await asyncio.sleep(0.003)
            found = await in_state(self.supervisor, name, "running", "settling")
        starter = await until(lambda: number_in(Path(f"{self.world.pidfile(name)}.starter")))
        # The supervisor recognizes a reused pid by the start time of its process, which has a resolution of one tick.
        # This program can reuse a pid within a tick. The kernel does not do that in practice, because it first hands
        # out all other pids. Therefore, wait for the next tick.
        if born := proc.stat(found.pid):
            await until(lambda: clock.boot_ticks() > born.start_ticks + 1)
        number = found.pid if which == "process" else starter
        if then == "next agent" and self.random.random() < 0.5:
            await self.supervisor.close()
            kill(found.pid)
            stranger = await self.strangers.take(number, how)
            await self.begin()
        else:
            kill(found.pid)
            stranger = await self.strangers.take(number, how)
            if then == "next agent":
                await self.supervisor.close()
                await self.begin()
        if then == "restart":
            await self.supervisor.restart_one(name)
            await self.supervisor.finished(name)
        if then == "stop" or self.random.random() < 0.5:
            await self.supervisor.stop_one(name)
            await self.supervisor.finished(name)
            assert info(self.supervisor, name).state == "stopped", info(self.supervisor, name)
        if stranger:
            self.taken += 1
            if got := await self.strangers.end(stranger):
                self.signalled.append(f"{name}, {which}, {how}, {then}: {got}")


def kill(pid: int) -> None:
    """Kill a process that the supervisor has reported as running, without the supervisor's knowledge."""
    found = proc.stat(pid)
    if found is not None:
        process.send(found.identity, 9)


async def main(base: Path, rounds: int, seed: int) -> None:
    with reaper.reaping():
        one = Rounds(base, seed)
        try:
            await one.run(rounds)
        finally:
            one.world.end()
    json.dump({"rounds": rounds, "taken": one.taken, "signalled": one.signalled}, sys.stdout)


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("REUSE_LOG", "ERROR"), stream=sys.stderr)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
