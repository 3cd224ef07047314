"""``./dev run python -m tools.bench.scale``: 10 to 1000 agents on one nats-server, idle and after a server outage.

The agents consist of the real bus module and the real heartbeat, and about fifty of them share a process. nats-server
uses mutual TLS with P-256 keys, and the same users as nats-sync configures. A run consists of a minute of heartbeats, a
simultaneous request to all agents, and an outage: the server is killed, and restarted without its state 15 s later.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.core.settings import Mbus
from agent_shim.demo.director import Director, HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.edges import heartbeat
from agent_shim.edges.bus.nats import BusTiming, NatsBus
from tests.support.broker import NatsServer
from tests.support.readings import cpu_seconds, pss
from tools.bench.measuring import Stopwatch

COUNTS: Final = (10, 50, 200, 500, 1000)
AGENTS_PER_PROCESS: Final = 50
STEADY_S: Final = 62.0
"""Seconds without requests. Each agent sends two heartbeats in this time."""
AWAY_S: Final = 15.0
"""Length of the outage in seconds."""
TICK_S: Final = 0.25
RETURN_TIMEOUT_S: Final = 600.0

VITALS: Final = {
    "cpu": {"user": "1.5", "sys": "0.7", "wait": "0.0"},
    "disk": {name: {"percent": "41", "inode_percent": "7"} for name in ("system", "ephemeral", "persistent")},
    "load": ["0.10", "0.15", "0.09"],
    "mem": {"kb": "1234567", "percent": "31"},
    "swap": {"kb": "0", "percent": "0"},
    "uptime": {"secs": 123456},
}
_MESSAGE: Final = heartbeat.Message(
    deployment="deployment",
    job="job",
    index=0,
    job_state="running",
    vitals=VITALS,
    node_id="a0b1c2d3-e4f5-6789-abcd-ef0123456789",
    number_of_processes=5,
)
BEAT: Final = msgspec.json.encode(_MESSAGE)


# --- process that runs about fifty agents -----------------------------------------------------------------------------


async def answer(data: bytes) -> tuple[str, bytes]:
    """Answer any request with pong."""
    return json.loads(data)["reply_to"], b'{"value":"pong"}'


async def live(agent_id: str, own: dict[str, Any], buses: list[NatsBus]) -> None:
    """Run one light agent, which only connects to the bus and sends heartbeats."""
    mbus = Mbus(tuple(own["urls"]), own["ca"], own["certificate"], own["private_key"])

    async def send(message: bytes) -> None:
        await bus.publish(f"hm.agent.heartbeat.{agent_id}", message)

    async def measure() -> None:
        """Do nothing, because this agent sends the same vitals in every heartbeat."""

    beat = heartbeat.Heartbeat(measure, lambda _: BEAT, send)
    bus = NatsBus(agent_id, mbus, answer, on_connected=beat.beat_now)
    buses.append(bus)
    await asyncio.gather(bus.run(), beat.run())


async def crowd() -> None:
    """Run the agents whose configuration arrives on standard input.

    At each tick, print the number of connected agents, and totals such as connection attempts and bytes sent.
    """
    given = json.loads(sys.stdin.readline())
    buses: list[NatsBus] = []
    lives = [asyncio.create_task(live(agent_id, own, buses)) for agent_id, own in given.items()]
    while True:
        await asyncio.sleep(TICK_S - time.monotonic() % TICK_S)
        stats = [bus.stats for bus in buses]
        told = {
            "at": time.monotonic(),
            "connected": sum(bus.is_connected for bus in buses),
            "attempts": sum(each.attempts for each in stats),
            "connects": sum(each.connects for each in stats),
            "sent": sum(each.sent for each in stats),
            "sent_bytes": sum(each.sent_bytes for each in stats),
        }
        print(json.dumps(told), flush=True)
        for each in lives:
            if each.done():
                each.result()


# --- all processes ----------------------------------------------------------------------------------------------------


class Crowds:
    """The processes that run the agents, and the totals of the statistics that these processes print."""

    def __init__(self) -> None:
        self._children: list[asyncio.subprocess.Process] = []
        self._reading: list[asyncio.Task[None]] = []
        self._last: dict[int, dict[str, float]] = {}
        self.series: list[tuple[float, dict[str, float]]] = []

    async def add(self, given: dict[str, Any]) -> None:
        """Start another process that runs the agents in ``given``."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tools.bench.scale", "--crowd"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert child.stdin is not None
        child.stdin.write(json.dumps(given).encode() + b"\n")
        self._children.append(child)
        self._reading.append(asyncio.create_task(self._read(child)))

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            self._last[child.pid] = json.loads(line)
            self.series.append((time.monotonic(), self.now))

    @property
    def now(self) -> dict[str, float]:
        """Return the current totals over all processes."""
        names = ("connected", "attempts", "connects", "sent", "sent_bytes")
        return {name: sum(each[name] for each in self._last.values()) for name in names}

    @property
    def cpu(self) -> float:
        """Return the CPU time of all processes in seconds."""
        return sum(cpu_seconds(child.pid) for child in self._children)

    async def until_connected(self, count: int) -> None:
        async with asyncio.timeout(RETURN_TIMEOUT_S):
            while self.now["connected"] < count:
                await asyncio.sleep(TICK_S / 5)

    async def end(self) -> None:
        for child in self._children:
            child.kill()
            await child.wait()
        await asyncio.gather(*self._reading)


