"""Persistent record of a service's processes: numbers with start times, sessions, and pidfiles.

Process numbers are reused, in a container very soon. ``ownership`` attributes processes by these records.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from agent_shim.host import clock, guarded, proc, trusted_path
from agent_shim.host.descriptors import closing

MARK: Final = "AGENT_SHIM_SERVICE"
"""The only variable that start programs, stop programs and rules receive in addition to monit's."""
MONIT_MARK: Final = "MONIT_SERVICE"
"""monit's own variable: identifies processes that monit itself started before the agent took over."""
_SCRIPTS: Final = "scripts of job "
_RULES: Final = "rules of job "
MAX_SESSIONS: Final = 32
"""Maximum number of recorded sessions. Processes in older ones have been swept."""

Identity: TypeAlias = tuple[int, int]
"""Process number and start ticks."""


def mark(name: str, base: Path) -> str:
    """Return the value of ``MARK``, which is unique to this agent: another one may have a service of the same name."""
    return f"{name}@{base}"


def script_label(job: str) -> str:
    """Return the label of the processes that the scripts of a job (pre-start, post-start, drain …) start."""
    return f"{_SCRIPTS}{job}"


def rule_label(job: str) -> str:
    """Return the label of the processes that the rules of a job start (``then exec``)."""
    return f"{_RULES}{job}"


def is_rule_label(label: str) -> bool:
    return label.startswith(_RULES)


def is_script_label(label: str) -> bool:
    """Return True for the label of scripts or rules: a service may take over what they started."""
    return label.startswith((_SCRIPTS, _RULES))


class Pidfile(NamedTuple):
    """Content of a pidfile, and the attributes that change when it is rewritten."""

    pid: int
    modified: float
    """Seconds since 1970."""
    inode: int
    owner: int = 0
    """Uid of the owner."""


def read(path: Path | str | None) -> Pidfile | None:
    """Read a pidfile as monit does: a regular file that starts with a number above 0. None otherwise."""
    if path is None:
        return None
    try:
        return _read(path)
    except OSError:
        return None


def is_void(path: Path | str) -> bool:
    """Return True if a pidfile is missing or names no process that exists, which monit 5.2.5 takes for its absence.

    False where it cannot be read, for lack of descriptors for example.
    """
    try:
        found = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return found is None or proc.stat(found.pid) is None


def _read(path: Path | str) -> Pidfile | None:
    with closing(guarded.open_file(path)) as descriptor:
        text, status = os.read(descriptor, 64), os.fstat(descriptor)
    number = re.match(rb"\s*(\d{1,10})(?!\d)", text)
    if number is None or int(number[1]) == 0:
        return None
    return Pidfile(int(number[1]), status.st_mtime_ns / 1e9, status.st_ino, status.st_uid)


def read_own(path: Path) -> Pidfile | None:
    """Read a pidfile that the agent wrote, in a directory that only it can write. None otherwise.

    Jobs can make directories in ``sys/run``.
    """
    trusted = trusted_path.trusted_users()
    try:
        with guarded.held(path.parent) as directory:
            status = os.fstat(directory)
            found = read(Path(f"/proc/self/fd/{directory}", path.name))
    except OSError:
        return None
    is_private = status.st_uid in trusted and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found if is_private and found is not None and found.owner in trusted else None


class Session(NamedTuple):
    """Session of a start program; it has the number of its leader, ``pid``, as long as it lasts.

    The number is reused once the session is empty. A process in it that is older than the tick ``seen`` is one of the
    service, and proves that the session still is the same.
    """

    pid: int
    start: int
    seen: int = 0
    is_led: bool = True
    """The leader may still be alive."""


_SAVED_NAMES: Final = {
    "is_only_named": "is_guest",
    "is_in_cgroup": "is_caged",
    "descendants": "kin",
    "named_by": "heeded",
}
"""Names in the state of earlier agents."""


class ProcessRecord(msgspec.Struct, rename=_SAVED_NAMES):
    """Record of a service's processes. Part of the agent's saved state."""

    known: Identity | None = None
    """The service's process, while it may be alive."""
    is_only_named: bool = False
    """Only a pidfile or a pattern names ``known``: it is watched, and never signalled."""
    is_in_cgroup: bool = False
    """The start program was spawned in the cgroup of the service, so all its descendants are in it."""
    program: Identity | None = None
    """The start program, while it may be alive."""
    descendants: list[Identity] = []
    """Living descendants seen so far. They still belong to the service after the process exits."""
    sessions: list[Session] = []
    """Sessions of the last start programs."""
    begun: int = 0
    """Start tick of the last start program."""
    before: Pidfile | None = None
    """The pidfile before that start."""
    named_by: Pidfile | None = None
    """The pidfile that named ``known``."""
    shared: int = 0
    """Session of ``known`` if a script of the job began it: other services of the job may be in it."""

    def begin(self, program: Identity, pidfile: Pidfile | None) -> None:
        """Record a started start program. ``pidfile`` preceded it."""
        self.program, self.begun = program, program[1]
        self.before = pidfile
        self.sessions = [*self.sessions, Session(*program)][-MAX_SESSIONS:]

    def widen(self, process: proc.Stat) -> None:
        """Record the session that a process of the service started."""
        is_known = any(process.session == session.pid for session in self.sessions)
        if process.session not in (0, self.shared) and not is_known and len(self.sessions) < MAX_SESSIONS:
            is_led = process.pid == process.session
            self.sessions = [*self.sessions, Session(process.session, process.start_ticks, clock.boot_ticks(), is_led)]

    def numbers(self) -> set[int]:
        """Numbers of all recorded sessions, live or not."""
        return {session.pid for session in self.sessions}

    def lives(self, session: int) -> None:
        """Record that a process of the service is alive in this session now."""
        now = clock.boot_ticks()
        self.sessions = [s._replace(seen=max(s.seen, now)) if s.pid == session else s for s in self.sessions]

    def ended(self, process: Identity, session: int, seen: int) -> None:
        """Record the exit of a process of the service, alive in this session until the tick ``seen``.

        A daemon may write its pidfile before it begins its session.
        """
        if session == process[0] and session not in self.numbers() and not self.is_only_named:
            self.sessions = [*self.sessions, Session(*process)][-MAX_SESSIONS:]
        if process == self.known:
            self.known = None
        if process == self.program:
            self.program = None
        self.sessions = [
            s._replace(seen=max(s.seen, seen) if s.pid == session else s.seen, is_led=s.is_led and s[:2] != process)
            for s in self.sessions
        ]

    def record_descendants(self, processes: Iterable[Identity]) -> None:
        """Record the processes of the service now: they still belong to it after their proof has exited."""
        self.descendants = sorted(set(processes) - {self.known, self.program})

    def is_fresh(self, pidfile: Pidfile) -> bool:
        """True if the pidfile was written since the last start."""
        return self.begun > 0 and pidfile != self.before

    def lasting(self, by_session: Mapping[int, Iterable[proc.Stat]], marked: Collection[int]) -> dict[int, int]:
        """Map number to start tick of sessions that our start programs still have. ``marked`` carry our mark."""
        return {
            session.pid: session.start
            for session in self.sessions
            for process in by_session.get(session.pid, ())
            if process.start_ticks >= session.start
            and (
                process.start_ticks < session.seen
                or process.pid in marked
                or process.identity == self.known
                or (session.is_led and process.identity == session[:2])
            )
        }
