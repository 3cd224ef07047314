"""Disk requests of the Director: the asynchronous part of the disk service.

Every request reads settings, hints, markers and mounts again, so that no cached state can be wrong. Changes come
through the task lane, one request at a time. Failures are ``ActionError`` or ``HostError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.bulk import workers
from agent_shim.bulk.protocol import CopyTree, Progress, Report
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import DiskAssociation, Effective
from agent_shim.host import files, mounts, process, volumes
from agent_shim.services.disks import hints
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.disks.markers import OURS, Disk
from agent_shim.services.disks.mounting import DiskMounts, InUseError, View, plain

logger = logging.getLogger(__name__)

DEVICES: Final = Path("/dev")
SHARED_MEMORY: Final = DEVICES / "shm"

Copy = Callable[[Path, Path, Report], Awaitable[list[str]]]
"""Copies the first directory to the second, reports its progress and returns the losses (``bulk.copytree``)."""


async def in_worker(source: Path, target: Path, report: Report) -> list[str]:
    """Copy in a worker, which may take hours and be killed. Raises ``ActionError`` with its text."""
    return (await workers.work(CopyTree(str(source), str(target), sorted(OURS)), report=report)).losses


class Timeouts(msgspec.Struct, frozen=True):
    """Timeouts in seconds."""

    arrival: float = 30.0
    """Until a volume arrives after the request that names it."""
    use: float = 20.0
    """Until processes release a disk that is being unmounted."""
    grace: float = 5.0
    """Between TERM and KILL for processes of jobs among them."""
    look: float = 0.2
    rival: float = 40.0
    """Until the lease of another agent expires. The agent of a deleted VM may have lost the disk without releasing the
    lease, which expires if it is not renewed from the request on (``volume_lease.Pace``).
    """


class Disks:
    """Persistent and dynamic disks of this instance.

    ``settings`` and ``instance`` (the id in the apply spec, or "") are called each time. ``of_jobs`` returns the pids
    that may be terminated to release a disk. ``hold`` gets a private directory on a volume, locks the volume against
    other agents, and returns the agent that holds it, or "". ``release`` unlocks it. ``binds`` None tries whether this
    container may mount.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Effective],
        instance: Callable[[], str],
        of_jobs: Callable[[], Collection[int]],
        *,
        hold: Callable[[Path], str] = lambda _: "",
        release: Callable[[Path], None] = lambda _: None,
        copy: Copy = in_worker,
        timeouts: Timeouts = Timeouts(),
        binds: bool | None = None,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._of_jobs = of_jobs
        self._copy = copy
        self.timeouts = timeouts
        self.mounts = DiskMounts(paths, settings, instance, hold, release, binds)
        """The blocking part."""
        self._running = ""
        self._error = ""
        self.progress: Progress | None = None
        """Progress of a running migration."""
        self.is_mounted = False
        """True if a disk, known or not, was on the store at the last look."""

    # --- restarts ---------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Mount every disk where it was before a restart. ``problem`` reports failures."""
        await self._restored()
        for wanted in self._settings().update.disk_associations:
            try:
                await asyncio.to_thread(self.mounts.link, wanted)
            except (ActionError, OSError) as exc:
                logger.warning("cannot link %s to disk %s: %s", wanted.name, wanted.cid, exc)

    async def problem(self) -> str:
        """Return the reason why no job may start (a disk that belongs on the store is missing), or ""."""
        if self._running:
            return f"{self._running} is in progress"
        view = await self._look()
        decided = self.mounts.plan(view)
        if decided.problem or decided.store in ("", view.store):
            return decided.problem
        return f"disk {decided.store} is not on {self._paths.store}: {self._error or 'it has not been mounted'}"

    async def _restored(self) -> View:
        """Restore the mounts as far as possible, then look."""
        try:
            await asyncio.to_thread(self.mounts.restore)
            self._error = ""
        except (ActionError, OSError) as exc:
            self._error = str(exc)
            logger.warning("cannot restore the mounts of disks: %s", exc)
        return await self._look()

    async def _look(self) -> View:
        view = await asyncio.to_thread(self.mounts.look)
        self.is_mounted = bool(view.store) or view.has_stranger
        return view

    # --- hints ------------------------------------------------------------------------------------------------------

    async def add(self, cid: str, hint: Any) -> None:
        """Keep a disk hint of the CPI. Raises ``ActionError`` for a disk without a cid.

        The Go agent keeps such a hint. In a :class:`View` the empty cid means a mount without a known disk.
        """
        if not cid:
            raise ActionError("cannot keep the hint: the disk has no cid")
        await asyncio.to_thread(self._change_hints, cid, hints.from_hint(cid, hint, self._settings().source.env))

    async def remove(self, cid: str) -> None:
        """Remove the hint, if any."""
        await asyncio.to_thread(self._change_hints, cid, None)

    def _change_hints(self, cid: str, disk: DiskSettings | None) -> None:
        before = hints.load(self._paths.disk_hints)
        after = {other: known for other, known in before.items() if other != cid}
        if disk is not None:
            after[cid] = disk
        if after != before:
            hints.save(self._paths.disk_hints, after)

    async def find(self, cid: str) -> DiskSettings:
        """Return the settings of a disk. Raises ``ActionError`` in the Go agent's words (settings/service.go)."""
        known = await asyncio.to_thread(self.mounts.known)
        if cid in known:
            return known[cid]
        view = await self._look()
        if self.mounts.place_of(view, cid) is not None:  # mounted, though its hint was removed
            return DiskSettings(cid=cid)
        raise ActionError(f"Persistent disk with volume id '{cid}' could not be found")

    # --- list, mount, unmount ---------------------------------------------------------------------------------------

    async def list(self) -> list[str]:
        """Return the mounted disks, the one on the store first. Missing mounts are restored before."""
        view = await (self._look() if self._running else self._restored())
        linked = await asyncio.to_thread(self.mounts.linked, view)
        return list(dict.fromkeys(cid for cid in (view.store, view.target, *linked) if cid))

    async def mount(self, cid: str) -> None:
        """Mount a disk on the store, or on the migration target while the store has a disk. Idempotent."""
        with self._exclusively(f"mount_disk {cid}"):
            await self._wait_for_volume(cid)
            deadline = time.monotonic() + self.timeouts.rival
            while True:
                try:
                    await asyncio.to_thread(self.mounts.mount, cid)
                    break
                except InUseError:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(self.timeouts.look)
            await self._look()

    async def unmount(self, cid: str) -> str:
        """Unmount a disk wherever it is mounted. Return the text of the reply."""
        known = await self.find(cid)
        with self._exclusively(f"unmount_disk {cid}"):
            view = await self._look()
            links = (await asyncio.to_thread(self.mounts.linked, view)).get(cid, [])
            place = self.mounts.place_of(view, cid)
            if place is not None:
                await self._wait_until_unused(place, view.disks.get(cid))
            await asyncio.to_thread(self.mounts.take_down, view, cid)
            for link in links:
                await asyncio.to_thread(files.remove_tree, link)
            await self._look()
        return f"Unmounted partition of {known}" if place or links else f"Partition of {known} is not mounted"

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if self._running:
            raise ActionError(f"cannot {what}: {self._running} is in progress")
        self._running = what
        try:
            yield
        finally:
            self._running = ""

    async def _wait_for_volume(self, cid: str) -> None:
        """Wait for the volume of a known disk."""
        deadline = time.monotonic() + self.timeouts.arrival
        while True:
            disk = (await self._look()).disks.get(cid)
            if disk is None:
                raise ActionError(f"Persistent disk with volume id '{cid}' could not be found")
            if disk.volume is not None:
                return
            if disk.place is not None and await asyncio.to_thread(self.mounts.is_of_container, disk.place):
                raise ActionError(
                    f"cannot use disk {cid}: {disk.place} is a directory of the container itself "
                    "(have the CPI name the directory at which it mounts the volume)"
                )
            if _is_device(disk.place):
                raise ActionError(
                    f"cannot use disk {cid}: {disk.place} is a block device, not a directory with its files "
                    "(have the CPI mount the volume into the container and name that directory as path in the hint)"
                )
            if time.monotonic() > deadline:
                raise ActionError(f"the volume of disk {cid} is not there: {_missing(disk.place)}")
            await asyncio.sleep(self.timeouts.look)

    async def _wait_until_unused(self, place: Path, disk: Disk | None) -> None:
        """Wait until no process uses a disk. Only processes of jobs are terminated."""
        used = [path for path in {place, disk.volume if disk else None} if path is not None]
        deadline = time.monotonic() + self.timeouts.use
        while holders := await asyncio.to_thread(volumes.holders, used):
            if not await self._end_jobs(holders) and time.monotonic() > deadline:
                raise ActionError(f"{place} is in use: {'; '.join(map(str, holders))}")
            await asyncio.sleep(self.timeouts.look)

    async def _end_jobs(self, holders: Iterable[volumes.Holder]) -> bool:
        """Return True if a process ended, which makes another look worthwhile."""
        of_jobs = await asyncio.to_thread(self._of_jobs)
        leftovers = [holder for holder in holders if holder.pid in of_jobs]
        left: Collection[tuple[int, int]] = {(holder.pid, holder.start_ticks) for holder in leftovers}
        for holder in leftovers:
            logger.warning("terminating a process of a job: %s", holder)
        for sig, within in ((signal.SIGTERM, self.timeouts.grace), (signal.SIGKILL, process.KILL_TIMEOUT_S)):
            left = await process.send_all(left, sig, within)
        return len(left) < len(leftovers)

    # --- migrate ----------------------------------------------------------------------------------------------------

    async def migrate(self, old: str = "", new: str = "") -> None:
        """Copy the disk on the store to the one on the migration target, and swap them.

        Empty cids stand for the disks mounted there. An interrupted migration begins again. A finished one is not
        repeated.
        """

        def report(progress: Progress) -> None:
            self.progress = progress

        with self._exclusively(f"migrate_disk {old} {new}".rstrip()):
            view = await asyncio.to_thread(self.mounts.restore)
            if _is_migrated(view, old, new):
                return
            source, target = self._pair(view, old, new)
            await self._wait_until_unused(self._paths.store, source)
            try:
                await asyncio.to_thread(self.mounts.prepare, source, target)
                for loss in await self._copy(source.there, target.there, report):
                    logger.warning("disk %s cannot store what disk %s has: %s", target.cid, source.cid, loss)
                await self._wait_until_unused(self._paths.store, source)
                await asyncio.to_thread(self.mounts.swap, source, target)
            finally:
                self.progress = None
                await self._restored()

    def _pair(self, view: View, old: str, new: str) -> tuple[Disk, Disk]:
        """Return the disks to copy from and to. The requested cids must be the mounted ones."""
        found = []
        places = (self._paths.store, view.store, old), (self._paths.store_migration_target, view.target, new)
        for place, there, wanted in places:
            if there == "" or wanted not in ("", there):
                text = f"disk {wanted} is not on {place}" if wanted else f"no disk is on {place}"
                raise ActionError(f"{text}: disk {there} is" if there else text)
            if there not in view.disks:
                raise ActionError(f"Persistent disk with volume id '{there}' could not be found")
            found.append(view.disks[there])
        return found[0], found[1]

    # --- links ------------------------------------------------------------------------------------------------------

    async def associate(self, wanted: Collection[DiskAssociation]) -> None:
        """Link ``instance/disks/NAME`` to each disk. Raises ``ActionError`` as update_settings of the Go agent does."""
        known = await asyncio.to_thread(self.mounts.known)
        for each in wanted:
            if each.cid not in known:
                missing = f"Persistent disk with volume id '{each.cid}' could not be found"
                raise ActionError(f"Fetching disk settings: {missing}")
            with errors_as(f"Associating disk with name {each.name}", ActionError, OSError):
                await self._wait_for_path(known[each.cid].place)
                await asyncio.to_thread(self.mounts.link, each)

    async def add_dynamic(self, cid: str, hint: Any) -> None:
        """Link ``data/dynamic_disks/CID`` to the path of the hint (platform/linux_platform.go, SetupDynamicDisk)."""
        place = hints.from_hint(cid, hint, self._settings().source.env).place
        link = self._paths.dynamic_disks / plain(cid)
        with errors_as(f"Timed out resolving device path for {cid}", ActionError):
            await self._wait_for_path(place)
        assert place is not None, "it exists"
        await asyncio.to_thread(files.swap_link, place, link)

    async def remove_dynamic(self, cid: str) -> None:
        """Remove that link, if it exists."""
        link = self._paths.dynamic_disks / plain(cid)
        await asyncio.to_thread(link.unlink, missing_ok=True)

    def dynamic_places(self) -> dict[str, Path]:
        """Return the directories of mounted dynamic disks by cid. Does not ask the disks, which may not answer.

        A device is left out, because the volume driver that uses it decides where its file system is mounted.
        """
        points = {mount.point for mount in mounts.mounts()} if self._paths.is_system else None
        found: dict[str, Path] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._paths.dynamic_disks) as entries:
            for entry in entries:
                place = Path(entry.path).readlink() if entry.is_symlink() else None
                if place is not None and (points is None or place in points):
                    found[entry.name] = place
        return found

    async def _wait_for_path(self, place: Path | None) -> None:
        """Wait for a volume, a device or a file at ``place``."""
        deadline = time.monotonic() + self.timeouts.arrival
        while place is None or not await asyncio.to_thread(self._is_there, place):
            if place is None or time.monotonic() > deadline:
                raise ActionError(_missing(place))
            await asyncio.sleep(self.timeouts.look)

    def _is_there(self, place: Path) -> bool:
        return place.exists() and not self.mounts.is_bare(place)


def _is_migrated(view: View, old: str, new: str) -> bool:
    """Return True if the disk on the store is the requested, finished copy."""
    there = view.disks.get(view.store)
    if there is None or there.marker is None or there.role != "store" or not there.marker.source or view.target:
        return False
    return new in ("", there.cid) and old in ("", there.marker.source)


def _is_device(place: Path | None) -> bool:
    """Return True for a block device, and for a device name that this container lacks: waiting provides neither."""
    if place is None:
        return False
    return place.is_block_device() or (place.is_relative_to(DEVICES) and not place.is_relative_to(SHARED_MEMORY))


def _missing(place: Path | None) -> str:
    if place is None:
        return "the CPI has named no path"
    if not place.exists():
        return f"there is no {place}"
    return f"nothing is mounted at {place}" if place.is_dir() else f"{place} is not a directory"
