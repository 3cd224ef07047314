"""Whose a process is.

monit believes any number in a pidfile that some process has. Numbers are used again, in a container very soon, so here
a process belongs to a service only for a reason: it carries our mark, it was known before, it descends from the start
program or shares its session, or it came after our start into a pidfile written since. What has no such reason is
neither taken for the service nor signalled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from agent_shim.host import clock, files, proc

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
        descriptor = files.open_plain(path)
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


class Session(NamedTuple):
    """A session that a start program ran in: it keeps the number of its leader, which is ``pid``, as long as it lasts.

    When it has emptied, the number is used again. Whatever has it and was there before the tick ``seen`` is of ours,
    and shows that this one has lasted until now.
    """

    pid: int
    start: int
    seen: int = 0
    is_led: bool = True
    """Whether the leader may live."""


class Traces(msgspec.Struct):
    """What is remembered of a service's processes; outlives the agent in its saved state."""

    known: Identity | None = None
    """The process it stands for, while it may live."""
    program: Identity | None = None
    """The start program, while it may live."""
    kin: list[Identity] = []
    """What was seen to descend from the process, and lives: it is still of the service when the process has ended."""
    sessions: list[Session] = []
    """Of the last start programs."""
    begun: int = 0
    """The tick at which the last of them started."""
    before: Pidfile | None = None
    """The pidfile as it was before that."""
    heeded: Pidfile | None = None
    """The pidfile by which ``known`` was found."""

    def begin(self, program: Identity, pidfile: Pidfile | None) -> None:
        """A start program runs; ``pidfile`` is what was there before it."""
        self.program, self.begun = program, program[1]
        self.before = pidfile
        self.sessions = [*self.sessions, Session(*program)][-MAX_SESSIONS:]

    def lives(self, session: int) -> None:
        """A process of ours lives in the session of this number now."""
        self._saw(session, clock.boot_ticks())

    def ended(self, process: Identity, session: int, seen: int) -> None:
        """A process of ours has ended that lived in this session until the tick ``seen``."""
        if process == self.known:
            self.known = None
        if process == self.program:
            self.program = None
        self._saw(session, seen)
        self.sessions = [s._replace(is_led=s.is_led and s[:2] != process) for s in self.sessions]

    def see_kin(self, processes: Mapping[int, proc.Stat], below: Mapping[int, list[int]]) -> None:
        """Remember what descends from the process; ``below`` is what ``proc.children`` gives of ``processes``."""
        if not self.kin and (self.known is None or self.known[0] not in below):
            return
        kin = {each for each in self.kin if each[0] in processes and processes[each[0]].identity == each}
        if self.known is not None and self.known[0] in processes and processes[self.known[0]].identity == self.known:
            kin |= {processes[pid].identity for pid in proc.descent(below, [self.known[0]])} - {self.known}
        self.kin = sorted(kin)

    def _saw(self, session: int, tick: int) -> None:
        self.sessions = [s._replace(seen=max(s.seen, tick)) if s.pid == session else s for s in self.sessions]

    def is_fresh(self, pidfile: Pidfile) -> bool:
        """Whether it was written since the last start began."""
        return self.begun > 0 and pidfile != self.before

    def is_used_up(self, pidfile: Pidfile, process: Identity) -> bool:
        """Whether it named a process that has ended: who has the number now is another one."""
        return pidfile == self.heeded and process != self.known

    def own(self, process: proc.Stat, name: str, base: Path, pidfile: Pidfile | None) -> bool:
        """Whether a process that ``pidfile`` (or a pattern: None) names belongs to service ``name``."""
        if not process.is_alive or process.pid in (1, os.getpid()):
            return False
        if process.identity == self.known:
            return True
        if pidfile is not None and self.is_used_up(pidfile, process.identity):
            return False
        if process.identity == self.program:
            # A number may be that of the process before it: the pidfile that says so is still that one's.
            return pidfile is None or self.is_fresh(pidfile)
        if (found := proc.variable(process.pid, MARK)) is not None:
            return found == mark(name, base)
        if (found := proc.variable(process.pid, MONIT_MARK)) is not None:
            return found == name
        # It may have wiped its environment, or we may not read it (another user's, without CAP_SYS_PTRACE).
        near = {each.pid: each for each in (process, proc.stat(process.session)) if each is not None}
        if process.session in self._lasting(near, ()) or self._descends(process):
            return True
        if pidfile is None:
            return False
        if self.is_fresh(pidfile) and process.start_ticks >= self.begun:
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
        sessions = self._lasting(processes, marked)
        found = {
            p.pid for p in processes.values() if p.session in sessions and p.start_ticks >= sessions[p.session]
        } - others
        kin = [each for each in self.kin if each[0] not in others]
        for pid, start in filter(None, (self.known, self.program, *kin, *known)):
            if pid in processes and processes[pid].start_ticks == start:
                found.add(pid)
        found = proc.descent(census.children, marked | found) - {1, os.getpid()}
        return [processes[pid].identity for pid in found if processes[pid].is_alive]

    def _lasting(self, processes: Mapping[int, proc.Stat], marked: Collection[int]) -> dict[int, int]:
        """Number and start of the sessions that are still those of our start programs; ``marked`` carry our mark."""
        return {
            session.pid: session.start
            for session in self.sessions
            for process in processes.values()
            if process.session == session.pid
            and process.start_ticks >= session.start
            and (
                process.start_ticks < session.seen
                or process.pid in marked
                or process.identity == self.known
                or (session.is_led and process.identity == session[:2])
            )
        }

    def _descends(self, process: proc.Stat) -> bool:
        above: proc.Stat | None = process
        for _ in range(32):
            if above is None or above.parent <= 1:
                return False
            if self.program is not None and above.parent == self.program[0]:
                return above.start_ticks >= self.program[1]
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
