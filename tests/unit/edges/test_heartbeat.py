"""Tests that heartbeats keep their schedule, even if vitals or the bus are slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import selectors
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import BusError
from agent_shim.edges.heartbeat import Heartbeat, Message
from agent_shim.host import clock
from tests.support import protocol
from tests.support.waiting import until


class HeartbeatParts:
    """Stand-ins for the parts that a heartbeat needs: vitals that can be slow or fail, a state to report, and a bus
    that records heartbeats.
    """

    def __init__(self) -> None:
        self.measured = 0
        self.slowness = 0.0
        self.state = "running"
        self.failure: Exception | None = None
        self.no_link: Exception | None = None
        self.missed = 0
        self.can_measure = asyncio.Event()
        self.can_measure.set()
        self.beats: list[tuple[float, int | None, str]] = []

    async def collect(self) -> int:
        await asyncio.sleep(self.slowness)
        await self.can_measure.wait()
        if self.failure:
            raise self.failure
        self.measured += 1
        return self.measured

    def compose(self, vitals: int | None) -> bytes:
        return json.dumps([vitals, self.state]).encode()

    async def publish(self, message: bytes) -> None:
        if self.no_link:
            self.missed += 1
            raise self.no_link
        self.beats.append((time.monotonic(), *json.loads(message)))

    @property
    def vitals(self) -> list[int | None]:
        return [vitals for _, vitals, _ in self.beats]


@asynccontextmanager
async def beating(world: HeartbeatParts, **bounds: float) -> AsyncIterator[Heartbeat[int]]:
    """Send heartbeats for the duration of the block. ``bounds`` override the agent's periods and time limits."""
    heart = Heartbeat(world.collect, world.compose, world.publish, **bounds)
    running = asyncio.create_task(heart.run())
    try:
        yield heart
        assert not running.done(), "nothing ends the heartbeat"
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


BEGUN_AT = 1000.0


class SkippingSelector(selectors.DefaultSelector):
    """A selector that advances its clock instead of waiting. An hour passes in a moment, and all times are exact."""

    now = BEGUN_AT

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "somebody waits for ever"
        self.now += max(timeout, 0.0)
        return super().select(0)


def run_without_waiting(play: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a coroutine in an event loop that advances its clock instead of waiting."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    monkeypatch.setattr(loop, "time", lambda: selector.now)
    monkeypatch.setattr(time, "monotonic", lambda: selector.now)
    monkeypatch.setattr(clock, "BEGUN_AT", selector.now)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play)


@pytest.mark.parametrize("slowness", [0.0, 0.5, 0.999, 1.5, 29.5, 31.5, 100.0, 3600.0])
def test_s7_heartbeats_keep_a_fixed_schedule(monkeypatch: pytest.MonkeyPatch, slowness: float) -> None:
    """In an hour, 120 heartbeats are sent. Each is at most 1 s later than a multiple of 30 s."""
    world = HeartbeatParts()
    world.slowness = slowness

    async def play() -> None:
        async with beating(world):
            await asyncio.sleep(3601.5)

    run_without_waiting(play(), monkeypatch)
    times = [at - BEGUN_AT for at, _, _ in world.beats]

    assert times == pytest.approx([30.0 * number + min(slowness, 1.0) for number in range(1, 121)], abs=0.001)
    ages = [vitals for vitals in world.vitals if vitals is not None]
    assert len(ages) == 120 - max(0, math.ceil((slowness - 1) / 30))


def test_extra_heartbeats_do_not_shift_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HeartbeatParts()
    world.slowness = 5.0
    requested_at = [3.0, 29.5, 45.0, 89.999, 90.001]

    async def play() -> None:
        async with beating(world) as heart:
            for at in requested_at:
                await asyncio.sleep(BEGUN_AT + at - time.monotonic())
                heart.beat_now()
            await asyncio.sleep(30)

    run_without_waiting(play(), monkeypatch)
    times = [at - BEGUN_AT for at, _, _ in world.beats]

    for due in (30.0, 60.0, 90.0):
        assert any(due <= at <= due + 2.001 for at in times), due
    for at in requested_at:
        assert any(at <= beat <= at + 1.001 for beat in times), at
    assert len(times) in (7, 8, 9)


def test_missed_heartbeats_are_not_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the whole machine pauses, the schedule continues afterwards."""
    world = HeartbeatParts()

    async def play() -> None:
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]  # noqa: SLF001
        async with beating(world):
            await asyncio.sleep(40)
            selector.now += 100
            await asyncio.sleep(45)

    run_without_waiting(play(), monkeypatch)

    assert [at - BEGUN_AT for at, _, _ in world.beats] == pytest.approx([30, 140, 150, 180], abs=0.001)


async def test_slow_vitals_do_not_delay_a_heartbeat() -> None:
    """If a measurement hangs, heartbeats contain the previous vitals but the current state."""
    world = HeartbeatParts()
    async with beating(world, period=0.05, collect_s=0.02) as heart:
        await until(lambda: bool(world.vitals) and world.vitals[-1] is not None)
        world.can_measure.clear()
        # Skip one heartbeat, because a measurement that has just ended may still change the vitals.
        held, begun = len(world.beats) + 1, world.measured
        await until(lambda: len(world.beats) >= held + 2)
        world.state = "failing"
        told = len(world.beats) + 1
        await until(lambda: len(world.beats) >= told + 2)
        left = len(world.beats)
        assert world.measured <= begun + 1, "one measurement at a time"
        world.can_measure.set()
        await until(lambda: world.vitals[-1] not in (None, world.vitals[held]))

    assert heart.sent_at is not None
    assert len(set(world.vitals[held:left])) == 1
    assert world.vitals[held] is not None
    assert [state for *_, state in world.beats][told] == "failing"


async def test_failed_measurement_is_logged_and_the_last_vitals_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    world = HeartbeatParts()
    async with beating(world, period=0.03, collect_s=0.02):
        await until(lambda: world.vitals[-1:] not in ([], [None]))
        world.failure = OSError("no /proc")
        before = len(world.beats)
        await until(lambda: caplog.text.count("cannot measure the vitals") >= 2 and len(world.beats) >= before + 2)
        world.failure = None
        measured = world.measured
        await until(lambda: world.measured > measured)

    assert None not in world.vitals[before:]


async def test_heartbeat_without_a_connection_is_skipped() -> None:
    world = HeartbeatParts()
    world.no_link = BusError("there is no link")
    async with beating(world, period=0.02, collect_s=0.02) as heart:
        await until(lambda: world.missed >= 3)

        assert world.beats == []
        assert heart.sent_at is None

        world.no_link = None
        await until(lambda: len(world.beats) >= 1)


def test_s7_heartbeat_has_the_same_members_as_under_the_go_agent() -> None:
    """The Health Monitor would drop a heartbeat with an id or a time."""
    given = protocol.message("heartbeat")

    assert msgspec.to_builtins(Message(**given)) == given
