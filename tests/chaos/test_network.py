"""Chaos cases in group N, which is about the bus and the network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
import uuid
from bisect import bisect, bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import SERVER
from agent_shim.edges.bus.nats import NatsBus
from tests.chaos.case import case
from tests.support.bus import ClientConnection, FakeServer
from tests.support.instance import AGENT
from tests.support.proxy import Proxy
from tests.support.readings import cpu_seconds
from tests.support.stand import CONNECTED, CannotInjectError, Stand, at_most, expect, refused, until


@case(
    "N-01",
    "the bus server is killed and started again",
    scale="down for 1 and 10 s instead of 1 to 600 s",
    has_full=True,
    is_long=True,
)
async def test_agent_reconnects_to_a_killed_server(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    took = []
    for outage in (1, 10, *([60, 600] if stand.is_full else [])):
        beats = len(stand.monitor.of("heartbeat", AGENT))
        await stand.world.server.kill()
        await asyncio.sleep(outage)
        await stand.world.server.start()
        took.append(await stand.answers(CONNECTED))
        await until(lambda: len(stand.monitor.of("heartbeat", AGENT)) > beats, 3, "no heartbeat arrived")  # noqa: B023
    stand.tell(f"the agent was back {' and '.join(f'{seconds:.1f}' for seconds in took)} s after the server")


@case(
    "N-02",
    "all traffic to and from the bus server is dropped",
    scale="40 s instead of 120 s",
    has_full=True,
    is_long=True,
)
async def test_dead_bus_connection_is_detected_and_replaced(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.proxy.swallow()
    left = stand.proxy.left
    dead = await until(lambda: stand.proxy.left > left, 16, "the agent did not notice the dead connection")
    await asyncio.sleep(stand.of(40, 120) - dead)
    stand.proxy.flow()
    back = await stand.answers(CONNECTED)
    stand.tell(f"the agent noticed it after {dead:.1f} s, and was back {back:.1f} s after traffic passed again")


@case("N-03", "the bus server is suspended with SIGSTOP", scale="30 s instead of 45 s", has_full=True, is_long=True)
async def test_agent_survives_a_suspended_bus_server(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    stand.world.server.pause()
    try:
        await asyncio.sleep(stand.of(30, 45))
    finally:
        stand.world.server.resume()
    stand.tell(f"the agent was back {await stand.answers(CONNECTED):.1f} s after the server resumed")


@case(
    "N-04",
    "the connection to the bus is cut repeatedly",
    scale="every 3 s, for 1 minute instead of 30",
    has_full=True,
    is_long=True,
)
async def test_agent_reconnects_at_most_once_a_second_after_repeated_disconnections(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    links, begun_at = stand.proxy.connections, time.monotonic()
    seconds = stand.of(60, 1800)
    while time.monotonic() - begun_at < seconds:
        stand.proxy.cut()
        await asyncio.sleep(3)
    made = stand.proxy.connections - links
    expect(made <= seconds, f"the agent tried to connect {made} times in {seconds} s, but the limit is once a second")
    stand.tell(
        f"{made} attempts to connect in {seconds} s; the agent was back after {await stand.answers(CONNECTED):.1f} s"
    )


@case("N-05", "pings arrive while the agent installs packages of 600 MB and packs logs of 440 MB", is_long=True)
async def test_pings_are_answered_during_heavy_work(stand: Stand) -> None:
    await stand.boot()
    # Write the files in threads. If the writes blocked the event loop, the proxy in this process would stop, and the
    # agent and the bus server would drop the silent connection.
    spec = await asyncio.to_thread(stand.world.spec, 2, 6, 100 << 20)
    logs = stand.world.base / "data/sys/log/job0"
    logs.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread((logs / "big.log").write_bytes, b"all work and no play\n" * (20 << 20))
    stand.remember()

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
    expect(longest < 0.25, f"a ping took {longest * 1000:.0f} ms, but the limit is 250 ms")
    stand.tell(f"the longest ping took {longest * 1000:.0f} ms")


@case("N-08", "update_settings changes the bus credentials, and finally sets invalid ones", is_long=True)
async def test_changed_bus_credentials_are_used_and_invalid_credentials_refused(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    longest = 0.0
    for _ in range(5):
        fresh = stand.world.server.mbus(AGENT)
        cert = {"ca": fresh.ca, "certificate": fresh.certificate, "private_key": fresh.private_key}
        links = stand.proxy.connections
        begun_at = time.monotonic()
        await stand.world.run("update_settings", {"mbus": {"urls": list(stand.world.urls), "cert": cert}})
        await stand.answers(5)
        longest = at_most(
            max(longest, time.monotonic() - begun_at), 10, "the answer over the new connection took {:.2f} s"
        )
        expect(stand.proxy.connections > links, "the agent still uses the old connection")
    bad = {"ca": fresh.ca, "certificate": "nonsense", "private_key": fresh.private_key}
    await refused(stand, "update_settings", {"mbus": {"urls": list(stand.world.urls), "cert": bad}})
    await stand.answers(2)
    stand.tell(
        f"5 changes, each followed by an answer over the new connection within {longest:.2f} s; invalid credentials "
        "were refused"
    )


@case(
    "N-09",
    "the agent's user is removed from nats-server and restored",
    scale="20 s instead of 120 s",
    has_full=True,
    is_long=True,
)
async def test_agent_reconnects_when_its_bus_user_is_restored(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    await stand.world.server.remove_agent(AGENT)
    await asyncio.sleep(stand.of(20, 120))
    await stand.world.server.add_agent(AGENT)
    stand.tell(f"the agent was back {await stand.answers(CONNECTED):.1f} s after the user was restored")


@case("N-13", "a request arrives four times, and results are queried late and in reverse order")
async def test_repeated_request_takes_effect_once_and_results_can_be_queried_late(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    stand.script("job0", "count", f"echo once >> {stand.world.base}/data/count")
    director = stand.world.director
    request_id = str(uuid.uuid4())
    for _ in range(4):
        await director.request(AGENT, "run_script", ("count", {}), request_id)
    count = stand.world.base / "data/count"
    await until(count.exists, 5, "the script did not run")
    tasks = [(await stand.call("run_script", "pre-stop", {}))["agent_task_id"] for _ in range(3)]
    for task in reversed(tasks):
        await stand.world.director.value(AGENT, "get_task", task)
    expect(count.read_text() == "once\n", f"the script ran {count.read_text().count('once')} times instead of once")
    stand.tell("the four copies had one effect")


@case(
    "N-14",
    "reply subjects that nobody subscribes to, that are not permitted, empty or too long",
    attack="another agent forges a reply_to",
)
async def test_invalid_reply_subjects_do_not_close_the_connection(stand: Stand) -> None:
    await stand.boot()
    stand.remember()
    peer = stand.world.director.peer
    assert peer is not None
    subjects = ("director.nobody.x.y", "", "a" * 10_000, "agent.other", "x y", "director.*.>", "_INBOX.1", "$SYS.REQ")
    for reply_to in subjects:
        message = {"protocol": 3, "method": "ping", "arguments": [], "reply_to": reply_to}
        await peer.publish(f"agent.{AGENT}", json.dumps(message).encode())
    links = stand.proxy.connections
    await stand.answers(2)
    expect(stand.proxy.connections == links, "the agent did not keep its connection")
    stand.tell(f"the connection was kept with {len(subjects)} kinds of subjects")


@case("N-11", "the bus server stops reading during a flood of requests, twice", is_long=True)
async def test_agent_survives_a_server_that_stops_reading(stand: Stand) -> None:
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
    stand.tell(f"the agent was back {max(took):.1f} s after the server read again")


class NameServer(asyncio.DatagramProtocol):
    """A name server that answers queries for IPv4 addresses with ``address``.

    ``mode`` can make it answer with an error, or not at all.
    """

    CODES: Final = {"answer": 0, "SERVFAIL": 2, "NXDOMAIN": 3}

    def __init__(self) -> None:
        self.mode = "answer"
        self.address = "127.0.0.1"
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self.mode == "silence" or self._transport is None:
            return
        question = data[12 : data.index(b"\0", 12) + 5]
        is_found = self.mode == "answer" and question[-4:] == b"\0\1\0\1"
        head = data[:2] + (0x8180 | self.CODES[self.mode]).to_bytes(2) + bytes([0, 1, 0, is_found, 0, 0, 0, 0])
        record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.address)
        self._transport.sendto(head + question + record * is_found, addr)


@asynccontextmanager
async def names(stand: Stand) -> AsyncIterator[NameServer]:
    """Run a name server that the agent uses for all names. Call this before ``boot``."""
    if os.geteuid() != 0:
        raise CannotInjectError("needs root to replace /etc/resolv.conf")
    address = f"127.{os.getpid() >> 16 & 0x7F | 0x80}.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}"
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, (address, 53))
    own = stand.world.scratch / "resolv.conf"
    own.write_text(f"nameserver {address}\n")
    stand.prefix(f"""unshare --mount sh -c 'mount --bind {own} /etc/resolv.conf && exec "$0" "$@"'""")
    try:
        yield server
    finally:
        transport.close()


@case(
    "N-12",
    "the bus server's name cannot be resolved (NXDOMAIN, SERVFAIL, no answer for 30 s), then has another address",
    is_long=True,
)
async def test_agent_survives_name_server_failures_and_follows_a_new_address(stand: Stand) -> None:
    async with names(stand) as server, Proxy(stand.proxy.target, "127.0.0.2", stand.proxy.port) as other:
        stand.world.urls = (f"nats://{SERVER}:{stand.proxy.port}",)
        await stand.boot()
        await stand.deploy(3)
        stand.remember()
        stand.dies("job0", times=None)  # the number varies, because two exits within ten seconds cause only one alert
        longest = 0.0
        for mode, seconds in (("NXDOMAIN", 6), ("SERVFAIL", 6), ("silence", 30)):
            server.mode = mode
            links = stand.proxy.connections
            stand.proxy.cut()
            await asyncio.sleep(seconds)
            expect(
                stand.proxy.connections == links,
                f"{mode}: the agent connected although the server's name could not be resolved",
            )
            before = stand.live()["job0"]
            os.kill(before, signal.SIGKILL)
            missing = f"{mode}: job0 was not restarted"
            await until(lambda: stand.live().get("job0", before) != before, 3, missing)  # noqa: B023
            is_reported = "agent_shim_bus_connected 0" in await asyncio.to_thread(stand.scrape)
            expect(is_reported, f"{mode}: the metrics do not report that the agent is disconnected")
            server.mode = "answer"
            longest = max(longest, await stand.answers(CONNECTED + 5))
        server.address = "127.0.0.2"
        moved = await until(lambda: other.connections, 70, "the agent did not connect to the new address")
        await stand.answers(5)
        stand.tell(
            f"the agent was back within {longest:.1f} s; it used the new address after {moved:.0f} s, although the "
            "old one still answered"
        )


ERRORS = (
    "Unknown Protocol Operation",
    "Attempted To Connect To Route Port",
    "Authorization Violation",
    "Authorization Timeout",
    "Invalid Client Protocol",
    "Maximum Control Line Exceeded",
    "Parser Error",
    "Secure Connection - TLS Required",
    "Stale Connection",
    "Maximum Connections Exceeded",
    "Maximum Subscriptions Exceeded",
    "Slow Consumer",
    "Maximum Payload Violation",
    "Invalid Subject",
    "Invalid Publish Subject",
    'Permissions Violation for Subscription to "agent.x"',
    'Permissions Violation for Publish to "hm.agent.heartbeat.x"',
    "User Authentication Expired",
    "User Authentication Revoked",
    "Account Authentication Expired",
    "Failed Account Registration",
    "Server Shutdown",
    "something that no server says",
    "",
)
"""Errors from nats-server's ``server/errors.go``, and two invented errors."""


