"""Measures the memory and CPU usage of an idle agent, the cost of a heartbeat, and response times under load."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import urllib.request
from contextlib import suppress
from typing import Final

from agent_shim.demo.director import HealthMonitor
from agent_shim.demo.pki import HEALTH_MONITOR
from tests.support.instance import AGENT, BYSTANDER, INTERPRETER, RunningAgent, bystander, world
from tests.support.ports import free_address
from tests.support.readings import pss
from tools.bench.large import fill, watched
from tools.bench.measuring import ECHO, MB, Figures, Stopwatch, figure

JOBS: Final = 5
CALM_S: Final = 3.0
SAMPLE_S: Final = 2.0
"""Length in seconds of the windows in which CPU time is measured.

The agent prepares each heartbeat just before sending it, so the window in which a heartbeat arrives also contains the
CPU time for its preparation.
"""
WATCHED_S: Final = 95.0
LOGS: Final = 100 * MB


async def measure(command: str, scale: float, found: Figures) -> None:
    """Measure an idle and a busy agent. ``scale`` multiplies the idle time and the size of the logs."""
    interpreter = subprocess.Popen([INTERPRETER, "-c", "import asyncio, ssl; asyncio.run(asyncio.sleep(3600))"])
    try:
        async with world(command) as w, world(ECHO) as least, bystander(w):
            await least.start_agent()
            port = w.http = free_address()
            await w.start_agent()
            await w.run("apply", w.spec(JOBS, 6, 64 * 1024))
            await w.run("start")
            await w.until_running()
            await asyncio.to_thread(scrape, port)
            await asyncio.sleep(CALM_S)
            floor, floor_is = [least.pss()], "a bare nats-py echo"
            found["pss_with_5_processes_scraped"] = figure([w.pss()], "MB", floor=floor, floor_is=floor_is)
            found["pss_of_an_interpreter_with_asyncio_and_ssl"] = figure([pss(interpreter.pid)], "MB")
            found |= await still(w, least, WATCHED_S * max(scale, 0.35))
            found |= await busy(w, int(LOGS * scale))
            await asyncio.sleep(CALM_S)
            found["pss_after_apply_and_fetch_logs"] = figure([w.pss()], "MB", floor=floor, floor_is=floor_is)
    finally:
        interpreter.kill()
        interpreter.wait()


async def still(w: RunningAgent, least: RunningAgent, seconds: float) -> Figures:
    """Return the idle agent's CPU usage as a percentage of one core, and the milliseconds of CPU time per heartbeat."""
    monitor, watch = HealthMonitor(), Stopwatch()
    used, floor = w.cpu_seconds(), least.cpu_seconds()
    windows: list[float] = []
    beats: list[float] = []
    async with monitor.on(w.server.peer(HEALTH_MONITOR)):
        while watch.seconds < seconds:
            before, seen = w.cpu_seconds(), len(monitor.of("heartbeat", AGENT))
            await asyncio.sleep(SAMPLE_S)
            spent = (w.cpu_seconds() - before) * 1000
            (beats if len(monitor.of("heartbeat", AGENT)) > seen else windows).append(spent)
    share = (w.cpu_seconds() - used) / watch.seconds * 100
    least_share = (least.cpu_seconds() - floor) / watch.seconds * 100
    found = {
        "idle_cpu_with_5_processes": figure([share], "%", floor=[least_share], floor_is="a bare nats-py echo"),
    }
    if beats and windows:
        usual = statistics.median(windows)
        found["heartbeat_cpu"] = figure([max(0.0, each - usual) for each in beats], "ms")
    return found


async def busy(w: RunningAgent, size: int) -> Figures:
    """Measure response times to pings while the agent stops, installs and starts jobs and packs ``size`` bytes of logs.

    A process that does nothing else is pinged at the same time. If this process answers late as well, the delay is due
    to the machine.
    """
    await asyncio.to_thread(fill, w.base / "data/sys/log", 50, max(1, size // 50))
    async with watched(w) as watch:
        for number in range(3):
            await w.run("stop")
            await w.run("apply", w.spec(JOBS, 6, size // 20, version=f"busy-{number}"))
            await w.run("start")
            await w.run("fetch_logs", "job", None)
            await w.director.value(AGENT, "get_state", "full")
    lags = {who: sorted(each / 1000 for each in trips) for who, trips in watch.pings.items()}
    floor_is = "pinging an idle process at the same time"
    at = {who: trips[min(len(trips) - 1, int(len(trips) * 0.999))] for who, trips in lags.items()}
    most = {who: trips[-1] for who, trips in lags.items()}
    return {
        "ping_under_work_p99.9": figure([at[AGENT]], "s", floor=[at[BYSTANDER]], floor_is=floor_is),
        "ping_under_work_max": figure([most[AGENT]], "s", floor=[most[BYSTANDER]], floor_is=floor_is),
    }


def scrape(address: str) -> None:
    """Scrape the metrics as Prometheus does. Do nothing if the agent has no metrics."""
    with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        answer.read()
