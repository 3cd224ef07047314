"""Figures, which are the results of benchmarks, and stopwatches.

A figure is ``{"unit", "median", "min", "max", "samples"}``. If a floor was measured in the same run, the figure also
has ``"floor"`` (the median for a minimal program that does the same work), ``"floor_is"`` (a description of that
program) and ``"ratio"``.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tests.support.instance import INTERPRETER, ROOT

MB: Final = 1024 * 1024
ECHO: Final = f"env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(INTERPRETER)} -m tools.bench.echo {{config}}"
"""Command of a minimal agent. Its results are the floor of many figures."""
Figure = dict[str, Any]
Figures = dict[str, Figure]
"""Figures by name. Each figure is added as soon as it has been measured, so that a later failure does not lose it."""


def figure(samples: Sequence[float], unit: str, *, floor: Sequence[float] = (), floor_is: str = "") -> Figure:
    """Return the figure for ``samples``. If ``floor`` has samples, their median is the figure's floor."""
    made: Figure = {
        "unit": unit,
        "median": _rounded(statistics.median(samples)),
        "min": _rounded(min(samples)),
        "max": _rounded(max(samples)),
        "samples": len(samples),
    }
    if floor:
        least = statistics.median(floor)
        made |= {"floor": _rounded(least), "floor_is": floor_is}
        if least > 0:
            made["ratio"] = round(statistics.median(samples) / least, 2)
    return made


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


class Stopwatch:
    """Measures the seconds since its creation."""

    def __init__(self) -> None:
        self._begun_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_at


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the block's duration in seconds to a list."""
    watch = Stopwatch()
    yield
    into.append(watch.seconds)
