"""Readings of the whole machine, from texts of the kernel."""

from __future__ import annotations

import pytest

from agent_shim.host import clock, host_stats

STAT = """cpu  100 20 30 400 50 6 7 8 90 1
cpu0 1 1 1 1 1 1 1 1 1 1
"""
MEMINFO = """MemTotal:        1000 kB
MemFree:          100 kB
MemAvailable:     600 kB
Buffers:           10 kB
Cached:           200 kB
HugePages_Total:       0
SwapTotal:        500 kB
SwapFree:         450 kB
"""


def test_processor_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """User holds nice; the total holds steal and leaves the guests out."""
    monkeypatch.setattr(clock, "TICKS", 100)
    times = host_stats.parse_stat(STAT)

    assert (times.user, times.system, times.wait, times.total) == pytest.approx((1.2, 0.3, 0.5, 6.21))


def test_memory_in_use_is_what_is_not_available() -> None:
    """Cache that can be given back is not in use."""
    assert host_stats.parse_meminfo(MEMINFO) == host_stats.Memory(1024_000, 409_600, 512_000, 51_200)


def test_memory_of_an_old_kernel() -> None:
    """Without MemAvailable free, buffers and cache stand for it; without swap lines there is none."""
    text = "".join(MEMINFO.splitlines(keepends=True)[i] for i in (0, 1, 3, 4))

    assert host_stats.parse_meminfo(text) == host_stats.Memory(1024_000, 706_560, 0, 0)


@pytest.mark.parametrize("text", ["", "intr 1 2", "cpu 1 2", "cpu a b c d e", "cpu -1 0 0 0 0", "cpu ² 1 1 1 1"])
def test_other_texts_are_no_processor_times(text: str) -> None:
    """What the kernel would not write is an error, never a number."""
    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.parse_stat(text)


@pytest.mark.parametrize("text", ["", "MemFree: 1 kB", "MemTotal: much kB", "MemTotal: -5 kB"])
def test_other_texts_are_no_memory(text: str) -> None:
    """What the kernel would not write is an error, never a number."""
    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.parse_meminfo(text)


def test_load() -> None:
    """Three averages; what follows is something else."""
    assert host_stats.parse_loadavg("0.39 12.51 0.00 2/345 6789\n") == (0.39, 12.51, 0.0)


@pytest.mark.parametrize("text", ["", "0.1 0.2", "nan nan nan", "0.1 -0.2 0.3", "1 2 inf", "1e3 1 1"])
def test_other_texts_are_no_load(text: str) -> None:
    """What the kernel would not write is an error, never a number."""
    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.parse_loadavg(text)


def test_the_real_machine_can_be_read() -> None:
    """The kernel of this machine writes what we read."""
    times, memory = host_stats.cpu_times(), host_stats.memory()

    assert 0 < times.user + times.system + times.wait <= times.total
    assert 0 < memory.used < memory.total
    assert min(host_stats.load()) >= 0
