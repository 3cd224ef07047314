"""Handles the Director's disk requests. This is the asynchronous part of the disk service.

For each request, the service examines the disks, a function of ``decisions`` returns the necessary steps, and
``mounting`` carries them out. Then the disks are examined again to verify the outcome. ``mount_disk``,
``unmount_disk`` and ``migrate_disk`` run as tasks, one at a time. Failures raise ``ActionError`` or ``HostError``.
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
from typing import Any

import msgspec

from agent_shim.bulk import workers
from agent_shim.bulk.protocol import CopyTree, Progress, Report
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import DiskAssociation, Effective
from agent_shim.host import files, mounts, process, volumes
from agent_shim.services.disks import decisions, hints
from agent_shim.services.disks.decisions import View
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.disks.markers import OURS
from agent_shim.services.disks.mounting import Decision, DiskMounts, Leases, VolumeInUseError, plain

logger = logging.getLogger(__name__)

Copy = Callable[[Path, Path, Report], Awaitable[list[str]]]
"""A function that copies the first directory to the second, reports progress, and returns descriptions of the
attributes that could not be copied (``bulk.copytree``).
"""


async def in_worker(source: Path, target: Path, report: Report) -> list[str]:
    """Copy a directory in a worker process, because the copy may take hours and may have to be aborted. Return
    descriptions of the attributes that could not be copied. Raises ``ActionError`` with the worker's error.
    """
    return (await workers.execute(CopyTree(str(source), str(target), sorted(OURS)), report=report)).losses


class DiskTimeouts(msgspec.Struct, frozen=True):
    """Timeouts in seconds."""

    arrival: float = 30.0
    """How long to wait for a requested disk's volume to appear."""
    use: float = 20.0
    """How long to wait until processes release a disk that is being unmounted."""
    grace: float = 5.0
    """Time between TERM and KILL for job processes that use the disk."""
    look: float = 0.2
    rival: float = 40.0
    """How long to wait for another agent's lease to expire. A deleted VM's agent may have lost the disk without
    releasing its lease. Such a lease expires if it is not renewed for a while after the request begins
    (``volume_lease.LeasePace``).
    """


