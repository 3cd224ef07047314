"""late_boot.py FILE ARGUMENT...: an agent with an additional late boot step, which waits until FILE exists."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agent_shim.cli import main as cli
from agent_shim.daemon import boot

_steps = boot.steps


def _with_one_more(*arguments: Any, **options: Any) -> list[boot.Step]:
    async def wait() -> None:
        while not FILE.exists():
            await asyncio.sleep(0.01)

    return [*_steps(*arguments, **options), boot.Step("a late one", wait, late=True)]


if __name__ == "__main__":
    FILE = Path(sys.argv.pop(1))
    boot.steps = _with_one_more
    sys.exit(cli.main())
