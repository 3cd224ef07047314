"""without_nft.py FILE ARGUMENT...: an agent that writes a line to FILE instead of loading packet filter rules."""

from __future__ import annotations

import sys
from pathlib import Path

from agent_shim.cli import main as cli
from agent_shim.daemon import runtime
from agent_shim.host import nftables
from agent_shim.services import firewall


def _note(chains: str) -> None:
    with FILE.open("a") as stream:
        stream.write(f"{len(chains)}\n")


async def _replace(chains: str) -> None:
    _note(chains)


if __name__ == "__main__":
    FILE = Path(sys.argv.pop(1))
    nftables.replace = _replace
    runtime.firewall_obstacle = lambda *_, **__: ""
    firewall.RULES_PERIOD_S = 86400.0  # type: ignore[misc]
    sys.exit(cli.main())
