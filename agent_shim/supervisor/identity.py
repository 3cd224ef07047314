"""Whose a process is.

monit believes any number in a pidfile that some process has. Numbers are used again, in a container very soon, so here
a process belongs to a service only for a reason: it carries our mark, it was known before, it descends from the start
program or shares its session, or it came after our start into a pidfile written since. What has no such reason is
neither taken for the service nor signalled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from agent_shim.host import clock, proc

MARK: Final = "AGENT_SHIM_SERVICE"
"""The one variable that start and stop programs get beyond what monit gives them."""
MONIT_MARK: Final = "MONIT_SERVICE"
"""What monit itself gives them: by it the processes of a machine that monit ran until now are known."""
MAX_SESSIONS: Final = 8
"""Start programs that are remembered; what an older one left has been swept or carries the mark."""

Identity: TypeAlias = tuple[int, int]
"""Number and start ticks."""


def mark(name: str, base: Path) -> str:
    """The value of ``MARK``: another agent on the machine may have a service of the same name."""
    return f"{name}@{base}"


class Pidfile(NamedTuple):
    """What a pidfile said, and what tells that it was written again."""

    pid: int
    modified: float
    """Seconds since 1970."""
    inode: int


def read(path: Path) -> Pidfile | None:
    """Read a pidfile as monit does: a regular file that begins with a number above 0; None otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 64)
        status = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    number = re.match(rb"\s*(\d{1,10})(?!\d)", text)
    if number is None or int(number[1]) == 0:
        return None
    return Pidfile(int(number[1]), status.st_mtime_ns / 1e9, status.st_ino)


class Traces(msgspec.Struct):
    """What is remembered of a service's processes; outlives the agent in its saved state."""

    known: Identity | None = None
    """The process it stands for, or stood for last."""
    program: Identity | None = None
    """The start program, while it runs and after."""
    sessions: list[Identity] = []
    """Leaders of the sessions that start programs ran in: a session keeps the number of its leader."""
    pidfile: Pidfile | None = None
    """The pidfile as it was before the last start."""

    def begin(self, program: Identity, pidfile: Pidfile | None) -> None:
        """A start program runs; ``pidfile`` is what was there before it."""
        self.program = program
        self.pidfile = pidfile
        self.sessions = [*self.sessions, program][-MAX_SESSIONS:]

    def is_fresh(self, pidfile: Pidfile) -> bool:
        """Whether it was written since the last start began."""
        return self.program is not None and pidfile != self.pidfile

    def own(self, process: proc.Stat, name: str, base: Path, pidfile: Pidfile | None) -> bool:
        """Whether a process that ``pidfile`` (or a pattern: None) names belongs to service ``name``."""
        if not process.is_alive or process.pid in (1, os.getpid()):
            return False
        if process.identity in (self.known, self.program):
            return True
        if (found := proc.variable(process.pid, MARK)) is not None:
            return found == mark(name, base)
        if (found := proc.variable(process.pid, MONIT_MARK)) is not None:
            return found == name
        # It may have wiped its environment, or we may not read it (another user's, without CAP_SYS_PTRACE).
        if self._shares_session(process, proc.stat(process.session)) or self._descends(process):
            return True
        if pidfile is None:
            return False
        if self.program is not None and self.is_fresh(pidfile) and process.start_ticks >= self.program[1]:
            return True
        # Started by hand: it lived when the pidfile was written, so it is the one that was meant, unless the number is
        # from another pid namespace; therefore it must also look like a program of a job.
        return pidfile.modified + 0.1 > clock.wall_time_of(process.start_ticks) and f"{base}/" in proc.command_line(
            process.pid
        )

    def members(self, census: proc.Census, name: str, base: Path, known: Iterable[Identity]) -> list[Identity]:
        """Everything alive that belongs to the service: by mark, session, descent from it or from ``known``."""
        processes = census.processes
        marked = set(census.marked.get(mark(name, base), ()))
        others = set().union(*census.marked.values()) - marked
        found = {p.pid for p in processes.values() if self._shares_session(p, processes.get(p.session))} - others
        for pid, start in filter(None, (self.known, self.program, *known)):
            if pid in processes and processes[pid].start_ticks == start:
                found.add(pid)
        found = proc.descent(census.children, marked | found) - {1, os.getpid()}
        return [processes[pid].identity for pid in found if processes[pid].is_alive]

    def _shares_session(self, process: proc.Stat, leader: proc.Stat | None) -> bool:
        """``leader`` is who has the number of the session now: if it is not the one we started, the number is used
        again."""
        return any(
            process.session == pid and process.start_ticks >= start and (leader is None or leader.start_ticks == start)
            for pid, start in self.sessions
        )

    def _descends(self, process: proc.Stat) -> bool:
        above: proc.Stat | None = process
        for _ in range(32):
            if above is None or above.parent <= 1:
                return False
            if above.parent == (self.program or (0, 0))[0]:
                return above.start_ticks >= (self.program or (0, 0))[1]
            above = proc.stat(above.parent)
        return False


def match(pattern: re.Pattern[str], traces: Traces, name: str, base: Path) -> proc.Stat | None:
    """The process whose command line ``pattern`` fits and that may be the service's: the known one, else the oldest.

    Any process may be: a pattern is how monit finds what others start. A start program that still runs as a script is
    only taken when nothing else fits.
    """
    found = []
    for process in proc.table().values():
        if process.is_alive and process.pid not in (1, os.getpid()) and pattern.search(proc.command_line(process.pid)):
            marked = proc.variable(process.pid, MARK)
            if marked is None or marked == mark(name, base):
                found.append(process)
    order = {traces.known: 0, traces.program: 2}
    return min(found, key=lambda process: (order.get(process.identity, 1), process.start_ticks), default=None)
