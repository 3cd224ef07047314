"""Tests uptimes and timestamps."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.host import clock, proc


@given(
    now=st.floats(min_value=0, max_value=1e10),
    uptime_file=st.floats(min_value=0, max_value=1e10),
    wall=st.floats(min_value=0, max_value=1e11),
    start_ticks=st.integers(min_value=0, max_value=10**13),
)
def test_uptime_is_a_non_negative_integer(now: float, uptime_file: float, wall: float, start_ticks: int) -> None:
    """Whatever the clocks show, the uptime must be a number that ``bosh vms`` can decode."""
    readings = {time.CLOCK_BOOTTIME: now, time.CLOCK_MONOTONIC: uptime_file, time.CLOCK_REALTIME: wall}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "clock_gettime", readings.__getitem__)
        patch.setattr(time, "time", lambda: wall)
        uptime = clock.uptime_of(start_ticks)

    assert type(uptime) is int
    assert uptime >= 0


def test_uptime_counts_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", lambda _: 1000.5)

    assert clock.uptime_of(990 * clock.TICKS) == 10
    assert clock.uptime_of(1000 * clock.TICKS) == 0


def test_process_start_times_are_measured_with_the_boot_time_clock() -> None:
    own = proc.stat(os.getpid())
    assert own is not None

    assert 0 < own.start_ticks <= clock.boot_ticks()
    assert clock.boot_time() - 86400 < own.start_ticks / clock.TICKS


def test_current_boot_ticks_convert_to_the_current_time() -> None:
    assert abs(clock.wall_time_of(clock.boot_ticks()) - time.time()) < 0.1
