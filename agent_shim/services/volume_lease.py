"""Two agents on one volume: the second waits and touches nothing.

A pod may be made anew while its predecessor still ends, and an unreachable node may keep a pod that was replaced long
ago. So an agent holds a lock on the volume ``data`` and on every disk that it mounts. The kernel gives the lock up when
the agent ends, and knows of other agents on the same machine only; so the locked file is also a lease, renewed every
few seconds. Nobody compares clocks: a lease is over when it has not changed for a while before one's own eyes.

| the lock | the lease | then |
|---|---|---|
| somebody has it | any | wait |
| free | none, or given back | take it |
| free | of an agent on this kernel, met for the first time | take it: that agent has ended |
| free | of an agent on this kernel that was seen alive | take it when it stays free: it may only be restarted |
| free | of another machine | take it when it does not change for ``patience`` |
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.core.errors import AlreadyRunningError
from agent_shim.core.paths import Paths
from agent_shim.host import files, guarded, proc

logger = logging.getLogger(__name__)

NAME: Final = "lease.json"
SCHEMA: Final = 1
_MAX_BYTES: Final = 4096


class Lease(msgspec.Struct, frozen=True):
    """The content of the file; ``holder`` is another one for each agent process, ``count`` goes up while it lives."""

    schema: int
    holder: str
    agent_id: str
    host: str
    boot: str
    count: int = 0
    is_over: bool = False

    def __str__(self) -> str:
        return f"agent {self.agent_id or '(without settings yet)'} on {self.host or 'an unnamed host'}"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between renewals, and for which a lease must not have changed to be over."""

    period: float = 10.0
    patience: float = 25.0
    restart: float = 5.0
    """For which a lock on this kernel must have been free: an agent that is only restarted takes it again sooner."""


@dataclass(slots=True)
class _Seen:
    """The lease of somebody else, and since when it is so."""

    raw: bytes
    since: float


@dataclass(slots=True)
class _Hold:
    """An open file, used by one thread at a time: a number that was closed meanwhile could be another file's."""

    descriptor: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0


