"""Ages and timestamps."""

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
def test_uptime_is_a_natural_number(now: float, uptime_file: float, wall: float, start_ticks: int) -> None:
    """`bosh vms` can decode the result for any two clocks."""
    readings = {time.CLOCK_BOOTTIME: now, time.CLOCK_MONOTONIC: uptime_file, time.CLOCK_REALTIME: wall}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "clock_gettime", readings.__getitem__)
        patch.setattr(time, "time", lambda: wall)
        uptime = clock.uptime_of(start_ticks)

    assert type(uptime) is int
    assert uptime >= 0


def test_uptime_counts_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second that has begun but not passed does not count."""
    monkeypatch.setattr(time, "clock_gettime", lambda _: 1000.5)

    assert clock.uptime_of(990 * clock.TICKS) == 10
    assert clock.uptime_of(1000 * clock.TICKS) == 0


def test_start_times_share_the_origin_of_boot_time() -> None:
    """The age of the test's own process is positive and matches the kernel's figure."""
    own = proc.stat(os.getpid())
    assert own is not None

    assert 0 < own.start_ticks <= clock.boot_ticks()
    assert clock.boot_time() - 86400 < own.start_ticks / clock.TICKS


def test_wall_time_of_the_current_tick_is_the_current_time() -> None:
    """Ticks are converted to wall clock time with an error of little more than one tick."""
    assert abs(clock.wall_time_of(clock.boot_ticks()) - time.time()) < 0.1
