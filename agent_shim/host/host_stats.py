"""What the machine says of itself: processor times, memory, load. Bytes, seconds.

``/proc`` is read directly: psutil gives the same figures for 1.3 MB of memory. Parsers raise ``ValueError`` for a text
that the kernel does not write; nothing here is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_shim.host import clock

PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor time since some beginning; ``total`` is all there was, used or not."""

    user: float
    system: float
    wait: float
    total: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes there are and bytes in use, of memory and of swap."""

    total: int
    used: int
    swap_total: int
    swap_used: int


def cpu_times(proc: Path = PROC) -> CpuTimes:
    """Of all processors together, since boot."""
    return parse_stat((proc / "stat").read_text())


def parse_stat(text: str) -> CpuTimes:
    """The first line of ``/proc/stat``; guests are left out, their time is counted in user and nice already."""
    label, *fields = text.partition("\n")[0].split()
    if label != "cpu":
        raise ValueError("the first line does not begin with cpu")
    user, nice, system, idle, wait, *rest = (_natural(field) / clock.TICKS for field in fields[:8])
    return CpuTimes(user + nice, system, wait, user + nice + system + idle + wait + sum(rest))


def memory(proc: Path = PROC) -> Memory:
    """Of the whole machine."""
    return parse_meminfo((proc / "meminfo").read_text())


def parse_meminfo(text: str) -> Memory:
    """In use is what is not available (kernels before 3.14 do not say: free, buffers and cache together)."""
    kib = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        kib[name] = _natural(rest.split()[0]) if rest.split() else 0
    if "MemTotal" not in kib:
        raise ValueError("no line begins with MemTotal")
    free = sum(kib.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))
    available = kib.get("MemAvailable", free)
    swap_total, swap_free = kib.get("SwapTotal", 0), kib.get("SwapFree", 0)
    return Memory(
        total=1024 * kib["MemTotal"],
        used=1024 * max(0, kib["MemTotal"] - available),
        swap_total=1024 * swap_total,
        swap_used=1024 * max(0, swap_total - swap_free),
    )


def load(proc: Path = PROC) -> tuple[float, float, float]:
    """Of the whole machine, over 1, 5 and 15 minutes; there is none of a container."""
    return parse_loadavg((proc / "loadavg").read_text())


def parse_loadavg(text: str) -> tuple[float, float, float]:
    """``0.39 0.51 0.48 2/345 6789``."""
    one, five, fifteen = (_natural(field.replace(".", "", 1)) and float(field) for field in text.split()[:3])
    return one, five, fifteen


def _natural(field: str) -> int:
    if not (field.isascii() and field.isdigit()):
        raise ValueError(f"{field[:40]!r} is not a natural number")
    return int(field)
