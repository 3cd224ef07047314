"""``./dev bench [PART...]``: measure an agent through its protocol alone, and print the results as one JSON document.

Progress goes to stderr. Each figure is a median with its minimum and maximum. Most figures have a floor, which is
measured in the same run: the cost of the smallest program that does the same. On a busy machine, only the ratio of a
figure to its floor is meaningful. If a part fails, the figures that it has measured are kept, and ``missing`` gives the
reason.

The agent is installed as in the image, with its own interpreter and modules that are compiled without docstrings.
``./dev bench`` creates that installation in .venv-program.

``--agent-command`` measures another agent. In the command, ``{config}`` is replaced with the path of agent.json, and
``{base}`` with the directory that is used instead of /var/vcap. ``python -m tools.bench.go_agent`` measures the Go
agent in this way.

``--into-docs`` also writes the table in docs/performance.md. Use it without PARTs on a quiet machine. It takes about
twenty minutes. ``--beside FILE`` adds a column with the results of another agent from an earlier run, and also writes
the table in README.md. ``--from FILE`` uses the results of an earlier run instead of measuring.

Four parts run only if they are named: ``large`` (gigabytes of logs, a large compiled package, a large apply), ``scale``
(1 000 and 10 000 light agents, and an outage of their bus), ``cpi`` (the Kubernetes CPI on its own node, as root) and
``monit`` (``agent-shim monit`` compared with monit 5.2.5, whose path is in MONIT_525).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agent_shim import __version__
from tests.support.instance import COMMAND, INTERPRETER
from tools.bench import (
    ageing,
    archives,
    boots,
    cpi,
    crowds,
    deploys,
    idle,
    in_place_of_monit,
    installs,
    large,
    lifecycles,
    neighbours,
    pings,
    table,
)
from tools.bench.measuring import Figures

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
ON_DEMAND: Final[dict[str, Part]] = {
    "large": large.measure,
    "cpi": cpi.measure,
    "monit": in_place_of_monit.measure,
}


async def measure(command: str, parts: Mapping[str, Part], scale: float) -> tuple[Figures, dict[str, str]]:
    """Run the benchmark ``parts`` against the agent that ``command`` starts. Return all figures, and the error of each
    part that failed.
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
        except Exception as exc:  # noqa: BLE001 - a failed part does not affect the others
            missing[name] = str(exc) or f"{type(exc).__name__} in {_place(exc)}"
            _say(f"{name}: cannot measure all of it: {missing[name]}")
        figures |= {figure: {**values, "part": name} for figure, values in found.items()}
        _say(f"{name} took {time.monotonic() - part_begun_at:.0f} s")
    return figures, missing


def _place(exc: Exception) -> str:
    """Return the module and function of the benchmark in which an error occurred."""
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
    parser.add_argument("--agent-command", default=COMMAND, help="measure another agent")
    parser.add_argument("--agent-name", metavar="NAME", help="heading of the agent's figures (default: the command)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for counts, sizes and times (default: 1)")
    parser.add_argument("--into-docs", action="store_true", help="also write the tables of the docs")
    words = "use the JSON of an earlier run; repeat the option for runs of different parts"
    parser.add_argument("--from", dest="earlier", type=Path, action="append", metavar="FILE", help=words)
    words = "add a column with the figures in this JSON; files of the same agent share a column"
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="FILE", help=words)
    args = parser.parse_args()
    args.parts = dict.fromkeys(args.parts or PARTS)
    if unknown := args.parts.keys() - (PARTS | ON_DEMAND).keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; the parts are {named}")
    return args


def python_version() -> str:
    """Return the version of the interpreter that runs the agent."""
    ask = [INTERPRETER, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Measure, print the results and write the tables. Return the exit code."""
    args = parsed()
    # Raise KeyboardInterrupt, so that the processes started here are stopped as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.earlier:
        document = table.merged([json.loads(path.read_text()) for path in args.earlier])[0]
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
                "python": python_version(),
                "load_before": round(load, 1),
            },
            "figures": figures,
            "missing": missing,
        }
        json.dump(document, sys.stdout, indent=2)
        print()
    if args.into_docs:
        table.write(document, table.merged([json.loads(path.read_text()) for path in args.beside]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
