"""Short commands of the system, run to their end; what they read is in no list of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import process

ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
MOST_READ: Final = 64 * 1024
"""Bytes of what a command prints that count, the first ones."""


async def run(
    program: str,
    *arguments: str,
    given: str = "",
    user: str | None = None,
    group: str | None = None,
    env: Mapping[str, str] = ENVIRONMENT,
    patience: float = 60.0,
    grace: float = 1.0,
) -> str:
    """What the program prints when it reads ``given``; ``HostError`` with that when it fails.

    After ``patience`` seconds, or when this is cancelled, its process group gets TERM and ``grace`` seconds later KILL.
    """
    with _in_memory(given.encode()) as stdin, _in_memory() as output:
        running = process.spawn(
            [program, *arguments], env=env, stdin=stdin, stdout=output, stderr=output, user=user, group=group
        )
        try:
            async with asyncio.timeout(patience):
                status = await running.wait()
        except TimeoutError:
            await running.terminate(grace)
            raise HostError(f"cannot run {program}: it takes longer than {patience:.0f} seconds") from None
        except asyncio.CancelledError:
            await running.terminate(grace)
            raise
        printed = os.pread(output, MOST_READ, 0).decode(errors="replace")
    if status != 0:
        raise HostError(f"cannot run {program}: exit status {status}: {printed.strip()[-500:]}")
    return printed


def in_terminal(argv: list[str]) -> int:
    """Run a program that has our terminal, whose interrupts are for it alone; its exit code, -N when signal N ended it.

    For commands, which wait for nothing else. Raises ``OSError``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGINT])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def _in_memory(content: bytes = b"") -> Iterator[int]:
    """A file that is on no disk."""
    descriptor = os.memfd_create("agent_shim")
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)
