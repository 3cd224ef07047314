"""Acquires and renews leases on volumes. If two agents have access to a volume, the second waits and changes nothing.

Two agents can have access to the same volume if a pod is recreated while its predecessor is still shutting down, or if
an unreachable node still runs a pod that was replaced long ago. An agent therefore locks the ``data`` volume and every
disk that it mounts. The kernel releases the lock when the agent exits. Because a lock works only between agents on the
same machine, the locked file is also a lease that is renewed every few seconds. Clocks are not compared: a lease
expires when the observer has not seen it change for a while. On a file system to which only this kernel writes, the
lease is not renewed, because the lock suffices for agents on this machine, and other machines would not see the renewal
(docs/decisions/0025-leases-of-local-volumes-are-not-renewed.md).

| lock | lease | action |
|---|---|---|
| held | any | wait |
| free | none, or released | acquire it |
| free | from an agent that shares locks with this one, seen for the first time | acquire it; that agent has exited |
| free | from an agent that shares locks with this one and was seen alive | acquire it if the lock stays free |
| free | from another machine | acquire it if the lease does not change for ``patience`` |

Two agents share locks if only one kernel writes to the file system, or if both see the same boot id of their kernel.
The boot id alone is not enough, because LXD gives a container a new one at each start.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import AlreadyRunningError
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files, guarded, mounts, proc

logger = logging.getLogger(__name__)

NAME: Final = "lease.json"
SCHEMA: Final = 1
_MAX_BYTES: Final = 4096
UNWRITABLE: Final = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a write to a full or read-only file system. An agent uses a volume on such a file system without a
lease.
"""


class Lease(msgspec.Struct, frozen=True):
    """Content of the lease file. ``holder`` is different for each agent process, and ``count`` increases with every
    renewal.
    """

    schema: int
    holder: str
    agent_id: str
    host: str
    boot: str
    count: int = 0
    is_over: bool = False

    def __str__(self) -> str:
        return f"agent {self.agent_id or '(without settings yet)'} on {self.host or 'an unnamed host'}"


class LeasePace(msgspec.Struct, frozen=True):
    """Timing of leases in seconds: the interval between renewals, and how long a lease must stay unchanged before it
    expires.
    """

    period: float = 10.0
    patience: float = 25.0
    restart: float = 5.0
    """How long the lock must stay free before an agent takes over a lease whose holder it has seen alive, if the two
    agents share locks. A restarting agent reacquires its own lock sooner than that.
    """


class Hold(msgspec.Struct):
    """An open lease file. Threads must acquire ``turn`` before they use the descriptor, because after another thread
    has closed the file, the same descriptor number may refer to a different file.
    """

    descriptor: int
    is_local: bool
    """True if only this kernel writes to the file system."""
    turn: threading.Lock = msgspec.field(default_factory=threading.Lock)
    count: int = 0
    version: tuple[int, int, int] | None = None
    """Version of the file after this agent's last write, if the file system is local."""


