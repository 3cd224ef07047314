"""The blocking half: what is where, and bringing it to where it belongs.

Every step may be the last before a kill: what the next agent finds then leads it to the same end (``identity.plan``).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import DiskAssociation, Effective
from agent_shim.host import copytree, files, mounts, volumes
from agent_shim.services.disks import hints, markers
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.disks.markers import OURS, Disk, Marker, Plan, Role

logger = logging.getLogger(__name__)


class InUseError(ActionError):
    """Another agent has the volume, or had it until its lease is over (``fencing``)."""


@dataclass(frozen=True, slots=True)
class View:
    """What was found just now: disks by cid, the one mounted last, and which are mounted (cids, or "").

    ``has_stranger``: a volume is on the store that no Director has ever had to do with, a StatefulSet's say.
    """

    disks: dict[str, Disk]
    managed: str
    store: str
    target: str
    has_stranger: bool = False


class DiskMounts:
    """The store, the migration target, and the volumes that may come there."""

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Effective],
        instance: Callable[[], str],
        hold: Callable[[Path], str],
        let_go: Callable[[Path], None],
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._instance = instance
        self._hold = hold
        self._let_go = let_go
        self._binds: bool | None = None
        self._taken_down: set[str] = set()
        """Disks that are down although their marker, on a broken or full volume, could not be made to say so."""

    # --- what is there ----------------------------------------------------------------------------------------------

    def known(self) -> dict[str, DiskSettings]:
        """All disks that the settings or a hint name."""
        source = self._settings().source
        return hints.known(source.disks.persistent, source.env, hints.load(self._paths.disk_hints))

    def look(self) -> View:
        disks = {cid: self._find(cid, known) for cid, known in self.known().items()}
        try:
            managed = self._paths.managed_disk.read_text().strip()
        except OSError:
            managed = ""
        store = self._mounted_on(self._paths.store, disks, managed)
        target = self._mounted_on(self._paths.store_migration_target, disks, managed)
        return View(disks, managed, store, target, not store and self._has_stranger(disks))

    def _has_stranger(self, disks: dict[str, Disk]) -> bool:
        store = self._paths.store
        if not mounts.is_mount_point(store) or markers.read(store) is not None:
            return False
        return not any(disk.volume is not None and volumes.shows(store, disk.volume) for disk in disks.values())

    def _find(self, cid: str, known: DiskSettings) -> Disk:
        place = known.place
        if place is None and mounts.is_mount_point(self._paths.store) and not self._paths.store.is_symlink():
            place = self._paths.store  # the CPI names none: whoever made the container has put it there
        if place is None or not volumes.is_directory(place):
            return Disk(cid, place)
        if self.is_bare(place):
            return Disk(cid, place)
        marker = markers.read(place)
        if marker is not None and cid in self._taken_down:
            marker = msgspec.structs.replace(marker, role="")
        return Disk(cid, place, place, marker)

    def is_bare(self, place: Path) -> bool:
        """True for a directory that is no mount point: there a volume is missing.

        What it lies on does not matter. A directory of the node, into which volumes are mounted while the pod runs, is
        a mount itself; a file that is written there before the volume arrives, or after it has left, stays on the node.
        """
        return self._paths.is_system and volumes.is_directory(place) and not mounts.is_mount_point(place)

    def _mounted_on(self, place: Path, disks: dict[str, Disk], managed: str) -> str:
        for disk in disks.values():
            if disk.volume is None or disk.is_another or not volumes.shows(place, disk.volume):
                continue
            if disk.marker is not None:
                return disk.cid if disk.role else ""
            # Without a marker: ours when it was mounted last, or when somebody has brought it here from elsewhere.
            is_up = disk.cid not in self._taken_down and (disk.cid == managed or disk.volume != place)
            return disk.cid if is_up else ""
        if place.is_symlink() or mounts.is_mount_point(place):  # a disk whose hint is gone
            marker = markers.read(place)
            return marker.cid if marker and marker.role else ""
        return ""

    def plan(self, view: View) -> Plan:
        return markers.plan(view.disks.values(), on_store=view.store, managed=view.managed, instance=self._instance())

    # --- bringing it there ------------------------------------------------------------------------------------------

    def settle(self) -> View:
        """Bring what was mounted to its place: after a restart, or after a step that was cut off."""
        view = self.look()
        decided = self.plan(view)
        for cid in {decided.store, decided.target, *decided.replaced} - {""}:
            self._take(view.disks[cid])
        for cid in decided.replaced:
            self._release(view.disks[cid], view.disks[cid].volume)
            self._let_go(view.disks[cid].there / markers.DIRECTORY)
        if decided.store:
            if view.store not in ("", decided.store):
                self._make_way(view, decided)
            self._put(view.disks[decided.store], self._paths.store)
            self._claim(view.disks[decided.store], "store")
        self._settle_target(view, decided)
        return self.look()

    def _settle_target(self, view: View, decided: Plan) -> None:
        place, there = self._paths.store_migration_target, view.disks.get(view.target)
        is_unmarked = there is not None and there.marker is None  # an older agent's, and nothing tells that it is wrong
        if decided.target == view.target or (is_unmarked and not decided.target):
            return
        if view.target:
            volumes.take_away(place)
        if decided.target:
            self._put(view.disks[decided.target], place)

    def _make_way(self, view: View, decided: Plan) -> None:
        """Take away what is on the store because a swap was cut off; anything else stays."""
        there = view.disks.get(view.store)
        if there is None or not (there.role == "target" or there.cid in decided.replaced):
            raise ActionError(f"disk {decided.store} belongs on {self._paths.store}, but disk {view.store} is there")
        if there.volume != self._paths.store:
            volumes.take_away(self._paths.store)

    def _take(self, disk: Disk) -> None:
        """Have a volume to ourselves before it is touched."""
        if rival := self._hold(disk.there / markers.DIRECTORY):
            raise InUseError(f"disk {disk.cid} is in use by {rival}")

    def _put(self, disk: Disk, place: Path, *more: str) -> None:
        volumes.show(disk.there, place, bind=self.binds())
        options = self.known()[disk.cid].mount_options or []
        try:
            volumes.set_options(place, like=disk.there, more=[*options, *more])
        except HostError as exc:
            if exc.errno != errno.EPERM:
                raise
            logger.warning("%s", exc)

    def binds(self) -> bool:
        """True if this container may mount; found out once."""
        if self._binds is None:
            self._binds = volumes.can_bind(self._paths.bosh)
            logger.info("disks come to their places by %s", "bind mounts" if self._binds else "links")
        return self._binds

    def _claim(self, disk: Disk, role: Role) -> None:
        """Mark a disk that was put in its place. A full or read-only one is used all the same."""
        before = disk.marker if disk.marker and not disk.is_another else Marker(disk.cid)
        source = before.source if before.role == role or before.is_unfinished else ""
        marker = msgspec.structs.replace(before, role=role, source=source, instance=self._instance())
        if marker != disk.marker:
            try:
                markers.write(disk.there, marker)
            except HostError as exc:
                logger.warning("%s; only this container knows where it belongs", exc)
        self._taken_down.discard(disk.cid)
        if role == "store":
            self._remember(disk.cid)

    def _remember(self, cid: str) -> None:
        path = self._paths.managed_disk
        with suppress(OSError):
            if path.read_text() == cid:
                return
        files.write_atomic(path, cid.encode())

    def _release(self, disk: Disk, volume: Path | None) -> None:
        """Mark a disk, visible at ``volume``, as one that does not come back by itself."""
        before = disk.marker
        if before is None or volume is None:
            return
        source = before.source if before.is_unfinished else ""
        try:
            markers.write(volume, msgspec.structs.replace(before, role="", source=source, instance=self._instance()))
        except HostError as exc:
            logger.warning("%s", exc)
            with suppress(OSError):  # a full disk still lets go of a name
                markers.remove(volume)

    # --- mount and unmount ------------------------------------------------------------------------------------------

    def mount(self, cid: str) -> None:
        """Bring a disk that is there to the store, or to the migration target while another one is on the store."""
        view = self.settle()
        disk = view.disks[cid]
        if disk.is_another and disk.marker:
            raise ActionError(
                f"the volume at {disk.volume} is marked as disk {disk.marker.cid}, not {cid} "
                f"(if it really is {cid}, remove {markers.DIRECTORY} from it)"
            )
        self._take(disk)
        if cid == view.target:
            return
        occupant = view.store or self._mount_older(view, disk)
        if occupant not in ("", cid):
            if view.target:
                self.take_down(view, view.target)
            self._put(disk, self._paths.store_migration_target)
            self._claim(disk, "target")
            return
        if disk.marker and disk.marker.is_unfinished:
            raise ActionError(f"disk {cid} holds an unfinished copy of disk {disk.marker.source}")
        self._refuse_strangers(view)
        self._put(disk, self._paths.store)
        self._claim(disk, "store")

    def _mount_older(self, view: View, new: Disk) -> str:
        """Mount what must be the former disk when a new, empty one comes and no marker tells; its cid, or "".

        CPIs that make the container anew to attach a second disk lose all that an agent without markers knew.
        """
        associated = {wanted.cid for wanted in self._settings().update.disk_associations}
        if new.role == "store" or not copytree.is_empty(new.there, spared=OURS):
            return ""
        others = [
            disk
            for disk in view.disks.values()
            if disk.cid not in (new.cid, *associated)
            and disk.marker is None
            and disk.volume is not None
            and not copytree.is_empty(disk.volume, spared=OURS)
        ]
        if len(others) != 1:
            return ""
        logger.info("disk %s is the former one: %s is new and empty", others[0].cid, new.cid)
        self._take(others[0])
        self._put(others[0], self._paths.store)
        self._claim(others[0], "store")
        return others[0].cid

    def _refuse_strangers(self, view: View) -> None:
        """Nothing is mounted over, and no link changed, that leads to a place nobody knows."""
        store = self._paths.store
        if not (mounts.is_mount_point(store) or (store.is_symlink() and store.exists())):
            return
        if not any(disk.volume and volumes.shows(store, disk.volume) for disk in view.disks.values()):
            mount = mounts.mount_of(store)
            what = f"{mount.kind} {mount.source}" if mount else "nothing known"
            raise ActionError(f"{store} leads to a place that is no known disk ({what})")

    def take_down(self, view: View, cid: str) -> None:
        """Take a disk away from where it is mounted; it does not come back by itself."""
        disk = view.disks.get(cid)
        volume = disk.volume if disk else None
        place = self.place_of(view, cid)
        if volume is not None:
            try:
                files.sync_filesystem(volume)
            except HostError as exc:  # a broken disk has to go all the same
                logger.warning("%s", exc)
        if place is not None and place != volume:
            try:
                volumes.take_away(place)
            except HostError as exc:
                if exc.errno != errno.EPERM:
                    raise
                # Whoever made the container has mounted it twice; what may not be undone counts as undone.
                logger.warning("%s; the disk is no longer counted as mounted", exc)
        self._taken_down.add(cid)
        if view.managed == cid:
            self._paths.managed_disk.unlink(missing_ok=True)
        if disk is not None and not disk.is_another:
            self._release(disk, volume)
        if volume is not None:
            self._let_go(volume / markers.DIRECTORY)

    def place_of(self, view: View, cid: str) -> Path | None:
        """Where a disk is mounted; None where it is not, and for the empty cid, which names no disk."""
        if not cid:
            return None
        if cid == view.store:
            return self._paths.store
        return self._paths.store_migration_target if cid == view.target else None

    # --- migrate ----------------------------------------------------------------------------------------------------

    def prepare(self, old: Disk, new: Disk) -> None:
        """See that the copy may be made, note on the new disk that it is one, and keep others from writing."""
        if not self.binds() and not self._paths.store.is_symlink():
            raise ActionError(
                f"disk {old.cid} is mounted on {self._paths.store} for good: this container may not mount"
            )
        is_filled = not copytree.is_empty(new.there, spared=OURS)
        if is_filled and (new.marker is None or new.marker.source != old.cid):
            raise ActionError(f"disk {new.cid} holds files that are no copy of disk {old.cid}")
        if is_filled and copytree.is_empty(old.there, spared=OURS):
            raise ActionError(f"disk {old.cid} is empty and disk {new.cid} is not")
        markers.write(new.there, self._copy_of(old, new, "target"))
        self._put(old, self._paths.store, "ro")

    def swap(self, old: Disk, new: Disk) -> None:
        """Put the finished copy in the place of its source. It counts from the moment its marker says ``store``.

        What fails before that is undone by the next ``settle``.
        """
        store = self._paths.store
        # The new disk may come to hide the old one, which has to be marked after that.
        held = os.open(old.there, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self.binds() and old.volume != store:
                volumes.take_away(store)
            self._put(new, store)
            markers.write(new.there, self._copy_of(old, new, "store"))
            self._release(old, Path(f"/proc/self/fd/{held}"))
            self._let_go(old.there / markers.DIRECTORY)
        finally:
            os.close(held)
        volumes.take_away(self._paths.store_migration_target)

    def _copy_of(self, old: Disk, new: Disk, role: Role) -> Marker:
        generation = old.marker.generation + 1 if old.marker else 1
        return Marker(new.cid, role, old.cid, generation, self._instance())

    # --- links ------------------------------------------------------------------------------------------------------

    def link(self, wanted: DiskAssociation) -> None:
        """Link ``instance/disks/NAME`` to a disk, of whatever kind (agent/action/update_settings.go)."""
        disk = self.look().disks.get(wanted.cid)
        if disk is None:
            raise ActionError(f"Persistent disk with volume id '{wanted.cid}' could not be found")
        if disk.place is None or not disk.place.exists():
            raise ActionError(f"there is nothing at {disk.place or 'the place of the disk, which nobody named'}")
        if self.is_bare(disk.place):
            raise ActionError(f"nothing is mounted at {disk.place}")
        files.make_dir(self._paths.instance_disks, 0o755)
        files.swap_link(disk.place, self._paths.instance_disks / plain(wanted.name))

    def linked(self, view: View) -> dict[str, list[Path]]:
        """The links that lead to disks, by cid, in the order of the associations."""
        found: dict[str, list[Path]] = {}
        for wanted in self._settings().update.disk_associations:
            disk = view.disks.get(wanted.cid)
            link = self._paths.instance_disks / plain(wanted.name)
            if disk and disk.place and link.is_symlink() and volumes.shows(link, disk.place):
                found.setdefault(wanted.cid, []).append(link)
        return found


def plain(name: str) -> str:
    """``name`` itself; raises ``ActionError`` when it is more than the name of a file."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ActionError(f"cannot use {name!r} as the name of a link")
    return name