def _nonsense() -> dict[str, bytes]:
    """Return invalid server messages, keyed by a description."""
    message = b'{"protocol":3,"method":"ping","arguments":[],"reply_to":"director.x.y.z"}'
    return {
        **{f"-ERR {text}": f"-ERR '{text}'\r\n".encode() for text in ERRORS},
        "-ERR alone": b"-ERR\r\n",
        "an unknown verb": b"FOO bar\r\n",
        "binary": random.Random(10).randbytes(200 << 10),
        "a line without end": b"INFO " + b"x" * (200 << 10),
        "a large INFO": b'INFO {"server_id":"x","pad":"' + b"x" * (200 << 10) + b'"}\r\n',
        "an INFO that is no JSON": b"INFO {\r\n",
        "an INFO of another shape": b"INFO [1]\r\n",
        "an INFO of strange values": b'INFO {"max_payload":"many","connect_urls":7,"ldm":true}\r\n',
        "an empty message": b"MSG agent.x 1 0\r\n\r\n",
        "the number of another subscription": b"MSG agent.x 99 %d\r\n%b\r\n" % (len(message), message),
        "a negative size": b"MSG agent.x 1 -5\r\n",
        "a size that is none": b"MSG agent.x 1 many\r\n",
        "a huge size": b"MSG agent.x 1 99999999999999\r\n",
        "too few words": b"MSG agent.x\r\n",
        "headers": b"HMSG agent.x 1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        "broken headers": b"HMSG agent.x 1 90 12\r\nNATS/1.0\r\n\r\n\r\n",
        "a payload of another size": b"MSG agent.x 1 4\r\n%b\r\n" % message,
        "pongs for nothing": b"PONG\r\n" * 1000,
        "a thousand pings": b"PING\r\n" * 1000,
        "no words at all": b"\r\n\r\n\r\n",
    }


