"""Tests how the whole machine's CPU times, memory and load are read, using simulated files instead of /proc."""

from __future__ import annotations

from pathlib import Path

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


def test_cpu_times_are_parsed(tmp_path: Path) -> None:
    """User time includes the time of processes with a positive niceness. The total includes steal time but not guest
    time, because the kernel counts guest time as user time as well.
    """
    (tmp_path / "stat").write_text(STAT)
    times = host_stats.cpu_times(tmp_path)

    ticks = [figure * clock.TICKS for figure in (times.user, times.system, times.wait, times.total)]
    assert ticks == pytest.approx([120, 30, 50, 621])


def test_used_memory_is_total_minus_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)

    assert host_stats.memory(tmp_path) == host_stats.Memory(1024_000, 409_600, 512_000, 51_200)


@pytest.mark.parametrize("text", ["", "cpu 1 2", "cpu a b c d e", "cpu -1 0 0 0 0 0 0 0 0 0", "cpu ² 1 1 1 1"])
def test_invalid_cpu_times_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)

    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.cpu_times(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "MemFree: 1 kB", "MemTotal: much kB", "MemTotal: -5 kB", MEMINFO.replace("   500 kB", "-500 kB")]
)
def test_invalid_meminfo_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)

    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.memory(tmp_path)


def test_load_averages_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.39 12.51 0.00 2/345 6789\n")

    assert host_stats.load(tmp_path) == (0.39, 12.51, 0.0)


@pytest.mark.parametrize("text", ["", "0.1 0.2", "nan nan nan", "0.1 -0.2 0.3", "1 2 inf"])
def test_invalid_load_averages_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "loadavg").write_text(text)

    with pytest.raises(ValueError, match=r"^.+$"):
        host_stats.load(tmp_path)


def test_cpu_memory_and_load_of_this_machine_can_be_read() -> None:
    times, memory = host_stats.cpu_times(), host_stats.memory()

    assert 0 < times.user + times.system + times.wait <= times.total
    assert 0 < memory.used < memory.total
    assert min(host_stats.load()) >= 0