class Disks:
    """This instance's persistent and dynamic disks.

    ``settings`` and ``instance`` (the id in the apply spec, or "") are called whenever the disks are examined.
    ``of_jobs`` returns the pids that the agent is allowed to terminate in order to release a disk. If ``binds`` is
    None, a trial mount shows whether this container is allowed to create bind mounts.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Effective],
        instance: Callable[[], str],
        of_jobs: Callable[[], Collection[int]],
        leases: Leases,
        *,
        copy: Copy = in_worker,
        timeouts: DiskTimeouts = DiskTimeouts(),
        binds: bool | None = None,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._of_jobs = of_jobs
        self._copy = copy
        self.timeouts = timeouts
        self._mounts = DiskMounts(paths, settings, instance, leases, binds)
        self._running = ""
        """The disk request in progress, as errors name it, or ""."""
        self._error = ""
        """Why the last attempt to restore the mounts failed, or "". ``problem`` quotes it if the disk that belongs on
        the store is missing.
        """
        self.progress: Progress | None = None
        """Progress of a running migration."""
        self.is_mounted = False
        """True if a disk, known or unknown, was on the store when the disks were last examined."""

    # --- restarts -----------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Mount every disk where it was before a restart, and link the disks that the Director has associated.

        ``problem`` reports disks that could not be mounted. Failures to link are only logged.
        """
        view = await self._restored()
        for wanted in self._settings().update.disk_associations:
            try:
                await asyncio.to_thread(self._mounts.link, view, wanted)
            except (ActionError, OSError) as exc:
                logger.warning("cannot link %s to disk %s: %s", wanted.name, wanted.cid, exc)

    async def problem(self) -> str:
        """Return the reason why no job may start, or "". The reason is a disk request in progress, a missing disk that
        belongs on the store, or doubt about which disk belongs there (:class:`.decisions.Placement`).
        """
        if self._running:
            return f"{self._running} is in progress"
        view = await self._look()
        decided = decisions.plan_of(view)
        if decided.problem or decided.store in ("", view.on_store):
            return decided.problem
        return f"disk {decided.store} is not on {self._paths.store}: {self._error or 'it has not been mounted'}"

    async def _restored(self) -> View:
        """Restore as many mounts as possible, and return the resulting view."""
        try:
            view = await self._fulfil(decisions.steps_to_restore)
            self._error = ""
        except (ActionError, OSError) as exc:
            self._error = str(exc)
            logger.warning("cannot restore the mounts of disks: %s", exc)
            return await self._look()
        return view

    async def _look(self) -> View:
        """Examine all disks."""
        return self._seen(await asyncio.to_thread(self._mounts.look))

    async def _fulfil(self, decide: Decision, *cids: str, view: View | None = None) -> View:
        """Carry out the steps that a request needs, starting from ``view`` or, without one, from a new examination of
        the disks. ``cids`` are the remaining arguments of ``decide``. Return the resulting view.
        """
        return self._seen(await asyncio.to_thread(self._mounts.fulfil, decide, *cids, view=view))

    def _seen(self, view: View) -> View:
        """Update ``is_mounted`` from a new view, and return the view."""
        self.is_mounted = bool(view.on_store) or view.has_unknown_volume
        return view

    # --- hints --------------------------------------------------------------------------------------------------------

    async def add(self, cid: str, hint: Any) -> None:
        """Store the CPI's hint for a disk. Raises ``ActionError`` for a disk without a cid.

        The Go agent accepts an empty cid, but this agent uses it for a mount that is not a known disk (:class:`View`).
        """
        if not cid:
            raise ActionError("cannot keep the hint: the disk has no cid")
        await asyncio.to_thread(self._change_hints, cid, hints.from_hint(cid, hint, self._settings().source.env))

    async def remove(self, cid: str) -> None:
        """Remove the CPI's hint for a disk, if there is one."""
        await asyncio.to_thread(self._change_hints, cid, None)

    def _change_hints(self, cid: str, disk: DiskSettings | None) -> None:
        """Replace a disk's hint, or remove it if ``disk`` is None."""
        before = hints.load(self._paths.disk_hints)
        after = {other: known for other, known in before.items() if other != cid}
        if disk is not None:
            after[cid] = disk
        if after != before:
            hints.save(self._paths.disk_hints, after)

    async def find(self, cid: str) -> DiskSettings:
        """Return a disk's settings. Raises ``ActionError`` with the Go agent's message if no such disk is known."""
        known = await asyncio.to_thread(self._mounts.known)
        if cid in known:
            return known[cid]
        if (await self._look()).point_of(cid) is not None:  # the disk may still be mounted after its hint was removed
            return DiskSettings(cid=cid)
        raise ActionError(decisions.NOT_FOUND.format(cid))

    # --- list, mount, unmount -----------------------------------------------------------------------------------------

    async def list(self) -> list[str]:
        """Restore missing mounts, unless a disk request is in progress. Then return the cids of the disks that are
        mounted or have a symlink in ``instance/disks``. The disk that is mounted on the store comes first.
        """
        view = await (self._look() if self._running else self._restored())
        return list(dict.fromkeys(cid for cid in (view.on_store, view.on_target, *view.links) if cid))

    async def mount(self, cid: str) -> None:
        """Mount a disk on the store, or on the migration target if the store already has another disk. Idempotent."""
        with self._exclusively(f"mount_disk {cid}"):
            deadline = time.monotonic() + self.timeouts.arrival
            while True:  # wait until the volume appears
                found = await self._look()
                disk = found.disks.get(cid)
                if disk is None or disk.volume is not None or disk.unusable or time.monotonic() > deadline:
                    break
                await asyncio.sleep(self.timeouts.look)
            decisions.present(found, cid)  # raises if the disk is unknown or has no usable volume
            view: View | None = found
            deadline = time.monotonic() + self.timeouts.rival
            while True:  # wait until another agent's lease expires
                try:
                    # Restore the other mounts first, because they determine where this disk is mounted.
                    view = await self._fulfil(decisions.steps_to_restore, view=view)
                    view = await self._fulfil(decisions.steps_to_mount, cid, view=view)
                    break
                except VolumeInUseError:
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(self.timeouts.look)
                view = None  # examine the disks again
            if view.point_of(cid) is None:
                raise ActionError(f"cannot mount disk {cid}: it is not mounted afterwards")

    async def unmount(self, cid: str) -> str:
        """Unmount a disk wherever it is mounted, and remove its links in ``instance/disks``. Return a message for the
        Director that says whether anything changed.
        """
        known = await self.find(cid)
        with self._exclusively(f"unmount_disk {cid}"):
            view = await self._look()
            point, disk = view.point_of(cid), view.disks.get(cid)
            if point is not None:
                await self._wait_until_unused(point.path, disk.volume if disk else None)
            after = await self._fulfil(decisions.steps_to_unmount, cid, view=view)
            for link in view.links.get(cid, ()):
                await asyncio.to_thread(files.remove_tree, link)
            if still := after.point_of(cid):
                raise ActionError(f"disk {cid} is still mounted on {still.path}")
        has_changed = point is not None or cid in view.links
        return f"Unmounted partition of {known}" if has_changed else f"Partition of {known} is not mounted"

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        """Keep other disk requests from running during the block. Raises ``ActionError`` if one is already running.
        ``what`` names this request in errors.
        """
        if self._running:
            raise ActionError(f"cannot {what}: {self._running} is in progress")
        self._running = what
        try:
            yield
        finally:
            self._running = ""

    async def _wait_until_unused(self, place: Path, volume: Path | None) -> None:
        """Wait until no process uses a disk. Terminate job processes that use it, but only wait for other processes.
        Raises ``ActionError`` on a timeout.
        """
        used = [path for path in {place, volume} if path is not None]
        deadline = time.monotonic() + self.timeouts.use
        while holders := await asyncio.to_thread(volumes.holders, used):
            # As long as job processes exit, there is progress, so the deadline does not matter.
            if not await self._end_jobs(holders) and time.monotonic() > deadline:
                raise ActionError(f"{place} is in use: {'; '.join(map(str, holders))}")
            await asyncio.sleep(self.timeouts.look)

    async def _end_jobs(self, holders: Iterable[volumes.Holder]) -> bool:
        """Terminate job processes among ``holders``. Return True if at least one has exited, which means that the
        disk may now be unused.
        """
        of_jobs = await asyncio.to_thread(self._of_jobs)
        job_holders = [holder for holder in holders if holder.pid in of_jobs]
        alive: Collection[tuple[int, int]] = {(holder.pid, holder.start_ticks) for holder in job_holders}
        for holder in job_holders:
            logger.warning("terminating a process of a job: %s", holder)
        for sig, within in ((signal.SIGTERM, self.timeouts.grace), (signal.SIGKILL, process.KILL_TIMEOUT_S)):
            alive = await process.send_all(alive, sig, within)
        return len(alive) < len(job_holders)

    # --- migrate ------------------------------------------------------------------------------------------------------

    async def migrate(self, old: str = "", new: str = "") -> None:
        """Copy the disk on the store to the disk on the migration target, and swap the two disks.

        ``old`` and ``new`` are the expected cids of these disks; "" matches any disk. An interrupted migration starts
        over. If the migration has already finished, nothing is done.
        """

        def report(progress: Progress) -> None:
            self.progress = progress

        with self._exclusively(f"migrate_disk {old} {new}".rstrip()):
            view = await self._fulfil(decisions.steps_to_restore)
            steps = decisions.steps_to_begin_copy(view, old, new)
            if not steps:
                return
            source, target = view.disks[view.on_store], view.disks[view.on_target]
            await self._wait_until_unused(self._paths.store, source.there)
            try:
                await asyncio.to_thread(self._mounts.carry_out, steps)
                for loss in await self._copy(source.there, target.there, report):
                    logger.warning("disk %s cannot store what disk %s has: %s", target.cid, source.cid, loss)
                await self._wait_until_unused(self._paths.store, source.there)
                await self._fulfil(decisions.steps_to_swap, source.cid, target.cid)
            finally:
                self.progress = None
                await self._restored()  # after a failure, this undoes or completes the swap

    # --- links --------------------------------------------------------------------------------------------------------

    async def associate(self, wanted: Collection[DiskAssociation]) -> None:
        """Create an ``instance/disks/NAME`` link to each disk. Raises ``ActionError`` in the same cases as the Go
        agent's update_settings.
        """
        known = await asyncio.to_thread(self._mounts.known)
        for each in wanted:
            if each.cid not in known:
                raise ActionError(f"Fetching disk settings: {decisions.NOT_FOUND.format(each.cid)}")
            with errors_as(f"Associating disk with name {each.name}", ActionError, OSError):
                await self._wait_for_path(known[each.cid].place)
                await asyncio.to_thread(self._mounts.link, await self._look(), each)

    async def add_dynamic(self, cid: str, hint: Any) -> None:
        """Create the ``data/dynamic_disks/CID`` link to the path in the hint (platform/linux_platform.go,
        SetupDynamicDisk).
        """
        link = self._paths.dynamic_disks / plain(cid)
        place = hints.from_hint(cid, hint, self._settings().source.env).place
        with errors_as(f"Timed out resolving device path for {cid}", ActionError):
            await self._wait_for_path(place)
        assert place is not None, "otherwise _wait_for_path raises"
        await asyncio.to_thread(files.swap_link, place, link)

    async def remove_dynamic(self, cid: str) -> None:
        """Remove the link to a dynamic disk, if it exists."""
        link = self._paths.dynamic_disks / plain(cid)
        await asyncio.to_thread(link.unlink, missing_ok=True)

    def dynamic_places(self) -> dict[str, Path]:
        """Return the directories of mounted dynamic disks, keyed by cid. The disks are not accessed, because they might
        not respond.

        A device is left out, because the volume driver that uses it decides where its file system is mounted.
        """
        # If the base directory is not ``/var/vcap``, nothing is mounted in it, so every link counts.
        points = {mount.point for mount in mounts.mounts()} if self._paths.is_system else None
        found: dict[str, Path] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._paths.dynamic_disks) as entries:
            for entry in entries:
                place = Path(entry.path).readlink() if entry.is_symlink() else None
                if place is not None and (points is None or place in points):
                    found[entry.name] = place
        return found

    async def _wait_for_path(self, place: Path | None) -> None:
        """Wait until ``place`` exists as a volume, a device or a file, so that a link can point to it. Raises
        ``ActionError`` on a timeout, or immediately if the CPI has named no path (None).
        """
        deadline = time.monotonic() + self.timeouts.arrival
        while True:
            missing, is_linkable = await asyncio.to_thread(self._mounts.absence, place)
            if is_linkable:
                return
            if place is None or time.monotonic() > deadline:
                raise ActionError(missing)
            await asyncio.sleep(self.timeouts.look)
