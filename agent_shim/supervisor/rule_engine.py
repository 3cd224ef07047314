"""Evaluates the rules of services every ten seconds: check, count, act.

The cycles of a service count from the start of its process; services due at about the same time share one pass over
``/proc``. Slow tests (connections, file systems) run in a task per rule and never overlap themselves, so a hanging test
delays no other. ``rule_counter`` counts failures; docs/monit-deviations.md lists differences.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from agent_shim.host import clock, guarded, proc
from agent_shim.supervisor import event_kinds, network_checks
from agent_shim.supervisor.filesystem_usage import usage
from agent_shim.supervisor.monit.ast import Connection, Limit, Rule
from agent_shim.supervisor.plan import ProcessSpec, reaction
from agent_shim.supervisor.process_record import Identity
from agent_shim.supervisor.rule_counter import RuleCounter, RuleTransition, exceeds, percent
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.state import UP

logger = logging.getLogger(__name__)

STEPS: Final = 10
"""Parts of a cycle: services due in the same part are checked together."""
USAGE_TIMEOUT_S: Final = 60.0
"""Timeout of reading a file system; a hanging one keeps its thread, and no other is started for it."""


class Finding(NamedTuple):
    """Result of one test; ``text`` describes it, good or bad."""

    fails: bool
    text: str


class _Table:
    """All processes at the start of a cycle."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.processes = proc.table()
        self._below = proc.children(self.processes)

    def tree(self, root: int) -> list[proc.Stat]:
        """Return a process followed by its descendants."""
        below = proc.descent(self._below, [root]) - {root}
        return [self.processes[root], *(self.processes[pid] for pid in below)]


