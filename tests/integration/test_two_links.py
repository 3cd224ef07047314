"""A request that comes to the agent by two links to the bus in the same instant, as when credentials are replaced."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

from agent_shim_demo.director import Director
from tests.support.broker import NatsServer
from tests.support.bus import connected, on_bus
from tests.support.waiting import until
from tests.support.world import world as made


async def test_settings_that_come_by_both_links_are_one_task(tmp_path: Path) -> None:
    """Each link hands the same bytes to the agent; both replies name the one task, which is done once."""
    replies: list[str] = []
    async with made(tmp_path / "world") as world, NatsServer(tmp_path / "bus") as server:
        await server.add_agent("agent")

        async def handle(data: bytes) -> tuple[str, bytes] | None:
            answer = await world.dispatcher.handle(data)
            assert answer is not None
            replies.append(json.loads(answer[1])["value"]["agent_task_id"])
            return answer

        mbus = server.mbus("agent")
        async with (
            on_bus(mbus, "agent", handle=handle) as one,
            on_bus(mbus, "agent", handle=handle) as other,
            Director().on(server.peer()) as director,
        ):
            await asyncio.gather(connected(one), connected(other))
            request = {
                "method": "update_settings",
                "arguments": [{"trusted_certs": ""}],
                "protocol": 3,
                "reply_to": f"director.d.agent.{uuid.uuid4()}",
            }
            assert director._peer is not None
            await director._peer.publish("agent.agent", json.dumps(request).encode())
            await until(lambda: len(replies) == 2)

        assert len(set(replies)) == 1
        assert [each.id for each in world.agent.tasks._tasks.values()] == replies[:1]
