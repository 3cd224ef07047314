"""``./dev bench [PART...]``: measure an agent through the wire alone and print one JSON; it keeps no verdict.

Any agent can be put in by ``--agent-command``, where ``{config}`` stands for its agent.json and ``{base}`` for the
directory that stands for /var/vcap. Progress goes to stderr. Figures are medians with the spread, and beside them the
floor of the same run: the least that could do it. On a machine that does other things only these ratios say something.

``./dev bench --into-docs`` measures everything and writes the table of docs/performance.md: that is all of a final run,
on a quiet machine, half an hour long. ``--beside FILE`` adds a column for another agent, from the JSON that an
earlier run with ``--agent-command`` has printed. ``--from FILE`` measures nothing and takes figures of an earlier run.
``large`` (GBs of logs, a large compiled package, a large apply) is only measured when it is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from agent_shim import __version__
from benchmarks import (
    ageing,
    archives,
    boots,
    crowds,
    deploys,
    idle,
    installs,
    large,
    lifecycles,
    neighbours,
    pings,
    table,
)
from benchmarks.measuring import Figure
from benchmarks.world import COMMAND

Part = Callable[[str, float], Awaitable[dict[str, Figure]]]
PARTS: Final[dict[str, Part]] = {
    "boots": boots.measure,
    "pings": pings.measure,
    "installs": installs.measure,
    "lifecycles": lifecycles.measure,
    "archives": archives.measure,
    "idle": idle.measure,
    "deploys": deploys.measure,
    "crowds": crowds.measure,
    "neighbours": neighbours.measure,
    "ageing": ageing.measure,
}


async def measure(command: str, names: list[str], scale: float) -> dict[str, Any]:
    """All figures of some parts of one agent."""
    figures: dict[str, Any] = {}
    for name in names:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        part = large.measure if name == "large" else PARTS[name]
        figures.update(await part(command, scale))
    return figures


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = f"{', '.join(PARTS)}, large; default: all but large"
    parser.add_argument("parts", nargs="*", metavar="PART", help=named)
    parser.add_argument("--agent-command", default=COMMAND, help="default: this agent")
    parser.add_argument("--scale", type=float, default=1.0, help="of counts, sizes and times (default: 1)")
    parser.add_argument("--into-docs", action="store_true", help="write the table of docs/performance.md as well")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="figures of an earlier run")
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="FILE", help="another agent's JSON")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS) - {"large"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {named}")
    return args


def main() -> int:
    """Measure, print, draw."""
    args = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started stays
    if args.earlier:
        document = json.loads(args.earlier.read_text())
    else:
        load = os.getloadavg()[0]
        document = {
            "agent_command": args.agent_command if args.agent_command != COMMAND else f"agent-shim {__version__}",
            "date": datetime.now(UTC).date().isoformat(),
            "scale": args.scale,
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "load_before": round(load, 1),
            },
            "figures": asyncio.run(measure(args.agent_command, args.parts or list(PARTS), args.scale)),
        }
        json.dump(document, sys.stdout, indent=2)
        print()
    if args.into_docs:
        table.write(document, [json.loads(path.read_text()) for path in args.beside])
    return 0


if __name__ == "__main__":
    sys.exit(main())
