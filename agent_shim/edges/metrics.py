"""Serves metrics and health checks over HTTP: ``/metrics``, ``/healthz`` and ``/readyz``. These pages contain no
secrets, and callers cannot change anything through them.

``Readings`` holds the current values for a scrape, ``Metrics`` counts events and renders the counts and the readings,
and ``Routes`` answers requests. Times are in seconds.
"""

from __future__ import annotations

import asyncio
import html
import os
import sys
import time
import urllib.parse
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import msgspec

from agent_shim import __revision__, __version__
from agent_shim.core import lean_imports, safetext
from agent_shim.core.bus_stats import Stats
from agent_shim.edges import http_server
from agent_shim.edges.http_server import HttpRequest, HttpResponse
from agent_shim.host import clock, proc
from agent_shim.services.vitals import Figures
from agent_shim.supervisor.ownership.ending import KINDS
from agent_shim.supervisor.process_stats import ServiceInfo

# Import ``prometheus_client`` with stand-ins for these modules. The real ones would use 4 MB, and only the library's
# own HTTP server and client need them.
lean_imports.preload(
    "prometheus_client", "http.server", "socketserver", "urllib.error", "urllib.request", "wsgiref.simple_server"
)
from prometheus_client import Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

disable_created_metrics()  # type: ignore[no-untyped-call]

PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text format. The library defines a constant for it only in version 0.23 and later."""

# --- readings ---------------------------------------------------------------------------------------------------------


class BusReading(msgspec.Struct, frozen=True):
    """State of the bus connection, and its counters since the agent started. ``heartbeat_age`` is None before the first
    heartbeat.
    """

    connected: bool | None = False
    """Whether the bus is connected, or None if there is no Director."""
    heartbeat_age: float | None = None
    stats: Stats = msgspec.field(default_factory=Stats)


class DiskReading(msgspec.Struct, frozen=True):
    """The persistent disk. ``migrated`` is the completed fraction of the current migration phase."""

    is_mounted: bool = False
    is_migrating: bool = False
    migrated: float = 0.0


class Readings(msgspec.Struct, frozen=True):
    """The values of one scrape. They must be cheap to gather, without accessing a disk or waiting for anything."""

    bus: BusReading = BusReading()
    figures: Figures = msgspec.field(default_factory=Figures)
    stemcell: tuple[str, str] | None = None
    """The stemcell's operating system and version."""
    instance: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Values of the labels in ``INSTANCE``. The mapping is empty before the first ``apply``."""
    is_ready: bool = False
    job_state: str = ""
    """One of ``JOB_STATES``, or "" before the agent has its settings."""
    jobs_blocked: bool = False
    """True if the jobs cannot be started or deployed."""
    processes: Sequence[ServiceInfo] = ()
    """All services. The figures of a service that is not running are 0 rather than omitted, because series that come
    and go complicate queries.
    """
    tasks_running: int = 0
    tasks_waiting: int = 0
    firewall_enforced: bool = False
    failures: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many times each of the agent's background tasks has failed and been restarted, by task name."""
    addresses_missing: int = 0
    """Number of expected addresses that no interface has."""
    certificates: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Expiry of the bus certificates, in seconds since 1970."""
    disk: DiskReading = DiskReading()
    blobs: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Number of blob transfers by direction and outcome."""
    blob_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    alerts: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of alerts by outcome (``ALERT_OUTCOMES``)."""


ACTION_BOUNDS: Final = (0.005, 0.05, 0.5, 2.0, 10.0, 60.0, 600.0)
LAG_BOUNDS: Final = (0.005, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_PERIOD_S: Final = 10.0
PAGE_TTL_S: Final = 1.0
"""How long a rendered page is cached. The cache makes ten scrapers cost as much as one."""

OUTCOMES: Final = frozenset({"done", "failed"})
OTHER: Final = "other"
"""Label value for an unknown method or outcome, so that callers cannot create new series."""


class ReadingsCollector(Collector):
    """Creates the samples for a scrape from readings. It runs in a thread, because rendering takes 60 ms for 500
    processes, and any host that reaches the port can send requests.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        yield from _of_agent(self._readings)
        yield from _of_processes(self._readings)


