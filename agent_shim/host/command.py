"""Runs short system commands to completion. Secrets are passed on stdin, never as arguments."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import files, process
from agent_shim.host.descriptors import closing

ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Maximum number of output bytes that are read. The rest is discarded."""


async def run(
    program: str,
    *arguments: str,
    given: str = "",
    through: Sequence[str] = (),
    env: Mapping[str, str] = ENVIRONMENT,
    timeout: float = 60.0,
    grace: float = 1.0,
) -> str:
    """Run the program with ``given`` as stdin and return its output. Raises ``HostError`` with the output if the
    program fails.

    ``through`` is a command, such as setpriv, that is run in order to execute the program. Errors do not mention it.
    After ``timeout`` seconds, or on cancellation, SIGTERM is sent to the program's process group, and SIGKILL ``grace``
    seconds later.
    """
    with _in_memory(given.encode()) as stdin, _in_memory() as output:
        argv = [*through, program, *arguments]
        running = process.spawn(argv, env=env, stdin=stdin, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(timeout):
                status = await running.wait_or_terminate(grace)
        except TimeoutError:
            raise HostError(f"cannot run {program}: no result within {timeout:.0f} seconds") from None
        printed = os.pread(output, MAX_OUTPUT_BYTES, 0).decode(errors="replace")
    if status != 0:
        raise HostError(f"cannot run {program}: exit status {status}: {printed.strip()[-500:]}")
    return printed


@contextlib.contextmanager
def _in_memory(content: bytes = b"") -> Iterator[int]:
    """Yield the descriptor of an in-memory file that contains ``content``. Raises ``HostError``."""
    with files.attempting("make a file in memory"):
        memory_file = os.memfd_create("agent_shim")
    with closing(memory_file) as descriptor:
        os.pwrite(descriptor, content, 0)
        yield descriptor
