"""Model of the cost of many agents on one nats-server, fitted to measurements. A simulation of their reconnection.

A reconnection is a handshake with mutual TLS, which needs a processor: active handshakes share the processors evenly,
and one that exceeds its timeout is wasted. After it the server looks for the certificate's user among all users, one
connection at a time, whatever the number of its processors. The pauses are the bus module's. The simulation is
by discrete events.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from agent_shim.edges.bus.nats import Timing

BEYOND: Final = (1000, 2000, 3000, 5000, 10_000, 100_000)
SERVER_CORES: Final = 4
HANDSHAKE_S: Final = 0.0016
SEARCH_S: Final = 1.7e-6
"""Processor time of the server for a handshake, and for each user in its search. Measured by ``./dev bench scale``."""
HEARTBEAT_PERIOD_S: Final = 30.0
"""Seconds between two heartbeats of an agent."""
PING_PERIOD_S: Final = 5.0
"""Seconds between two pings, of the server and of the agent."""
MAX_SIMULATED_S: Final = 600.0


def model(measured: Sequence[dict[str, Any]], cores: int, away: float) -> dict[str, Any]:
    """Return the fit, its prediction of the last point from the earlier ones, and its predictions for more agents."""
    *before, last = measured
    points = before or [last]
    checks = {
        name: {"modelled": round(_linear(points, name, last["agents"]), 3), "measured": round(last[name], 3)}
        for name in ("server_mb", "server_cpu_percent", "messages_per_second")
    }
    handshake, client = _each(points, "handshake_cpu"), _each(points, "agent_cpu")
    here = storm(last["agents"], cores / (handshake + client), away)
    for name in ("back_median", "back_last", "attempts"):
        checks[name] = {"modelled": round(here[name], 2), "measured": round(last[name], 2)}
    handshake, client = _each(measured, "handshake_cpu"), _each(measured, "agent_cpu")
    return {"handshake_cpu": handshake, "agent_cpu": client, "checks": checks, "beyond": _beyond(measured)}


def _beyond(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the predictions for more agents, each with its own user, and a server with dedicated cores."""
    beyond = []
    for count in BEYOND:
        told = {name: _linear(measured, name, count) for name in ("server_mb", "server_cpu_percent")}
        capacity = handshakes_per_s(count, SERVER_CORES)
        outage = storm(count, capacity, 60)
        beyond.append(
            {
                "agents": count,
                **{name: round(value, 1) for name, value in told.items()},
                "heartbeats_per_second": round(count / HEARTBEAT_PERIOD_S, 1),
                "pings_per_second": round(count * 2 / PING_PERIOD_S),
                "handshakes_per_second": round(capacity),
                **{f"storm_{name}": round(value, 2) for name, value in outage.items()},
            }
        )
    return beyond


def handshakes_per_s(users: int, cores: int) -> float:
    """Return the connections that a server with this many users accepts in a second."""
    search = SEARCH_S * users
    return min(cores / (HANDSHAKE_S + search), 1 / search)


def _each(points: Sequence[dict[str, Any]], name: str) -> float:
    """Return the cost of one more agent, without the constant part."""
    costs = [{"agents": each["agents"], name: each[name] * each["agents"]} for each in points]
    if len(costs) < 2:
        return float(points[0][name])
    return max(1e-6, _linear(costs, name, 1) - _linear(costs, name, 0))


def _linear(points: Sequence[dict[str, Any]], name: str, at: float) -> float:
    """Return the value of the least-squares line through the points at another one."""
    if len(points) < 2:
        return float(points[0][name]) * at / float(points[0]["agents"])
    xs, ys = [float(each["agents"]) for each in points], [float(each[name]) for each in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    return y + slope * (at - x)


def storm(count: int, capacity: float, away: float, timing: Timing | None = None) -> dict[str, float]:
    """Simulate the return of a server after an outage, with ``capacity`` handshakes a second, any number at once.

    Returns the seconds from its return until the first, the middle and the last agent is connected, and the attempts of
    each since the outage began.
    """
    timing = timing or Timing()
    random.seed(1)
    ahead = [(timing.pause(0) - away, number) for number in range(count)]
    heapq.heapify(ahead)
    failures, slow = [0] * count, [0] * count
    going: deque[tuple[float, float, int]] = deque()
    """Handshakes in order of arrival: the share of work at which each is complete, its timeout, its agent."""
    served, now, attempts = 0.0, -away, 0
    back: list[float] = []

    def fail(number: int, at: float) -> None:
        failures[number] += 1
        heapq.heappush(ahead, (at + timing.pause(failures[number], slow[number]), number))

    while len(back) < count and now < MAX_SIMULATED_S:
        next_at = ahead[0][0] if ahead else MAX_SIMULATED_S
        if going:
            rate = capacity / len(going)
            next_at = min(next_at, now + max(0.0, going[0][0] - served) / rate, going[0][1])
            served += (next_at - now) * rate
        now = next_at
        while going and (going[0][0] <= served + 1e-9 or going[0][1] <= now):
            done, _, number = going.popleft()
            if done <= served + 1e-9:
                back.append(now)
            else:
                slow[number] += 1
                fail(number, now)
        while ahead and ahead[0][0] <= now:
            _, number = heapq.heappop(ahead)
            attempts += 1
            if now < 0:
                fail(number, now)
            else:
                going.append((served + 1.0, now + timing.handshake_timeout_s(slow[number]), number))
    back += [MAX_SIMULATED_S] * (count - len(back))
    return {
        "back_first": back[0],
        "back_median": back[count // 2],
        "back_last": back[-1],
        "attempts": attempts / count,
    }
