"""Tests heartbeats and alerts as the Health Monitor receives them at the beginning of each connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from agent_shim.demo.director import HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.edges.alerts import Alerts
from agent_shim.edges.heartbeat import Heartbeat
from tests.support.broker import NatsServer
from tests.support.bus import connected, on_bus
from tests.support.waiting import until


async def test_heartbeat_and_pending_alerts_are_sent_on_each_connection(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:

        async def send(message: bytes) -> None:
            await bus.publish("hm.agent.heartbeat.agent", message)

        async def vitals() -> int:
            return 1

        def told() -> None:
            heart.beat_now()
            alerts.flush()

        async with (
            HealthMonitor().on(server.peer(HEALTH_MONITOR)) as monitor,
            on_bus(server.mbus("agent"), on_connected=told) as bus,
        ):
            heart = Heartbeat(vitals, lambda known: json.dumps({"vitals": known}).encode(), send)
            alerts = Alerts("agent", bus.publish)
            running = [asyncio.create_task(heart.run()), asyncio.create_task(alerts.run())]
            alerts.raise_alert("web", "Does not exist", "restart", "process is not running", [])
            await server.add_agent("agent")
            beat = await monitor.wait_for("heartbeat", "agent")
            await monitor.wait_for("alert", "agent", lambda body: body["severity"] == 1)

            assert beat.body == {"vitals": 1}

            await server.remove_agent("agent")
            await until(lambda: not bus.is_connected)
            alerts.raise_alert("db", "Timeout", "unmonitor", "", [])
            await server.add_agent("agent")
            await connected(bus)
            await monitor.wait_for("alert", "agent", lambda body: body["severity"] == 2)
            await until(lambda: len(monitor.of("heartbeat", "agent")) == 2)
            for task in running:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
