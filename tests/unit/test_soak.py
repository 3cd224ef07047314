"""Tests the verdicts on recorded soak tests."""

from __future__ import annotations

from tests.support.witness import Size
from tools.chaos.soak import Record

MIB = 1 << 20
HOUR = 3600


def record(growth: float = 0.0, descriptors: int = 0) -> Record:
    """Return a one-hour record with a heartbeat every 30 s.

    Over the hour, memory grows by ``growth`` bytes, and the number of open descriptors by ``descriptors``.
    """
    found = Record(begun_at=1000.0, until=1000.0 + HOUR)
    for second in range(0, HOUR, 5):
        share = second / HOUR
        size = Size(30 + round(descriptors * share), 5, int(40 * MIB + growth * share))
        found.sizes.append((1000.0 + second, size))
        found.pings.append((1000.0 + second, 0.002))
    found.beats = [1000.0 + beat for beat in range(0, HOUR, 30)]
    return found


def test_soak_passes_without_growth_and_with_all_heartbeats() -> None:
    assert record().faults() == []
    assert record(growth=MIB / 2).faults() == []


def test_soak_reports_growth() -> None:
    assert record(growth=2 * MIB).faults() == ["memory grows by 2.00 MiB an hour"]
    assert record(descriptors=10).faults() == ["39 descriptors after 34"]


def test_soak_ignores_growth_in_the_first_quarter() -> None:
    found = record()
    found.sizes = [
        (at, Size(size.descriptors, size.threads, size.memory if at > found.settled_at else MIB))
        for at, size in found.sizes
    ]

    assert found.faults() == []


def test_soak_reports_late_heartbeats_unless_the_bus_or_the_machine_caused_them() -> None:
    late = record()
    late.beats[50] += 2.5
    outage, starved = record(), record()
    outage.beats[50] = starved.beats[50] = late.beats[50]
    outage.outages.append((late.beats[50] - 20, late.beats[50] - 10))
    starved.sleeper.append((late.beats[50] - 2.4, 2.3))

    assert late.faults() == ["a heartbeat 2.5 s late at 1502 s; the sleeper was 0.0 s late"]
    assert outage.faults() == []
    assert starved.faults() == []