class Metrics:
    """Counts events, reads current values, and renders the counts and the values as text.

    ``read`` gathers the readings of a scrape. ``methods`` are the actions that get their own series; others are counted
    as ``OTHER``.
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
        text = "Time from a request to the end of its action."
        self._actions = Counter("agent_shim_actions", "Completed actions.", ("method", "outcome"), registry=None)
        self._durations = Histogram(
            "agent_shim_action_duration_seconds", text, ("method",), buckets=ACTION_BOUNDS, registry=None
        )
        text = "Delay with which the event loop wakes a sleeping task."
        self._lag = Histogram("agent_shim_loop_lag_seconds", text, buckets=LAG_BOUNDS, registry=None)
        self._of_process = ProcessCollector(registry=None)
        self._read_at = float("-inf")
        self._readings = Readings()
        self._pages: dict[tuple[bool, bool], bytes] = {}
        """Pages rendered from ``_readings``, by format and encoding."""
        self._rendering = asyncio.Lock()

    def action_done(self, method: str, outcome: str, seconds: float) -> None:
        """Count an action that ran for ``seconds`` and ended with ``outcome`` (done or failed)."""
        method = method if method in self._methods else OTHER
        self._actions.labels(method, outcome if outcome in OUTCOMES else OTHER).inc()
        self._durations.labels(method).observe(seconds)

    async def watch_lag(self) -> None:
        """Measure how late the event loop wakes a sleeping task. Runs as a root task until cancelled."""
        while True:
            pause = clock.until_beat(LAG_PERIOD_S)
            due = self._clock() + pause
            await asyncio.sleep(pause)
            self._lag.observe(max(0.0, self._clock() - due))

    async def render(self, is_openmetrics: bool = False, is_packed: bool = False) -> bytes:
        """Render all metrics as OpenMetrics 1.0 if ``is_openmetrics``, otherwise as Prometheus text 0.0.4, and compress
        them with gzip if ``is_packed``. The page is at most ``PAGE_TTL_S`` old.
        """
        async with self._rendering:  # one rendering at a time, so that concurrent scrapes share a page
            registry = self.registry()  # must come first, because it replaces outdated pages
            pages, key = self._pages, (is_openmetrics, is_packed)
            if key not in pages:
                pages[key] = await asyncio.to_thread(_page, registry, *key)
            return pages[key]

    def registry(self) -> CollectorRegistry:
        """Return a registry of all metrics, with readings that are at most ``PAGE_TTL_S`` old."""
        registry = CollectorRegistry()
        collectors = (ReadingsCollector(self.recent()), self._actions, self._durations, self._lag, self._of_process)
        for collector in collectors:
            registry.register(collector)
        return registry

    def recent(self) -> Readings:
        """Return readings that are at most ``PAGE_TTL_S`` old."""
        now = self._clock()
        if now - self._read_at >= PAGE_TTL_S:
            self._read_at, self._readings, self._pages = now, self._read(), {}
        return self._readings


def _page(registry: CollectorRegistry, is_openmetrics: bool, is_packed: bool) -> bytes:
    """Render all metrics as in ``Metrics.render``. This function blocks."""
    generate: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest if is_openmetrics else generate_latest
    text = generate(registry)
    # Adding 16 makes zlib write the gzip format.
    return zlib.compress(text, GZIP_LEVEL, 16 + zlib.MAX_WBITS) if is_packed else text


def _of_agent(readings: Readings) -> Iterator[Metric]:
    """Yield all metric families with their samples, except those about processes and the event counters of
    ``Metrics``.
    """
    build = {"version": __version__, "revision": __revision__, "python": ".".join(map(str, sys.version_info[:3]))}
    yield InfoMetricFamily("agent_shim_build", "Versions of the agent and of its Python.", build)
    stemcell = dict(zip(("os", "version"), readings.stemcell, strict=True)) if readings.stemcell else None
    yield InfoMetricFamily("agent_shim_stemcell", "This container's stemcell.", stemcell)
    about = {name: safetext.label(readings.instance.get(name, "")) for name in INSTANCE}
    instance = about if readings.instance else None
    yield InfoMetricFamily("agent_shim_instance", "The instance as the Director knows it.", instance)
    yield _gauge("ready", "1 while `/readyz` answers 200.", _one(readings.is_ready))
    states: Rows = [((state,), readings.job_state == state) for state in JOB_STATES]
    yield _gauge("job_state", "1 for the instance's state, 0 for the others.", states, "state")
    text = "1 while the jobs cannot be started or deployed; `agent-shim status` gives the reason."
    yield _gauge("jobs_blocked", text, _one(readings.jobs_blocked))
    yield from _of_bus(readings.bus)
    text = "Expiry time of a bus certificate, in seconds since 1970."
    yield _gauge("bus_certificate_expiry_timestamp_seconds", text, _by_label(readings.certificates), "certificate")
    yield from _of_machine(readings.figures)
    yield from _of_disk(readings.disk)
    yield _gauge("tasks_running", "Long actions in progress.", _one(readings.tasks_running))
    yield _gauge("tasks_waiting", "Long actions waiting in the queue.", _one(readings.tasks_waiting))
    text = "How often each of the agent's background tasks crashed and was restarted."
    yield _counter("part_failures", text, _by_label(readings.failures), "part")
    missing = _one(readings.addresses_missing)
    yield _gauge("addresses_missing", "Addresses in the settings and the spec that no interface has.", missing)
    enforced = _one(readings.firewall_enforced)
    yield _gauge("firewall_enforced", "1 while packet filter rules keep jobs off the bus.", enforced)
    transfers = [((*pair,), readings.blobs.get(pair, 0)) for pair in _TRANSFERS]
    text = "Blobs read from and written to the blobstore, or uploaded and downloaded by a client."
    yield _counter("blob_transfers", text, transfers, "direction", "outcome")
    sizes = [((direction,), readings.blob_bytes.get(direction, 0)) for direction in _DIRECTIONS]
    yield _counter("blob_bytes", "Bytes of completely transferred blobs.", sizes, "direction")
    outcomes = [((outcome,), readings.alerts.get(outcome, 0)) for outcome in ALERT_OUTCOMES]
    yield _counter("alerts", "Alerts for the Health Monitor.", outcomes, "outcome")


def _of_bus(bus: BusReading) -> Iterator[Metric]:
    text, stats = "1 while the agent is connected to the bus; absent without a Director.", bus.stats
    yield _gauge("bus_connected", text, _one(bus.connected))
    yield _counter("bus_reconnects", "Reconnections to the bus.", _one(stats.reconnects))
    messages = [(("in",), stats.received), (("out",), stats.sent)]
    yield _counter("bus_messages", "Messages on the bus.", messages, "direction")
    sizes = [(("in",), stats.received_bytes), (("out",), stats.sent_bytes)]
    yield _counter("bus_bytes", "Message bytes on the bus.", sizes, "direction")
    yield _counter("bus_rejected", "Invalid requests dropped.", _one(stats.rejected))
    yield _counter("bus_attempts", "Connection attempts to the bus.", _one(stats.attempts))
    counts = (stats.duplicates, stats.flooded, stats.failed, stats.unanswered, stats.denied)
    unserved = dict(zip(("duplicate", "flood", "failure", "no_reply", "denied"), counts, strict=True))
    yield _counter("bus_unserved", "Requests and replies dropped, by reason.", _by_label(unserved), "reason")
    yield _gauge("heartbeat_age_seconds", "Time since the last heartbeat was sent.", _one(bus.heartbeat_age))


_DIRECTIONS: Final = ("get", "put", "upload", "download")
"""Directions of blob transfers: the agent gets blobs from the blobstore and puts them there, while an HTTPS client
uploads blobs to the agent and downloads them from it.
"""
_TRANSFERS: Final = tuple((direction, outcome) for direction in _DIRECTIONS for outcome in ("done", "failed"))
ALERT_OUTCOMES: Final = ("sent", "dropped", "collapsed")
"""Whether an alert was sent on the bus, dropped in favour of newer ones while the bus was disconnected, or suppressed
as a repetition.
"""
INSTANCE: Final = ("deployment", "group", "index", "id", "az")
"""Labels of ``agent_shim_instance_info``."""
JOB_STATES: Final = ("running", "starting", "failing", "stopped")
"""States of the instance as reported to the Director."""
STATES: Final = ("running", "starting", "failing", "unknown")
"""Process states as reported to the Director."""


def _of_machine(figures: Figures) -> Iterator[Metric]:
    """Yield metrics for the container and the host. If the container has no limits, its figures equal those of the
    host.
    """
    memory, cpu = figures.memory.items(), figures.cpu.items()
    rows: Rows = [((scope,), known.used) for scope, known in memory]
    yield _gauge("memory_used_bytes", "Memory in use, without reclaimable page cache.", rows, "scope")
    rows = [((scope,), known.total) for scope, known in memory]
    yield _gauge("memory_size_bytes", "Memory size: the container's limit, or all of the host's memory.", rows, "scope")
    rows = [((scope,), known.swap_used) for scope, known in memory]
    yield _gauge("swap_used_bytes", "Swap in use.", rows, "scope")
    rows = [((scope,), known.swap_total) for scope, known in memory]
    yield _gauge("swap_size_bytes", "Swap size.", rows, "scope")
    yield _counter("oom_kills", "Out-of-memory kills in this container.", _one(figures.oom_kills))
    modes = [
        ((scope, mode), seconds)
        for scope, known in cpu
        for mode, seconds in (("user", known.user), ("system", known.system), ("wait", known.wait))
        if known.total or mode != "wait"  # the container's total and wait are unknown
    ]
    text = "Processor time; the `wait` mode is available only for the host."
    yield _counter("cpu_seconds", text, modes, "scope", "mode")
    yield _gauge("cpus", "Available processors; for the container, its quota.", _by_label(figures.processors), "scope")
    yield _gauge("load_average", "The host's load average.", _by_label(figures.load), "minutes")
    yield from _of_file_systems(figures.disks.items())


def _of_file_systems(disks: Collection[tuple[str, os.statvfs_result]]) -> Iterator[Metric]:
    """Yield disk usage by role: system, ephemeral (``data``), persistent (``store``), or the cid of a dynamic disk."""
    rows: Rows = [((role,), known.f_blocks * known.f_frsize) for role, known in disks]
    yield _gauge("disk_size_bytes", "Size of a disk.", rows, "disk")
    rows = [((role,), (known.f_blocks - known.f_bfree) * known.f_frsize) for role, known in disks]
    yield _gauge("disk_used_bytes", "Bytes in use on a disk.", rows, "disk")
    rows = [((role,), known.f_files) for role, known in disks]
    yield _gauge("disk_inodes", "Number of inodes on a disk; 0 if it is not fixed.", rows, "disk")
    rows = [((role,), known.f_files - known.f_ffree) for role, known in disks]
    yield _gauge("disk_inodes_used", "Inodes in use on a disk.", rows, "disk")


def _of_disk(disk: DiskReading) -> Iterator[Metric]:
    yield _gauge("persistent_disk_mounted", "1 while a persistent disk is mounted on the store.", _one(disk.is_mounted))
    yield _gauge("disk_migration_running", "1 while a persistent disk is being migrated.", _one(disk.is_migrating))
    text = "Completed fraction of the copy; 0 without a migration."
    yield _gauge("disk_migration_ratio", text, _one(disk.migrated))


def _of_processes(readings: Readings) -> Iterator[Metric]:
    named = [((safetext.label(service.process.name),), service) for service in readings.processes]

    def rows(member: str) -> Rows:
        return [(label, getattr(service, member)) for label, service in named]

    info = InfoMetricFamily("agent_shim_process", "The job that a process belongs to.", labels=["process"])
    for label, service in named:
        info.add_metric(label, {"bosh_job": safetext.label(service.job)})
    yield info
    up: Rows = [(label, service.pid != 0) for label, service in named]
    yield _gauge("process_up", "1 while the process is running.", up, "process")
    states = [((*label, state), service.process.state == state) for label, service in named for state in STATES]
    text = "1 for the state reported to the Director, 0 for the others."
    yield _gauge("process_state", text, states, "process", "state")
    text = "Start time of the process, in seconds since 1970; 0 while it is not running."
    yield _gauge("process_start_time_seconds", text, rows("started_at"), "process")
    yield _counter("process_restarts", "Automatic restarts of the process.", rows("restarts"), "process")
    exits = [((*label, kind), service.exits.get(kind, 0)) for label, service in named for kind in KINDS]
    yield _counter("process_exits", "Unexpected exits of the process, by reason.", exits, "process", "reason")
    yield _counter("process_oom_kills", "Out-of-memory kills of the process.", rows("oom_kills"), "process")
    memory: Rows = [(label, service.process.mem_kb * 1024) for label, service in named]
    yield _gauge("process_memory_bytes", "Resident memory of the process tree.", memory, "process")
    yield _counter("process_cpu_seconds", "Processor time of the process tree.", rows("cpu_seconds"), "process")
    # Count open files here, because this function runs in a thread and not in the event loop. Before Linux 6.2, the
    # only way to count is to list up to a million files of each process.
    open_files: Rows = [(label, proc.open_files(service.pid) if service.pid else 0) for label, service in named]
    yield _gauge("process_open_files", "Open files of the process.", open_files, "process")
    yield _gauge("process_threads", "Threads of the process tree.", rows("threads"), "process")


Rows = Iterable[tuple[tuple[str, ...], float | None]]
"""The samples of one metric family. Each has label values and a value. A sample whose value is None is omitted."""


def _one(value: float | None) -> Rows:
    """Return the row of a metric without labels."""
    return [((), value)]


def _by_label(values: Mapping[str, float]) -> Rows:
    """Return the rows of a metric that has one label. ``values`` maps the label's values to the metric's values."""
    return [((label,), value) for label, value in values.items()]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, rows: Rows, *labels: str
) -> Metric:
    """Return a metric with a sample for each row whose value is not None."""
    family = kind(f"agent_shim_{name}", text, labels=labels)
    for label, value in rows:
        if value is not None:
            family.add_metric(label, float(value))
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)


# --- HTTP -------------------------------------------------------------------------------------------------------------


class Routes(msgspec.Struct, frozen=True):
    """Answers HTTP requests according to their path. ``ready(level)`` (``jobs``, ``agent`` or ``boot``) returns whether
    the agent is ready, and the reason.
    """

    render: Callable[[bool, bool], Awaitable[bytes]]
    ready: Callable[[str], tuple[bool, str]]
    read: Callable[[], Readings]

    def answer(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        """Answer a request such as ``GET /readyz?level=agent``."""
        path, _, query = request.target.partition("?")
        if path == "/":
            return HttpResponse(200, landing_page(self.read(), self.ready("jobs")).encode("utf-8", "replace"), HTML)
        if path == "/metrics":
            is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "").lower()
            return self._page(is_openmetrics, is_packed=_takes_gzip(request.headers.get("accept-encoding", "")))
        if path == "/healthz":
            return HttpResponse(200, b"ok\n")
        if path == "/readyz":
            level = urllib.parse.parse_qs(query).get("level", ["jobs"])[0]
            if level not in ("jobs", "agent", "boot"):
                return HttpResponse(400, b"level must be jobs, agent or boot\n")
            is_ready, reason = self.ready(level)
            return HttpResponse(200 if is_ready else 503, f"{reason}\n".encode("utf-8", "replace"))
        return HttpResponse(404, b"not found; available: /, /metrics, /healthz, /readyz\n")

    async def _page(self, is_openmetrics: bool, *, is_packed: bool) -> HttpResponse:
        kind = openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else PLAIN
        coding = {"Content-Encoding": "gzip"} if is_packed else {}
        return HttpResponse(
            200, await self.render(is_openmetrics, is_packed), kind, coding | {"Vary": "Accept-Encoding"}
        )


def _takes_gzip(accepted: str) -> bool:
    """Return True if a list of encodings contains gzip with a weight other than 0."""
    for coding in accepted.lower().split(","):
        name, _, weight = coding.partition(";")
        if name.strip() == "gzip":
            # A weight of 0 consists only of zeros and a dot.
            return weight.replace(" ", "").removeprefix("q=").strip("0.") != "" or not weight
    return False


HTML: Final = "text/html; charset=utf-8"
GZIP_LEVEL: Final = 1
"""The lowest compression level. It takes a fifth of the default level's time, and the result is a tenth larger."""
_LANDING: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ border-bottom: 1px solid #8888; padding: .2rem 0 .2rem .6rem; text-align: left; vertical-align: top }}
td:nth-child(-n+2) {{ min-width: 4rem; overflow-wrap: anywhere }}
th:first-child, td:first-child {{ padding-left: 0 }}
@media (max-width: 32rem) {{
  body {{ padding: 0 .5rem }}
  th:nth-child(2), td:nth-child(2) {{ display: none }}
}}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
</style>
<h1>{title}</h1>
<p>{state}
<p><a href="/metrics">metrics</a> · <a href="/readyz">readiness</a> · <a href="/healthz">liveness</a>
<div><table>
<thead><tr><th>process<th>job<th>state<th class="number">memory<th class="number">restarts</thead>
{rows}
</table></div>
<p>agent_shim {version}
</html>
"""


def landing_page(readings: Readings, ready: tuple[bool, str]) -> str:
    """Return the HTML page at ``/``. It contains no scripts. ``ready`` is the result of ``Routes.ready``."""
    instance, (is_ready, why) = readings.instance, ready
    name = f"{instance['deployment']} / {instance['group']}/{instance['id']}" if instance else ""
    rows = [
        f"<tr><td>{_text(service.process.name)}<td>{_text(service.job)}<td>{_text(service.state)}"
        f'<td class="number">{service.process.mem_kb / 1024:.1f} MiB<td class="number">{service.restarts}'
        for service in readings.processes
    ]
    return _LANDING.format(
        title=_text(name) or "agent_shim",
        state=_text(why) if is_ready else f"<strong>{_text(why)}</strong>",
        rows="\n".join(rows) or '<tr><td colspan="5">no processes',
        version=_text(__version__),
    )


def _text(text: str) -> str:
    """Escape text for HTML."""
    return html.escape(safetext.line(text))


def listening(address: str, routes: Routes) -> AbstractAsyncContextManager[tuple[str, int] | None]:
    """Serve on ``address`` for the duration of the block. Yields the bound address, or None if ``address`` is ``off``
    or cannot be bound.
    """
    return http_server.listening(address, routes.answer, "metrics and probes")
