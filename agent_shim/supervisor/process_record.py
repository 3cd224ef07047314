"""What is remembered of a service's processes: numbers with start times, sessions, and what a pidfile said.

A number alone is used again, in a container very soon. ``ownership`` decides from these traces whose a process is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from agent_shim.host import clock, guarded, proc

MARK: Final = "AGENT_SHIM_SERVICE"
"""The one variable that start and stop programs get beyond what monit gives them."""
MONIT_MARK: Final = "MONIT_SERVICE"
"""What monit itself gives them: by it the processes of a machine that monit ran until now are known."""
MAX_SESSIONS: Final = 32
"""Sessions that are remembered; what was in an older one has been swept."""

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
    owner: int = 0
    """The user who owns it."""


def read(path: Path) -> Pidfile | None:
    """Read a pidfile as monit does: a regular file that begins with a number above 0; None otherwise."""
    try:
        descriptor = guarded.open_file(path)
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
    return Pidfile(int(number[1]), status.st_mtime_ns / 1e9, status.st_ino, status.st_uid)


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


class ProcessRecord(msgspec.Struct):
    """What is remembered of a service's processes; outlives the agent in its saved state."""

    known: Identity | None = None
    """The process it stands for, while it may live."""
    is_guest: bool = False
    """``known`` is only named by a pidfile or a pattern: it is watched, and never signalled."""
    is_caged: bool = False
    """The start program began in the cgroup of the service, and with it all that came of it."""
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
        self._join(Session(*program))

    def found(self, process: proc.Stat, pidfile: Pidfile | None, *, is_guest: bool, leads_session: bool) -> None:
        """The process the service stands for. ``leads_session``: its session began with it or what it descends from."""
        self.known, self.heeded, self.is_guest = process.identity, pidfile, is_guest
        if leads_session and not is_guest:
            self.widen(process)

    def widen(self, process: proc.Stat) -> None:
        """Remember the session of a process of the service that began in it."""
        if process.session not in {0, *self.numbers()} and len(self.sessions) < MAX_SESSIONS:
            is_led = process.pid == process.session
            self._join(Session(process.session, process.start_ticks, clock.boot_ticks(), is_led))

    def _join(self, session: Session) -> None:
        self.sessions = [*self.sessions, session][-MAX_SESSIONS:]

    def identities(self) -> list[Identity]:
        """The processes that are the service's because they were before."""
        known = None if self.is_guest else self.known
        return [each for each in (known, self.program, *self.kin) if each is not None]

    def numbers(self) -> set[int]:
        """Of its sessions, lasting or not."""
        return {session.pid for session in self.sessions}

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

    def see_kin(self, processes: Iterable[Identity]) -> None:
        """Remember what is of the service now: it still is when what proves it has ended."""
        self.kin = sorted(set(processes) - {self.known, self.program})

    def _saw(self, session: int, tick: int) -> None:
        self.sessions = [s._replace(seen=max(s.seen, tick)) if s.pid == session else s for s in self.sessions]

    def is_fresh(self, pidfile: Pidfile) -> bool:
        """Whether it was written since the last start began."""
        return self.begun > 0 and pidfile != self.before

    def is_used_up(self, pidfile: Pidfile, process: Identity) -> bool:
        """Whether it named a process that has ended: who has the number now is another one."""
        return pidfile == self.heeded and process != self.known

    def lasting(self, processes: Mapping[int, proc.Stat], marked: Collection[int]) -> dict[int, int]:
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
