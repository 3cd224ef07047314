"""What an observer may ask over HTTP: ``/metrics``, ``/healthz`` and ``/readyz``; read-only, nothing secret.

Three parts: ``Readings``, the values of one scrape; ``Metrics``, which counts what happens and writes both kinds of
values as text; ``Routes``, what is behind which path. All times are seconds.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import logging
import sys
import time
import urllib.parse
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final

from agent_shim import __version__, responder
from agent_shim.responder import Request, Response

logger = logging.getLogger(__name__)


class _Placeholder(ModuleType):
    """Stands for a module that somebody imports names from and that we do not want: every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _bare(package: str, unwanted: Sequence[str]) -> Iterator[None]:
    """Inside, modules of ``package`` are imported without its ``__init__`` and without the ``unwanted`` modules.

    prometheus-client drags in its own HTTP server and client, which we do not use: 4.2 MB, with this 0.3.
    """
    spec = importlib.machinery.PathFinder.find_spec(package)
    if package in sys.modules or spec is None:
        yield
        return
    shell = ModuleType(package)
    shell.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = shell
    placeholders = [name for name in unwanted if name not in sys.modules]
    sys.modules.update({name: _Placeholder(name) for name in placeholders})
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]


with _bare(
    "prometheus_client",
    ["gzip", "http.server", "socketserver", "urllib.error", "urllib.request", "wsgiref.simple_server"],
):
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.registry import CollectorRegistry


# --- what is shown --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BusReading:
    """The link to the bus since the agent started; ``heartbeat_age`` is None before the first heartbeat."""

    connected: bool = False
    reconnects: int = 0
    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    rejected: int = 0
    heartbeat_age: float | None = None


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The vitals of this container as last measured; what could not be measured is missing.

    ``used`` is bytes of memory and swap in use; all else but ``load`` (by minutes) is shares of one: ``full`` of memory
    and swap, ``cpu`` by mode, ``disks`` and ``inodes`` by disk.
    """

    used: Mapping[str, float] = field(default_factory=dict)
    full: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    disks: Mapping[str, float] = field(default_factory=dict)
    inodes: Mapping[str, float] = field(default_factory=dict)


def machine_reading(vitals: Mapping[str, Any]) -> MachineReading:
    """The vitals of a heartbeat, whose figures are texts in KiB and percent, as a reading; any part may be missing."""
    memory = {kind: vitals[name] for kind, name in (("memory", "mem"), ("swap", "swap")) if name in vitals}
    disks = vitals.get("disk", {})
    return MachineReading(
        used={kind: int(part["kb"]) * 1024 for kind, part in memory.items()},
        full=_shares(memory, "percent"),
        cpu={mode: float(percent) / 100 for mode, percent in vitals.get("cpu", {}).items()},
        load=dict(zip(("1", "5", "15"), map(float, vitals.get("load", ())), strict=False)),
        disks=_shares(disks, "percent"),
        inodes=_shares(disks, "inode_percent"),
    )


def _shares(parts: Mapping[str, Mapping[str, str]], member: str) -> dict[str, float]:
    return {name: float(part[member]) / 100 for name, part in parts.items() if member in part}


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One supervised process: uptime in seconds, memory in bytes, ``cpu`` as a share of one core."""

    name: str
    state: str
    is_up: bool
    uptime: float = 0.0
    restarts: int = 0
    memory: int | None = None
    cpu: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """The values of one scrape. Gathering them must be cheap: no disk, no waiting."""

    bus: BusReading = BusReading()
    machine: MachineReading = MachineReading()
    processes: Sequence[ProcessReading] = ()
    tasks_running: int = 0
    tasks_waiting: int = 0
    addresses_missing: int = 0
    """Addresses that the Director counts on and no interface has."""
    certificates: Mapping[str, float] = field(default_factory=dict)
    """Ends of the certificates of the bus, in seconds since 1970."""
    migration: float | None = None
    """How much of its phase (counting, copying, comparing) a migration has done, of one; None while there is none."""


class Histogram:
    """How often something took how long; ``bounds`` are the upper ends of the buckets, rising."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper ends with the number of all that were not longer, as the exposition formats want them."""
        below = 0
        rows = []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            below += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        return rows


