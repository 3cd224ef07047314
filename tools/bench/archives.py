"""Measures the throughput of packing and unpacking, compared with tar, gzip, pigz and igzip on the same files.

Three actions are measured: an ``apply`` of a large package, an ``apply`` of a package with many files, and
``fetch_logs``.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from isal import isal_zlib

from agent_shim.demo.release import archive
from tests.support.instance import AGENT, RunningAgent, world
from tools.bench.installs import unpack
from tools.bench.large import fill
from tools.bench.measuring import MB, Figure, Figures, figure, timed

ROUNDS: Final = 3
LARGE: Final = 200 * MB
MANY_FILES: Final = 2000
LOGS: Final = 400 * MB
SMALL_LOGS: Final = 20_000
SMALL_LOG_BYTES: Final = 4096


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure the throughput. ``scale`` multiplies sizes and counts."""
    async with world(command) as w:
        await w.start_agent()
        found["unpack_one_file_of_200_MB"] = await unpacked(w, "large", int(LARGE * scale))
        small = {f"d{number % 40}/{number}": b"x" * 10_000 for number in range(int(MANY_FILES * scale))}
        found["unpack_2000_files_of_10_KB"] = await unpacked(w, "many", 0, small)
        found |= await packed(w, "fetch_logs_of_400_MB", 40, int(LOGS * scale / 40))
        found |= await packed(w, "fetch_logs_of_20000_small_files", int(SMALL_LOGS * scale), SMALL_LOG_BYTES)


async def unpacked(w: RunningAgent, name: str, size: int, files: dict[str, bytes] | None = None) -> Figure:
    took: list[float] = []
    least: list[float] = []
    for number in range(ROUNDS):
        spec = w.spec(1, 1, size, version=f"{name}-{number}")
        package = next(iter(spec["packages"].values()))
        if files is not None:
            package |= w.blob(f"{name}-{number}", archive({**files}))
        with timed(least):
            await asyncio.to_thread(unpack, [w.store / package["blobstore_id"]], w.scratch / "floor")
        shutil.rmtree(w.scratch / "floor")
        took.append(await w.run("apply", spec))
        await w.run("apply", w.spec(1, 0, version=f"{name}-{number}"))
    return figure(took, "s", floor=least, floor_is="tar -xzf")


async def packed(w: RunningAgent, name: str, files: int, size: int) -> dict[str, Figure]:
    """Measure the throughput in MB/s for ``files`` logs of ``size`` bytes each.

    Return the figure for ``fetch_logs``, whose floor is igzip, and the figures for tar with several compressors.
    """
    logs = w.base / "data/sys/log"
    await asyncio.to_thread(fill, logs, files, size)
    rates: dict[str, list[float]] = {"agent": [], "igzip": [], "tar and gzip -1": []}
    others: dict[str, Callable[[], object]] = {
        "igzip": lambda: squeeze(logs),
        "tar and gzip -1": lambda: tar(logs, w.scratch / "floor.tgz", ["gzip", "-1"]),
    }
    if shutil.which("pigz"):
        rates["tar and pigz"] = []
        others["tar and pigz"] = lambda: tar(logs, w.scratch / "floor.tgz", ["pigz", "-1"])
    for _ in range(ROUNDS):
        took: list[float] = []
        with timed(took):
            await w.director.run(AGENT, "fetch_logs", "job", None)
        rates["agent"].append(files * size / MB / took[-1])
        for other, run in others.items():
            with timed(took):
                await asyncio.to_thread(run)
            rates[other].append(files * size / MB / took[-1])
    for each in logs.iterdir():
        shutil.rmtree(each)
    made = {
        name: figure(
            rates["agent"],
            "MB/s",
            floor=rates["igzip"],
            floor_is="only reading the files and compressing them with igzip",
        )
    }
    return made | {f"{name}_by_{other.replace(' ', '_')}": figure(rates[other], "MB/s") for other in list(rates)[2:]}


def squeeze(root: Path) -> int:
    """Read and compress all logs below ``root`` without writing the result. Return the compressed size in bytes."""
    packer = isal_zlib.compressobj(2, wbits=31)
    total = 0
    for path in sorted(root.rglob("*.log")):
        with path.open("rb", buffering=0) as file:
            while piece := file.read(1 << 16):
                total += len(packer.compress(piece))
    return total


def tar(root: Path, target: Path, packer: Sequence[str]) -> None:
    """Pack a directory with tar and a compressor, as a shell script would."""
    with target.open("wb") as out:
        reading = subprocess.Popen(["tar", "-cf", "-", "-C", root, "."], stdout=subprocess.PIPE)
        subprocess.run(packer, stdin=reading.stdout, stdout=out, check=True)
        reading.wait()
    target.unlink()