@asynccontextmanager
async def agents(server: NatsServer, count: int) -> AsyncIterator[Crowds]:
    """Run ``count`` agents during the block. When the block starts, some of them might not be connected yet."""
    crowds = Crowds()
    try:
        for begin in range(0, count, AGENTS_PER_PROCESS):
            await crowds.add(
                {
                    f"agent-{number}": msgspec.structs.asdict(server.mbus(f"agent-{number}"))
                    for number in range(begin, min(count, begin + AGENTS_PER_PROCESS))
                }
            )
        yield crowds
    finally:
        await crowds.end()


@dataclass
class Point:
    """Results for a number of agents. Units are seconds, MB and percent of one core."""

    agents: int
    all_connected_after: float = 0.0
    server_mb: float = 0.0
    server_cpu_percent: float = 0.0
    messages_per_second: float = 0.0
    payload_bytes_per_second: float = 0.0
    asked_all_after: float = 0.0
    """Seconds from a simultaneous request to all agents until the last answer."""
    handshake_cpu: float = 0.0
    """The server's CPU time in seconds for each agent that reconnects."""
    agent_cpu: float = 0.0
    """CPU time per agent in seconds, from when the server is killed until all agents have reconnected."""
    back_first: float = 0.0
    """Seconds from the server's restart until the first agent is connected."""
    back_median: float = 0.0
    """Seconds from the server's restart until half of the agents are connected."""
    back_last: float = 0.0
    """Seconds from the server's restart until all agents are connected."""
    attempts: float = 0.0
    """Average number of connection attempts per agent."""
    most_attempts_away: float = 0.0
    """Maximum number of connection attempts within one second while the server is down."""
    most_attempts_per_second: float = 0.0
    """Maximum number of connection attempts within one second after the server's restart."""
    deaf: int = 0
    curve: list[tuple[float, float, float]] | None = None
    """Points of a curve: seconds since the restart, number of connected agents, number of attempts so far."""


async def measure(count: int) -> Point:
    """Measure a bus with ``count`` agents."""
    point = Point(count)
    with tempfile.TemporaryDirectory() as scratch:
        server = NatsServer(Path(scratch) / "bus")
        for number in range(count):
            await server.add_agent(f"agent-{number}")
        async with server:
            director, monitor = Director(), HealthMonitor()
            async with director.on(server.peer()), monitor.on(server.peer(HEALTH_MONITOR)):
                watch = Stopwatch()
                async with agents(server, count) as crowds:
                    await crowds.until_connected(count)
                    point.all_connected_after = watch.seconds
                    await asyncio.sleep(3)
                    await steady(point, server, monitor)
                    point.asked_all_after, deaf = await asked(director, count)
                    point.deaf += deaf
                    await storm(point, server, crowds)
                    await asyncio.sleep(1)
                    _, deaf = await asked(director, count)
                    point.deaf += deaf
    return point


