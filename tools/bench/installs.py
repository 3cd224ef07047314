"""Measures an ``apply`` with a few large packages, with many small ones, and with many jobs. The floor is the time that
tar needs.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.support.instance import RunningAgent, world
from tools.bench.measuring import MB, Figure, Figures, figure, timed

ROUNDS: Final = 3
LARGE: Final = (6, 20 * MB)
SMALL_PACKAGE_BYTES: Final = 1024
COUNTS: Final = (1, 10, 100)
JOBS: Final = 50


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure installations. ``scale`` multiplies the size of the large packages."""
    async with world(command) as w:
        await w.start_agent()
        packages, size = LARGE
        found["apply_6_packages_of_20_MB"] = await applied(w, 5, packages, int(size * scale))
        for count in COUNTS:
            name = "small_package" if count == 1 else "small_packages"
            found[f"apply_{count}_{name}"] = await applied(w, 1, count, SMALL_PACKAGE_BYTES)
        found[f"apply_{JOBS}_jobs_with_a_package_each"] = await applied(w, JOBS, JOBS, SMALL_PACKAGE_BYTES)
        spec = w.spec(5, packages, SMALL_PACKAGE_BYTES, version="same")
        await w.run("apply", spec)
        again = [await w.run("apply", spec) for _ in range(ROUNDS)]
        found["apply_of_installed_bundles"] = figure(again, "s")


async def applied(w: RunningAgent, jobs: int, packages: int, size: int) -> Figure:
    """Measure applies, each with new bundles, and return their durations. The floor is the time in which tar unpacks
    the same archives, two at a time.
    """
    took: list[float] = []
    least: list[float] = []
    for number in range(ROUNDS):
        spec = w.spec(jobs, packages, size, version=f"{jobs}-{packages}-{number}")
        blobs = [w.store / each["blobstore_id"] for each in spec["packages"].values()]
        templates = w.store / spec["rendered_templates_archive"]["blobstore_id"]
        with timed(least):
            await asyncio.to_thread(unpack, [*blobs, templates], w.scratch / "floor")
        shutil.rmtree(w.scratch / "floor")
        took.append(await w.run("apply", spec))
    # Remove the bundles from the last round, so that the next measurement does not include their removal.
    await w.run("apply", w.spec(1, 0, version=f"none-{jobs}-{packages}"))
    return figure(took, "s", floor=least, floor_is="tar, two at a time")


def unpack(archives: Sequence[Path], where: Path) -> None:
    """Unpack each archive into its own directory with tar, two at a time."""

    def one(number: int) -> None:
        target = where / str(number)
        target.mkdir(parents=True)
        subprocess.run(["tar", "-xzf", archives[number], "-C", target], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(len(archives))))
