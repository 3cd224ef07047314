"""``./dev bench scale``: thousands of light agents on a server with its own core, compared with the model.

A light agent is a real client of the bus (mutual TLS, a certificate of its own, subscription, pings, heartbeats) whose
timeouts and pauses are the agent's own ``Timing``. Everything else is left out, so that a few processes on the other
core hold ten thousand. The server is killed and started again, and ``benchmarks.scale_model`` predicts the same outage
from the measured cost of one handshake. That cost grows with the number of users: a second measurement connects a few
agents to a server with many users.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from agent_shim.core.settings import Mbus
from agent_shim.edges.bus import tls
from agent_shim.edges.bus.nats import Timing
from benchmarks import scale_model
from benchmarks.measuring import Figures, Stopwatch, cpu_seconds, figure, pss
from benchmarks.scale import BEAT, TICK_S, Crowds, Point, storm
from tests.support.broker import NatsServer

SIZES: Final = (1000, 10_000)
USERS: Final = (100, 1000, 3000, 10_000)
MOST_USERS: Final = 1000
"""Maximum number of users in an outage: ten thousand agents share them, or their handshakes would take minutes."""
CONNECTED: Final = 100
"""Agents that connect to a server with many users."""
PROCESSES: Final = 4
AWAY_S: Final = 15.0
STEADY_S: Final = 15.0
AT_ONCE: Final = 8
"""Concurrent first connections of a process: few, so that their cost is that of a handshake without an outage."""
TIMING: Final = Timing()


async def measure(_: str, scale: float, found: Figures) -> None:
    """``scale`` multiplies the numbers of agents. The figures are named after the full numbers."""
    for size in USERS:
        cost = await handshake(max(2, int(size * scale)), CONNECTED)
        found[f"handshake_of_the_server_with_{size}_users"] = figure([cost], "s")
    for size in SIZES:
        point, cost = await outage(max(2, int(size * scale)), AWAY_S, STEADY_S)
        modelled = scale_model.storm(point.agents, 1 / cost, AWAY_S)
        name = f"{size}_light_agents"
        found[f"{name}_handshake_of_the_server"] = figure([cost], "s")
        found[f"{name}_server_memory"] = figure([point.server_mb], "MB")
        found[f"{name}_server_cpu_at_rest"] = figure([point.server_cpu_percent], "%")
        for told in ("back_median", "back_last", "attempts"):
            unit = "attempts" if told == "attempts" else "s"
            found[f"{name}_{told}"] = figure([getattr(point, told)], unit, floor=[modelled[told]], floor_is="the model")
        found[f"{name}_most_attempts_while_away"] = figure([point.most_attempts_away], "/s")
        found[f"{name}_most_attempts"] = figure([point.most_attempts_per_second], "/s")
        found[f"{name}_handshake_of_the_server_in_the_outage"] = figure([point.handshake_cpu], "s")
        found[f"{name}_generator_for_each"] = figure([point.agent_cpu], "s")


async def handshake(users: int, count: int) -> float:
    """Return the server's processor time for each of ``count`` connections without an outage."""
    async with bus(users) as server:
        used = cpu_seconds(server.pid)
        async with agents(server, users, count):
            return (cpu_seconds(server.pid) - used) / count


async def outage(count: int, away: float, steady: float) -> tuple[Point, float]:
    """Connect the agents, leave them at rest, kill the server, start it again; also measure the cost of a handshake."""
    point, users = Point(count), min(count, MOST_USERS)
    async with bus(users) as server:
        watch, used = Stopwatch(), cpu_seconds(server.pid)
        async with agents(server, users, count) as crowds:
            point.all_connected_after = watch.seconds
            cost = (cpu_seconds(server.pid) - used) / count
            watch, used = Stopwatch(), cpu_seconds(server.pid)
            await asyncio.sleep(steady)
            point.server_cpu_percent = (cpu_seconds(server.pid) - used) / watch.seconds * 100
            point.server_mb = pss(server.pid)
            await storm(point, server, crowds, away)
    return point, cost


