"""``./dev bench [PART...]``: measure an agent through the wire alone and print one JSON; it keeps no verdict.

Any agent can be put in by ``--agent-command``, where ``{config}`` stands for its agent.json and ``{base}`` for the
directory that stands for /var/vcap. Progress goes to stderr. Figures are medians with the spread, and beside them the
floor of the same run: the least that could do it. On a machine that does other things only these ratios say something.
A part that comes to no end keeps the figures it has, and is listed under ``missing`` with the reason.

``./dev bench --into-docs`` measures everything and writes the table of docs/performance.md: that is all of a final run,
on a quiet machine, some twenty minutes long. ``--beside FILE`` adds a column for another agent, from the JSON that an
earlier run with ``--agent-command`` has printed (``python -m benchmarks.go_agent`` for the Go agent). ``--from FILE``
measures nothing and takes figures of an earlier run.
``large`` (GBs of logs, a large compiled package, a large apply) is only measured when it is named, and so are ``scale``
(1 000 and 10 000 light agents and an outage of their bus) and ``cpi``: the Kubernetes CPI on a node of its own, as
root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agent_shim import __version__
from benchmarks import (
    ageing,
    archives,
    boots,
    cpi,
    crowds,
    deploys,
    idle,
    installs,
    large,
    lifecycles,
    light,
    neighbours,
    pings,
    table,
)
from benchmarks.measuring import Figures
from benchmarks.world import COMMAND

Part = Callable[[str, float, Figures], Awaitable[None]]
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
HERE: Final = Path(__file__).parent
ON_DEMAND: Final[dict[str, Part]] = {"large": large.measure, "scale": light.measure, "cpi": cpi.measure}


async def measure(command: str, parts: Mapping[str, Part], scale: float) -> tuple[Figures, dict[str, str]]:
    """All figures of some parts of one agent, and for each part that came to no end why.

    Each figure says of which part it is.
    """
    figures: Figures = {}
    missing: dict[str, str] = {}
    begun_at = time.monotonic()
    for name, part in parts.items():
        found: Figures = {}
        part_begun_at = time.monotonic()
        _say(f"{name} (after {part_begun_at - begun_at:.0f} s)")
        try:
            await part(command, scale, found)
        except Exception as exc:  # noqa: BLE001 - what one agent cannot do takes nothing away from the other parts
            missing[name] = str(exc) or f"{type(exc).__name__} in {_place(exc)}"
            _say(f"{name}: cannot measure all of it: {missing[name]}")
        figures |= {figure: {**values, "part": name} for figure, values in found.items()}
        _say(f"{name} took {time.monotonic() - part_begun_at:.0f} s")
    return figures, missing


def _place(exc: Exception) -> str:
    """Where in the benchmark it was."""
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if Path(frame.filename).parent == HERE]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "an unknown place"


def _say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = f"{', '.join(PARTS | ON_DEMAND)}; default: all but {', '.join(ON_DEMAND)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=named)
    parser.add_argument("--agent-command", default=COMMAND, help="default: this agent")
    parser.add_argument("--agent-name", metavar="NAME", help="what the figures are headed with; default: the command")
    parser.add_argument("--scale", type=float, default=1.0, help="of counts, sizes and times (default: 1)")
    parser.add_argument("--into-docs", action="store_true", help="write the table of docs/performance.md as well")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="figures of an earlier run")
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="FILE", help="another agent's JSON")
    args = parser.parse_args()
    args.parts = dict.fromkeys(args.parts or PARTS)
    if unknown := args.parts.keys() - (PARTS | ON_DEMAND).keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {named}")
    return args


def main() -> int:
    """Measure, print, draw."""
    args = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or started processes remain
    if args.earlier:
        document = json.loads(args.earlier.read_text())
    else:
        load = os.getloadavg()[0]
        begun = datetime.now(UTC)
        parts = {name: (PARTS | ON_DEMAND)[name] for name in args.parts}
        figures, missing = asyncio.run(measure(args.agent_command, parts, args.scale))
        name = f"agent-shim {__version__}" if args.agent_command == COMMAND else args.agent_command
        document = {
            "agent": args.agent_name or name,
            "date": begun.date().isoformat(),
            "from": begun.strftime("%H:%M"),
            "to": datetime.now(UTC).strftime("%H:%M"),
            "scale": args.scale,
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "load_before": round(load, 1),
            },
            "figures": figures,
            "missing": missing,
        }
        json.dump(document, sys.stdout, indent=2)
        print()
    if args.into_docs:
        table.write(document, [json.loads(path.read_text()) for path in args.beside])
    return 0


if __name__ == "__main__":
    sys.exit(main())
