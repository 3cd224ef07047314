"""``./dev soak SECONDS``: subject an agent to faults and to all kinds of work for a given time.

A Director sends requests all the time. Jobs are killed and deployed again, their logs are fetched, errands run, and
credentials change. Malformed messages and floods of requests arrive. The bus is killed, loses its connections, or
swallows messages. The agent is killed once, at the start. Each kind of event happens once in the first quarter of the
time. Growth is measured from the end of that quarter.

A second process only sleeps and reads the clock. If a heartbeat is late and this process wakes up late too, the machine
was overloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from tests.support import namespaces
from tests.support.instance import AGENT, COMMAND
from tests.support.nonsense import BAD, mutated
from tests.support.stand import CONNECTED, Stand, expect, stand, until
from tests.support.witness import Size

JOBS: Final = 20
HEARTBEAT_PERIOD_S: Final = 30.0
TOLERANCE: Final = 1.0
"""How many seconds late a heartbeat may be."""

GROWTH: Final = 1 << 20
"""How many bytes per hour the memory may grow by after the first quarter of the run."""

_NONSENSE: Final = tuple(message for message in BAD if b"[null]" not in message)
"""Malformed messages. An ``apply`` with null as its argument is not among them, because it would remove all jobs."""

_SLEEPER: Final = """
import time
due = time.monotonic()
while True:
    due += 0.1
    time.sleep(max(0, due - time.monotonic()))
    late = time.monotonic() - due
    if late > 0.02:
        print(due, late, flush=True)
    if late > 1:
        due = time.monotonic()