async def steady(point: Point, server: NatsServer, monitor: HealthMonitor) -> None:
    """Measure the server's resource usage and the heartbeat rate while no requests are sent."""
    used, watch, before = cpu_seconds(server.pid), Stopwatch(), len(monitor.notices)
    await asyncio.sleep(STEADY_S)
    point.server_cpu_percent = (cpu_seconds(server.pid) - used) / watch.seconds * 100
    point.messages_per_second = (len(monitor.notices) - before) / watch.seconds
    point.payload_bytes_per_second = point.messages_per_second * len(BEAT)
    point.server_mb = pss(server.pid)


async def asked(director: Director, count: int) -> tuple[float, int]:
    """Send a request to all agents at the same time.

    Return the seconds until the last answer, and the number of agents that did not answer.
    """
    watch = Stopwatch()
    answers = await asyncio.gather(
        *(director.value(f"agent-{number}", "ping", timeout=30.0) for number in range(count)), return_exceptions=True
    )
    return watch.seconds, sum(isinstance(each, BaseException) for each in answers)


async def storm(point: Point, server: NatsServer, crowds: Crowds, away: float = AWAY_S) -> None:
    """Kill the server, restart it after ``away`` seconds, and record how the agents reconnect."""
    before, used = crowds.now, crowds.cpu
    crowds.series.clear()
    await server.kill()
    await asyncio.sleep(away)
    point.most_attempts_away = steepest([(at, now["attempts"]) for at, now in crowds.series])
    crowds.series.clear()
    await server.start()
    back = time.monotonic()
    await crowds.until_connected(point.agents)
    point.back_last = time.monotonic() - back
    point.handshake_cpu = cpu_seconds(server.pid) / point.agents
    point.agent_cpu = (crowds.cpu - used) / point.agents
    point.attempts = (crowds.now["attempts"] - before["attempts"]) / point.agents
    seen = [(at - back, now["connected"], now["attempts"]) for at, now in crowds.series]
    point.back_first = next((at for at, connected, _ in seen if connected), point.back_last)
    point.back_median = next((at for at, connected, _ in seen if connected >= point.agents / 2), point.back_last)
    point.most_attempts_per_second = steepest([(at, attempts) for at, _, attempts in seen])
    point.curve = seen[:: max(1, len(seen) // 200)]


def steepest(series: Sequence[tuple[float, float]]) -> float:
    """Return the largest increase in a value within one second."""
    most, begin = 0.0, 0
    for at, value in series:
        while series[begin][0] < at - 1:
            begin += 1
        most = max(most, value - series[begin][1])
    return most


async def main_async(counts: Sequence[int], kept: Path | None) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    for count in counts:
        print(f"scale: {count} agents", file=sys.stderr, flush=True)
        points.append(asdict(await measure(count)))
        if kept is not None:  # Save these results, because the next run may have too many agents for this machine.
            kept.write_text(json.dumps(points))
    beat = statistics.mean([len(BEAT)])
    return {
        "cores": os.cpu_count(),
        "beat_bytes": beat,
        "timing": {"connect": BusTiming().connect, "longest": BusTiming().longest},
        "measured": points,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, metavar="N", help=f"numbers of agents (default: {COUNTS})")
    parser.add_argument("--crowd", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write results here after each number of agents")
    args = parser.parse_args()
    # Raise KeyboardInterrupt, so that the processes started here are stopped as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.crowd:
        asyncio.run(crowd())
        return 0
    json.dump(asyncio.run(main_async(args.counts or COUNTS, args.keep)), sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
