"""Collects figures about services: age, memory and CPU time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from agent_shim.host import cgroups, clock, host_stats, proc
from agent_shim.supervisor.event_kinds import ORDER
from agent_shim.supervisor.monit.ast import Connection, Echo
from agent_shim.supervisor.network_checks import requested
from agent_shim.supervisor.ownership.process_record import Identity
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.state import MONITORED, UP

logger = logging.getLogger(__name__)

MAX_INLINE_PROCESSES: Final = 1000
"""Maximum number of processes that are read on the event loop. If there are more, a thread reads them, because a job
can start tens of thousands.
"""
PASS_SHARE: Final = 0.05
"""Maximum share of a processor for passes over all processes. It is limited because other machines may request the
figures, and jobs control the number of processes.
"""
MIN_SAMPLE_S: Final = 1.0
"""Minimum interval between samples of CPU time. Shorter intervals give imprecise figures."""
PROCESSORS: Final = os.cpu_count() or 1
MEMORY_TTL_S: Final = 10.0
"""How long the container's memory limit is cached. It rarely changes at run time."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """A process as reported by ``get_state`` (jobsupervisor/job_supervisor_interface.go).

    ``mem_*`` is the resident memory of the process tree, and ``cpu_total`` its CPU time since the last query, as a
    percentage of all processors.
    """

    name: str
    state: str
    uptime_secs: int = 0
    mem_kb: int = 0
    mem_percent: float = 0.0
    cpu_total: float = 0.0


class ResponseInfo(msgspec.Struct, frozen=True):
    """The last response to a connection or echo request. ``seconds`` is -1 if there was no response, and 0 before the
    first request.
    """

    kind: str
    """``TCP``, ``UDP``, ``UNIX`` or ``ICMP``."""
    seconds: float
    host: str = ""
    port: int = 0
    path: str = ""
    request: str = ""
    protocol: str = ""


class ServiceInfo(msgspec.Struct, frozen=True):
    """A service as shown to operators. ``state`` is the agent's own state, and ``process.state`` is the one reported to
    the Director.
    """

    process: ProcessInfo
    job: str
    kind: str
    groups: tuple[str, ...]
    state: str
    pid: int
    restarts: int
    last_exit: str
    reason: str
    parent: int = 0
    children: int = 0
    """Number of descendants of the process."""
    own_mem_kb: int = 0
    own_mem_percent: float = 0.0
    own_cpu: float = 0.0
    """The ``own_*`` fields are for the process without its descendants. They have the same units as in ``process``."""
    faults: tuple[str, ...] = ()
    """Faults of the running service, in monit's words and order."""
    mode: str = "active"
    unheeded: tuple[str, ...] = ()
    """Statements in the service's file that have no effect."""
    started_at: float = 0.0
    """Start time of the process in seconds since 1970, or 0 if there is none."""
    retry_secs: float | None = None
    """Seconds until the next start, or None if none is due."""
    cpu_seconds: float = 0.0
    """CPU time of the process tree, including exited descendants that were waited for."""
    threads: int = 0
    exits: Mapping[str, int] = {}
    """Unexpected exits by kind (``ending.KINDS``)."""
    oom_kills: int = 0
    responses: tuple[ResponseInfo, ...] = ()
    """Responses in monit's order, which begins with the last rule."""


class _Sample(NamedTuple):
    """The CPU times of a process tree and of its root alone at one moment, with the percentages reported then."""

    identity: Identity
    taken_at: float
    ticks: int
    own_ticks: int
    share: float
    own_share: float


class _Look(NamedTuple):
    """Processes by pid, and the pids of each process's children."""

    processes: MutableMapping[int, proc.Stat]
    children: Mapping[int, list[int]]


_NO_LOOK: Final = _Look({}, {})