@case(
    "N-10",
    "the bus server sends every -ERR, invalid data, and a message in two pieces",
    attack="a neighbour poses as the bus and sends invalid data",
    is_long=True,
)
async def test_agent_survives_invalid_and_split_server_messages(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    todo, pieces = list(_nonsense().items()), 0
    done = asyncio.Event()

    async def script(wire: ClientConnection) -> None:
        nonlocal pieces
        for start in ("CONNECT ", "PING", "SUB agent.", "PING"):
            await wire.expect(start)
            if start == "PING":
                wire.send(b"PONG\r\n")
        if not todo:
            pieces = await _in_pieces(wire)
            done.set()
            return
        wire.send(todo.pop(0)[1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await wire.answer_pings()

    before, begun_at = cpu_seconds(stand.pid), time.monotonic()
    kinds = len(todo)
    async with FakeServer(script, authority=stand.world.server.authority).serving() as fake:
        real, stand.proxy.target = stand.proxy.target, fake.port
        stand.proxy.cut()
        try:
            async with asyncio.timeout(600):
                await done.wait()
        except TimeoutError:
            expect(
                False, f"the agent stopped connecting after {fake.connections} connections, {len(todo)} kinds were left"
            )
        finally:
            stand.proxy.target = real
        share = (cpu_seconds(stand.pid) - before) / (time.monotonic() - begun_at)
    stand.proxy.cut()
    back = await stand.answers(CONNECTED)
    expect(share < 0.2, f"the agent used {share:.0%} of a CPU, but the limit is 20%")
    stand.tell(
        f"{kinds} kinds of data, a request split at {pieces} places; the agent was back {back:.1f} s after that, and "
        f"used {share:.1%} of a CPU"
    )


async def _in_pieces(wire: ClientConnection) -> int:
    """Send a ping in two pieces, once for each position at which it can be split. Return the number of answers."""
    reply_to = f"director.x.{AGENT}.y"
    request = json.dumps({"protocol": 3, "method": "ping", "arguments": [], "reply_to": reply_to}).encode()
    message = b"MSG agent.%b 1 %d\r\n%b\r\n" % (AGENT.encode(), len(request), request)
    for place in range(1, len(message)):
        wire.send(message[:place])
        await asyncio.sleep(0.002)
        wire.send(message[place:])
        async with asyncio.timeout(10):
            while not (line := await wire.expect("")).startswith(f"PUB {reply_to} "):
                if line == "PING":
                    wire.send(b"PONG\r\n")
                elif line.startswith("PUB "):
                    await wire.payload(int(line.split()[-1]))
            answer = await wire.payload(int(line.split()[-1]))
            expect(answer == b'{"value":"pong"}', f"the answer to a ping in two pieces is {answer!r} instead of pong")
    return len(message) - 1


CROWD = 1000
OUTAGE = 20
SETTLED = 12
"""Seconds after which agents that lost their server at the same time have spread out their retries."""


class _Member(NatsBus):
    """One of many clients. It records when it tries to connect and when it succeeds."""

    came = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tries: list[float] = []

    async def _connect(self, mbus: Mbus) -> Any:
        self.tries.append(time.monotonic())
        link = await super()._connect(mbus)
        self.came = time.monotonic()
        return link


@case("N-06", "the bus server of 1000 agents restarts", is_long=True, scale="simplified agents, server down for 20 s")
async def test_a_thousand_agents_spread_out_their_reconnections(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    server = stand.world.server
    await server.add_agent("crowd")
    mbus = server.mbus("crowd")

    async def answer(data: bytes) -> tuple[str, bytes] | None:
        return None

    members = [_Member("crowd", mbus, answer) for _ in range(CROWD)]
    tasks = []
    try:
        for at in range(0, CROWD, 50):
            tasks += [asyncio.create_task(one.run()) for one in members[at : at + 50]]
            async with asyncio.timeout(120):
                await asyncio.gather(*(one.wait_connected() for one in members[at : at + 50]))
        await stand.answers(5)
        await server.kill()
        lost_at = time.monotonic()
        await asyncio.sleep(OUTAGE)
        await server.start()
        begun_at = time.monotonic()
        await until(lambda: min(one.came for one in members) > begun_at, 60, "not all agents reconnected")
        last = max(one.came for one in members) - begun_at
        await stand.answers(5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tries = sorted(at - lost_at for one in members for at in one.tries if at > lost_at + SETTLED)
    most = max(bisect(tries, at + 1) - bisect_left(tries, at) for at in tries if at < OUTAGE - 1)
    expect(most <= 200, f"{most} agents tried to connect within a second, but the limit is 200")
    expect(last <= 30, f"the last agent reconnected after {last:.1f} s, but the limit is 30 s")
    stand.tell(f"at most {most} tried to connect within a second; all were back {last:.1f} s after the server")
