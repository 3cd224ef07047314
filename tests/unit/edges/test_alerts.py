"""Tests alerts: their content, their order, and how often they are sent to the Health Monitor."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent_shim.core.errors import BusError
from agent_shim.edges import alerts
from agent_shim.edges.alerts import Alerts, alert_of
from tests.support import protocol
from tests.support.waiting import until

KINDS = (
    "checksum, connection, data access, execution, filesystem flags, gid, heartbeat, icmp, monit instance, type, "
    "permission, pid, ppid, resource limit, size, timestamp, uid"
).split(", ")


@pytest.mark.parametrize(
    ("event", "severity"),
    [
        ("Does not exist", 1),
        ("Execution failed", 1),
        ("Connection failed", 1),
        ("monit instance failed", 1),
        ("Timeout", 2),
        ("PID failed", 2),
        ("something new", 2),
        ("", 2),
        ("Resource limit matched", 3),
        ("content doesn't match", 3),
        ("size changed", 3),
        ("connection changed", 3),
        ("PID changed", 4),
        ("existence changed", 4),
        ("timeout changed", 4),
    ],
)
def test_s8_alert_severities_match_the_go_agent(event: str, severity: int) -> None:
    message = alert_of("web", event, "restart", "", [], 0)

    assert message is not None
    assert json.loads(message)["severity"] == severity


@pytest.mark.parametrize(
    "event",
    [
        *(f"{kind} succeeded" for kind in [*KINDS, "content"]),
        *(f"{kind} not changed" for kind in [*KINDS, "existence", "timeout"]),
        "Action done",
        "Exists",
        "Content match",
        "Timeout recovery",
        "Monit instance changed",
    ],
)
def test_s8_recovery_events_cause_no_alert(event: str) -> None:
    assert alert_of("web", event, "alert", "", [], 0) is None


def test_s8_alert_message_matches_the_go_agent() -> None:
    told = protocol.message("alert")
    ips = ["192.168.7.9", "10.0.0.5"]
    message = json.loads(alert_of("nats", "Does not exist", "restart", told["summary"], ips, 1306076861.7) or b"")

    assert message.pop("id") not in ("", told.pop("id"))
    assert message == told


def test_s8_alert_ids_are_unique() -> None:
    """The Health Monitor drops an alert with an id that it has already seen."""
    messages = [json.loads(alert_of("a", "Timeout", "alert", "", [], 0) or b"") for _ in range(100)]

    assert len({message["id"] for message in messages}) == 100
    assert messages[0]["title"] == "a - Timeout - alert"


class SwitchedBus:
    """A bus that accepts messages only while it is up."""

    def __init__(self) -> None:
        self.is_up = True
        self.messages: list[dict[str, object]] = []
        self.attempts = 0

    async def publish(self, subject: str, data: bytes) -> None:
        assert subject == "hm.agent.alert.agent"
        self.attempts += 1
        await asyncio.sleep(0)
        if not self.is_up:
            raise BusError("there is no link")
        self.messages.append(json.loads(data))

    @property
    def services(self) -> list[str]:
        return [str(message["title"]).split(" ")[0] for message in self.messages]


@asynccontextmanager
async def sending(bus: SwitchedBus, *, quiet: float = 20.0) -> AsyncIterator[Alerts]:
    """Yield a queue whose alerts are sent to the bus for the duration of the block."""
    queue = Alerts("agent", bus.publish, quiet=quiet)
    running = asyncio.create_task(queue.run())
    try:
        yield queue
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def fail(queue: Alerts, service: str, event: str = "Does not exist") -> None:
    queue.raise_alert(service, event, "restart", "process is not running", ["10.0.0.1"])


async def test_alerts_are_kept_until_the_bus_is_connected() -> None:
    bus = SwitchedBus()
    bus.is_up = False
    async with sending(bus) as queue:
        fail(queue, "p1")
        await until(lambda: bus.attempts == 1)
        bus.is_up = True
        fail(queue, "p2")
        await until(lambda: queue.sent == 2)
        bus.is_up = False
        fail(queue, "p3")
        await until(lambda: bus.attempts == 4)
        bus.is_up = True
        queue.flush()
        await until(lambda: queue.sent == 3)

    assert bus.services == ["p1", "p2", "p3"]


async def test_oldest_alerts_are_dropped_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_QUEUED", 3)
    bus = SwitchedBus()
    bus.is_up = False
    async with sending(bus) as queue:
        for number in range(5):
            fail(queue, f"p{number}")
        bus.is_up = True
        await until(lambda: queue.sent == 3)

    assert bus.services == ["p2", "p3", "p4"]
    assert queue.dropped == 2


async def test_dropping_an_alert_that_is_being_sent_does_not_drop_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue may overflow while its oldest alert is being sent."""
    monkeypatch.setattr(alerts, "MAX_QUEUED", 2)
    bus = SwitchedBus()
    async with sending(bus) as queue:
        fail(queue, "p0")
        await asyncio.sleep(0)
        for number in range(1, 3):
            fail(queue, f"p{number}")
        await until(lambda: queue.sent == 3)

    assert bus.services == ["p0", "p1", "p2"]


async def test_repeated_alert_is_sent_once_within_the_quiet_time() -> None:
    bus = SwitchedBus()
    async with sending(bus) as queue:
        for _ in range(50):
            fail(queue, "p1")
        fail(queue, "p2")
        fail(queue, "p1", "Timeout")
        await until(lambda: queue.sent == 3)

    assert bus.services == ["p1", "p2", "p1"]
    assert queue.collapsed == 49


async def test_alert_is_sent_again_after_the_quiet_time() -> None:
    bus = SwitchedBus()
    async with sending(bus, quiet=0.01) as queue:
        fail(queue, "p1")
        await asyncio.sleep(0.02)
        fail(queue, "p1")
        await until(lambda: queue.sent == 2)

    assert queue.collapsed == 0
