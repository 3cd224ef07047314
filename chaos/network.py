"""N: the bus and the network."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from benchmarks.world import AGENT
from chaos.cases import case
from chaos.stand import CONNECTED, Stand, expect, until


@case("N-01", "the server is killed and comes back after 1 and 10 s", scale="1 and 10 s of 1 to 600", is_long=True)
async def server_killed(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    took = []
    for outage in (1, 10):
        beats = len(stand.monitor.of("heartbeat", AGENT))
        await stand.world.server.kill()
        await asyncio.sleep(outage)
        await stand.world.server.start()
        took.append(await stand.answers(CONNECTED))
        await until(lambda: len(stand.monitor.of("heartbeat", AGENT)) > beats, 3, "heartbeat at once")  # noqa: B023
    return f"back {' and '.join(f'{seconds:.1f}' for seconds in took)} s after the server"


@case("N-02", "a black hole in both directions", scale="40 s of 120", is_long=True)
async def black_hole(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.proxy.swallow()
    links = stand.proxy.connections
    dead = await until(lambda: stand.proxy.connections > links, 16, "dead link noticed")
    await asyncio.sleep(40 - dead)
    stand.proxy.flow()
    back = await stand.answers(CONNECTED)
    return f"dead after {dead:.1f} s, back {back:.1f} s after it healed"


@case("N-03", "the server is stopped by a signal", scale="30 s of 45", is_long=True)
async def server_stopped(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.world.server.pause()
    try:
        await asyncio.sleep(30)
    finally:
        stand.world.server.resume()
    return f"back {await stand.answers(CONNECTED):.1f} s after it went on"


@case("N-04", "the link is cut again and again", scale="every 3 s for 1 of 30 min", is_long=True)
async def flaps(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    links, begun_at = stand.proxy.connections, time.monotonic()
    while time.monotonic() - begun_at < 60:
        stand.proxy.cut()
        await asyncio.sleep(3)
    made = stand.proxy.connections - links
    expect(made <= 60, f"{made} attempts in 60 s")
    return f"{made} attempts in 60 s, back after {await stand.answers(CONNECTED):.1f} s"


@case("N-05", "heavy work: 600 MB are applied and packed while pings go on", is_long=True)
async def heavy(stand: Stand) -> str:
    await stand.boot()
    spec = stand.world.spec(2, 6, 100 << 20)
    logs = stand.world.base / "data/sys/log/job0"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "big.log").write_bytes(b"all work and no play\n" * (20 << 20))
    stand.remember()
    stand.involved = None

    async def work() -> None:
        await stand.world.run("prepare", spec)
        await stand.world.run("apply", spec)
        await stand.world.run("fetch_logs", "job", [])

    working = asyncio.create_task(work())
    longest = 0.0
    while not working.done():
        begun_at = time.monotonic()
        await stand.call("ping", timeout=5)
        longest = max(longest, time.monotonic() - begun_at)
        await asyncio.sleep(0.01)
    await working
    expect(longest < 0.25, f"a ping took {longest * 1000:.0f} ms")
    return f"the longest ping took {longest * 1000:.0f} ms"


@case("N-08", "bus credentials change by update_settings, and then to some that are no good", is_long=True)
async def rotated(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    longest = 0.0
    for _ in range(5):
        fresh = stand.world.server.mbus(AGENT)
        cert = {"ca": fresh.ca, "certificate": fresh.certificate, "private_key": fresh.private_key}
        begun_at = time.monotonic()
        await stand.world.run("update_settings", {"mbus": {"urls": list(stand.world.urls), "cert": cert}})
        await stand.answers(5)
        longest = max(longest, time.monotonic() - begun_at)
    bad = {"ca": fresh.ca, "certificate": "nonsense", "private_key": fresh.private_key}
    try:
        await stand.world.run("update_settings", {"mbus": {"urls": list(stand.world.urls), "cert": bad}})
    except RpcRemoteError as exc:
        refusal = str(exc)
    else:
        refusal = ""
    expect(bool(refusal), "a certificate that is none was taken")
    await stand.answers(2)
    return f"5 changes, {longest:.2f} s at most until the answer over the new link; a bad one is refused"


@case("N-09", "its user is removed from the server and given back", scale="20 s of 120", is_long=True)
async def refused(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    await stand.world.server.remove_agent(AGENT)
    await asyncio.sleep(20)
    await stand.world.server.add_agent(AGENT)
    return f"back {await stand.answers(CONNECTED):.1f} s after it was known again"


@case("N-13", "requests come twice, answers are asked for late and in another order")
async def duplicates(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    script = stand.world.base / "jobs/job0/bin/count"
    script.write_text(f"#!/bin/sh\necho once >> {stand.world.base}/data/count\n")
    script.chmod(0o755)
    director = stand.world.director
    request_id = str(uuid.uuid4())
    for _ in range(4):
        await director._send(AGENT, "run_script", ("count", {}), request_id)
    count = stand.world.base / "data/count"
    await until(count.exists, 5, "the script")
    tasks = [(await stand.call("run_script", "pre-stop", {}))["agent_task_id"] for _ in range(3)]
    for task in reversed(tasks):
        await stand.world.director.value(AGENT, "get_task", task)
    expect(count.read_text() == "once\n", f"the script ran {count.read_text().count('once')} times")
    return "one effect of four copies"


@case("N-14", "reply subjects that are dead, forbidden, empty or long")
async def replies(stand: Stand) -> str:
    await stand.boot()
    stand.remember()
    peer = stand.world.director._peer
    assert peer is not None
    subjects = ("director.nobody.x.y", "", "a" * 10_000, "agent.other", "x y", "director.*.>", "_INBOX.1", "$SYS.REQ")
    for reply_to in subjects:
        message = {"protocol": 3, "method": "ping", "arguments": [], "reply_to": reply_to}
        await peer.publish(f"agent.{AGENT}", json.dumps(message).encode())
    links = stand.proxy.connections
    await stand.answers(2)
    expect(stand.proxy.connections == links, "the link was given up")
    return f"{len(subjects)} kinds, the link stays"


@case("N-11", "the server takes nothing any more while much is asked, twice", is_long=True)
async def full_window(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(50)
    stand.remember()
    took = []
    for _ in range(2):
        stand.remember_memory()
        asked = [asyncio.create_task(stand.call("get_state", "full", timeout=40)) for _ in range(300)]
        await asyncio.sleep(0.05)
        stand.proxy.swallow()
        await asyncio.sleep(20)
        stand.proxy.flow()
        await asyncio.gather(*asked, return_exceptions=True)
        took.append(await stand.answers(CONNECTED))
    return f"back {max(took):.1f} s after it took again"


@case("N-15", "every byte is late by 0.5 s", scale="delay only", is_long=True)
async def late(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.proxy.delay = 0.5
    longest, chance = 0.0, random.Random(15)
    for _ in range(20):
        begun_at = time.monotonic()
        try:
            await stand.call(chance.choice(["ping", "get_state"]), timeout=6)
        except (RpcTimeoutError, RpcRemoteError) as exc:
            expect(False, str(exc))
        longest = max(longest, time.monotonic() - begun_at)
    beat = await stand.heartbeat(35)
    stand.proxy.delay = 0.0
    expect(longest < 5, f"a request took {longest:.1f} s")
    return f"a request took {longest:.2f} s at most; a heartbeat within {beat:.0f} s"
