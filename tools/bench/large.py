"""``./dev bench large``: cost of fetching large logs, compiling a large package and applying large packages.

The agent is measured from outside, through the protocol and ``/proc``. During each action, the agent and a process that
does nothing else are pinged every ten milliseconds, and the agent's memory is sampled. While logs are packed, a job
writes and rotates a log.

A ``scale`` of 1 means 10 GB of logs in 20 000 files, a compiled package of 2 GB, and an apply of 10 packages with 500
MB each. Half of each package is random bytes and half is text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import random
import shutil
import statistics
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_shim.core.errors import HostError
from agent_shim.demo.release import archive
from tests.support.instance import AGENT, BYSTANDER, RunningAgent, bystander, world
from tools.bench.measuring import Figures

POOL_BYTES: Final = 4 << 20
FILES: Final = 20_000
LOGS: Final = 10_000_000_000
COMPILED: Final = 2_000_000_000
PACKAGES: Final = 10
PACKAGE: Final = 500_000_000
ROOM_FACTOR: Final = 2.0
"""The free disk space must be at least this many times the amount of data."""


def line(chance: random.Random) -> str:
    """Return a line that resembles one in an access log. About two thirds of it is predictable."""
    return (
        f"2026-11-20T13:{chance.randrange(60):02}:{chance.randrange(60):02}.{chance.randrange(10**6):06}Z "
        f"[{chance.choice(['INFO', 'WARN', 'DEBUG'])}] web.{chance.randrange(9)} request "
        f"id={chance.getrandbits(64):016x} path=/v2/apps/{chance.getrandbits(32):08x} took={chance.random():.4f}s\n"
    )


def fill(root: Path, files: int, size: int) -> None:
    """Write ``files`` logs of ``size`` bytes each into the log directories of a hundred jobs."""
    chance = random.Random(1)
    pool = "".join(line(chance) for _ in range(POOL_BYTES // 110)).encode()
    for number in range(files):
        path = root / f"job{number % 100}" / f"{number}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = chance.randrange(len(pool) // 2)
        with path.open("wb") as out:
            for _ in range(size // (POOL_BYTES // 2)):
                out.write(pool[begin : begin + POOL_BYTES // 2])
            out.write(pool[begin : begin + size % (POOL_BYTES // 2)])


# --- observations -----------------------------------------------------------------------------------------------------


def memory(pid: int | str, name: str) -> float:
    """Return a memory value of a process in MB, or 0 if the process has exited.

    ``name`` is ``VmRSS`` for the current memory or ``VmHWM`` for the peak.
    """
    with contextlib.suppress(OSError):
        for text in Path(f"/proc/{pid}/status").read_text().splitlines():
            if text.startswith(f"{name}:"):
                return int(text.split()[1]) / 1024
    return 0.0


@dataclass
class Watch:
    """Response times and memory measured while an action runs."""

    pings: dict[str, list[float]] = field(default_factory=lambda: {AGENT: [], BYSTANDER: []})
    children: dict[str, float] = field(default_factory=dict)
    """Peak memory in MB of each of the agent's child processes, by pid."""

    async def ping(self, w: RunningAgent, agent_id: str) -> None:
        while True:
            begun_at = time.monotonic()
            await w.director.value(agent_id, "ping")
            self.pings[agent_id].append((time.monotonic() - begun_at) * 1000)
            await asyncio.sleep(0.01)

    async def look(self, w: RunningAgent) -> None:
        while True:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{w.pid}/task/{w.pid}/children").read_text().split()
                self.children |= {pid: max(self.children.get(pid, 0), memory(pid, "VmHWM")) for pid in children}
            await asyncio.sleep(0.05)


@asynccontextmanager
async def watched(w: RunningAgent) -> AsyncIterator[Watch]:
    """Send pings and sample memory during the block."""
    watch = Watch()
    going = [asyncio.create_task(work) for work in (*(watch.ping(w, who) for who in watch.pings), watch.look(w))]
    try:
        yield watch
    finally:
        for task in going:
            task.cancel()
        await asyncio.wait(going)