@asynccontextmanager
async def bus(users: int) -> AsyncIterator[NatsServer]:
    """Give a server its own core. This process and its later children use the others."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            server = Pinned(Path(scratch) / "bus", core)
            await server.add_agents([f"agent-{number}" for number in range(users)], bootstrap=False)
            async with server:
                yield server
    finally:
        os.sched_setaffinity(0, cores)


@asynccontextmanager
async def agents(server: NatsServer, users: int, count: int) -> AsyncIterator[Crowds]:
    """Connect ``agents`` agents, evenly distributed over the users."""
    crowds = Crowds("benchmarks.light")
    try:
        for first in range(PROCESSES):
            mine = [f"agent-{number * max(users // count, 1) % users}" for number in range(first, count, PROCESSES)]
            given = {name: msgspec.structs.asdict(server.mbus(name)) for name in dict.fromkeys(mine)}
            await crowds.add({"agents": mine, "users": given})
        await crowds.until_connected(count)
        yield crowds
    finally:
        await crowds.end()


class Pinned(NatsServer):
    """A server on its own core; it counts its processors when it starts."""

    def __init__(self, where: Path, core: int) -> None:
        super().__init__(where)
        self._core = core

    async def start(self) -> None:
        others = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            await super().start()
        finally:
            os.sched_setaffinity(0, others)


# --- light agents ---------------------------------------------------------------------------------------------------


class Light:
    """One client: its connection attempts, and its messages while it is connected."""

    def __init__(self, agent_id: str, mbus: Mbus, context: ssl.SSLContext) -> None:
        self.is_connected = False
        self.attempts = self.connects = self.sent = self.sent_bytes = 0
        self._id, self._mbus, self._context = agent_id, mbus, context
        self._address = urlsplit(mbus.urls[0])
        self._slow = self._silent = 0
        self._greeted = False
        self._hello = (
            f'CONNECT {{"verbose":false,"pedantic":false,"tls_required":true,"name":"{agent_id}","lang":"light",'
            f'"version":"1","protocol":1}}\r\nSUB agent.{agent_id} 1\r\nPING\r\n'
        ).encode()
        self._beat = f"PUB hm.agent.heartbeat.{agent_id} {len(BEAT)}\r\n".encode() + BEAT + b"\r\n"

    async def live(self, first: asyncio.Semaphore) -> None:
        """Stay connected, endlessly; with the pauses of ``NatsBus.run``."""
        failures = 0
        async with first:
            connection = await self._attempt()
        while True:
            if connection is None:
                failures += 1
                await asyncio.sleep(TIMING.pause(failures, self._slow))
            else:
                failures = self._slow = 0
                await self._stay(connection)
                await asyncio.sleep(TIMING.pause(0))
            connection = await self._attempt()

    async def _attempt(self) -> ssl.SSLSocket | None:
        self.attempts += 1
        self._greeted = False
        sock = socket.socket()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(TIMING.handshake_timeout_s(self._slow)):
                return await self._open(sock)
        except TimeoutError:
            self._slow += self._greeted
        except OSError:
            pass
        sock.close()
        return None

    async def _open(self, sock: socket.socket) -> ssl.SSLSocket:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self._address.hostname, self._address.port))
        if not (await loop.sock_recv(sock, 4096)).startswith(b"INFO "):
            raise ConnectionError
        self._greeted = True
        tls.load_pair(self._context, self._mbus.certificate, self._mbus.private_key)
        secure = self._context.wrap_socket(sock, server_hostname=self._address.hostname, do_handshake_on_connect=False)
        try:
            while True:
                with suppress(ssl.SSLWantReadError):
                    secure.do_handshake()
                    break
                await _readable(secure)
            secure.send(self._hello)
            heard = b""
            while b"PONG\r\n" not in heard:
                with suppress(ssl.SSLWantReadError):
                    if not (part := secure.recv(4096)):
                        raise ConnectionError
                    heard += part
                    continue
                await _readable(secure)
        except BaseException:
            secure.close()
            raise
        return secure

    async def _stay(self, secure: ssl.SSLSocket) -> None:
        """Answer, ping and beat until the connection breaks."""
        loop = asyncio.get_running_loop()
        self.is_connected, self._silent = True, 0
        self.connects += 1
        over: asyncio.Future[None] = loop.create_future()
        loop.add_reader(secure, self._hear, secure, over)
        self._send(secure, self._beat, over)
        ticks = 0
        while not over.done() and self._silent <= TIMING.unanswered:
            self._silent += 1
            self._send(secure, b"PING\r\n", over)
            await asyncio.wait([over], timeout=TIMING.ping)
            ticks += 1
            if ticks % (scale_model.HEARTBEAT_PERIOD_S // TIMING.ping) == 0:
                self._send(secure, self._beat, over)
        self.is_connected = False
        loop.remove_reader(secure)
        secure.close()

    def _hear(self, secure: ssl.SSLSocket, over: asyncio.Future[None]) -> None:
        try:
            heard = secure.recv(65536)
        except ssl.SSLWantReadError:
            return
        except OSError:
            heard = b""
        if not heard:
            _finish(over)
        if b"PONG" in heard:
            self._silent = 0
        if b"PING" in heard:
            self._send(secure, b"PONG\r\n", over)

    def _send(self, secure: ssl.SSLSocket, data: bytes, over: asyncio.Future[None]) -> None:
        try:
            secure.send(data)
        except OSError:
            _finish(over)
        else:
            self.sent += data is self._beat
            self.sent_bytes += len(data)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _finish, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def crowd() -> None:
    """Run agents with the names on standard input. Print a line of state each tick, as ``benchmarks.scale`` does."""
    given = json.loads(sys.stdin.readline())
    users = {name: Mbus(tuple(own.pop("urls")), **own) for name, own in given["users"].items()}
    context = tls.client_context(next(iter(users.values())))
    first = asyncio.Semaphore(AT_ONCE)
    all_of_them = [Light(name, users[name], context) for name in given["agents"]]
    lives = [asyncio.create_task(agent.live(first)) for agent in all_of_them]
    while True:
        await asyncio.sleep(TICK_S - time.monotonic() % TICK_S)
        told: dict[str, Any] = {
            name: sum(getattr(agent, name) for agent in all_of_them)
            for name in ("attempts", "connects", "sent", "sent_bytes")
        }
        told["connected"] = sum(agent.is_connected for agent in all_of_them)
        print(json.dumps({"at": time.monotonic(), **told}), flush=True)
        for each in lives:
            if each.done():
                each.result()


if __name__ == "__main__":
    asyncio.run(crowd())