class VolumeLeases:
    """The locks and leases of this agent.

    ``host`` and ``boot`` name the place: by default this pod or machine, and the kernel that it runs on.
    """

    def __init__(self, *, pace: Pace = Pace(), host: str | None = None, boot: str | None = None) -> None:
        self._agent_id = ""
        self._pace = pace
        self._holder = secrets.token_hex(8)
        self._host = socket.gethostname() if host is None else host
        self._boot = _boot() if boot is None else boot
        self._held: dict[Path, _Hold] = {}
        self._seen: dict[Path, _Seen] = {}

    def introduce(self, agent_id: str) -> None:
        """Tell others who we are. Blocks on the disks."""
        self._agent_id = agent_id
        for directory in list(self._held):
            self.renew(directory)

    def hold(self, directory: Path) -> str:
        """Take the volume of which ``directory`` is a private one of ours; "" when it is ours, else who has it.

        Blocks on the disk; raises ``HostError``. A volume that is full or read-only is not kept from anybody.
        """
        if directory in self._held:
            return ""
        try:
            descriptor = _open(directory)
        except OSError as exc:
            if exc.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                logger.warning("nothing keeps a second agent from %s: %s", directory, exc)
                return ""
            raise files.failed(f"take {directory.parent}", exc) from exc
        rival = self._rival(directory, descriptor)
        if rival:
            os.close(descriptor)
            return rival
        self._seen.pop(directory, None)
        hold = self._held[directory] = _Hold(descriptor)
        self._write(directory, hold)
        return ""

    def _rival(self, directory: Path, descriptor: int) -> str:
        is_locked = _lock(descriptor)
        raw = os.pread(descriptor, _MAX_BYTES, 0)
        lease = _decoded(raw)
        if is_locked is not False and (not raw or (lease and lease.is_over)):
            return ""
        seen = self._seen.get(directory)
        is_local = is_locked and lease is not None and lease.boot == self._boot != ""
        if is_local and seen is None:
            return ""
        if seen is None or seen.raw != raw or is_locked is False:
            seen = self._seen[directory] = _Seen(raw, time.monotonic())
        is_over = time.monotonic() - seen.since > (self._pace.restart if is_local else self._pace.patience)
        return "" if is_over else str(lease or "an agent that does not say who it is")

    def twin(self, directory: Path) -> str:
        """Another agent with our id that has a volume; "" where there is none. The volume is not kept."""
        rival = self.hold(directory)
        if not rival:
            self.let_go(directory)
            return ""
        lease = _decoded(guarded.head(directory / NAME, _MAX_BYTES, directory.parent))
        return rival if lease is not None and lease.agent_id == self._agent_id else ""

    def let_go(self, directory: Path) -> None:
        """Give a volume back, for anybody to take at once, unless it was taken already. Blocks on the disk."""
        if hold := self._held.pop(directory, None):
            with hold.turn:
                if not self._taker(directory, hold):
                    self._write(directory, hold, is_over=True)
                os.close(hold.descriptor)
                hold.descriptor = -1

    def let_all_go(self) -> None:
        """Give everything back: nothing of ours runs any more."""
        for directory in list(self._held):
            self.let_go(directory)

    async def keep(self, lost: Callable[[str], None]) -> NoReturn:
        """For ever: renew the leases; ``lost`` is told when somebody else has taken a volume meanwhile.

        A volume that does not answer keeps the others from nothing.
        """
        renewing: dict[Path, asyncio.Task[None]] = {}

        async def renew(directory: Path) -> None:
            if found := await asyncio.to_thread(self.renew, directory):
                lost(found)

        while True:
            await asyncio.sleep(self._pace.period)
            for directory in list(self._held):
                if directory not in renewing or renewing[directory].done():
                    renewing[directory] = asyncio.create_task(renew(directory), name="lease")

    def renew(self, directory: Path) -> str:
        """Renew a lease once; who has the volume instead of us, or "". Blocks on the disk."""
        hold = self._held.get(directory)
        if hold is None:
            return ""
        with hold.turn:
            if hold.descriptor < 0:
                return ""
            if taker := self._taker(directory, hold):
                return f"{directory.parent} was taken over by {taker}"
            hold.count += 1
            self._write(directory, hold)
        return ""

    def _taker(self, directory: Path, hold: _Hold) -> str:
        """The agent that has taken a volume of ours, "" where none has, or none can be read."""
        try:
            lease = _decoded(os.pread(hold.descriptor, _MAX_BYTES, 0))
        except OSError as exc:
            logger.warning("cannot read the lease of %s: %s", directory, exc)
            return ""
        return str(lease) if lease is not None and lease.holder != self._holder else ""

    def _write(self, directory: Path, hold: _Hold, *, is_over: bool = False) -> None:
        """In place: another inode would have another lock. By one call: who is killed leaves the old one or the new."""
        lease = Lease(SCHEMA, self._holder, self._agent_id, self._host, self._boot, hold.count, is_over)
        raw = msgspec.json.encode(lease)
        try:
            # Blanks take the place of what a longer one before has left.
            os.pwrite(hold.descriptor, raw.ljust(min(os.fstat(hold.descriptor).st_size, _MAX_BYTES)), 0)
            os.fdatasync(hold.descriptor)
        except OSError as exc:
            logger.warning("cannot write the lease of %s: %s", directory, exc)


def _open(directory: Path) -> int:
    """The file, made if need be. Others may write to the volume: no link is followed, no pipe waited for."""
    files.make_dir(directory, 0o700)
    with guarded.held(directory, directory.parent) as top:
        descriptor = guarded.open_beneath(top, NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{directory / NAME} is no regular file")
    return descriptor


def _lock(descriptor: int) -> bool | None:
    """True with the lock, False when somebody else has it, None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        logger.info("no lock to be had, the lease alone counts: %s", exc.strerror)
        return None
    return True


def _decoded(raw: bytes) -> Lease | None:
    """What a file says; None while it says nothing, or half of something."""
    try:
        return msgspec.json.decode(raw, type=Lease)
    except ValueError:
        return None


def _boot() -> str:
    try:
        return proc.boot_id()
    except OSError:
        return ""


# --- one root file system --------------------------------------------------------------------------------------------


class exclusive_agent:  # noqa: N801 - reads as a phrase: with exclusive_agent(paths, "start")
    """Hold the lock that says an agent works on this root file system; who comes second cannot do ``what``."""

    def __init__(self, paths: Paths, what: str) -> None:
        self._what = what
        self._path = paths.bosh / "agent_shim.lock"
        self._held: int | None = None

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(self._held, 20, 0).decode(errors="replace").strip()
            os.close(self._held)
            other = f"another agent, process {who}," if who.isdigit() else "another agent"
            raise AlreadyRunningError(f"cannot {self._what}: {other} holds {self._path}") from None
        os.ftruncate(self._held, 0)
        os.pwrite(self._held, f"{os.getpid()}\n".encode(), 0)

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            os.close(self._held)