async def figures(w: RunningAgent, size: float, work: Awaitable[Any]) -> dict[str, Any]:
    """Return the measurements of ``work``, which processes ``size`` bytes."""
    Path(f"/proc/{w.pid}/clear_refs").write_text("5")  # This resets VmHWM to the current memory.
    before, begun_at = memory(w.pid, "VmRSS"), time.monotonic()
    async with watched(w) as watch:
        await work
    seconds = time.monotonic() - begun_at
    return {
        "MB": round(size / 1e6),
        "seconds": round(seconds, 1),
        "MB_per_second": round(size / 1e6 / seconds),
        "agent_MB_before": round(before, 1),
        "agent_MB_grown": round(memory(w.pid, "VmHWM") - before, 1),
        "largest_child_MB": round(max(watch.children.values(), default=0), 1),
        "slowest_ping_ms": round(max(watch.pings[AGENT]), 1),
        "slowest_ping_of_the_bystander_ms": round(max(watch.pings[BYSTANDER]), 1),
        "ping_ms_p99": round(statistics.quantiles(watch.pings[AGENT], n=100)[98], 1),
        "pings": len(watch.pings[AGENT]),
    }


# --- actions ----------------------------------------------------------------------------------------------------------


async def write(log: Path) -> None:
    """Write to a log ten times a second as a job would, and rotate it every second."""
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        for _ in range(10):
            with log.open("a") as out:
                out.write("x" * 1000 + "\n")
            await asyncio.sleep(0.1)
        log.replace(log.with_name(f"{log.name}.1"))


async def of_logs(w: RunningAgent, scale: float) -> dict[str, Any]:
    """Measure the agent while it packs logs for ``fetch_logs`` and for ``bundle_logs``."""
    size, logs = LOGS * scale, w.base / "data/sys/log"
    count = max(1, int(FILES * scale))
    await asyncio.to_thread(fill, logs, count, int(size / count))
    writing = asyncio.create_task(write(logs / "busy/busy.log"))
    try:
        return {
            "fetch_logs": await figures(w, size, w.director.run(AGENT, "fetch_logs", "job", None)),
            "bundle_logs": await figures(
                w, size, w.director.value(AGENT, "bundle_logs", {"log_type": "job"}, timeout=3600)
            ),
        }
    finally:
        writing.cancel()


async def of_compiling(w: RunningAgent, scale: float) -> dict[str, Any]:
    """Measure the compilation of a package with a large result."""
    half = int(COMPILED * scale / 2)
    packaging = f"""set -e
head -c {half} /dev/urandom >$BOSH_INSTALL_TARGET/random
yes all work and no play makes a dull package | head -c {half} >$BOSH_INSTALL_TARGET/text
"""
    source = w.blob("source", archive({"packaging": packaging}))
    compiling = w.director.run(AGENT, "compile_package", source["blobstore_id"], source["sha1"], "large", "1", {})
    return {"compile_package": await figures(w, 2 * half, compiling)}


async def of_applying(w: RunningAgent, scale: float) -> dict[str, Any]:
    """Measure an apply of large packages."""
    size = int(PACKAGE * scale)
    spec = w.spec(1, PACKAGES)
    digest = await asyncio.to_thread(pack, w.store / "large-0", size)
    for number, package in enumerate(spec["packages"].values()):
        if number:
            (w.store / f"large-{number}").hardlink_to(w.store / "large-0")
        package |= {"blobstore_id": f"large-{number}", "sha1": digest}
    return {"apply": await figures(w, PACKAGES * size, w.director.run(AGENT, "apply", spec))}


def pack(path: Path, size: int) -> str:
    """Write a package with one file of ``size`` bytes, half random and half text. Return the package's SHA-1."""
    text = b"all work and no play makes a dull package\n" * (1 << 14)
    content = path.with_name("content")
    with content.open("wb") as out:
        while out.tell() < size:
            piece = os.urandom(len(text)) if out.tell() < size // 2 else text
            out.write(piece[: size - out.tell()])
    with gzip.open(path, "wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        tar.add(content, "content")
    content.unlink()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha1").hexdigest()


PARTS: Final[dict[Callable[[RunningAgent, float], Awaitable[dict[str, Any]]], int]] = {
    of_logs: LOGS,
    of_compiling: COMPILED,
    of_applying: PACKAGES * PACKAGE,
}


async def measure(command: str, scale: float, found: Figures) -> None:
    """Run each measurement with a new agent in a new directory."""
    for part, size in PARTS.items():
        async with world(command) as w, bystander(w):
            free = shutil.disk_usage(w.scratch).free
            if free < size * scale * ROOM_FACTOR:
                raise HostError(
                    f"cannot measure: {free / 1e9:.0f} GB are free below {w.scratch}; try a smaller --scale"
                )
            await w.start_agent()
            found |= await part(w, scale)