class _ProcessReader:
    """Reads all of the machine's processes. Up to ``MAX_INLINE_PROCESSES`` are read on the event loop. If there are
    more, a thread reads them and takes at most ``PASS_SHARE`` of a processor.

    Between passes, the result of the last pass is combined with the current main processes of services, so that no
    caller has to wait. The figures of descendants are then as old as the last pass.
    """

    def __init__(self) -> None:
        self._last: _Look = _NO_LOOK
        self._due_at = float("-inf")
        self._reader: threading.Thread | None = None  # noqa: TID251 - see ``_read_in_thread``

    def now(self, leaders: Collection[int]) -> _Look:
        """Return the processes. ``leaders`` are the pids of services' main processes, whose figures are always
        current.
        """
        if (self._reader is None or not self._reader.is_alive()) and time.monotonic() >= self._due_at:
            if self._read(partial(proc.small_table, MAX_INLINE_PROCESSES)):  # False if there are too many
                return self._last
            self._read_in_thread()
        present = {pid: stat for pid in leaders if (stat := proc.stat(pid)) is not None}
        last = self._last  # read this once, because the thread may replace it at any time
        return _Look(ChainMap(present, last.processes), last.children)

    def _read_in_thread(self) -> None:
        """Begin to read all processes in a thread, without waiting for the result."""
        try:
            # Do not use ``blocking.call``, because it would wait for this thread's result.
            name = "many processes"
            self._reader = threading.Thread(target=self._read, args=[proc.table], name=name, daemon=True)  # noqa: TID251
            self._reader.start()
        except RuntimeError as exc:
            logger.warning("cannot read %d and more processes: %s", MAX_INLINE_PROCESSES, exc)

    def _read(self, read: Callable[[], dict[int, proc.Stat] | None]) -> bool:
        """Read all processes with ``read``, and set the time of the next pass. Return False if there are too many
        processes, in which case ``read`` has returned None.
        """
        cpu_before = time.thread_time()
        processes = read()
        if processes is None:
            return False
        self._last = _Look(processes, proc.children(processes))
        self._due_at = time.monotonic() + (time.thread_time() - cpu_before) / PASS_SHARE
        return True


