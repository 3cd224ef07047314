"""Chaos cases in group M: messages are malformed or oversized, or arrive in large numbers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Final

from tests.chaos.case import case
from tests.support.instance import AGENT
from tests.support.nonsense import BAD, mutated
from tests.support.stand import CannotInjectError, Stand, at_most, expect

PINGS_PER_S: Final = 5000
"""Number of pings that a flood sends per second."""


@case(
    "M-01",
    "malformed and mutated requests, twice",
    attack="a request is malformed, or has a value of the wrong type",
    scale="10 000 requests instead of 100 000",
    has_full=True,
    is_long=True,
)
async def test_malformed_requests_neither_delay_pings_nor_restart_jobs(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(2)
    for message in BAD:
        await _publish(stand, message)
    await stand.answers(2)
    stand.remember()
    before = stand.live()
    slowest = await _mutated(stand, stand.of(5000, 50_000))
    stand.remember_memory()
    slowest = max(slowest, await _mutated(stand, stand.of(5000, 50_000)))
    expect(slowest < 1, f"a ping took {slowest:.2f} s, but the limit is 1 s")
    expect(stand.live() == before, "a job was restarted")
    stand.involved = set(before)  # all jobs, because one of the messages applies an empty spec
    await stand.deploy(2)
    stand.tell(f"the slowest ping meanwhile took {slowest * 1000:.0f} ms")


async def _mutated(stand: Stand, count: int) -> float:
    """Send malformed requests, with pings in between. Return the duration of the slowest ping in seconds."""
    chance, slowest = random.Random(1), 0.0
    for number in range(count):
        message = chance.choice(BAD) if chance.random() < 0.02 else mutated(chance)
        await _publish(stand, message)
        if number % 500 == 0:
            begun_at = time.monotonic()
            await stand.call("ping", timeout=5)
            slowest = max(slowest, time.monotonic() - begun_at)
    return slowest


async def _publish(stand: Stand, message: bytes) -> None:
    peer = stand.world.director.peer
    assert peer is not None
    await peer.publish(f"agent.{AGENT}", message)


@case(
    "M-02",
    "two floods of 5 000 pings/s, 5 000 get_task requests and 200 tasks",
    scale="10 s instead of 60 s each",
    has_full=True,
    is_long=True,
)
async def test_request_floods_leak_no_memory(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(2)
    before = stand.size()
    stand.remember()
    sent, beat, back = await _flood(stand)
    kept = stand.size().memory - before.memory
    expect(kept < 30 << 20, f"memory grew by {kept >> 20} MiB during the first flood, but the limit is 30")
    stand.remember_memory()
    again = await _flood(stand)
    sent, beat, back = min(sent, again[0]), max(beat, again[1]), max(back, again[2])
    more = stand.size().memory - before.memory - kept
    rest = f"a heartbeat within {beat:.0f} s, a pong after {back * 1000:.0f} ms"
    stand.tell(f"{sent} pings/s; {rest}; memory after the first flood {_mb(kept)}, after the second {_mb(more)}")


def _mb(size: int) -> str:
    return f"{size / (1 << 20):+.1f} MiB"


async def _flood(stand: Stand) -> tuple[int, float, float]:
    """Flood the agent with requests. Return the number of pings sent per second and two durations in seconds.

    The durations are measured from the end of the flood until the next heartbeat, and from a later ping until its
    reply.
    """
    tasks = [asyncio.create_task(stand.call("run_script", "nothing", {}, timeout=60)) for _ in range(200)]
    asked = [asyncio.create_task(stand.call("get_task", "none", timeout=60)) for _ in range(5000)]
    begun_at = time.monotonic()
    sent = 0
    seconds = stand.of(10, 60)
    ping = {"protocol": 3, "method": "ping", "arguments": [], "reply_to": "director.x.y.z"}
    message = json.dumps(ping).encode()
    while (lasted := time.monotonic() - begun_at) < seconds:
        while sent < lasted * PINGS_PER_S:
            await _publish(stand, message)
            sent += 1
        await asyncio.sleep(0.01)
    if sent < 0.95 * PINGS_PER_S * seconds:
        raise CannotInjectError(
            f"needs a machine that sends {PINGS_PER_S} pings/s, but this one sent {sent // seconds}"
        )
    beat = await stand.heartbeat(31)
    await asyncio.gather(*tasks, *asked, return_exceptions=True)
    return sent // seconds, beat, await stand.answers(5)


@case("M-03", "an errand prints 50 MB, half of it quotation marks and invalid UTF-8", is_long=True)
async def test_reply_to_an_errand_with_50_mb_of_output_is_truncated(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    stand.script("job0", "run", "yes '\"\\' | head -c 25000000\nhead -c 25000000 /dev/urandom")
    result = await stand.world.director.run(AGENT, "run_errand", "job0", timeout=60, limit=120)
    size = len(json.dumps(result))
    at_most(size, 2 << 20, "the escaped reply has {} bytes")
    expect(result["exit_code"] == 0, f"the errand's exit code is {result['exit_code']} instead of 0")
    kept = len(result["stdout"])
    expect(kept > 100_000, f"the reply contains only {kept} characters of the output")
    stand.tell(f"the reply was {size >> 10} KiB long")
