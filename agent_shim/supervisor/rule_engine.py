"""Evaluates services' rules: tests them once per cycle, counts the results and carries out the actions.

As in monit, the cycles of a process are counted from its start, and the cycles of other checks begin immediately. A new
process is ``running`` once its ports answer, so its ports are tested up to ``STEPS`` times before its first cycle.
Services due at about the same time share one pass over ``/proc``. Each slow test (a connection, a path) runs in a
separate task, so a test that hangs does not delay others. The same test never runs twice at the same time.
``rule_counter`` counts failures. docs/monit-deviations.md lists differences from monit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final, NoReturn, TypeAlias

from agent_shim.host import blocking, cgroups, clock, host_stats, proc
from agent_shim.supervisor import event_kinds, network_checks
from agent_shim.supervisor.monit.ast import CHANGES, Changed, Connection, Echo
from agent_shim.supervisor.ownership.process_record import Identity
from agent_shim.supervisor.path_checks import Numbered, PathWatch
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.rule_counter import CheckResult, Cycles, RuleCounter, RuleTransition, judge, percent
from agent_shim.supervisor.service import Service
from agent_shim.supervisor.state import MONITORED, UP, State

logger = logging.getLogger(__name__)

STEPS: Final = 10
"""Number of parts of a cycle. Services that are due in the same part are checked together."""
PASS_SHARE: Final = 0.05
"""Maximum share of one CPU that reading all processes may use. The share is limited because a job can have thousands of
processes.
"""
LOOK_TIMEOUT_S: Final = 60.0
"""Timeout for a test in a thread. If the test hangs, for example because a file server does not answer, its thread
keeps running, and no other thread is started for that path.
"""
ANSWERS: Final = "answers"
"""Key under which the port tests before the first cycle are run."""
REMEMBERED: Final = MONITORED | {State.BOUNCING}
"""States in which the counts and last values of a check are kept."""

Look: TypeAlias = Callable[[], Awaitable[Iterable[Numbered]]]
"""A function that tests some rules of a service once."""


class _CycleProcesses:
    """All processes at the start of a cycle."""

    def __init__(self) -> None:
        self.at, begun = time.monotonic(), time.thread_time()
        self.processes = proc.table()
        self._children = proc.children(self.processes)
        self.cost = time.thread_time() - begun
        """CPU seconds spent on reading all processes."""

    def tree(self, root: int) -> list[proc.Stat]:
        """Return a process and all its descendants, starting with the process itself."""
        descendants = proc.descent(self._children, [root]) - {root}
        return [self.processes[root], *(self.processes[pid] for pid in descendants)]


class _ServiceChecks:
    """The state of a service's tests, which is valid for one process and one set of rules."""

    def __init__(self, service: Service, period: float) -> None:
        """Begin to count cycles. For a process, the first cycle begins one period after its start, because monit sleeps
        after a start.
        """
        self.spec: ProcessSpec = service.spec
        self.identity = _identity(service)
        first_at = service.up_at + period if self.spec.is_process else time.monotonic()
        self.cycles = Cycles(first_at, period, self.spec.every)
        self.counters = [RuleCounter(rule) for rule in self.spec.rules]
        self.busy: set[object] = set()
        """Keys of the tests in progress."""
        self.path = PathWatch(self.spec, self.spec.path) if self.spec.path is not None else None
        self._ticks: dict[Identity, int] = {}
        """CPU ticks of each process in the tree at the last check, which was at ``_read_at``."""
        self._read_at = 0.0
        self._parent: int | None = None
        """Pid of the process's parent at the last check, or None before the first check."""
        self._machine: host_stats.CpuTimes | None = None
        """The machine's CPU times at the last check, or None before the first check."""

    def is_of(self, service: Service) -> bool:
        """Return True if the service still has the same process and rules. If not, this object must be replaced."""
        return self.spec is service.spec and self.identity == _identity(service)

    async def check_process(self, table: _CycleProcesses, memory_total: int) -> list[Numbered]:
        """Compare the figures of the process and its process tree with the limits in the rules, and check whether the
        parent has changed. Return an empty list if the process has just exited.
        """
        pid, start = self.identity
        root = table.processes.get(pid)
        if root is None or root.start_ticks != start:
            return []
        tree = table.tree(pid)
        own, total = root.resident_kb * 1024, sum(stat.resident_kb for stat in tree) * 1024
        figures: dict[str, float] = {
            "memory": own,
            "totalmemory": total,
            "memory %": percent(own, memory_total),
            "totalmemory %": percent(total, memory_total),
            "children": len(tree) - 1,
            **_load(),
        }
        before, seconds = self._ticks, table.at - self._read_at
        self._ticks, self._read_at = {stat.identity: stat.cpu_ticks for stat in tree}, table.at
        if root.identity in before:  # the first check of a process cannot calculate its CPU usage
            used = [stat.cpu_ticks - before.get(stat.identity, 0) for stat in tree]
            whole = seconds * clock.TICKS * (os.cpu_count() or 1)
            figures |= {"cpu %": percent(used[0], whole), "totalcpu %": percent(sum(used), whole)}
        former, self._parent = self._parent, root.parent
        changed = CheckResult(former not in (None, root.parent), f"the parent of process {pid} is {root.parent}")
        parent_rules = [number for number, rule in enumerate(self.spec.rules) if rule.test == Changed("ppid")]
        return [*judge(self.spec.rules, figures), *((number, changed) for number in parent_rules)]

    def check_machine(self) -> list[Numbered]:
        """Compare load, memory, swap and CPU figures with the limits in the rules. Memory and swap are the container's,
        or the machine's if the container has no lower limit. Blocks for a millisecond.
        """
        host = host_stats.memory()
        memory = cgroups.memory(cgroups.find(), host) or host
        figures = _load() | {"memory": memory.used, "memory %": percent(memory.used, memory.total)}
        figures |= {"swap": memory.swap_used, "swap %": percent(memory.swap_used, memory.swap_total)}
        before, self._machine = self._machine, (now := host_stats.cpu_times())
        if before is not None:
            whole = now.total - before.total
            figures["cpu user %"] = percent(now.user - before.user, whole)
            figures["cpu system %"] = percent(now.system - before.system, whole)
            figures["cpu wait %"] = percent(now.wait - before.wait, whole)
        return list(judge(self.spec.rules, figures))


