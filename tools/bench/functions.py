"""``python -m tools.bench.functions``: count the agent's functions that run in an apply, a start and a restart.

Each function counts once, whichever threads run it. Comprehensions and lambdas do not count. Three numbers are printed
for each step. The first counts all functions in ``agent_shim``. The second counts only functions in the supervisor's
modules for states, services and requests. The third counts only functions in its modules for states and services,
without properties. ``-v`` lists the functions.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import agent_shim
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.state import State
from tests.support import jobs
from tests.support.world import LocalAgent, world

HOME: Final = Path(agent_shim.__file__).parent
UNNAMED: Final = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
LIFECYCLE: Final = ("supervisor/state.py", "supervisor/service.py")
REQUESTS: Final = (*LIFECYCLE, "supervisor/supervisor.py")
PROPERTIES: Final = frozenset(name for name, value in vars(Service).items() if isinstance(value, property))


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Record which of the agent's functions are entered during the block, in this thread and in threads started by it.

    The event loop gets a new executor, because threads of the previous executor are already running and would not be
    recorded.
    """
    found: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The body of a module or class, which an import executes, is not a function.
        if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(f"{HOME}/"):
            found.add(code)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def until(fact: Callable[[], bool]) -> None:
    while not fact():
        await asyncio.sleep(0.001)


async def measure(one: LocalAgent) -> dict[str, set[CodeType]]:
    """Apply a spec with one job, start the job, and kill its only process.

    Return the functions that were entered in each of the three steps.
    """
    store = Path(one.agent.settings.current.blobstore.options["blobstore_path"])
    spec = jobs.spec(store, {"web": jobs.sleeper(one.paths, "web")}, {"tool": {"bin/tool": "#!/bin/sh\n"}})
    with entered() as apply:
        reply = await one.call("apply", spec)
        await one.agent.tasks.find(reply["value"]["agent_task_id"]).ended.wait()
    await asyncio.sleep(1)
    with entered() as start:
        await one.call("start")
        record = one.agent.supervisor._services["web"].record  # noqa: SLF001 - calls of public methods would be counted
        await until(lambda: record.state is State.RUNNING)
    await asyncio.sleep(1)
    pid = one.agent.supervisor.services()[0].pid
    with entered() as restart:
        os.kill(pid, signal.SIGKILL)
        await until(lambda: record.state is State.SETTLING)
    return {"apply": apply, "start": start, "restart": restart}


def named(found: set[CodeType], *modules: str) -> list[str]:
    """Return the functions in the agent modules ``modules``, or in all modules if none are named."""
    places = {(str(Path(code.co_filename).relative_to(HOME)), code.co_name) for code in found}
    return sorted(f"{path} {name}" for path, name in places if name not in UNNAMED and (not modules or path in modules))


async def main() -> None:
    """Print a row for each of the three steps."""
    with tempfile.TemporaryDirectory() as base:
        async with world(Path(base)) as one:
            paths = await measure(one)
    for path, found in paths.items():
        lifecycle = [each for each in named(found, *LIFECYCLE) if each.split()[1] not in PROPERTIES]
        print(f"{path}: {len(named(found))}, {len(named(found, *REQUESTS))}, {len(lifecycle)}")
        if "-v" in sys.argv:
            print("\n".join(f"    {each}" for each in named(found)))


if __name__ == "__main__":
    asyncio.run(main())
