"""``./dev run python -m tools.bench.rotation [TIMES]``: rotate the bus credentials under load, by default 50 times.

A Director rotates the credentials with ``update_settings`` while other clients send requests without pauses. As with
nats-sync, the bus accepts the new user before each rotation and rejects the old user afterwards. For comparison,
requests are also sent to a second agent, whose credentials stay the same. Prints one JSON document.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from agent_shim.demo.director import Director, RpcTimeoutError
from tests.support.instance import AGENT, BYSTANDER, COMMAND, RunningAgent, bystander, world

ASKERS: Final = 8
ANSWER_TIMEOUT_S: Final = 5.0
"""Seconds after which a reply counts as lost. The Director waits 45 seconds."""


@dataclass
class Seen:
    """Totals over all clients that send requests to one agent."""

    replies: int = 0
    lost: int = 0
    slowest: float = 0.0
    gap: float = 0.0
    """Longest time in seconds during which none of the clients got a reply."""
    _last: float = 0.0

    async def ask(self, director: Director, agent_id: str, method: str) -> None:
        """Send requests without pauses until cancelled."""
        while True:
            begun_at = time.monotonic()
            try:
                await director.value(agent_id, method, timeout=ANSWER_TIMEOUT_S)
            except RpcTimeoutError:
                self.lost += 1
                continue
            now = time.monotonic()
            self.replies += 1
            self.slowest = max(self.slowest, now - begun_at)
            self.gap = max(self.gap, now - (self._last or begun_at))
            self._last = now


async def _rotate(w: RunningAgent, *, bootstrap: bool) -> None:
    mbus = w.server.mbus(AGENT, bootstrap=bootstrap)
    cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
    await w.server.add_agent(AGENT, bootstrap=True, permanent=True)
    await w.director.run(AGENT, "update_settings", {"mbus": {"cert": cert}, "trusted_certs": ""})
    await w.server.add_agent(AGENT, bootstrap=bootstrap, permanent=not bootstrap)


async def measure(times: int) -> dict[str, Any]:
    """Measure ``times`` rotations of the credentials under load, and return the results."""
    async with world(COMMAND) as w, bystander(w):
        await w.start_agent()
        rotated, left_alone = Seen(), Seen()
        going = [
            asyncio.create_task(rotated.ask(w.director, AGENT, method))
            for method in ("ping", "get_state") * (ASKERS // 2)
        ]
        going.append(asyncio.create_task(left_alone.ask(w.director, BYSTANDER, "ping")))
        begun_at = time.monotonic()
        try:
            for number in range(times):
                await _rotate(w, bootstrap=number % 2 == 0)
            seconds = time.monotonic() - begun_at
        finally:
            for task in going:
                task.cancel()
            await asyncio.wait(going)
        log = (w.scratch / "agent.log").read_text()
    return {
        "rotations": times,
        "links": log.count("connected to the bus"),
        "links_lost": log.count("is lost"),
        "seconds": round(seconds, 1),
        "replies": rotated.replies,
        "replies_lost": rotated.lost,
        "slowest_reply_ms": round(rotated.slowest * 1000, 1),
        "longest_gap_ms": round(rotated.gap * 1000, 1),
        "longest_gap_of_the_bystander_ms": round(left_alone.gap * 1000, 1),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]) if sys.argv[1:] else 50)), indent=2))