class RuleEngine:
    """Evaluates all services' rules. ``run`` never returns."""

    def __init__(self, services: Callable[[], Iterable[Service]], memory_total: Callable[[], int], period: float):
        """Create the engine. ``memory_total`` returns the number of bytes that counts as 100% of memory. ``period`` is
        the length of a cycle in seconds.
        """
        self._services = services
        self._memory_total = memory_total
        self._period = period
        self._watches: dict[str, _ServiceChecks] = {}
        self.plan_changed = asyncio.Event()
        """Set whenever the services change. This wakes the engine, which sleeps while there are no rules."""

    async def run(self) -> NoReturn:
        """Start due tests, checking for them ``STEPS`` times per cycle. Sleep if there are no rules. Never returns."""
        due, cost = time.monotonic(), 0.0
        async with asyncio.TaskGroup() as checks:
            while True:
                while not any(each.spec.rules for each in self._services()):
                    self.plan_changed.clear()
                    await self.plan_changed.wait()
                # Wait longer after an expensive pass over /proc, so that passes use only ``PASS_SHARE`` of a CPU.
                due = max(due + self._period / STEPS, time.monotonic() + cost / PASS_SHARE)
                await asyncio.sleep(due - time.monotonic())
                cost = await self._step(checks)

    async def _step(self, checks: asyncio.TaskGroup) -> float:
        """Begin the tests that are due, and test the ports of processes that have just been started. Return the CPU
        seconds spent on reading all processes.
        """
        services = [each for each in self._services() if each.spec.rules]
        # Keep the counts of services that are being restarted, and drop those of stopped services.
        before = self._watches
        kept = [each.name for each in services if each.state in REMEMBERED and each.name in before]
        self._watches = {name: before[name] for name in kept}
        due = []
        for service in services:
            if service.state in UP:
                watch = before.get(service.name)
                if watch is None or not watch.is_of(service):
                    watch = _ServiceChecks(service, self._period)
                self._watches[service.name] = watch
                if watch.cycles.is_due(time.monotonic()):
                    due.append((service, watch))
                elif service.awaits_answers and ANSWERS not in watch.busy:
                    checks.create_task(_await_answers(service, watch), name="check")
        table = await asyncio.to_thread(_CycleProcesses) if any(service.spec.is_process for service, _ in due) else None
        for service, watch in due:
            for key, look in self._looks(service, watch, table):
                if key not in watch.busy:  # the previous test may still be running
                    checks.create_task(_check(service, watch, key, look), name="check")
        return table.cost if table is not None else 0.0

    def _looks(
        self, service: Service, watch: _ServiceChecks, table: _CycleProcesses | None
    ) -> Iterator[tuple[object, Look]]:
        """Yield a service's tests. Each has a key, and tests with the same key never overlap. ``table`` is None only if
        no service with a process is due in this step.
        """
        spec = watch.spec
        if spec.kind == "host":
            yield "host", partial(_ask_host, service, spec)
        elif watch.path is not None:
            yield "path", partial(_look_in_thread, spec.name, watch.path.look)
        elif spec.kind == "system":
            yield "system", partial(_look_in_thread, spec.name, watch.check_machine)
        elif table is not None:
            for number, rule in enumerate(spec.rules):
                if isinstance(rule.test, Connection):
                    yield number, partial(_ask, service, rule.test, number)
            # Yield this test last, because it finishes without waiting. Otherwise, ``_check`` would set ``is_checked``
            # before the connection tests have begun.
            yield "process", partial(watch.check_process, table, self._memory_total())


