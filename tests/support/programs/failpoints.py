"""failpoints.py FILE ARGUMENT...: an agent in which any asyncio task can be made to fail.

On SIGRTMIN, the agent reads FILE. If FILE contains the name of a task, that task's current wait raises an unexpected
error. If FILE is empty, the agent fills it with the names of all tasks that it restarts after a failure, one per line.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, Final

from agent_shim.cli import main as cli
from agent_shim.core.keep_running import run_forever
from agent_shim.daemon import main
from agent_shim.daemon.main import Daemon


def restarted() -> list[str]:
    """Return the names of the tasks that the agent restarts after a failure."""
    named = {task.get_name(): getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()}
    return sorted(name for name, coroutine in named.items() if coroutine == run_forever.__name__)


def obey() -> None:
    """Make the task named in ``FILE`` fail or, if ``FILE`` is empty, write the names of all restarted tasks there."""
    if name := FILE.read_text():
        fail(name)
    else:
        FILE.write_text("".join(f"{name}\n" for name in restarted()))


def fail(name: str) -> None:
    """Make the task called ``name`` fail."""
    for task in asyncio.all_tasks():
        if task.get_name() == name:
            waits_for: Any = task
            while isinstance(waits_for, asyncio.Task):
                waits_for = getattr(waits_for, "_fut_waiter", None)
            if waits_for is not None and not waits_for.done():
                waits_for.set_exception(ArithmeticError("planted"))


class Failing(Daemon):
    """The daemon, with a handler for the signal that makes one of its tasks fail."""

    async def serve(self) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGRTMIN, obey)
        return await super().serve()


def run() -> int:
    """Run the agent until it exits, and return its exit code."""
    main.Daemon = Failing  # type: ignore[misc]
    return cli.main()


if __name__ == "__main__":
    FILE: Final = Path(sys.argv.pop(1))
    sys.exit(run())