"""


@dataclass(frozen=True)
class Profile:
    """How much load to generate.

    ``sampled`` and ``scraped`` are the intervals in seconds between samples of the agent's size and between scrapes of
    its metrics.
    """

    jobs: int
    tasks_asked: int
    """Number of ``get_task`` requests per second."""
    sampled: int
    scraped: int
    is_load: bool = False


FAULTS: Final = Profile(JOBS, 5, 5, 15)
"""The default profile, which contains all kinds of faults and work."""
LOAD: Final = Profile(202, 18, 5, 1, is_load=True)
"""A profile with 202 services. Each second, a process is killed, 2.8 MB are appended to a log and twenty requests are
sent. The bus is restarted every minute.
"""
FLOOD_LIMIT: Final = 200 << 20


@dataclass
class Record:
    """Measurements from a run. All points in time are monotonic seconds."""

    begun_at: float
    until: float
    profile: Profile = FAULTS
    sizes: list[tuple[float, Size]] = field(default_factory=list)
    pings: list[tuple[float, float]] = field(default_factory=list)
    """Time and duration of each ping in seconds."""
    sleeper: list[tuple[float, float]] = field(default_factory=list)
    """Times at which the sleeping process should have woken up, each with the delay of that wake-up. Delays below 20 ms
    are not recorded.
    """
    beats: list[float] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    """Periods that begin with a deliberate stop of the bus or the agent and end with the agent's next answer."""
    connected: list[float] = field(default_factory=list)
    """Seconds from the end of each fault until the agent was connected again."""
    done: dict[str, int] = field(default_factory=dict)
    """Number of events of each kind."""
    broken: list[str] = field(default_factory=list)

    @property
    def settled_at(self) -> float:
        """Return the time at which the first quarter of the run ends."""
        return self.begun_at + (self.until - self.begun_at) / 4

    def settled(self) -> list[tuple[float, Size]]:
        """Return the samples of the agent's size that were taken after the first quarter."""
        return [(moment, size) for moment, size in self.sizes if moment >= self.settled_at]

    def growth(self) -> float:
        """Return the slope of a regression line through the memory samples after the first quarter, in bytes
        per hour.
        """
        samples = self.settled()
        if len(samples) < 3:
            return 0.0
        line = statistics.linear_regression([at for at, _ in samples], [float(size.memory) for _, size in samples])
        return line.slope * 3600

    def ends(self, what: Callable[[Size], int]) -> tuple[float, float]:
        """Return the medians of a value in the first and the last third of the samples that were taken after the first
        quarter.
        """
        values = [what(size) for _, size in self.settled()]
        third = max(1, len(values) // 3)
        return statistics.median(values[:third]), statistics.median(values[-third:])

    def course(self) -> list[float]:
        """Return the median of the agent's memory in each twelfth of the run, in MiB."""
        twelfth = (self.until - self.begun_at) / 12
        parts: list[list[int]] = [[] for _ in range(12)]
        for moment, size in self.sizes:
            parts[min(11, int((moment - self.begun_at) / twelfth))].append(size.memory)
        return [round(statistics.median(part) / (1 << 20), 2) for part in parts if part]

    def gaps(self) -> list[tuple[float, float]]:
        """Return the time of each heartbeat and the gap before it. Gaps during which the bus was down are left out."""
        found = []
        for before, at in zip(self.beats, self.beats[1:], strict=False):
            if not any(begin < at and end > before for begin, end in self.outages):
                found.append((at, at - before))
        return found

    def starved(self, begin: float, end: float) -> float:
        """Return the sleeping process's longest wake-up delay between ``begin`` and ``end``, in seconds. It shows how
        overloaded the machine was.
        """
        return max((late for at, late in self.sleeper if begin <= at + late and at <= end), default=0.0)

    def faults(self) -> list[str]:
        """Return a message for each condition that was violated."""
        found = list(self.broken)
        if (growth := self.growth()) > GROWTH:
            found.append(f"memory grows by {growth / (1 << 20):.2f} MiB an hour")
        first, last = self.ends(lambda size: size.descriptors)
        if last > first + 1:
            found.append(f"{last:g} descriptors after {first:g}")
        first, last = self.ends(lambda size: size.threads)
        if last > first + 1:
            found.append(f"{last:g} threads after {first:g}")
        for at, gap in self.gaps():
            late = gap - HEARTBEAT_PERIOD_S
            if late > TOLERANCE and late > 2 * (machine := self.starved(at - late - 1, at)):
                moment = at - self.begun_at
                found.append(f"a heartbeat {late:.1f} s late at {moment:.0f} s; the sleeper was {machine:.1f} s late")
        return found

    def figures(self) -> dict[str, object]:
        """Return the results that the soak prints."""
        descriptors, threads = self.ends(lambda size: size.descriptors), self.ends(lambda size: size.threads)
        memory = self.ends(lambda size: size.memory)
        free = [took for at, took in self.pings if not any(begin - 1 < at < end + 1 for begin, end in self.outages)]
        return {
            "seconds": round(self.until - self.begun_at),
            "done": self.done,
            "memory, first and last third after the first quarter, MiB": [round(one / (1 << 20), 1) for one in memory],
            "memory in each twelfth, MiB": self.course(),
            "growth, MiB an hour": round(self.growth() / (1 << 20), 2),
            "descriptors": descriptors,
            "threads": threads,
            "heartbeats": len(self.beats),
            "longest gap outside outages, s": round(max((gap for _, gap in self.gaps()), default=0.0), 2),
            "longest gap, s": round(max((at - before for before, at in pairwise(self.beats)), default=0.0), 2),
            "pings": len(free),
            "ping, median and 99.9 %, ms": [
                round(1000 * one, 1) for one in (statistics.median(free), sorted(free)[int(len(free) * 0.999)])
            ]
            if free
            else [],
            "longest ping, ms": round(1000 * max(free, default=0.0)),
            "sleeper at most late, ms": round(1000 * self.starved(self.begun_at, self.until)),
            "outages": len(self.outages),
            "connected after an outage, median and longest, s": [
                round(one, 2) for one in (statistics.median(self.connected), max(self.connected))
            ]
            if self.connected
            else [],
        }


# --- actions ----------------------------------------------------------------------------------------------------------


class Soak:
    """Exposes an agent to a profile's requests and faults."""

    def __init__(self, one: Stand, record: Record, seed: int) -> None:
        self._stand = one
        self._record = record
        self._chance = random.Random(seed)
        self._version = 1
        self._plan: dict[str, tuple[float, Callable[[], Awaitable[None]]]] = {
            "nonsense": (60, self._nonsense),
            "job killed": (60, self._one_job),
            "errand": (120, self._errand),
            "logs fetched": (300, self._logs),
            "flood": (300, self._flood),
            "all jobs killed": (360, self._all_jobs),
            "credentials changed": (420, self._credentials),
            "deployed": (600, self._deploy),
            "bus killed": (840, self._bus_killed),
            "bus swallows": (900, self._bus_swallows),
            "bus cut": (960, self._bus_cut),
        }

    async def run(self) -> None:
        """Kill the agent, then run the planned actions until the soak ends.

        Each action runs once in the first quarter, and then at its own interval.
        """
        record = self._record
        await self._do("agent killed", self._agent_killed)
        quarter = record.settled_at - time.monotonic()
        step = quarter / (len(self._plan) + 1)
        due = {name: time.monotonic() + number * step for number, name in enumerate(self._plan)}
        while (name := min(due, key=lambda each: due[each])) and due[name] < record.until - 20:
            await asyncio.sleep(due[name] - time.monotonic())
            interval, action = self._plan[name]
            await self._do(name, action)
            due[name] = max(due[name] + interval, time.monotonic())
        await asyncio.sleep(record.until - time.monotonic())

    async def _do(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        self._record.done[name] = self._record.done.get(name, 0) + 1
        try:
            await action()
        except Exception as exc:  # noqa: BLE001 - the soak continues and reports failures at its end
            moment = time.monotonic() - self._record.begun_at
            self._record.broken.append(f"{name} at {moment:.0f} s: {type(exc).__name__}: {exc}")

    @asynccontextmanager
    async def _outage(self, back: float = CONNECTED) -> AsyncIterator[None]:
        begun_at = time.monotonic()
        beats, before = len(self._record.beats), self._connections()
        self._record.outages.append((begun_at, float("inf")))
        try:
            yield
            healed_at = time.monotonic()
            while self._connections() == before:
                expect(time.monotonic() - healed_at < back, f"the agent did not reconnect within {back:g} s")
                await asyncio.sleep(0.05)
            took = time.monotonic() - healed_at
            self._record.connected.append(took)
            # Under load, a single answer may take up to ``back`` seconds.
            await self._stand.answers(back - took, patience=back)
            await until(lambda: len(self._record.beats) > beats, 3, "no heartbeat arrived after the reconnection")
        finally:
            self._record.outages[-1] = (begun_at, time.monotonic())

    def _connections(self) -> int:
        return self._stand.world.log_text().count("connected to the bus at")

    async def _running(self) -> None:
        async with asyncio.timeout(90):
            while (await self._stand.call("get_state", timeout=30))["job_state"] != "running":
                await asyncio.sleep(0.5)

    async def _agent_killed(self) -> None:
        async with self._outage(30):
            await self._stand.kill_agent()

    async def _nonsense(self) -> None:
        for _ in range(100):
            bad = self._chance.random() < 0.05
            await self._publish(self._chance.choice(_NONSENSE) if bad else mutated(self._chance))

    async def _flood(self) -> None:
        ping = {"protocol": 3, "method": "ping", "arguments": [], "reply_to": "director.x.y.z"}
        for _ in range(2000):
            await self._publish(json.dumps(ping).encode())

    async def _publish(self, message: bytes) -> None:
        peer = self._stand.world.director.peer
        assert peer is not None
        await peer.publish(f"agent.{AGENT}", message)

    async def _one_job(self) -> None:
        name, pid = self._chance.choice(sorted(self._stand.live().items()))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: self._stand.live().get(name, pid) != pid, 10, f"{name} was not restarted")

    async def _all_jobs(self) -> None:
        dead = set(self._stand.live().values())
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(set(self._stand.live().values()) - dead) == JOBS, 75, "not all jobs were restarted")
        await self._running()

    async def _errand(self) -> None:
        job = f"job{self._chance.randrange(JOBS)}"
        script = self._stand.world.base / f"jobs/{job}/bin/run"
        script.write_text("#!/bin/sh\nhead -c 2000000 /dev/urandom | od\n")
        script.chmod(0o755)
        await self._stand.world.director.run(AGENT, "run_errand", job, timeout=30)

    async def _logs(self) -> None:
        logs = self._stand.world.base / "data/sys/log/job0"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "big.log").write_bytes(b"all work and no play\n" * (1 << 20))
        result = await self._stand.world.director.run(AGENT, "fetch_logs", "job", [], timeout=30)
        (self._stand.world.store / result["blobstore_id"]).unlink(missing_ok=True)

    async def _credentials(self) -> None:
        fresh = self._stand.world.server.mbus(AGENT)
        cert = {"ca": fresh.ca, "certificate": fresh.certificate, "private_key": fresh.private_key}
        urls = list(self._stand.world.urls)
        await self._stand.world.run("update_settings", {"mbus": {"urls": urls, "cert": cert}})

    async def _deploy(self) -> None:
        self._version += 1
        world = self._stand.world
        for old in world.store.iterdir():
            old.unlink()
        spec = world.spec(JOBS, 5, 4 << 20, version=str(self._version))
        for method, *arguments in (("prepare", spec), ("stop",), ("apply", spec), ("start",)):
            await world.run(method, *arguments)
        await self._running()

    async def _bus_killed(self) -> None:
        async with self._outage():
            await self._stand.world.server.kill()
            await asyncio.sleep(5)
            await self._stand.world.server.start()

    async def _bus_swallows(self) -> None:
        async with self._outage():
            self._stand.proxy.swallow()
            await asyncio.sleep(20)
            self._stand.proxy.flow()

    async def _bus_cut(self) -> None:
        async with self._outage():
            for _ in range(5):
                self._stand.proxy.cut()
                await asyncio.sleep(3)


