"""Blocking part of the disk service: find the volumes and mount each where it belongs.

Any step may be the last before a kill: the next agent continues from the state on disk (``markers.plan``).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import DiskAssociation, Effective
from agent_shim.host import files, mounts, volumes
from agent_shim.host.descriptors import closing
from agent_shim.services.disks import hints, markers
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.disks.markers import OURS, Disk, Marker, Plan, Role

logger = logging.getLogger(__name__)


_SYSTEM = frozenset(
    Path("/", name)
    for name in ("bin", "boot", "dev", "dev/shm", "home", "lib", "lib64", "opt", "root", "run", "sbin", "tmp", "usr")
)
_KERNEL = (Path("/proc"), Path("/sys"))


class InUseError(ActionError):
    """Another agent uses the volume, or its lease has not expired yet (``volume_lease``)."""


class View(msgspec.Struct, frozen=True):
    """State found by one look: disks by cid, the one mounted last, and the mounted ones (cids, or "").

    ``has_stranger``: the store holds a volume unknown to the Director, for example one of a StatefulSet.
    """

    disks: dict[str, Disk]
    managed: str
    store: str
    target: str
    has_stranger: bool = False


class DiskMounts:
    """Mounts of the store, the migration target, and the volumes that may be placed there."""

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Effective],
        instance: Callable[[], str],
        hold: Callable[[Path], str],
        release: Callable[[Path], None],
        binds: bool | None,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._instance = instance
        self._hold = hold
        self._release = release
        self._binds = binds
        self._taken_down: set[str] = set()
        """Disks that this agent has unmounted: their mount or their marker may have stayed."""

    # --- current state ---------------------------------------------------------------------------------------------

    def known(self) -> dict[str, DiskSettings]:
        """Return all disks that the settings or a hint name."""
        source = self._settings().source
        found = hints.known(source.disks.persistent, source.env, hints.load(self._paths.disk_hints))
        if self._paths.is_system:
            return found
        moved = {cid: self._paths.moved(disk.place) for cid, disk in found.items() if disk.place is not None}
        return found | {cid: msgspec.structs.replace(found[cid], path=str(path)) for cid, path in moved.items()}

    def look(self) -> View:
        down = self._taken_down | self._recorded_down()
        disks = {cid: self._find(cid, known, is_down=cid in down) for cid, known in self.known().items()}
        try:
            managed = files.read(self._paths.managed_disk, is_own=True).decode().strip()
        except (OSError, UnicodeDecodeError):
            managed = ""
        store = self._mounted_on(self._paths.store, disks, managed)
        target = self._mounted_on(self._paths.store_migration_target, disks, managed)
        place = self._paths.store
        has_stranger = not store and mounts.is_mount_point(place) and markers.read(place) is None
        if has_stranger:
            has_stranger = not any(disk.volume and volumes.shows(place, disk.volume) for disk in disks.values())
        return View(disks, managed, store, target, has_stranger)

    def _find(self, cid: str, known: DiskSettings, *, is_down: bool) -> Disk:
        place = known.place
        if place is None and mounts.is_mount_point(self._paths.store) and not self._paths.store.is_symlink():
            place = self._paths.store  # the CPI names none: the volume was mounted there when the container was made
        if place is None or not volumes.is_directory(place) or self.is_bare(place) or self.is_of_container(place):
            return Disk(cid, place)
        marker = markers.read(place)
        if marker is not None and is_down:
            marker = msgspec.structs.replace(marker, role="")
        return Disk(cid, place, place, marker)

    def is_bare(self, place: Path) -> bool:
        """Return True for a directory that is not a mount point: its volume is missing.

        The mount below it is irrelevant. A directory of the node into which volumes are mounted while the pod runs is
        itself a mount. A file written there before the volume arrives, or after it left, would stay on the node.
        """
        return self._paths.is_system and volumes.is_directory(place) and not mounts.is_mount_point(place)

    def is_of_container(self, place: Path) -> bool:
        """Return True for a directory of the container itself, also if it is a mount: it would become the store."""
        real = place.resolve()
        if real in _SYSTEM or any(real.is_relative_to(top) for top in _KERNEL):
            return True
        ours = [path for path in vars(self._paths).values() if isinstance(path, Path) and path != self._paths.store]
        return real != self._paths.store and any(path.is_relative_to(real) for path in ours)

    def _mounted_on(self, place: Path, disks: dict[str, Disk], managed: str) -> str:
        """Return the cid of the disk that is mounted on a place and should be; "" without one.

        A mount of the platform stays after ``unmount_disk``, which removes the role.
        """
        for disk in disks.values():
            if disk.volume is None or disk.is_another or not volumes.shows(place, disk.volume):
                continue
            if disk.marker is not None:
                return disk.cid if disk.role else ""
            # Without a marker: mounted by this agent if it was mounted last, or if its volume was bound here from
            # elsewhere.
            is_up = disk.cid not in self._taken_down and (disk.cid == managed or disk.volume != place)
            return disk.cid if is_up else ""
        if place.is_symlink() or mounts.is_mount_point(place):  # a disk whose hint was removed
            marker = markers.read(place)
            return marker.cid if marker and marker.role else ""
        return ""

    def plan(self, view: View) -> Plan:
        return markers.plan(view.disks.values(), on_store=view.store, managed=view.managed, instance=self._instance())

    # --- bringing it there ------------------------------------------------------------------------------------------

    def restore(self) -> View:
        """Restore the mounts after a restart or an interrupted step."""
        view = self.look()
        decided = self.plan(view)
        for cid in {decided.store, decided.target, *decided.replaced} - {""}:
            self._take(view.disks[cid])
        for cid in decided.replaced:
            self._mark_unmounted(view.disks[cid], view.disks[cid].volume)
            self._release(view.disks[cid].there / markers.DIRECTORY)
        if decided.store:
            if view.store not in ("", decided.store):
                self._make_way(view, decided)
            self._put(view.disks[decided.store], self._paths.store)
            self._claim(view.disks[decided.store], "store")
        self._restore_target(view, decided)
        return self.look()

    def _restore_target(self, view: View, decided: Plan) -> None:
        place, there = self._paths.store_migration_target, view.disks.get(view.target)
        is_unmarked = there is not None and there.marker is None  # of an older agent, and no evidence against it
        if decided.target == view.target or (is_unmarked and not decided.target):
            return
        if view.target:
            volumes.take_away(place)
        if decided.target:
            self._put(view.disks[decided.target], place)

    def _make_way(self, view: View, decided: Plan) -> None:
        """Unmount a disk that an interrupted swap left on the store. Any other disk stays."""
        there = view.disks.get(view.store)
        if there is None or not (there.role == "target" or there.cid in decided.replaced):
            raise ActionError(f"disk {decided.store} belongs on {self._paths.store}, but disk {view.store} is there")
        if there.volume != self._paths.store:
            volumes.take_away(self._paths.store)

    def _take(self, disk: Disk) -> None:
        """Acquire the lease of a volume before it is used."""
        markers.set_aside(disk.there)
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
        """Return True if this container may mount. Detected once."""
        if self._binds is None:
            self._binds = volumes.can_bind(self._paths.bosh)
            logger.info("disks are placed with %s", "bind mounts" if self._binds else "links")
        return self._binds

    def _settle(self, disk: Disk, place: Path, role: Role) -> None:
        """Put a disk in its place and claim it. Take it down again if another agent would not find it there."""
        self._put(disk, place)
        try:
            self._claim(disk, role)
        except HostError:
            if place != disk.volume:
                volumes.take_away(place)
            raise

    def _claim(self, disk: Disk, role: Role) -> None:
        """Record that a disk was placed: in its marker, and for the store in ``managed_disk`` too.

        A full or read-only disk is used without a marker, and a full root file system without the other record. Raises
        ``HostError`` if the next agent would not mount the disk.
        """
        before = disk.marker if disk.marker and not disk.is_another else Marker(disk.cid)
        source = before.source if before.role == role or before.is_unfinished else ""
        marker = msgspec.structs.replace(before, role=role, source=source, instance=self._instance())
        unmarked: HostError | None = None
        if marker != disk.marker:
            try:
                markers.write(disk.there, marker)
            except HostError as exc:
                there = markers.read(disk.there)
                is_known = there is not None and (there.cid, there.role) == (disk.cid, role)
                if not is_known and (there is not None or role == "target"):
                    raise
                logger.warning("%s; another container would not recognize the disk", exc)
                unmarked = None if is_known else exc
        self._record_taken_down(disk.cid, is_down=False)
        self._taken_down.discard(disk.cid)
        if role == "store":
            try:
                files.write_atomic(self._paths.managed_disk, disk.cid.encode(), if_changed=True)
            except HostError as exc:
                if unmarked is not None:
                    raise
                logger.warning("%s; the marker of disk %s tells where it belongs", exc, disk.cid)

    def _mark_unmounted(self, disk: Disk, volume: Path | None) -> None:
        """Record that a disk, visible at ``volume``, is unmounted, so that no restart mounts it.

        Raises ``HostError`` if neither its marker nor the root file system takes the record.
        """
        before = disk.marker
        if before is None or volume is None:
            return
        source = before.source if before.is_unfinished else ""
        try:
            markers.write(volume, msgspec.structs.replace(before, role="", source=source, instance=self._instance()))
        except HostError as exc:
            logger.warning("%s", exc)
            try:
                markers.remove(volume)  # a full disk still allows an unlink
            except OSError:
                self._record_taken_down(disk.cid, is_down=True)

    def _recorded_down(self) -> set[str]:
        """Return the unmounted disks whose markers say otherwise: their volumes cannot be written."""
        try:
            return set(wire.decode(files.read(self._paths.taken_down, is_own=True), dict[str, str]))
        except (OSError, ValueError):
            return set()

    def _record_taken_down(self, cid: str, *, is_down: bool) -> None:
        before = self._recorded_down()
        after = before | {cid} if is_down else before - {cid}
        if after != before:
            files.write_atomic(self._paths.taken_down, msgspec.json.encode(dict.fromkeys(sorted(after), "")))

    # --- mount and unmount ------------------------------------------------------------------------------------------

    def mount(self, cid: str) -> None:
        """Mount a present disk on the store, or on the migration target while another one is on the store."""
        view = self.restore()
        disk = view.disks[cid]
        if disk.is_another and disk.marker:
            hint = f"(if it really is {cid}, remove {markers.DIRECTORY} from it)"
            raise ActionError(f"the volume at {disk.volume} is marked as disk {disk.marker.cid}, not {cid} {hint}")
        self._take(disk)
        if cid == view.target:
            return
        occupant = view.store or self._mount_older(view, disk)
        if occupant not in ("", cid):
            if view.target:
                self.take_down(view, view.target)
            self._settle(disk, self._paths.store_migration_target, "target")
            return
        if disk.marker and disk.marker.is_unfinished:
            raise ActionError(f"disk {cid} holds an unfinished copy of disk {disk.marker.source}")
        self._refuse_strangers(view)
        self._settle(disk, self._paths.store, "store")

    def _mount_older(self, view: View, new: Disk) -> str:
        """Mount the former disk when a new, empty one arrives and no marker identifies it. Return its cid, or "".

        CPIs that recreate the container to attach a second disk remove all state of an agent without markers.
        """
        associated = {wanted.cid for wanted in self._settings().update.disk_associations}
        if new.role == "store" or not files.is_empty(new.there, spared=OURS):
            return ""
        others = [
            disk
            for disk in view.disks.values()
            if disk.cid not in (new.cid, *associated)
            and disk.marker is None
            and disk.volume is not None
            and not files.is_empty(disk.volume, spared=OURS)
        ]
        if len(others) != 1:
            return ""
        logger.info("disk %s is the former one: %s is new and empty", others[0].cid, new.cid)
        self._take(others[0])
        self._settle(others[0], self._paths.store, "store")
        return others[0].cid

    def _refuse_strangers(self, view: View) -> None:
        """Raise ``ActionError`` if the store is a mount or link of unknown origin, which must not be covered."""
        store = self._paths.store
        if not (mounts.is_mount_point(store) or (store.is_symlink() and store.exists())):
            return
        if not any(disk.volume and volumes.shows(store, disk.volume) for disk in view.disks.values()):
            mount = mounts.mount_of(store)
            what = f"{mount.kind} {mount.source}" if mount else "nothing known"
            raise ActionError(f"{store} is not a known disk ({what})")

    def take_down(self, view: View, cid: str) -> None:
        """Unmount a disk and mark it, so that no restart mounts it."""
        disk = view.disks.get(cid)
        volume = disk.volume if disk else None
        place = self.place_of(view, cid)
        if volume is not None:
            try:
                files.sync_filesystem(volume)
            except HostError as exc:  # a broken disk must be unmounted all the same
                logger.warning("%s", exc)
        if place is not None and place != volume:
            try:
                volumes.take_away(place)
            except HostError as exc:
                if exc.errno != errno.EPERM:
                    raise
                # The container was made with a second mount of it. A mount that may not be removed counts as unmounted.
                logger.warning("%s; the disk is no longer counted as mounted", exc)
        self._taken_down.add(cid)
        if view.managed == cid:
            self._paths.managed_disk.unlink(missing_ok=True)
        try:
            if disk is not None and not disk.is_another:
                self._mark_unmounted(disk, volume)
        finally:
            if volume is not None:
                self._release(volume / markers.DIRECTORY)

    def place_of(self, view: View, cid: str) -> Path | None:
        """Return the mount point of a disk. None if it is not mounted, and for the empty cid, which names no disk."""
        if not cid:
            return None
        if cid == view.store:
            return self._paths.store
        return self._paths.store_migration_target if cid == view.target else None

    # --- migrate ----------------------------------------------------------------------------------------------------

    def prepare(self, old: Disk, new: Disk) -> None:
        """Check that the copy is allowed, mark the new disk as an unfinished copy, and make the old one read-only."""
        if not self.binds() and not self._paths.store.is_symlink():
            raise ActionError(f"disk {old.cid} cannot leave {self._paths.store}: this container may not mount")
        is_filled = not files.is_empty(new.there, spared=OURS)
        if is_filled and (new.marker is None or new.marker.source != old.cid):
            raise ActionError(f"disk {new.cid} holds files that are not a copy of disk {old.cid}")
        if is_filled and files.is_empty(old.there, spared=OURS):
            raise ActionError(f"disk {old.cid} is empty and disk {new.cid} is not")
        markers.write(new.there, self._copy_of(old, new, "target"))
        self._put(old, self._paths.store, "ro")

    def swap(self, old: Disk, new: Disk) -> None:
        """Put the finished copy in the place of its source. It is valid as soon as its marker says ``store``.

        A failure before that is undone by the next ``restore``.
        """
        store = self._paths.store
        # The new mount may hide the old disk, which is marked after it.
        with closing(os.open(old.there, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as held:
            if self.binds() and old.volume != store:
                volumes.take_away(store)
            self._put(new, store)
            markers.write(new.there, self._copy_of(old, new, "store"))
            self._mark_unmounted(old, Path(f"/proc/self/fd/{held}"))
            self._release(old.there / markers.DIRECTORY)
        volumes.take_away(self._paths.store_migration_target)

    def _copy_of(self, old: Disk, new: Disk, role: Role) -> Marker:
        generation = old.marker.generation + 1 if old.marker else 1
        return Marker(new.cid, role, old.cid, generation, self._instance())

    # --- links ------------------------------------------------------------------------------------------------------

    def link(self, wanted: DiskAssociation) -> None:
        """Link ``instance/disks/NAME`` to a disk of any kind (agent/action/update_settings.go)."""
        disk = self.look().disks.get(wanted.cid)
        if disk is None:
            raise ActionError(f"Persistent disk with volume id '{wanted.cid}' could not be found")
        if disk.place is None or not disk.place.exists():
            raise ActionError(f"there is nothing at {disk.place or 'the path, which the CPI has not named'}")
        if self.is_bare(disk.place):
            raise ActionError(f"nothing is mounted at {disk.place}")
        files.make_dir(self._paths.instance_disks, 0o755)
        files.swap_link(disk.place, self._paths.instance_disks / plain(wanted.name))

    def linked(self, view: View) -> dict[str, list[Path]]:
        """Return the links to disks by cid, in the order of the associations."""
        found: dict[str, list[Path]] = {}
        for wanted in self._settings().update.disk_associations:
            disk = view.disks.get(wanted.cid)
            link = self._paths.instance_disks / plain(wanted.name)
            if disk and disk.place and link.is_symlink() and volumes.shows(link, disk.place):
                found.setdefault(wanted.cid, []).append(link)
        return found


def plain(name: str) -> str:
    """Return ``name``. Raises ``ActionError`` unless it is a plain file name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ActionError(f"cannot use {name!r} as the name of a link")
    return name
