"""Process ownership: the evidence that a process belongs to a service (``Evidence``).

monit believes any number of a living process in a pidfile. A job can write any number there, carry any environment, and
leave its session and its parents by forking twice. It cannot leave the cgroup of its start program or enter a foreign
session, and it descends from the agent while that adopts orphans (``host.reaper``). So ``kinship`` attributes processes
by proof: cgroup, known identity, session, descent. For a process that a pidfile names, weaker evidence counts where
there is no proof, and never against it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pwd
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from agent_shim.host import clock, job_cgroups, proc, process
from agent_shim.supervisor.ownership.process_record import (
    MARK,
    MONIT_MARK,
    Identity,
    Pidfile,
    ProcessRecord,
    is_rule_label,
    is_script_label,
    mark,
    script_label,
)
from agent_shim.supervisor.posix_regex import Pattern

MAX_ANCESTORS: Final = 64
GATHER_ROUNDS: Final = 8
"""Looks for processes outside a cgroup that they should enter: each may have forked before it did."""
PROGRAMS: Final = ("packages/", "jobs/", "data/packages/", "data/jobs/")
"""Directories below the base with the programs of jobs. Only root can write to them."""

Records: TypeAlias = Iterable[tuple[str, ProcessRecord]]
"""The label and the process record of each service."""


class Tie(enum.Enum):
    """Relation of a process to a service that names it."""

    OWNED = "owned"
    SHARED = "shared"
    """Owned, started by a script or a rule: other services may be in its session."""
    NAMED = "named"
    """Watched although started by hand or by another program. Never signalled."""
    NONE = "none"


class Row(NamedTuple):
    """A row of the table of evidence."""

    fact: str
    """About the process that the pidfile names."""
    kept_by: str
    tie: Tie
    why: str = ""
    """Why it does not count. ``{}`` stands for the owner."""


class Evidence(enum.Enum):
    """Evidence about a process that a pidfile names. The first that there is decides."""

    STALE = Row(
        "the pidfile has not changed since the process that it named ended, or since the start program",
        "agent: inode and time of the pidfile",
        Tie.NONE,
        "its pidfile is older than the process",
    )
    INIT = Row(
        "is process 1, in a pidfile written since the start program: the job has no process of its own",
        "agent: inode and time of the pidfile",
        Tie.NAMED,
    )
    CGROUP = Row("is in the cgroup of the service", "kernel; only root leaves a cgroup", Tie.OWNED)
    HISTORY = Row(
        "is known by pid and start time, is in a session of the service that existed throughout, or descends from such "
        "a process",
        "agent and kernel: a session cannot be entered, orphans come to the agent",
        Tie.OWNED,
    )
    SCRIPTS = Row(
        "the same for the scripts of its job (pre-start, post-start, drain, errands)",
        "agent and kernel",
        Tie.SHARED,
    )
    RULES = Row(
        "the same for a program that a rule of any job ran (`then exec`), if a later pidfile of root or of its own "
        "user names it",
        "agent and kernel",
        Tie.SHARED,
    )
    OTHERS = Row("the same for another service or job", "agent and kernel", Tie.NONE, "it belongs to {}")
    AGENT = Row("the agent started it for itself: `sshd`, a worker", "agent", Tie.NONE, "it belongs to the agent")
    MARK = Row(
        f"carries the mark of the service or of its job's scripts, `{MARK}`, or monit's mark, `{MONIT_MARK}`; or, "
        "with such a pidfile, the mark of rules",
        "the process: it can mark itself and its descendants",
        Tie.OWNED,
    )
    ORPHAN = Row(
        "is an orphan that came to the agent, began since the start program, and a pidfile of root or of its own user "
        "names it that was written since then",
        "agent and kernel",
        Tie.OWNED,
    )
    PROGRAM = Row(
        "is older than the pidfile and executes a file in `jobs` or `packages`",
        "kernel; only root writes there",
        Tie.NAMED,
    )
    COMMAND = Row(
        "is older than the pidfile, which is of root or of its own user, and its command line names the base directory",
        "the process and the writer of the pidfile",
        Tie.NAMED,
    )
    NOTHING = Row(
        "none of these",
        "",
        Tie.NONE,
        "it was not started by this agent, and nothing shows that it belongs to the job",
    )


class Left(NamedTuple):
    """A process that survived a stop. ``pid`` 0 represents processes that exit before they can be listed."""

    pid: int
    start: int
    name: str

    @property
    def identity(self) -> Identity:
        return self.pid, self.start

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})" if self.pid else self.name


def left(identities: Iterable[Identity]) -> list[Left]:
    """Build a ``Left`` of each, with the process name from the kernel. Blocks for some 10 microseconds per process."""
    return [Left(pid, start, proc.name(pid)) for pid, start in identities]


class Unproven(enum.Enum):
    """Classification of a process without proof of ownership."""

    FOREIGN = "not of this agent"
    AGENTS = "started by the agent for itself"
    ORPHAN = "left to the agent by some job"


Verdict: TypeAlias = str | Unproven
"""The label of the owning service, or the classification without one."""


class Members(NamedTuple):
    """Living processes of a service, or of an unknown one."""

    identities: list[Identity]
    leads: list[proc.Stat]
    """The oldest of them in each session that they began, for ``ProcessRecord.widen``."""
    leaving: Collection[Identity] = ()
    """Other orphans that exit: one has lost its mark by then, and may have left a child that the pass missed."""
    unread: frozenset[int] | None = frozenset()
    """As in ``proc.Census``, without processes that are proven to be another service's or the agent's.

    A child that such a process left would be theirs too: the forks of one job keep no other job's stop from its proof.
    """


class Match(NamedTuple):
    """The process that a pattern names. ``leads`` as in ``Members``."""

    process: proc.Stat
    tie: Tie
    leads: list[proc.Stat]


class Look(proc.Census, frozen=True):
    """A census with the service of each process that is in a cgroup of one."""

    in_cgroup: Mapping[int, str]


def kinship(
    processes: Mapping[int, proc.Stat],
    records: Records,
    in_cgroup: Mapping[int, str],
    marked: Mapping[str, Collection[int]] = {},
    wanted: Iterable[int] | None = None,
) -> dict[int, Verdict]:
    """Attribute the ``wanted`` processes of a pass, by default all, and their ancestors.

    ``in_cgroup`` maps a process to the label of the service whose cgroup it is in. ``marked`` maps a label to the
    processes that carry its mark, as evidence that a session is still the same.
    """
    own_evidence = _proofs(processes, records, in_cgroup, marked)
    verdicts: dict[int, Verdict] = {}
    for pid in processes if wanted is None else wanted:
        # The nearest ancestor with evidence decides. Evidence of a service counts before evidence of its job's scripts.
        way: list[int] = []
        of_scripts: list[int] = []
        script = ""
        verdict: Verdict = Unproven.FOREIGN
        at = pid
        while at in processes and at not in way:
            found = verdicts[at] if at in verdicts else own_evidence(processes[at])
            way.append(at)
            if isinstance(found, str) and is_script_label(found):
                script, of_scripts = script or found, of_scripts or list(way)
            elif found is not None:
                verdict = found
                break
            at = processes[at].parent
        verdicts.update(dict.fromkeys(way, verdict))
        if script and isinstance(verdict, Unproven):
            verdicts.update(dict.fromkeys(of_scripts, script))
    # The agent and the init process never belong to a service.
    verdicts.update({pid: Unproven.AGENTS for pid in (1, os.getpid()) if pid in verdicts})
    return verdicts


def _proofs(
    processes: Mapping[int, proc.Stat],
    records: Records,
    in_cgroup: Mapping[int, str],
    marked: Mapping[str, Collection[int]],
) -> Callable[[proc.Stat], Verdict | None]:
    """Return the function that attributes a process by its own evidence, the strongest. Its None defers to the parent.

    The order: the cgroup of a service, its identity and sessions, the cgroup of scripts, its parent.
    """
    by_identity: dict[Identity, str] = {}
    by_session: dict[int, tuple[int, str]] = {}
    in_session: defaultdict[int, list[proc.Stat]] = defaultdict(list)
    for each in processes.values():
        in_session[each.session].append(each)
    for label, traces in records:
        for identity in (None if traces.is_only_named else traces.known, traces.program, *traces.descendants):
            if identity is not None:
                by_identity.setdefault(identity, label)
        for number, start in traces.lasting(in_session, marked.get(label, ())).items():
            by_session.setdefault(number, (start, label))

    def of(each: proc.Stat) -> Verdict | None:
        group = in_cgroup.get(each.pid, "")
        if group and not is_script_label(group):
            return group
        begun, label = by_session.get(each.session, (each.start_ticks + 1, ""))
        known = by_identity.get(each.identity) or (label if each.start_ticks >= begun else "")
        if known and not (group and is_script_label(known)):
            return known
        return group or _origin(each)

    def _origin(each: proc.Stat) -> Unproven | None:
        if process.is_spawned(each.identity):
            return Unproven.AGENTS
        if each.parent == os.getpid():
            return Unproven.ORPHAN
        above = processes.get(each.parent)
        is_root = each.parent <= 1 or above is None or above.start_ticks > each.start_ticks
        return Unproven.FOREIGN if is_root else None

    return of


def _doubtful(look: Look, verdicts: Mapping[int, Verdict], owners: Collection[Verdict]) -> frozenset[int] | None:
    """Return the unread processes of a pass whose children may be of ``owners``. None if not known."""
    if look.unread is None:
        return None
    return frozenset(pid for pid in look.unread if pid not in verdicts or verdicts[pid] in owners)


class Ownership:
    """Attributes processes to the services of one supervisor. ``records`` returns their labels and records."""

    def __init__(self, base: Path) -> None:
        self.records: Callable[[], Records] = tuple
        self._base = base

    # --- cgroups ----------------------------------------------------------------------------------------------------

    def cgroup(self, label: str) -> job_cgroups.JobCgroup:
        """Return the cgroups of a service."""
        return job_cgroups.JobCgroup(mark(label, self._base))

    def gather(self, label: str, pid: int) -> bool:
        """Move a process and its descendants into the cgroup of a service. False if some are elsewhere. Blocks."""
        cgroup = self.cgroup(label)
        with contextlib.suppress(OSError):
            for _ in range(GATHER_ROUNDS):
                tree = proc.descent(proc.children(proc.table()), [pid])
                if not (outside := [each for each in tree if self.label_of(each) != label]):
                    return True
                if not cgroup.enter(outside):
                    break
        return False

    def label_of(self, pid: int) -> str | None:
        """Return the service whose cgroup a process is in, or None."""
        name, end = job_cgroups.name_of(pid), mark("", self._base)
        return name.removesuffix(end) if name is not None and name.endswith(end) else None

    # --- all processes ----------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Take a pass. Blocks for some 30 microseconds per process."""
        end = mark("", self._base)
        in_cgroup = {pid: name.removesuffix(end) for pid, name in job_cgroups.members(end).items()}
        census = proc.census(MARK, in_cgroup)
        return Look(census.processes, census.children, census.marked, census.unread, in_cgroup)

    def _all(self, look: Look, *more: tuple[str, ProcessRecord]) -> tuple[dict[int, Verdict], dict[str, set[int]]]:
        """Attribute all processes, and map each label to those that carry its mark."""
        records = [*self.records(), *more]
        marked = {label: look.marked.get(mark(label, self._base), set()) for label, _ in records}
        return kinship(look.processes, records, look.in_cgroup, marked), marked

    def members(self, look: Look, label: str, traces: ProcessRecord, known: Iterable[Identity] = ()) -> Members:
        """Find living processes of a service: proven, marked, in ``known``, or descending from those.

        Blocks for some 7 microseconds per process of the machine, with a read of each orphan without a mark, and
        changes nothing.
        """
        processes = look.processes
        verdicts, marked = self._all(look, (label, traces), (label, ProcessRecord(descendants=list(known))))

        def is_open(pid: int) -> bool:
            return verdicts.get(pid) in (label, Unproven.FOREIGN, Unproven.ORPHAN)

        mine = {pid for pid, verdict in verdicts.items() if verdict == label}
        mine |= set(filter(is_open, proc.descent(look.children, filter(is_open, marked[label]))))
        mine -= {1, os.getpid()}
        if traces.known is not None and traces.is_only_named:
            mine.discard(traces.known[0])
        living = [processes[pid] for pid in mine if processes[pid].is_alive]
        oldest_last = sorted(living, key=lambda each: (each.start_ticks, each.pid != each.session), reverse=True)
        leads = {each.session: each for each in oldest_last if each.session not in processes or each.session in mine}
        carriers = set().union(*look.marked.values())
        unknown = [pid for pid, verdict in verdicts.items() if verdict is Unproven.ORPHAN and pid not in carriers]
        leaving = [processes[pid].identity for pid in unknown if processes[pid].is_alive and proc.is_leaving(pid)]
        unread = _doubtful(look, verdicts, (label, Unproven.FOREIGN, Unproven.ORPHAN))
        return Members([each.identity for each in living], list(leads.values()), leaving, unread)

    def strays(self, look: Look, since: int, *, of_jobs: bool = True) -> Members:
        """Find orphans of an unknown job, started since the tick ``since``. Blocks as ``members`` does.

        With ``of_jobs`` processes of users of jobs, else of root and of operators, who may have started them. A
        process with the mark of a service belongs to that service.
        """
        verdicts, marked = self._all(look)
        claimed = set().union(*(pids for label, pids in marked.items() if not is_script_label(label)))
        orphans = [
            (each.identity, proc.user(pid))
            for pid, each in look.processes.items()
            if verdicts[pid] is Unproven.ORPHAN and pid not in claimed and each.is_alive and each.start_ticks >= since
        ]
        found = [identity for identity, user in orphans if is_job_user(user) is of_jobs]
        leaving = {identity for identity in found if proc.is_leaving(identity[0])}
        gone = {pid for (pid, _), user in orphans if user is None}
        unread = _doubtful(look, verdicts, (Unproven.FOREIGN, Unproven.ORPHAN))
        if unread is not None:
            unread |= gone
        return Members([identity for identity in found if identity not in leaving], [], leaving, unread)

    # --- one process ------------------------------------------------------------------------------------------------

    def attribute(self, each: proc.Stat, ending: Collection[Verdict] = ()) -> Verdict:
        """Attribute an orphan that has exited and is not reaped yet.

        A session of a ``ending`` service was seen a moment ago, so any process that ends in it belongs to that service.
        """
        for label, traces in self.records():
            if label in ending and each.session in traces.numbers():
                return label
        return kinship(self._near(each), self.records(), {}, wanted=[each.pid]).get(each.pid, Unproven.FOREIGN)

    def verdict(self, each: proc.Stat) -> Verdict:
        """Attribute one process by proof."""
        own = self.label_of(each.pid)
        if own is not None and not is_script_label(own) and each.pid not in (1, os.getpid()):
            return own  # the strongest evidence, for which no other service is looked at
        near = self._near(each)
        in_cgroup = {pid: label for pid in near if (label := self.label_of(pid)) is not None}
        return kinship(near, self.records(), in_cgroup, wanted=[each.pid])[each.pid]

    def leads_session(self, each: proc.Stat, tie: Tie, label: str) -> bool:
        """Return True if the session of a service's process began with it or with another process of the service."""
        if tie is not Tie.OWNED and not (tie is Tie.SHARED and each.pid == each.session):
            return False
        leader = proc.stat(each.session)
        if leader is None or not leader.is_alive or leader.identity == each.identity:
            return True
        return self.verdict(leader) == label

    def tie(self, each: proc.Stat, label: str, job: str, traces: ProcessRecord, pidfile: Pidfile) -> tuple[Tie, str]:
        """Relate a process to the service of ``job`` whose ``pidfile`` names it. Explain ``Tie.NONE``. Blocks."""
        if each.identity == traces.known:
            return (Tie.NAMED if traces.is_only_named else Tie.OWNED), ""
        found, owner = self.evidence(each, label, script_label(job), traces, pidfile)
        if found in (Evidence.SCRIPTS, Evidence.RULES, Evidence.MARK):
            return (Tie.SHARED if owner != label else Tie.OWNED), ""
        return found.value.tie, found.value.why.format(owner)

    def evidence(
        self, each: proc.Stat, label: str, scripts: str, traces: ProcessRecord, pidfile: Pidfile
    ) -> tuple[Evidence, str]:
        """Return the first evidence about a process, and the label that it speaks for."""
        is_fresh = traces.is_fresh(pidfile)
        if pidfile == traces.named_by or (each.identity == traces.program and not is_fresh):
            return Evidence.STALE, ""
        if each.pid == 1:
            return (Evidence.INIT if is_fresh else Evidence.NOTHING), ""
        if self.label_of(each.pid) == label:
            return Evidence.CGROUP, label
        verdict = self.verdict(each)
        # The owner of a pidfile may only name a process that it could signal itself.
        is_allowed = pidfile.owner in (0, os.geteuid(), proc.user(each.pid))
        is_older = pidfile.modified + 0.1 > clock.wall_time_of(each.start_ticks)
        if isinstance(verdict, str):
            if is_rule_label(verdict) and is_allowed and is_older:
                return Evidence.RULES, verdict
            proofs = {label: Evidence.HISTORY, scripts: Evidence.SCRIPTS}
            return proofs.get(verdict, Evidence.OTHERS), verdict
        if process.is_spawned(each.identity):
            return Evidence.AGENT, ""
        # The mark of another is no evidence against it, because a process inherits the mark of whatever replaced it.
        carried = self._mark_of(each.pid) if verdict is not Unproven.AGENTS else ""
        if carried in (label, scripts) or (is_rule_label(carried) and is_allowed and is_older):
            return Evidence.MARK, carried
        if is_allowed and verdict is Unproven.ORPHAN and is_fresh and each.start_ticks >= traces.begun:
            return Evidence.ORPHAN, label
        return (self._written_as(each, is_allowed=is_allowed) if is_older else Evidence.NOTHING), label

    def _written_as(self, each: proc.Stat, *, is_allowed: bool) -> Evidence:
        """Return the evidence of the program and command line of a process that is older than its pidfile."""
        if proc.executable(each.pid).startswith(tuple(f"{self._base}/{name}" for name in PROGRAMS)):
            return Evidence.PROGRAM
        is_named = is_allowed and f"{self._base}/" in proc.command_line(each.pid)
        return Evidence.COMMAND if is_named else Evidence.NOTHING

    def _mark_of(self, pid: int) -> str:
        """Return the label that a process carries. "" without a mark, the mark itself if it is another agent's."""
        if marked := proc.variable(pid, MARK) or "":
            return marked.removesuffix(mark("", self._base))
        return proc.variable(pid, MONIT_MARK) or ""

    def match(self, pattern: Pattern, label: str, job: str, traces: ProcessRecord) -> Match | None:
        """Find the process whose command line matches ``pattern``: the known one, else the oldest. Blocks.

        Any process qualifies, because monit uses patterns to find processes of other origin. A start program that still
        runs as a script is the last choice.
        """
        seen = self.look()
        processes = seen.processes
        living = [pid for pid, each in processes.items() if each.is_alive and pid not in (1, os.getpid())]
        fitting = [pid for pid, line in proc.command_lines(living).items() if pattern.search(line)]
        if not fitting:
            return None
        members = self.members(seen, label, traces)
        ours = {pid for pid, _ in members.identities}
        verdicts = kinship(processes, self.records(), seen.in_cgroup, wanted=fitting)
        others = set().union(*(pids for of, pids in seen.marked.items() if not is_rule_label(of)))
        scripts = {pid for pid in fitting if _is_of_scripts(verdicts[pid], job)}
        ties = dict.fromkeys(scripts, Tie.SHARED) | dict.fromkeys(ours, Tie.OWNED)
        found = [
            Match(processes[pid], ties.get(pid, Tie.NAMED), members.leads)
            for pid in fitting
            if pid in ties or (isinstance(verdicts[pid], Unproven) and pid not in others)
        ]
        order = {traces.known: 0, traces.program: 2}
        return min(found, key=lambda one: (order.get(one.process.identity, 1), one.process.start_ticks), default=None)

    def _near(self, each: proc.Stat) -> dict[int, proc.Stat]:
        """Collect a process, its ancestors, their session leaders, and processes known to be in those sessions."""
        found = {each.pid: each}
        above: proc.Stat | None = each
        while above is not None and above.parent > 1 and above.parent not in found and len(found) < MAX_ANCESTORS:
            above = proc.stat(above.parent)
            if above is not None:
                found[above.pid] = above
        sessions = {one.session for one in found.values()}
        known = {traces.known[0] for _, traces in self.records() if traces.known and sessions & traces.numbers()}
        more = (sessions | known) - found.keys()
        return found | {pid: one for pid in more if (one := proc.stat(pid)) is not None}


def _is_of_scripts(verdict: Verdict, job: str) -> bool:
    """Return True for a process of the scripts of a job, or of any rule."""
    return isinstance(verdict, str) and (verdict == script_label(job) or is_rule_label(verdict))


def is_job_user(user: int | None) -> bool:
    """True for a user of jobs: not root and no ``bosh_`` account. Any user if the agent itself is not root."""
    if user is None:
        return False
    if user == 0 or os.geteuid() != 0:
        return os.geteuid() != 0
    try:
        return not pwd.getpwuid(user).pw_name.startswith("bosh_")
    except KeyError:
        return True