class Load(Soak):
    """Kills jobs, floods logs and restarts the bus, without pauses for recovery."""

    def __init__(self, one: Stand, record: Record, seed: int) -> None:
        super().__init__(one, record, seed)
        self._plan = {
            "job killed": (1, self._one_death),
            "log flooded": (1, self._log_flood),
            "bus killed": (60, self._bus_killed),
        }

    async def _one_death(self) -> None:
        """Kill a job without waiting for its restart."""
        living = sorted(self._stand.live().values())
        if living:
            os.kill(self._chance.choice(living), signal.SIGKILL)

    async def _log_flood(self) -> None:
        """Append megabytes to a job's log, which the agent's log rotation truncates."""
        log = self._stand.world.base / f"data/sys/log/job{self._chance.randrange(10)}/flood.log"

        def write() -> None:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                file.write(b"all work and no play\n" * (1 << 17))
            if log.stat().st_size > FLOOD_LIMIT:
                log.unlink()

        await asyncio.to_thread(write)


# --- observations -----------------------------------------------------------------------------------------------------


async def _ask(one: Stand, record: Record) -> None:
    """Send requests as a Director does during a deploy.

    These are a ping and several get_task requests each second, and a get_state request every tenth second. Under load,
    get_state is sent every second, too.
    """
    number = 0
    while True:
        number += 1
        begun_at = time.monotonic()
        with contextlib.suppress(RpcTimeoutError):
            await one.world.director.call(AGENT, "ping", timeout=10, retries=0)
            record.pings.append((begun_at, time.monotonic() - begun_at))
        with contextlib.suppress(RpcTimeoutError, RpcRemoteError):
            if number % 10 == 0 or record.profile.is_load:
                await one.call("get_state", "full", timeout=10)
        for _ in range(record.profile.tasks_asked):
            with contextlib.suppress(RpcTimeoutError, RpcRemoteError):
                await one.world.director.call(AGENT, "get_task", "none", timeout=10, retries=0)
        await asyncio.sleep(max(0.0, begun_at + 1 - time.monotonic()))