ACTION_BOUNDS: Final = (0.005, 0.05, 0.5, 2.0, 10.0, 60.0, 600.0)
LAG_BOUNDS: Final = (0.005, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_PERIOD: Final = 0.5
KEEP: Final = 1.0
"""How long a rendered page is good for: ten scrapers cost as much as one."""

OUTCOMES: Final = frozenset({"done", "failed"})
OTHER: Final = "other"
"""The label of what a caller made up: it must not make new series."""


class Metrics:
    """Counts what happens, reads what is, and writes both as text.

    ``read`` gathers the readings of a scrape; ``methods`` are the actions that have a series of their own.
    """

    def __init__(
        self,
        read: Callable[[], Readings],
        methods: Collection[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._methods = frozenset(methods)
        self._clock = clock
        self._actions: Counter[tuple[str, str]] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._lag = Histogram(LAG_BOUNDS)
        self._pages: dict[bool, tuple[float, bytes]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def action_done(self, method: str, outcome: str, seconds: float) -> None:
        """Count an action (``outcome``: done or failed) that took ``seconds`` from its request to its end."""
        method = method if method in self._methods else OTHER
        self._actions[method, outcome if outcome in OUTCOMES else OTHER] += 1
        self._durations.setdefault(method, Histogram(ACTION_BOUNDS)).add(seconds)

    async def watch_lag(self) -> None:
        """Measure for ever how late the event loop wakes who sleeps on it; somebody's root task."""
        while True:
            due = self._clock() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self._lag.add(max(0.0, self._clock() - due))

    def render(self, is_openmetrics: bool = False) -> bytes:
        """The page of all metrics, in the Prometheus text format 0.0.4 or as OpenMetrics 1.0; at most ``KEEP`` old."""
        made_at, page = self._pages.get(is_openmetrics, (float("-inf"), b""))
        now = self._clock()
        if now - made_at >= KEEP:
            page = (openmetrics.generate_latest if is_openmetrics else generate_latest)(self._registry)
            self._pages[is_openmetrics] = now, page
        return page

    def collect(self) -> Iterator[Metric]:
        """All metric families with their samples (the registry asks for them)."""
        readings = self._read()
        build = InfoMetricFamily("agent_shim_build", "Version of the agent and of its Python.")
        build.add_metric([], {"version": __version__, "python": ".".join(map(str, sys.version_info[:3]))})
        yield build
        yield from _of_bus(readings.bus)
        yield from _of_machine(readings.machine)
        yield from _of_processes(readings.processes)
        yield _gauge("tasks_running", "Long actions that run now.", _one(readings.tasks_running))
        yield _gauge("tasks_waiting", "Long actions that wait for their turn.", _one(readings.tasks_waiting))
        missing = _one(readings.addresses_missing)
        yield _gauge("addresses_missing", "Addresses of settings and spec that no interface has.", missing)
        ends = _by_label(readings.certificates)
        text = "When a certificate of the bus ends, in seconds since 1970."
        yield _gauge("bus_certificate_expiry_timestamp_seconds", text, ends, "certificate")
        yield _gauge(
            "disk_migration_ratio", "How much of a persistent disk is copied, then compared.", _one(readings.migration)
        )
        yield _counter("actions", "Actions that ended.", self._actions.items(), "method", "outcome")
        durations = HistogramMetricFamily(
            "agent_shim_action_duration_seconds", "Time from a request to the end of its action.", labels=["method"]
        )
        for method, histogram in self._durations.items():
            durations.add_metric([method], histogram.buckets(), histogram.total)
        yield durations
        yield HistogramMetricFamily(
            "agent_shim_loop_lag_seconds",
            "How late the event loop woke a sleeper.",
            self._lag.buckets(),
            self._lag.total,
        )


def _of_bus(bus: BusReading) -> Iterator[Metric]:
    yield _gauge("bus_connected", "1 while the agent is connected to the bus.", _one(bus.connected))
    yield _counter("bus_reconnects", "Times the link to the bus was made anew.", _one(bus.reconnects))
    messages = [(("in",), bus.received), (("out",), bus.sent)]
    yield _counter("bus_messages", "Messages over the bus.", messages, "direction")
    sizes = [(("in",), bus.received_bytes), (("out",), bus.sent_bytes)]
    yield _counter("bus_bytes", "Bytes of messages over the bus.", sizes, "direction")
    yield _counter("bus_rejected", "Messages dropped because they were no requests.", _one(bus.rejected))
    yield _gauge("heartbeat_age_seconds", "Time since the last heartbeat went out.", _one(bus.heartbeat_age))


def _of_machine(machine: MachineReading) -> Iterator[Metric]:
    yield _gauge("memory_used_bytes", "Memory and swap in use in this container.", _by_label(machine.used), "kind")
    yield _gauge("memory_used_ratio", "Share of memory and of swap in use.", _by_label(machine.full), "kind")
    yield _gauge("cpu_ratio", "Share of the processors in use.", _by_label(machine.cpu), "mode")
    yield _gauge("load_average", "Load average.", _by_label(machine.load), "minutes")
    yield _gauge("disk_used_ratio", "Share of a disk in use.", _by_label(machine.disks), "disk")
    yield _gauge("disk_inodes_used_ratio", "Share of the inodes of a disk in use.", _by_label(machine.inodes), "disk")


def _of_processes(processes: Sequence[ProcessReading]) -> Iterator[Metric]:
    # A name with an undecodable byte (a lone surrogate) would cost the whole page.
    named = [(process.name.encode("utf-8", "replace").decode(), process) for process in processes]
    states = [((name, process.state), 1) for name, process in named]
    yield _gauge("process_state", "1 for the state a process is in.", states, "process", "state")
    up = [((name,), process.is_up) for name, process in named]
    yield _gauge("process_up", "1 while a process runs and has settled.", up, "process")
    uptime = [((name,), process.uptime) for name, process in named]
    yield _gauge("process_uptime_seconds", "Time a process has been running.", uptime, "process")
    restarts = [((name,), process.restarts) for name, process in named]
    yield _counter("process_restarts", "Times a process that ended was started again.", restarts, "process")
    memory = [((name,), process.memory) for name, process in named]
    yield _gauge("process_memory_bytes", "Memory of a process and its children.", memory, "process")
    cpu = [((name,), process.cpu) for name, process in named]
    yield _gauge("process_cpu_ratio", "Share of one core that a process and its children use.", cpu, "process")


Rows = Iterable[tuple[tuple[str, ...], float | None]]
"""Samples of one family: the label values, and the value or None when there is none to show."""


def _one(value: float | None) -> Rows:
    return [((), value)]


def _by_label(values: Mapping[str, float]) -> Rows:
    return [((label,), value) for label, value in values.items()]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, rows: Rows, *labels: str
) -> Metric:
    family = kind(f"agent_shim_{name}", text, labels=labels)
    for label, value in rows:
        if value is not None:
            family.add_metric(label, float(value))
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)


# --- how it is asked for --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routes:
    """What is behind the paths. ``ready(level)`` (``jobs`` or ``agent``) is the answer and its reason."""

    render: Callable[[bool], bytes]
    ready: Callable[[str], tuple[bool, str]]

    def answer(self, request: Request) -> Response:
        """What is answered to ``GET /readyz?level=agent`` and its like."""
        path, _, query = request.target.partition("?")
        if path == "/metrics":
            is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "").lower()
            kind = openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_PLAIN_0_0_4
            return Response(200, self.render(is_openmetrics), kind)
        if path == "/healthz":
            return Response(200, b"ok\n")
        if path == "/readyz":
            level = urllib.parse.parse_qs(query).get("level", ["jobs"])[0]
            if level not in ("jobs", "agent"):
                return Response(400, b"level is jobs or agent\n")
            is_ready, reason = self.ready(level)
            return Response(200 if is_ready else 503, f"{reason}\n".encode("utf-8", "replace"))
        return Response(404, b"there is /metrics, /healthz and /readyz\n")


def listening(address: str, routes: Routes) -> AbstractAsyncContextManager[tuple[str, int] | None]:
    """Answer on ``address`` for the length of the block, as ``responder.listening`` does."""
    return responder.listening(address, routes.answer, "metrics and probes")
