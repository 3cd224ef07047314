"""Reads pidfiles, and keeps the persistent record of a service's processes. Processes are identified by pid and start
time, because pids are reused, in a container sometimes very quickly.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from agent_shim.host import guarded, proc, trusted_path
from agent_shim.host.descriptors import closing

Identity: TypeAlias = tuple[int, int]
"""Pid and start ticks."""


class Pidfile(NamedTuple):
    """The content of a pidfile, and those attributes of the file that change when it is rewritten."""

    pid: int
    modified: float
    """Modification time in seconds since 1970."""
    inode: int
    owner: int = 0
    """The owner's uid."""


def read(path: Path | str | None) -> Pidfile | None:
    """Read a pidfile as monit does. Return None unless it is a regular file that starts with a number above 0."""
    if path is None:
        return None
    try:
        return read_or_raise(path)
    except OSError:
        return None


def read_or_raise(path: Path | str) -> Pidfile | None:
    """Like ``read``, but raise ``OSError`` if the file cannot be read."""
    with closing(guarded.open_file(path)) as descriptor:
        text, status = os.read(descriptor, 64), os.fstat(descriptor)
    # A number with more than 10 digits cannot be a pid.
    number = re.match(rb"\s*(\d{1,10})(?!\d)", text)
    if number is None or int(number[1]) == 0:
        return None
    return Pidfile(int(number[1]), status.st_mtime_ns / 1e9, status.st_ino, status.st_uid)


def read_own(path: Path) -> Pidfile | None:
    """Read a pidfile written by the agent. Return None for any other file.

    The directory's owner and mode are checked too, because jobs can create directories in ``sys/run``.
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


_SAVED_NAMES: Final = {"is_only_named": "is_guest", "was_in_cgroup": "is_caged", "others": "kin", "named_by": "heeded"}
"""Maps attributes of ``ProcessRecord`` to their names in the state file. The attributes were renamed, but the file
keeps the names from earlier versions.
"""


class ProcessRecord(msgspec.Struct, rename=_SAVED_NAMES):
    """The agent's own record of a service's processes, in addition to their keepers. It is part of the saved state."""

    known: Identity | None = None
    """The service's process, for as long as it may be alive."""
    is_only_named: bool = False
    """True if only a pidfile or a pattern relates ``known`` to the service. In that case, the process is watched but
    never signalled.
    """
    was_in_cgroup: bool = False
    """True if an agent without keepers (0.2.0) tracked the processes with a cgroup."""
    program: Identity | None = None
    """The start program, for as long as it may be alive."""
    others: list[Identity] = []
    """Service processes that are not under one of the service's keepers, because they were taken over from scripts or
    rules, or from an agent without keepers. Their descendants belong to the service too.
    """
    begun: int = 0
    """Start time of the last start program, in ticks since boot, or 0 if none has been started."""
    before: Pidfile | None = None
    """The pidfile as it was before the last start."""
    named_by: Pidfile | None = None
    """The pidfile that named ``known``."""

    def begin(self, program: Identity, pidfile: Pidfile | None) -> None:
        """Record that a start program was started. ``pidfile`` is the pidfile as it was before the start."""
        self.program = program
        _, self.begun = program
        self.before = pidfile

    def ended(self, process: Identity) -> None:
        """Record the exit of one of the service's processes."""
        if process == self.known:
            self.known = None
        if process == self.program:
            self.program = None

    def take_over(self, processes: Iterable[Identity]) -> None:
        """Record processes of the service that are not under one of its keepers, and forget those that have exited."""
        self.others = sorted(each for each in {*self.others, *processes} if proc.is_there(each))

    def is_fresh(self, pidfile: Pidfile) -> bool:
        """Return True if the pidfile was written since the last start. Without a start, there is nothing to compare it
        with, so it is not fresh.
        """
        return self.begun > 0 and pidfile != self.before
