"""Evaluates the rules of services every ten seconds: check, count, act.

The cycles of a process count from its start, those of another check begin at once, as in monit; services due at about
the same time share one pass over ``/proc``. Slow tests (connections, paths) run in a task each and never overlap
themselves, so a hanging test delays no other. ``rule_counter`` counts failures; docs/monit-deviations.md lists
differences.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NoReturn

from agent_shim.host import cgroups, clock, guarded, host_stats, proc
from agent_shim.supervisor import event_kinds, network_checks
from agent_shim.supervisor.monit.ast import CHANGES, Changed, Connection, Echo, Rule
from agent_shim.supervisor.path_checks import Numbered, PathWatch
from agent_shim.supervisor.plan import ProcessSpec, reaction
from agent_shim.supervisor.process_record import Identity
from agent_shim.supervisor.rule_counter import Finding, RuleCounter, RuleTransition, judge, percent
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.state import MONITORED, UP, State

logger = logging.getLogger(__name__)

STEPS: Final = 10
"""Parts of a cycle: services due in the same part are checked together."""
PATH_TIMEOUT_S: Final = 60.0
"""Timeout of reading a path; a hanging one keeps its thread, and no other is started for it."""
REMEMBERED: Final = MONITORED | {State.BOUNCING}
"""States that keep the counts and last values of a check."""


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
        self._parent: int | None = None
        self._machine: host_stats.CpuTimes | None = None
        self.path = PathWatch(self.spec, self.spec.path) if self.spec.path is not None else None

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

    def has_new_parent(self, parent: int) -> bool:
        before, self._parent = self._parent, parent
        return before not in (None, parent)

    def machine(self) -> dict[str, float]:
        """Return the figures of the container, or of the machine where no limit is lower. Blocks for a millisecond."""
        figures: dict[str, float] = dict(zip(("loadavg1", "loadavg5", "loadavg15"), os.getloadavg(), strict=True))
        host = host_stats.memory()
        memory = cgroups.memory(cgroups.find(), host) or host
        figures |= {"memory": memory.used, "memory %": percent(memory.used, memory.total)}
        figures |= {"swap": memory.swap_used, "swap %": percent(memory.swap_used, memory.swap_total)}
        before, self._machine = self._machine, (now := host_stats.cpu_times())
        if before is not None:
            whole = now.total - before.total
            figures["cpu user %"] = percent(now.user - before.user, whole)
            figures["cpu system %"] = percent(now.system - before.system, whole)
            figures["cpu wait %"] = percent(now.wait - before.wait, whole)
        return figures


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
        kept = {each.name for each in self._services() if each.state in REMEMBERED}
        self._watches = {name: watch for name, watch in self._watches.items() if name in kept}
        self._watches |= {service.name: watch for service, watch in watched}
        due = [(service, watch) for service, watch in watched if watch.is_due(self._period)]
        if not due:
            return
        table = await asyncio.to_thread(_Table) if any(service.spec.is_process for service, _ in due) else None
        for service, watch in due:
            self._look_at(service, watch, table)

    def _watch(self, service: Service) -> _Watch:
        """Return the watch of a service; that of a process begins a cycle after its start, as monit sleeps then."""
        watch = self._watches.get(service.name)
        if watch is None or not watch.is_of(service):
            watch = _Watch(service, service.up_at + self._period if service.spec.is_process else time.monotonic())
        return watch

    # --- checks -------------------------------------------------------------------------------------------------------

    def _look_at(self, service: Service, watch: _Watch, table: _Table | None) -> None:
        spec = watch.spec
        if spec.kind == "host":
            self._run_aside(service, watch, "host", self._ask_host(service, watch))
        elif watch.path is not None:
            self._run_aside(service, watch, "path", _look_at_path(spec, watch.path))
        elif spec.kind == "system":
            self._run_aside(service, watch, "system", _look_at_machine(watch))
        elif table is not None:
            self._connect(service, watch)
            findings = list(judge(spec.rules, self._figures(watch, table)))
            findings += self._parent(watch, table)
            if findings:
                self._spawn(self._conclude(service, watch, findings))

    def _connect(self, service: Service, watch: _Watch) -> None:
        for number, rule in enumerate(watch.spec.rules):
            if isinstance(rule.test, Connection):
                self._run_aside(service, watch, number, _ask(service, rule.test, number))

    async def _ask_host(self, service: Service, watch: _Watch) -> list[Numbered]:
        """Send echo requests, then test the ports, unless the host is silent."""
        rules = list(enumerate(watch.spec.rules))
        echoes = [_echo(service, rule.test, number) for number, rule in rules if isinstance(rule.test, Echo)]
        findings = [each for found in await asyncio.gather(*echoes) for each in found]
        if not any(finding.fails for _, finding in findings):
            asked = [_ask(service, rule.test, number) for number, rule in rules if isinstance(rule.test, Connection)]
            findings += [each for found in await asyncio.gather(*asked) for each in found]
        return findings

    def _parent(self, watch: _Watch, table: _Table) -> list[Numbered]:
        root = table.processes.get(watch.identity[0])
        rules = [number for number, rule in enumerate(watch.spec.rules) if rule.test == Changed("ppid")]
        if root is None or not rules:
            return []
        text = f"the parent of process {root.pid} is {root.parent}"
        is_new = watch.has_new_parent(root.parent)
        return [(number, Finding(is_new, text)) for number in rules]

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
            **dict(zip(("loadavg1", "loadavg5", "loadavg15"), os.getloadavg(), strict=True)),
        }
        if (cpu := watch.cpu(tree, table.at)) is not None:
            figures |= {"cpu %": cpu[0], "totalcpu %": cpu[1]}
        return figures

    def _run_aside(
        self, service: Service, watch: _Watch, key: object, look: Coroutine[Any, Any, Iterable[Numbered]]
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

    async def _conclude(self, service: Service, watch: _Watch, findings: Iterable[Numbered]) -> None:
        for number, finding in findings:
            if service.state not in UP or not watch.is_of(service):
                return
            rule = watch.spec.rules[number]
            tally = watch.tallies[number]
            turn = tally.add(fails=finding.fails)
            if not finding.fails and not tally.has_failed:
                service.complaints.pop(number, None)
            await self._follow(service, number, rule, turn, finding)
        service.is_checked = True

    async def _follow(self, service: Service, number: int, rule: Rule, turn: RuleTransition, finding: Finding) -> None:
        kind, is_change = event_kinds.kind_of(rule.test), isinstance(rule.test, CHANGES)
        if turn in (RuleTransition.FAILED, RuleTransition.STILL):
            complaint = event_kinds.Complaint(kind, finding.text, is_change)
            service.complaints[number] = complaint
            if turn is RuleTransition.FAILED:
                service.notify(complaint.word, rule.action.kind, finding.text)
            await service.react(reaction(rule.action), complaint.word, finding.text)
        elif turn is RuleTransition.RECOVERED and rule.recovery.kind != "ignore":
            service.notify(kind.succeeded, rule.recovery.kind, finding.text)
            await service.react(reaction(rule.recovery), kind.succeeded, finding.text)


async def _ask(service: Service, test: Connection, number: int) -> list[Numbered]:
    begun_at = time.monotonic()
    why = await network_checks.probe(test)
    service.responses[number] = -1.0 if why else time.monotonic() - begun_at
    return [(number, Finding(bool(why), why or f"connection succeeded to {network_checks.where(test)}"))]


async def _echo(service: Service, test: Echo, number: int) -> list[Numbered]:
    """Return no finding where this container may send no echo requests, as monit does."""
    begun_at, address = time.monotonic(), service.spec.address
    why = await network_checks.echo(address, test)
    if why is None:
        return []
    service.responses[number] = -1.0 if why else time.monotonic() - begun_at
    return [(number, Finding(bool(why), why or f"{address} answers echo requests"))]


async def _look_at_path(spec: ProcessSpec, watch: PathWatch) -> list[Numbered]:
    try:
        return await guarded.aside(f"check {spec.name}", watch.look, timeout=PATH_TIMEOUT_S)
    except OSError as exc:
        logger.info("cannot check %s: %s", spec.name, exc)
        return []


async def _look_at_machine(watch: _Watch) -> list[Numbered]:
    try:
        return list(judge(watch.spec.rules, await asyncio.to_thread(watch.machine)))
    except (OSError, ValueError) as exc:
        logger.info("cannot check %s: %s", watch.spec.name, exc)
        return []


def _identity(service: Service) -> Identity:
    """Return the process identity, or (0, 0) without a process."""
    return service.process.identity if service.process is not None else (0, 0)
