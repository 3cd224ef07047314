"""Determines how a process is related to a service whose pidfile or pattern refers to it.

monit trusts a pidfile if it contains the pid of any living process. Here, the keeper above the process determines which
service it belongs to. If there is no such keeper, a pidfile counts only if it was written after the process had
started.
"""

from __future__ import annotations

import enum
import os
from typing import Final

from agent_shim.host import clock, proc, process
from agent_shim.supervisor.ownership.keepers import Keepers, is_rule_label, script_label
from agent_shim.supervisor.ownership.process_record import Pidfile, ProcessRecord
from agent_shim.supervisor.plan import ProcessSpec

PROGRAMS: Final = ("packages/", "jobs/", "data/packages/", "data/jobs/")
"""Directories below the base that contain job programs. Only root can write to them."""
TOLERANCE_S: Final = 0.1
"""Tolerance for comparing a file's modification time with a process's start time, which come from different clocks."""


class Tie(enum.Enum):
    """The relation between a process and a service whose pidfile or pattern refers to the process."""

    OWNED = "owned"
    """The process is under one of the service's keepers, or was taken over from an agent without keepers."""
    SHARED = "shared"
    """The process was started by a script in the service's job or by a rule in any job. Such scripts and rules may also
    have started other services' processes, so a stop terminates only this process and its descendants.
    """
    NAMED = "named"
    """The process is not under a keeper, but it runs a job's program that was started by hand or by another program. It
    is watched but never signalled.
    """
    NONE = "none"


def tie(
    keepers: Keepers, found: proc.Stat, spec: ProcessSpec, record: ProcessRecord, pidfile: Pidfile
) -> tuple[Tie, str]:
    """Return the relation between a process and the service whose pidfile names it. The second value is the reason for
    ``Tie.NONE``, otherwise "". Blocks for a moment.
    """
    if found.identity == record.known:
        return (Tie.NAMED if record.is_only_named else Tie.OWNED), ""
    is_fresh = record.is_fresh(pidfile)
    is_process_older = was_written_after(pidfile, found)
    # True if the pidfile's owner could also signal the process without the agent's help.
    is_allowed = pidfile.owner in (0, os.geteuid(), proc.user(found.pid))
    # If the pidfile already named the previous process, or is older than the start program, the pid in it has been
    # reused.
    if pidfile == record.named_by or (found.identity == record.program and not is_fresh):
        return Tie.NONE, "its pidfile is older than the process"
    if found.pid == 1:  # a job that has no process may write 1 to its pidfile
        return (Tie.NAMED, "") if is_fresh else (Tie.NONE, "it is PID 1")
    if found.pid in keepers.pids or process.is_spawned(found.identity):
        return Tie.NONE, "it belongs to the agent"
    owner = keepers.owner(found.identity)
    if owner in spec.labels or found.identity in record.others:
        return Tie.OWNED, ""
    # These scripts belong to the service's own job. A rule may belong to another job, so also check the pidfile's owner
    # and age.
    if owner == script_label(spec.job) or (is_rule_label(owner) and is_allowed and is_process_older):
        return Tie.SHARED, ""
    if owner:
        return Tie.NONE, f"it belongs to {owner}"
    if not is_process_older:
        return Tie.NONE, "its pidfile is older than the process"
    if proc.executable(found.pid).startswith(tuple(f"{keepers.base}/{name}" for name in PROGRAMS)):
        return Tie.NAMED, ""
    if is_allowed and f"{keepers.base}/" in proc.command_line(found.pid):
        return Tie.NAMED, ""
    return Tie.NONE, "it was not started by this agent, and nothing shows that it belongs to the job"


def was_written_after(pidfile: Pidfile, found: proc.Stat) -> bool:
    """Return True if the pidfile was written after the process started. Only then can it refer to this process."""
    return pidfile.modified + TOLERANCE_S > clock.wall_time_of(found.start_ticks)


def match(keepers: Keepers, spec: ProcessSpec, record: ProcessRecord) -> tuple[proc.Stat, Tie] | None:
    """Find the process whose command line matches the pattern. If several match, prefer the known one, then the oldest.
    Blocks.

    Any process qualifies unless it belongs to another service, because monit files use patterns for processes that
    monit did not start. The start program itself is chosen only if no other process matches.
    """
    assert spec.pattern is not None
    processes = proc.table()
    excluded = {1, os.getpid(), *keepers.pids}
    living = [pid for pid, candidate in processes.items() if candidate.is_alive and pid not in excluded]
    fitting = [pid for pid, line in proc.command_lines(living).items() if spec.pattern.search(line)]
    found: list[tuple[proc.Stat, Tie]] = []
    for candidate in (processes[pid] for pid in fitting):
        owner = keepers.owner(candidate.identity)
        if owner in spec.labels or candidate.identity in record.others:
            found.append((candidate, Tie.OWNED))
        elif owner == script_label(spec.job) or is_rule_label(owner):
            found.append((candidate, Tie.SHARED))
        elif not owner:
            found.append((candidate, Tie.OWNED if _is_known_as_own(candidate, record) else Tie.NAMED))
    ranks = {record.known: 0, record.program: 2}  # all other processes have rank 1
    return min(found, key=lambda entry: (ranks.get(entry[0].identity, 1), entry[0].start_ticks), default=None)


def _is_known_as_own(found: proc.Stat, record: ProcessRecord) -> bool:
    """Return True if ``found`` is the process in ``record``, unless only a pidfile or pattern relates that process to
    the service.
    """
    return found.identity == record.known and not record.is_only_named