async def _measure(one: Stand, record: Record) -> None:
    """Record the agent's size and scrape its metrics at regular intervals."""
    number = 0
    while True:
        with contextlib.suppress(OSError, KeyError):  # The size cannot be read while the agent is being restarted.
            if number % record.profile.sampled == 0:
                record.sizes.append((time.monotonic(), one.size()))
        if number % record.profile.scraped == 0:
            await asyncio.to_thread(one.scrape)
        number += 1
        await asyncio.sleep(1)


async def _beats(one: Stand, record: Record) -> None:
    """Record the times of heartbeats. Discard all other messages to the Health Monitor."""
    while True:
        record.beats += [notice.at for notice in one.monitor.of("heartbeat", AGENT)]
        one.monitor.notices.clear()
        await asyncio.sleep(0.05)


async def _sleeper(record: Record) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _SLEEPER, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        async for line in child.stdout:
            at, late = map(float, line.split())
            record.sleeper.append((at, late))
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def soak(command: str, seconds: float, seed: int, profile: Profile = FAULTS) -> Record:
    """Expose an agent to a profile's requests and faults for ``seconds`` seconds, and return the measurements."""
    async with stand(command) as one:
        await one.boot()
        await one.deploy(profile.jobs, 5, 4 << 20)
        one.remember()
        one.omit("I2", "all jobs are killed again and again")
        one.omit("I12", "each death is alerted, and many deaths")
        begun_at = time.monotonic()
        record = Record(begun_at, begun_at + seconds, profile=profile)
        watching = [asyncio.create_task(watch(one, record)) for watch in (_ask, _measure, _beats)]
        watching.append(asyncio.create_task(_sleeper(record)))
        try:
            await (Load if profile.is_load else Soak)(one, record, seed).run()
        finally:
            for watch in watching:
                watch.cancel()
            ended = await asyncio.gather(*watching, return_exceptions=True)
        record.broken += [repr(end) for end in ended if isinstance(end, Exception)]
        if not profile.is_load:  # Under the load profile, the job that was killed last might not be running yet.
            record.broken += await one.witness.broken()
        return record


def main() -> int:
    """Run a soak and print its results. Return 0 if no condition was violated."""
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--load", action="store_true", help="constant load with 202 services, without pauses")
    parser.add_argument("--agent-command", default=COMMAND, metavar="COMMAND")
    asked = parser.parse_args()
    namespaces.enter("tools.chaos.soak", sys.argv[1:], network=True)
    seed = int(time.time())
    record = asyncio.run(soak(asked.agent_command, asked.seconds, seed, LOAD if asked.load else FAULTS))
    faults = record.faults()
    figures = {"seed": seed, **record.figures(), "faults": faults}
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
