"""``./dev bench``: measure an agent and print one JSON; it keeps no verdict.

Any agent can be put in by ``--agent-command``, where ``{config}`` stands for its agent.json and ``{base}`` for the
directory that stands for /var/vcap. Progress goes to stderr. Figures are medians with the spread beside them.
``large`` measures GBs of logs, a large compiled package and a large apply instead (``benchmarks.large``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent_shim import __version__
from benchmarks import large
from benchmarks.world import AGENT, COMMAND, World, world

MB = 1024 * 1024


def median(samples: list[float], unit: str) -> dict[str, Any]:
    """The median of some samples with the least and the greatest."""
    return {
        "unit": unit,
        "median": round(statistics.median(samples), 6),
        "min": round(min(samples), 6),
        "max": round(max(samples), 6),
        "samples": len(samples),
    }


def pss(pid: int) -> float:
    """Proportional memory of a process and its children that are agents too (not jobs), in MB."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def boot(w: World) -> dict[str, Any]:
    """From exec to the first pong."""
    samples = []
    for _ in range(7):
        samples.append(await w.start_agent())
        await w.stop_agent()
    await w.start_agent()
    return {"exec_to_first_pong": median(samples, "s")}


async def latency(w: World) -> dict[str, Any]:
    """Round trips one after the other, and many at once."""
    pings = []
    for _ in range(300):
        begun_at = time.monotonic()
        await w.director.value(AGENT, "ping")
        pings.append(time.monotonic() - begun_at)
    rates = []
    for _ in range(5):
        begun_at = time.monotonic()
        await asyncio.gather(*(w.director.value(AGENT, "ping") for _ in range(500)))
        rates.append(500 / (time.monotonic() - begun_at))
    return {"ping": median(pings, "s"), "pipelined_pings_per_second": median(rates, "1/s")}


async def deploy(w: World) -> dict[str, Any]:
    """apply of 6 packages of 20 MB, start, kill and stop of five jobs."""
    applies = []
    for number in range(3):
        spec = w.spec(5, 6, 20 * MB, version=str(number))
        applies.append(await w.run("apply", spec))
    starts, runnings, stops = [], [], []
    for _ in range(5):
        starts.append(await w.run("start"))
        runnings.append(starts[-1] + await w.until_running())
        stops.append(await w.run("stop"))
    await w.run("start")
    await w.until_running()
    states = []
    for _ in range(50):
        begun_at = time.monotonic()
        await w.director.value(AGENT, "get_state", "full")
        states.append(time.monotonic() - begun_at)
    return {
        "apply_6_packages_of_20_MB": median(applies, "s"),
        "start_answered": median(starts, "s"),
        "start_until_5_running": median(runnings, "s"),
        "stop_of_5": median(stops, "s"),
        "get_state_full": median(states, "s"),
    }


async def killed(w: World) -> dict[str, Any]:
    """A killed process until a successor lives; each job is killed once, its first failure."""
    samples = []
    for job, pid in sorted(w.pids().items()):
        begun_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while w.pids().get(job) in (None, pid) or not Path(f"/proc/{w.pids()[job]}").exists():
                await asyncio.sleep(0.0005)
        samples.append(time.monotonic() - begun_at)
    await w.until_running()
    return {"killed_until_successor_lives": median(samples, "s")}


async def idle(w: World) -> dict[str, Any]:
    """Memory and CPU with five processes running and nothing to do."""
    await asyncio.sleep(3)
    memory, used, begun_at = pss(w.pid), cpu_seconds(w.pid), time.monotonic()
    await asyncio.sleep(30)
    share = (cpu_seconds(w.pid) - used) / (time.monotonic() - begun_at) * 100
    return {
        "pss_5_processes_after_apply": {"unit": "MB", "median": round(memory, 1), "samples": 1},
        "idle_cpu_5_processes": {"unit": "%", "median": round(share, 3), "samples": 1},
    }


async def as_the_director(w: World) -> dict[str, Any]:
    """A change deployed with the polls of a real Director; the time that the agent makes it wait."""
    w.director.poll = 1.0
    keep = dict.fromkeys(("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep")
    spec = w.spec(5, 6, MB, version="next")
    begun_at = time.monotonic()
    await w.run("prepare", spec)
    await w.run("run_script", "pre-stop", {"env": keep})
    await w.run("drain", "update", spec)
    await w.run("stop")
    await w.run("run_script", "post-stop", {})
    await w.run("update_settings", {"trusted_certs": "", "disk_associations": []})
    await w.run("apply", spec)
    await w.run("run_script", "pre-start", {})
    await w.run("start")
    while (await w.director.value(AGENT, "get_state"))["job_state"] != "running":
        await asyncio.sleep(1)
    await w.run("run_script", "post-start", {})
    waited = time.monotonic() - begun_at
    w.director.poll = 0
    return {"deploy_of_one_instance_as_the_director_polls": {"unit": "s", "median": round(waited, 3), "samples": 1}}


PARTS: dict[str, Callable[[World], Awaitable[dict[str, Any]]]] = {
    "boot": boot,
    "latency": latency,
    "deploy": deploy,
    "killed": killed,
    "idle": idle,
    "director": as_the_director,
}


async def measure(command: str) -> dict[str, Any]:
    """All figures of one agent."""
    figures: dict[str, Any] = {}
    async with world(command) as w:
        for name, part in PARTS.items():
            print(f"bench: {name}", file=sys.stderr, flush=True)
            figures.update(await part(w))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=["all", "large"], default="all", help="default: all but what is large"
    )
    parser.add_argument("--agent-command", default=COMMAND, help="default: this agent")
    parser.add_argument("--scale", type=float, default=1.0, help="of large things (default: 1, needs 20 GB of disk)")
    args = parser.parse_args()
    measuring = large.measure(args.agent_command, args.scale) if args.what == "large" else measure(args.agent_command)
    document = {
        "agent_command": args.agent_command if args.agent_command != COMMAND else f"agent-shim {__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "figures": asyncio.run(measuring),
    }
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