async def _check(service: Service, watch: _ServiceChecks, key: object, look: Look) -> None:
    """Run one test of a service, count its results, and carry out the actions of rules that fail or recover."""
    watch.busy.add(key)
    try:
        findings = await look()
    finally:
        watch.busy.discard(key)
    for number, finding in findings:
        if service.state not in UP or not watch.is_of(service):  # an action has changed the service
            return
        rule, counter = watch.spec.rules[number], watch.counters[number]
        turn = counter.add(fails=finding.fails)
        if not finding.fails and not counter.has_failed:
            service.complaints.pop(number, None)
        kind = event_kinds.kind_of(rule.test)
        if turn in (RuleTransition.FAILED, RuleTransition.STILL):
            complaint = event_kinds.Complaint(kind, finding.text, isinstance(rule.test, CHANGES))
            service.complaints[number] = complaint
            if turn is RuleTransition.FAILED:
                service.notify(complaint.word, rule.action.kind, finding.text)
            await service.react(rule.action, complaint.word, finding.text)
        elif turn is RuleTransition.RECOVERED and rule.recovery.kind != "ignore":
            service.notify(kind.succeeded, rule.recovery.kind, finding.text)
            await service.react(rule.recovery, kind.succeeded, finding.text)
    if not watch.busy - {ANSWERS}:  # this was the last of the tests that began together
        service.is_checked = True


async def _await_answers(service: Service, watch: _ServiceChecks) -> None:
    """Test a new process's ports. If all of them answer, the process counts as running. The rules do not count these
    results.
    """
    watch.busy.add(ANSWERS)
    try:
        tests = [rule.test for rule in watch.spec.rules if isinstance(rule.test, Connection)]
        whys = await asyncio.gather(*map(network_checks.probe, tests))
    finally:
        watch.busy.discard(ANSWERS)
    if watch.is_of(service) and not any(whys):
        service.is_checked = True


async def _ask_host(service: Service, spec: ProcessSpec) -> list[Numbered]:
    """Send echo requests and, unless one of them fails, test the ports. Return the results."""
    rules = list(enumerate(spec.rules))
    echoes = [_echo(service, rule.test, number) for number, rule in rules if isinstance(rule.test, Echo)]
    findings = [each for found in await asyncio.gather(*echoes) for each in found]
    if not any(finding.fails for _, finding in findings):
        asked = [_ask(service, rule.test, number) for number, rule in rules if isinstance(rule.test, Connection)]
        findings += [each for found in await asyncio.gather(*asked) for each in found]
    return findings


async def _ask(service: Service, test: Connection, number: int) -> list[Numbered]:
    """Test a connection, record the response time (-1 for a failure), and return the result for the rule ``number``."""
    begun_at = time.monotonic()
    why = await network_checks.probe(test)
    service.responses[number] = -1.0 if why else time.monotonic() - begun_at
    return [(number, CheckResult(bool(why), why or f"connection succeeded to {network_checks.where(test)}"))]


async def _echo(service: Service, test: Echo, number: int) -> list[Numbered]:
    """Send echo requests, and return the result for the rule ``number``. As in monit, there is no result if this
    container is not allowed to send such requests.
    """
    begun_at, address = time.monotonic(), service.spec.address
    why = await network_checks.echo(address, test)
    if why is None:
        return []
    service.responses[number] = -1.0 if why else time.monotonic() - begun_at
    return [(number, CheckResult(bool(why), why or f"{address} answers echo requests"))]


async def _look_in_thread(name: str, look: Callable[[], Iterable[Numbered]]) -> Iterable[Numbered]:
    """Run a blocking test. Return no results if the test fails or times out."""
    try:
        return await blocking.call(f"check {name}", look, timeout=LOOK_TIMEOUT_S)
    except (OSError, ValueError) as exc:
        logger.info("cannot check %s: %s", name, exc)
        return []


def _load() -> dict[str, float]:
    """Return the load averages of the last 1, 5 and 15 minutes, by metric."""
    return dict(zip(("loadavg1", "loadavg5", "loadavg15"), os.getloadavg(), strict=True))


def _identity(service: Service) -> Identity:
    """Return the identity of the service's process, or (0, 0) if there is none."""
    return service.process.identity if service.process is not None else (0, 0)
