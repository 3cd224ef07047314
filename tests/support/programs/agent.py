"""agent.py BASE: supervise the jobs described in BASE/files.json until killed."""

import asyncio
import sys
from pathlib import Path

import msgspec

from agent_shim.core.paths import Paths
from agent_shim.host import reaper
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs.jobs import FAST


async def main(base: Path) -> None:
    files = msgspec.json.decode((base / "files.json").read_bytes(), type=list[JobFile])
    with reaper.reaping():
        async with Supervisor(Paths(base), notify=print, timing=FAST) as supervisor:
            await supervisor.configure(files)
            await supervisor.start()
            await supervisor.run()


asyncio.run(main(Path(sys.argv[1])))
