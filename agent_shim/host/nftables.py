"""Sets packet filter rules in a separate table, using the ``nft`` program, which replaces the table atomically.

Other programs' tables are not changed. Our table outlives the agent and exists until the network namespace is
destroyed.
"""

from __future__ import annotations

import shutil
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import command

PROGRAM: Final = "nft"
TABLE: Final = "inet agent_shim"

_AWAY: Final = f"add table {TABLE}\ndelete table {TABLE}\n"
"""Commands that remove our table, whether or not it exists."""
_TIMEOUT_S: Final = 10.0


def is_installed() -> bool:
    """Return True if ``nft`` is installed."""
    return shutil.which(PROGRAM, path=command.ENVIRONMENT["PATH"]) is not None


async def replace(chains: str) -> None:
    """Replace the table with one that contains ``chains``, a text in the syntax of ``nft``. If this fails, keep the old
    table and raise ``HostError``.
    """
    await _run(f"{_AWAY}table {TABLE} {{\n{chains}}}\n")


async def remove() -> None:
    """Remove the table. Raises ``HostError``."""
    await _run(_AWAY)


async def look() -> None:
    """List the tables to test whether this process is allowed to use nftables. Raise ``HostError`` if it is not."""
    await _run("list tables\n")


async def _run(commands: str) -> None:
    """Run nft commands. Raises ``HostError`` if ``nft`` is not installed or a command fails."""
    if not is_installed():
        raise HostError(f"cannot set rules of the packet filter: {PROGRAM} is not installed")
    await command.run(PROGRAM, "-f", "-", given=commands, timeout=_TIMEOUT_S)
