"""Small real programs for tests, and how to wait for what they do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent_shim.host import proc, process

HERE = Path(__file__).parent
TIMEOUT_S = 60.0 * float(os.environ.get("SHIM_TEST_SLOW", "1"))
"""Seconds after which a fact that was waited for counts as missing."""

Fact = TypeVar("Fact")


def argv(name: str, *arguments: object) -> list[str]:
    """How to run one of the programs beside this file."""
    interpreter = [sys.executable, "-S", "-E"] if name.endswith(".py") else ["/bin/sh"]
    return [*interpreter, str(HERE / name), *map(str, arguments)]


async def eventually(fact: Callable[[], Fact | None], what: str = "") -> Fact:
    """Wait until ``fact()`` is true, and return it."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not (found := fact()):
                await asyncio.sleep(0.003)
            return found
    except TimeoutError:
        raise AssertionError(f"never came true: {what or fact}") from None


def foreign(*command: object, **env: str) -> int:
    """Start a program that does not descend from us, with ``env`` alone; its number."""
    script = '"$@" >/dev/null 2>&1 & echo $!'
    arguments = ["/bin/sh", "-c", script, "sh", *map(str, command)]
    return int(subprocess.run(arguments, env=env, capture_output=True, check=True).stdout)


def number_in(path: Path) -> int | None:
    """The number that a program has written, once it is there."""
    try:
        text = path.read_text()
    except FileNotFoundError:  # its writer may remove it at any moment
        return None
    return int(text) if text.endswith("\n") else None


def is_alive(pid: int) -> bool:
    """Return True if a process lives; a zombie does not."""
    found = proc.stat(pid)
    return found is not None and found.is_alive


def kill(pid: int) -> None:
    """Kill a living process."""
    found = proc.stat(pid)
    assert found is not None
    assert process.send(found.identity, signal.SIGKILL)


def marked(name: str, value: str) -> list[proc.Stat]:
    """Living processes with ``value`` somewhere in a variable of their environment."""
    return [s for s in proc.table().values() if s.is_alive and value in (proc.variable(s.pid, name) or "")]


def end_marked(name: str, value: str) -> None:
    """Kill the processes that a test has left, and those that they fork meanwhile."""
    while left := marked(name, value):
        for stat in left:
            process.send(stat.identity, signal.SIGKILL)