class VolumeLeases:
    """Locks and leases held by this agent.

    ``host`` and ``boot`` identify where the agent runs. The defaults are the name of this pod or machine, and the boot
    id of its kernel.
    """

    def __init__(self, *, pace: LeasePace = LeasePace(), host: str | None = None, boot: str | None = None) -> None:
        self._agent_id = ""
        self._pace = pace
        self._holder = secrets.token_hex(8)
        self._host = socket.gethostname() if host is None else host
        self._boot = boot or ""
        if boot is None:
            with suppress(OSError):  # /proc may hide the boot id
                self._boot = proc.boot_id()
        self.held: dict[Path, Hold] = {}
        """The leases that this agent holds, by directory."""
        self.former: dict[Path, str] = {}
        """The agents (ids, or "") that held this agent's volumes before it, by directory."""
        self._seen: dict[Path, tuple[bytes, float]] = {}
        """Other agents' leases by directory, each with the time of the last sign that its holder is alive."""

    def introduce(self, agent_id: str) -> None:
        """Write the agent id to all leases, and use it for those acquired later. The first lease is acquired before the
        settings are read, so the id is not known then. Blocks on disk I/O.
        """
        self._agent_id = agent_id
        for directory in list(self.held):
            self.renew(directory)

    def is_held(self, directory: Path) -> bool:
        """Return True if this agent has the lease on the volume that contains its private ``directory``."""
        return directory in self.held

    def hold(self, directory: Path) -> str:
        """Acquire the lease on the volume that contains the agent's private ``directory``. Return "" on success,
        otherwise a description of the holder.

        Blocks on disk I/O. Raises ``HostError``. A full or read-only volume is used without a lease.
        """
        if directory in self.held:
            return ""
        with ExitStack() as opened:
            try:
                descriptor = _open(directory)
                # If the lease cannot be acquired, close the descriptor to release the lock. Otherwise this agent would
                # lock itself out.
                opened.callback(os.close, descriptor)
                is_local = mounts.is_local(directory)
                if rival := self._rival(directory, descriptor, is_local=is_local):
                    return rival
            except OSError as exc:
                if exc.errno in UNWRITABLE:
                    logger.warning("cannot lock %s against a second agent: %s", directory, exc)
                    return ""
                raise files.failed(f"take {directory.parent}", exc) from exc
            opened.pop_all()
        self._seen.pop(directory, None)
        hold = self.held[directory] = Hold(descriptor, is_local)
        self._write(directory, hold)
        return ""

    def _rival(self, directory: Path, descriptor: int, *, is_local: bool) -> str:
        """Return the agent that still holds the lease, or "" if this agent may acquire it (see the module's table).
        Also update ``former``.
        """
        is_locked = _lock(descriptor)  # None if the file system does not support locks
        raw = os.pread(descriptor, _MAX_BYTES, 0)
        lease = _decoded(raw)
        self.former[directory] = lease.agent_id if lease else ""
        if is_locked is not False and (not raw or (lease and lease.is_over)):
            return ""
        last_seen, since = self._seen.get(directory, (None, 0.0))
        shares_locks = is_locked and (is_local or (lease is not None and lease.boot == self._boot != ""))
        if shares_locks and last_seen is None:
            return ""
        if last_seen != raw or is_locked is False:  # the other agent is alive
            since = time.monotonic()
            self._seen[directory] = raw, since
        has_expired = time.monotonic() - since > (self._pace.restart if shares_locks else self._pace.patience)
        return "" if has_expired else str(lease or "an agent that does not identify itself")

    def twin(self, directory: Path) -> str:
        """If another agent with the same agent id holds the volume, return a description of that agent, otherwise "".
        In either case, this agent does not keep the lease. At boot, an agent waits for such a predecessor to exit.
        """
        rival = self.hold(directory)
        if not rival:
            self.release(directory)
            return ""
        lease = _decoded(guarded.head(directory / NAME, _MAX_BYTES, directory.parent))
        return rival if lease is not None and lease.agent_id == self._agent_id else ""

    def release(self, directory: Path) -> None:
        """Release a volume, so that another agent can use it immediately. If another agent has already taken over the
        volume, its lease is not changed. Blocks on disk I/O.
        """
        if hold := self.held.pop(directory, None):
            with hold.turn:
                if not self._taker(directory, hold):
                    self._write(directory, hold, is_over=True)
                os.close(hold.descriptor)
                hold.descriptor = -1

    def release_all(self) -> None:
        """Release all volumes. Call this only when none of this agent's processes uses them any more."""
        for directory in list(self.held):
            self.release(directory)

    async def keep(self, lost: Callable[[str], None]) -> NoReturn:
        """Renew the leases forever. ``lost`` is called when another agent has taken over a volume.

        A volume that hangs does not delay the renewal of other leases.
        """
        renewing: dict[Path, asyncio.Task[None]] = {}

        async def renew(directory: Path) -> None:
            if loss := await asyncio.to_thread(self.renew, directory):
                lost(loss)

        while True:
            await asyncio.sleep(clock.until_beat(self._pace.period))
            for directory, hold in list(self.held.items()):
                # A local lease needs no renewal. Call ``renew`` only if another agent has changed the file, because
                # that agent may have taken over the volume. ``hold.version`` is set only for local files, so this stat
                # call does not block the event loop.
                if hold.version and hold.version == files.version(directory / NAME):
                    continue
                if directory not in renewing or renewing[directory].done():
                    renewing[directory] = asyncio.create_task(renew(directory), name="lease")

    def renew(self, directory: Path) -> str:
        """Renew a lease once. If another agent has taken over the volume, return a message that says so, otherwise "".

        Blocks on disk I/O.
        """
        hold = self.held.get(directory)
        if hold is None:
            return ""
        with hold.turn:
            if hold.descriptor < 0:  # released in the meantime
                return ""
            if taker := self._taker(directory, hold):
                return f"{directory.parent} was taken over by {taker}"
            hold.count += 1
            self._write(directory, hold)
        return ""

    def _taker(self, directory: Path, hold: Hold) -> str:
        """Return the agent that has taken over this agent's volume. Return "" if there is none or if the lease
        cannot be read.
        """
        try:
            lease = _decoded(os.pread(hold.descriptor, _MAX_BYTES, 0))
        except OSError as exc:
            logger.warning("cannot read the lease of %s: %s", directory, exc)
            return ""
        return str(lease) if lease is not None and lease.holder != self._holder else ""

    def _write(self, directory: Path, hold: Hold, *, is_over: bool = False) -> None:
        """Write the lease, marked as released if ``is_over`` is set.

        The file is written in place, because a new file would not be locked. It is written with a single call, so that
        it contains either the old or the new lease if the agent is killed.
        """
        lease = Lease(SCHEMA, self._holder, self._agent_id, self._host, self._boot, hold.count, is_over)
        raw = msgspec.json.encode(lease)
        try:
            # Pad with spaces, because the previous lease in the file may be longer.
            os.pwrite(hold.descriptor, raw.ljust(min(os.fstat(hold.descriptor).st_size, _MAX_BYTES)), 0)
            os.fdatasync(hold.descriptor)
        except OSError as exc:
            logger.warning("cannot write the lease of %s: %s", directory, exc)
        hold.version = files.version(directory / NAME) if hold.is_local else None