class ProcessStats:
    """Collects figures from ``/proc`` for each query. ``memory_total`` returns the memory size in bytes that counts as
    100%.
    """

    def __init__(self) -> None:
        self.memory_total: Callable[[], int] = _ContainerMemory()
        self._samples: dict[str, _Sample] = {}
        self._processes = _ProcessReader()

    def describe(self, services: Iterable[Service]) -> list[ServiceInfo]:
        """Describe services. As in monit, age, memory and CPU time are 0 for a service that is unmonitored or has no
        process.
        """
        services = list(services)
        try:
            leaders = [each.process.pid for each in services if each.process is not None]
            processes, children = self._processes.now(leaders)
        except OSError:  # out of file descriptors, so all figures are 0
            processes, children = _NO_LOOK
        total_kb = max(1, self.memory_total() // 1024)
        found = []
        for service in services:
            info = ProcessInfo(service.name, service.reported)
            figures: dict[str, Any] = {}
            process = service.process if service.process is not None and service.process.is_alive else None
            if process is not None and process.pid in processes and service.state in MONITORED:
                tree = [processes[pid] for pid in proc.descent(children, [process.pid])]
                kb = sum(stat.resident_kb for stat in tree)
                uptime = clock.uptime_of(process.start_ticks)
                root = processes[process.pid]
                ticks = sum(stat.cpu_ticks for stat in tree)
                cpu, own_cpu = self._cpu_shares(service.name, process.identity, ticks, root.cpu_ticks, uptime)
                figures = {
                    "parent": root.parent,
                    "children": len(tree) - 1,
                    "own_mem_kb": root.resident_kb,
                    "own_mem_percent": 100 * root.resident_kb / total_kb,
                    "own_cpu": own_cpu,
                    "started_at": clock.wall_time_of(process.start_ticks),
                    "cpu_seconds": sum(stat.cpu_ticks + stat.reaped_ticks for stat in tree) / clock.TICKS,
                    "threads": sum(stat.threads for stat in tree),
                }
                info = ProcessInfo(service.name, service.reported, uptime, kb, 100 * kb / total_kb, cpu)
            complaints = list(service.complaints.values()) if service.state in UP else []
            complaints.sort(key=lambda each: ORDER.index(each.kind))
            found.append(
                ServiceInfo(
                    process=info,
                    job=service.spec.job,
                    kind=service.spec.kind,
                    groups=tuple(sorted(service.spec.groups)),
                    state=service.state.shown,
                    pid=process.pid if process is not None else 0,
                    restarts=service.record.restarts,
                    retry_secs=max(0.0, at - time.monotonic()) if (at := service.retry_at) is not None else None,
                    last_exit=service.record.last_exit,
                    reason="; ".join(filter(None, [service.record.reason, *(each.text for each in complaints)])),
                    faults=tuple(dict.fromkeys(each.word for each in complaints)),
                    mode=service.spec.mode,
                    unheeded=service.spec.unsupported,
                    exits=service.record.exits,
                    oom_kills=service.record.oom_kills,
                    responses=tuple(_responses(service)),
                    **figures,
                )
            )
        return found

    def _cpu_shares(
        self, name: str, identity: Identity, ticks: int, own_ticks: int, uptime: int
    ) -> tuple[float, float]:
        """Return the percentage of all processors' time that a process tree has used since the last sample, and the
        percentage that its root process alone has used. If there is no sample of this process yet, the shares are
        averages since the process started. ``ticks`` and ``own_ticks`` are the CPU times so far, and ``uptime`` is in
        seconds.
        """
        now = time.monotonic()
        last = self._samples.get(name)
        if last is None or last.identity != identity:
            last = _Sample(identity, now - uptime, 0, 0, 0.0, 0.0)
        elif now - last.taken_at < MIN_SAMPLE_S:
            return last.share, last.own_share
        seconds = now - last.taken_at
        share, own_share = _percent(ticks - last.ticks, seconds), _percent(own_ticks - last.own_ticks, seconds)
        self._samples[name] = _Sample(identity, now, ticks, own_ticks, share, own_share)
        return share, own_share


def _responses(service: Service) -> Iterator[ResponseInfo]:
    """Yield the last responses to the service's connection and echo requests. As in monit, the last rule comes
    first.
    """
    for number, rule in reversed(list(enumerate(service.spec.rules))):
        seconds = service.responses.get(number, 0.0)
        match rule.test:
            case Echo():
                yield ResponseInfo("ICMP", seconds)
            case Connection(host, port, path, protocol, _, is_udp):
                # Like monit, show all protocol names in upper case except ``generic``.
                name = protocol.name if protocol.name == "generic" else protocol.name.upper()
                request = requested(protocol) if protocol.request else ""
                kind = "UNIX" if path else "UDP" if is_udp else "TCP"
                yield ResponseInfo(kind, seconds, host, port, path, request, name)


def _percent(ticks: int, seconds: float) -> float:
    """Return CPU time as a percentage of all processors.

    ``ticks`` can be negative, because the CPU time of a descendant is no longer counted once it has exited. In that
    case, the result is 0.
    """
    share = 100 * ticks / clock.TICKS / max(seconds, MIN_SAMPLE_S) / PROCESSORS
    return min(100.0, max(0.0, share))


class _ContainerMemory:
    """Caches the container's memory size in bytes: its limit, or the machine's memory if that is lower."""

    def __init__(self) -> None:
        self._cgroup = cgroups.find()
        self._total = 0
        self._read_at = float("-inf")

    def __call__(self) -> int:
        now = time.monotonic()
        if now - self._read_at > MEMORY_TTL_S:
            self._read_at = now
            self._total = cgroups.memory_total(self._cgroup, host_stats.memory_total())
        return self._total