class _Watch:
    """State of the checks of one service, for one process and one set of rules."""

    def __init__(self, service: Service, first_at: float) -> None:
        """``first_at`` is the monotonic time of the first check."""
        self.spec: ProcessSpec = service.spec
        self.identity = _identity(service)
        self.tallies = [RuleCounter(rule) for rule in self.spec.rules]
        self.busy: set[object] = set()
        self._next_at = first_at
        self._cycles = 0
        self._ticks: dict[Identity, int] = {}
        self._read_at = 0.0

    def is_of(self, service: Service) -> bool:
        """True while process and rules are the same: a new process starts from scratch."""
        return self.spec is service.spec and self.identity == _identity(service)

    def is_due(self, period: float) -> bool:
        """True if a check is due, every ``every`` cycles; polled often, because a missed cycle is skipped."""
        late = time.monotonic() - self._next_at
        if late < 0:
            return False
        self._next_at += period * (1 + late // period)
        self._cycles += 1
        return (self._cycles - 1) % self.spec.every == 0

    def cpu(self, tree: list[proc.Stat], at: float) -> tuple[float, float] | None:
        """Return the CPU share, in percent of all processors, of the process and its tree since the last cycle."""
        before, seconds = self._ticks, at - self._read_at
        self._ticks, self._read_at = {stat.identity: stat.cpu_ticks for stat in tree}, at
        if tree[0].identity not in before:
            return None
        used = [stat.cpu_ticks - before.get(stat.identity, 0) for stat in tree]
        whole = seconds * clock.TICKS * (os.cpu_count() or 1)
        return percent(used[0], whole), percent(sum(used), whole)


class RuleEngine:
    """Evaluates the rules of all services; ``run`` is endless."""

    def __init__(self, services: Callable[[], Iterable[Service]], memory_total: Callable[[], int], period: float):
        """``memory_total`` returns the bytes that percentages refer to; ``period`` is the cycle in seconds."""
        self._services = services
        self._memory_total = memory_total
        self._period = period
        self._watches: dict[str, _Watch] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self.plan_changed = asyncio.Event()
        """Wakes the engine: there may be rules now."""

    async def run(self) -> NoReturn:
        """Check due services, ``STEPS`` times a cycle, as long as there are rules."""
        due = time.monotonic()
        try:
            while True:
                while not self._ruled():
                    self.plan_changed.clear()
                    await self.plan_changed.wait()
                due = max(due + self._period / STEPS, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                for look in [look for look in self._looks if look.done()]:
                    self._looks.discard(look)
                    look.result()
                await self._step()
        finally:
            for look in self._looks:
                look.cancel()

    def _ruled(self) -> list[Service]:
        return [each for each in self._services() if each.spec.rules]

    async def _step(self) -> None:
        watched = [(service, self._watch(service)) for service in self._ruled() if service.state in UP]
        self._watches = {service.name: watch for service, watch in watched}
        due = [(service, watch) for service, watch in watched if watch.is_due(self._period)]
        if not due:
            return
        table = await asyncio.to_thread(_Table) if any(service.spec.is_process for service, _ in due) else None
        for service, watch in due:
            self._look_at(service, watch, table)

    def _watch(self, service: Service) -> _Watch:
        """Return the watch of a service; the first check follows a cycle after the start, as monit sleeps then."""
        watch = self._watches.get(service.name)
        if watch is None or not watch.is_of(service):
            since = service.up_at if service.spec.is_process else time.monotonic()
            watch = _Watch(service, since + self._period)
        return watch

    # --- checks -------------------------------------------------------------------------------------------------------

    def _look_at(self, service: Service, watch: _Watch, table: _Table | None) -> None:
        spec = watch.spec
        for number, rule in enumerate(spec.rules):
            if isinstance(rule.test, Connection):
                self._run_aside(service, watch, number, _connect(rule.test, number))
        if spec.path is not None:
            self._run_aside(service, watch, "path", _measure(spec, spec.path))
        elif table is not None and (findings := _judge(spec, self._figures(watch, table))):
            self._spawn(self._conclude(service, watch, findings))

    def _figures(self, watch: _Watch, table: _Table) -> Mapping[str, float]:
        """Return the figures of a process and its tree; empty if it has just exited."""
        pid, start = watch.identity
        root = table.processes.get(pid)
        if root is None or root.start_ticks != start:
            return {}
        tree = table.tree(pid)
        own, total = root.resident_kb * 1024, sum(stat.resident_kb for stat in tree) * 1024
        whole = self._memory_total()
        figures: dict[str, float] = {
            "memory": own,
            "totalmemory": total,
            "memory %": percent(own, whole),
            "totalmemory %": percent(total, whole),
            "children": len(tree) - 1,
        }
        if (cpu := watch.cpu(tree, table.at)) is not None:
            figures |= {"cpu %": cpu[0], "totalcpu %": cpu[1]}
        return figures

    def _run_aside(
        self, service: Service, watch: _Watch, key: object, look: Coroutine[Any, Any, Mapping[int, Finding]]
    ) -> None:
        """Run a check in its own task, unless the previous one with its key is still running."""
        if key in watch.busy:
            look.close()
            return
        watch.busy.add(key)

        async def run() -> None:
            try:
                findings = await look
            finally:
                watch.busy.discard(key)
            await self._conclude(service, watch, findings)

        self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._looks.add(asyncio.create_task(work, name="check"))

    # --- consequences -------------------------------------------------------------------------------------------------

    async def _conclude(self, service: Service, watch: _Watch, findings: Mapping[int, Finding]) -> None:
        for number, finding in findings.items():
            if service.state not in UP or not watch.is_of(service):
                return
            rule = watch.spec.rules[number]
            tally = watch.tallies[number]
            turn = tally.add(fails=finding.fails)
            if not finding.fails and not tally.has_failed:
                service.complaints.pop(number, None)
            await self._follow(service, number, rule, turn, finding)

    async def _follow(self, service: Service, number: int, rule: Rule, turn: RuleTransition, finding: Finding) -> None:
        kind = event_kinds.kind_of(rule.test)
        if turn in (RuleTransition.FAILED, RuleTransition.STILL):
            service.complaints[number] = event_kinds.Complaint(kind, finding.text)
            if turn is RuleTransition.FAILED:
                service.notify(kind.failed, rule.action.kind, finding.text)
            await service.react(reaction(rule.action))
        elif turn is RuleTransition.RECOVERED:
            service.notify(kind.succeeded, rule.recovery.kind, finding.text)
            await service.react(reaction(rule.recovery))


async def _connect(test: Connection, number: int) -> dict[int, Finding]:
    why = await network_checks.probe(test)
    return {number: Finding(bool(why), why or f"connection succeeded to {network_checks.where(test)}")}


async def _measure(spec: ProcessSpec, path: Path) -> dict[int, Finding]:
    try:
        return _judge(spec, await guarded.aside(f"check {spec.name}", partial(usage, path), timeout=USAGE_TIMEOUT_S))
    except OSError as exc:
        logger.info("cannot check %s: %s", spec.name, exc)
        return {}


def _judge(spec: ProcessSpec, figures: Mapping[str, float]) -> dict[int, Finding]:
    """Compare the figures with the limits of the rules, by their number; without a figure there is no finding."""
    findings = {}
    for number, rule in enumerate(spec.rules):
        if not isinstance(test := rule.test, Limit):
            continue
        value = figures.get(f"{test.metric} %" if test.percent else test.metric)
        if value is None:
            continue
        bad = exceeds(value, test)
        figure, limit = (_worded(each, test) for each in (value, test.limit))
        verb = "matches" if bad else "does not match"
        text = f"{test.metric} of {figure} {verb} the resource limit {test.operator} {limit}"
        findings[number] = Finding(bad, text)
    return findings


def _worded(value: float, test: Limit) -> str:
    if test.percent:
        return f"{value:.1f}%"
    return f"{value / 1024:.0f} kB" if test.metric.endswith(("memory", "space")) else f"{value:g}"


def _identity(service: Service) -> Identity:
    """Return the process identity, or (0, 0) without a process."""
    return service.process.identity if service.process is not None else (0, 0)