def _open(directory: Path) -> int:
    """Open or create the lease file. Jobs may write to the volume, so links are not followed, and opening a pipe does
    not block.
    """
    files.make_dir(directory, 0o700)
    with guarded.held(directory, directory.parent) as top:
        descriptor = guarded.open_beneath(top, NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{directory / NAME} is not a regular file")
    return descriptor


def _lock(descriptor: int) -> bool | None:
    """Return True if the lock was acquired, False if another process holds it, and None if the file system does not
    support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        logger.info("the file system has no locks against a second agent: %s", exc.strerror)
        return None
    return True


def _decoded(raw: bytes) -> Lease | None:
    """Decode a lease. Return None if the content is empty or incomplete."""
    try:
        return wire.decode(raw, Lease)
    except ValueError:
        return None


# --- one root file system ---------------------------------------------------------------------------------------------


def _open_lock_file(path: Path) -> int | None:
    """Open the lock file. Return None if the file system is full or read-only. In that case, the agent works without
    the lock.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in UNWRITABLE:
            raise
        logger.warning("cannot lock %s against a second agent: %s", path.parent, exc)
        return None


@contextmanager
def exclusive_agent(paths: Paths, what: str) -> Iterator[None]:
    """Hold a lock that prevents a second agent from using this root file system. On a full or read-only file system,
    run the block without the lock. Raises ``AlreadyRunningError`` with the message "cannot WHAT: why" if another agent
    holds the lock.
    """
    path = paths.agent_lock
    with files.attempting(f"{what}: {path}"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _open_lock_file(path)
    if descriptor is None:
        yield
        return
    try:
        with files.attempting(f"{what}: {path}"):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
        if _lock(descriptor) is False:
            pid = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            other = f"another agent, process {pid}," if pid.isdigit() else "another agent"
            raise AlreadyRunningError(f"cannot {what}: {other} holds {path}")
        with suppress(OSError):  # the lock is valid even without the recorded pid
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
