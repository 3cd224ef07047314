"""Rules of the packet filter, in one table of ours that the program ``nft`` puts in place as a whole, or not at all.

What others have in other tables stays as it is. The table lives as long as the network, which is longer than the agent.
"""

from __future__ import annotations

import shutil
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.host import command

PROGRAM: Final = "nft"
TABLE: Final = "inet agent_shim"

_AWAY: Final = f"add table {TABLE}\ndelete table {TABLE}\n"
"""Works whether there is one or not."""
_PATIENCE: Final = 10.0


def is_installed() -> bool:
    """Whether there is a program to do it with."""
    return shutil.which(PROGRAM, path=command.ENVIRONMENT["PATH"]) is not None


async def replace(chains: str) -> None:
    """Have a table with these chains in place of the one there is; raises ``HostError``, and then that one stays."""
    await _run(f"{_AWAY}table {TABLE} {{\n{chains}}}\n")


async def remove() -> None:
    """Have no table; raises ``HostError``."""
    await _run(_AWAY)


async def look() -> None:
    """Raises ``HostError`` where tables may not even be listed."""
    await _run("list tables\n")


async def _run(given: str) -> None:
    if not is_installed():
        raise HostError(f"cannot set rules of the packet filter: there is no program {PROGRAM}")
    await command.run(PROGRAM, "-f", "-", given=given, patience=_PATIENCE)
