"""Examines the disks, and carries out the steps that ``decisions`` returns. This is the blocking part of the disk
service.

The agent may be killed after any step. The next agent then continues from the state on disk.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import DiskAssociation, Effective
from agent_shim.host import files, mounts, volumes
from agent_shim.services.disks import decisions, hints, markers
from agent_shim.services.disks.decisions import Disk, MountPoint, Step, View
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.disks.markers import OURS, Marker

logger = logging.getLogger(__name__)

Decision = Callable[..., list[Step]]
"""A function from ``decisions`` that takes a view and the cids in a request."""
DEVICES: Final = Path("/dev")
SHARED_MEMORY: Final = DEVICES / "shm"
_SYSTEM: Final = frozenset(
    Path("/", name)
    for name in ("bin", "boot", "dev", "dev/shm", "home", "lib", "lib64", "opt", "root", "run", "sbin", "tmp", "usr")
)
_KERNEL: Final = (Path("/proc"), Path("/sys"))


class VolumeInUseError(ActionError):
    """Another agent uses the volume, or its lease has not expired yet (``volume_lease``)."""


class Leases(Protocol):
    """Leases that keep other agents from using a volume (``volume_lease.VolumeLeases``). All methods take the agent's
    private directory on the volume.
    """

    def hold(self, directory: Path) -> str:
        """Acquire a volume's lease. Return "" on success, otherwise a description of the agent that has the lease."""

    def release(self, directory: Path) -> None:
        """Release a volume's lease."""

    def is_held(self, directory: Path) -> bool:
        """Return True if this agent has the lease."""


class DiskMounts:
    """The mount points (store and migration target), and the volumes that can be mounted there.

    ``settings`` and ``instance`` (the id in the apply spec, or "") are called whenever the disks are examined.
    ``binds`` is True if this container is allowed to create bind mounts. If it is None, a trial mount is made to find
    out.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Effective],
        instance: Callable[[], str],
        leases: Leases,
        binds: bool | None,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._instance = instance
        self._leases = leases
        self._binds = binds

    def fulfil(self, decide: Decision, *which: str, view: View | None = None) -> View:
        """Call ``decide`` with a view and the cids ``which``, and carry out the steps that it returns. Return a view of
        the disks after the last step.

        The disks are examined first unless a ``view`` is given, and again if any steps were carried out.

        Raises ``ActionError`` if the request is rejected, and ``VolumeInUseError`` or ``OSError`` if a step fails.
        """
        view = self.look() if view is None else view
        steps = decide(view, *which)
        self.carry_out(steps)
        return self.look() if steps else view

    # --- inspection ---------------------------------------------------------------------------------------------------

    def known(self) -> dict[str, DiskSettings]:
        """Return all disks that are named in the settings or in a hint."""
        source = self._settings().source
        found = hints.known(source.disks.persistent, source.env, hints.load(self._paths.disk_hints))
        if self._paths.is_system:
            return found
        # If the base directory is not ``/var/vcap``, paths in ``/var/vcap`` refer to the same paths in the base
        # directory.
        places = {cid: self._paths.moved(disk.place) for cid, disk in found.items() if disk.place is not None}
        return found | {cid: msgspec.structs.replace(found[cid], path=str(path)) for cid, path in places.items()}

    def look(self) -> View:
        """Read settings, hints, records, the mount table, and all volumes with their markers."""
        paths, table, unmounted = self._paths, mounts.mounts(), self._recorded_unmounted()
        try:
            managed = files.read(paths.managed_disk, is_own=True).decode().strip()
        except (OSError, UnicodeDecodeError):
            managed = ""
        disks = {cid: self._disk(cid, known, table, unmounted) for cid, known in self.known().items()}
        wanted = self._settings().update.disk_associations
        links: dict[str, tuple[Path, ...]] = {}
        for each in wanted:
            disk, link = disks.get(each.cid), paths.instance_disks / each.name
            if is_plain(each.name) and disk and disk.place and link.is_symlink() and volumes.shows(link, disk.place):
                links[each.cid] = (*links.get(each.cid, ()), link)
        # While there is no volume, nothing can be mounted, so the trial mount is postponed.
        binds = self._may_bind() if any(disk.volume for disk in disks.values()) else False
        return View(
            store=self._mount_point(paths.store, disks, table, unmounted),
            target=self._mount_point(paths.store_migration_target, disks, table, unmounted),
            disks=disks,
            managed=managed,
            unmounted=unmounted,
            links=links,
            named=frozenset(each.cid for each in wanted),
            instance=self._instance(),
            binds=binds,
        )

    def _disk(self, cid: str, known: DiskSettings, table: Sequence[mounts.Mount], unmounted: frozenset[str]) -> Disk:
        """Examine one disk. ``table`` is the mount table, and ``unmounted`` are the disks recorded as unmounted."""
        place, store = known.place, self._paths.store
        if place is None and not store.is_symlink() and mounts.is_mount_point(store, table):
            place = store  # a CPI gives no path for a volume that the container was created with
        missing, is_linkable = self.absence(place, table)
        unusable = ""
        if place is not None and self._is_of_container(place):
            unusable = (
                f"cannot use disk {cid}: {place} is a directory of the container itself "
                "(have the CPI name the directory at which it mounts the volume)"
            )
        elif missing and _is_device(place):
            unusable = (
                f"cannot use disk {cid}: {place} is a block device, not a directory with its files "
                "(have the CPI mount the volume into the container and name that directory as path in the hint)"
            )
        if place is None or missing or unusable:
            return Disk(cid, place, missing=missing, unusable=unusable, is_linkable=is_linkable)
        try:
            is_empty = files.is_empty(place, spared=OURS)
        except OSError:
            is_empty = None
        return Disk(
            cid,
            place,
            place,
            _read_marker(place, unmounted, cid),
            tuple(known.mount_options or ()),
            is_linkable=is_linkable,
            is_empty=is_empty,
            is_held=self._leases.is_held(place / markers.DIRECTORY),
        )

    def absence(self, place: Path | None, table: Sequence[mounts.Mount] | None = None) -> tuple[str, bool]:
        """Return why there is no volume at ``place``, or "", and whether a link can point to ``place``. It can if
        ``place`` is a volume or anything other than a directory, such as a device.

        A directory that is not a mount point is not a volume, even if its parent is a mount, because the parent may be
        a directory on the node in which volumes are mounted while the pod runs. A file written there before the volume
        is mounted, or after it is unmounted, would stay on the node.
        """
        if place is None:
            return "the CPI has named no path", False
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return f"there is no {place}", False
        except OSError as exc:  # for example because the file server is down
            return f"cannot read {place}: {exc.strerror}", False
        if not stat.S_ISDIR(mode):
            return f"{place} is not a directory", True
        if self._paths.is_system and not mounts.is_mount_point(place, table):
            return f"nothing is mounted at {place}", False
        return "", True

    def _is_of_container(self, place: Path) -> bool:
        """Return True for a directory that belongs to the container itself, even if it is a mount. Without this check,
        such a directory could become the store.
        """
        real = Path(os.path.realpath(place))
        if real in _SYSTEM or any(real.is_relative_to(top) for top in _KERNEL):
            return True
        # A directory that contains one of the agent's own paths is not a volume either.
        own_paths = [
            path for path in vars(self._paths).values() if isinstance(path, Path) and path != self._paths.store
        ]
        return real != self._paths.store and any(path.is_relative_to(real) for path in own_paths)

    def _mount_point(
        self, path: Path, disks: dict[str, Disk], table: Sequence[mounts.Mount], unmounted: frozenset[str]
    ) -> MountPoint:
        """Examine the store or the migration target. For ``table`` and ``unmounted``, see :meth:`_disk`."""
        # Map each disk that is mounted or linked here to True if its mount already has the right options.
        shown = {
            cid: volumes.flags_to_set(path, disk.volume, disk.options, table) is None
            for cid, disk in disks.items()
            if disk.volume is not None and volumes.shows(path, disk.volume)
        }
        is_link, is_mount = path.is_symlink() and volumes.is_there(path), mounts.is_mount_point(path, table)
        # If a known disk is mounted here, its own entry already contains the marker.
        if not (is_link or is_mount) or not all(disks[cid].is_another for cid in shown):
            return MountPoint(path, shown, None, is_link, is_mount)
        mount = mounts.mount_of(path, table)
        source = f"{mount.kind} {mount.source}" if mount else ""
        return MountPoint(path, shown, _read_marker(path, unmounted), is_link, is_mount, source)

    def _may_bind(self) -> bool:
        """Return True if this container is allowed to create bind mounts. The result does not change while the
        container runs, so it is cached.
        """
        if self._binds is None:
            self._binds = volumes.can_bind(self._paths.bosh)
            logger.info("disks are placed with %s", "bind mounts" if self._binds else "links")
        return self._binds

    def _recorded_unmounted(self) -> frozenset[str]:
        """Return the cids in the file that lists unmounted disks. An unreadable file counts as empty."""
        try:
            return frozenset(wire.decode(files.read(self._paths.taken_down, is_own=True), dict[str, str]))
        except (OSError, ValueError):
            return frozenset()

    def link(self, view: View, wanted: DiskAssociation) -> None:
        """Create the ``instance/disks/NAME`` link to a disk of any kind (agent/action/update_settings.go)."""
        disk = view.disks.get(wanted.cid)
        if disk is None:
            raise ActionError(decisions.NOT_FOUND.format(wanted.cid))
        if disk.place is None or not disk.is_linkable:
            raise ActionError(disk.missing)
        files.make_dir(self._paths.instance_disks, 0o755)
        files.swap_link(disk.place, self._paths.instance_disks / plain(wanted.name))

    # --- carrying out steps -------------------------------------------------------------------------------------------

    def carry_out(self, steps: Sequence[Step]) -> None:
        """Carry out the steps in order, up to the first that fails.

        If one step mounts something over a volume, and a later one marks the volume as unmounted, the marker is written
        through a descriptor opened beforehand.
        """
        places = [step.place for step in steps if isinstance(step, decisions.Show)]
        with ExitStack() as opened:
            covered: dict[Path, Path] = {}
            for step in steps:
                if isinstance(step, decisions.Unclaim) and step.volume in places:
                    descriptor = os.open(step.volume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    opened.callback(os.close, descriptor)
                    covered[step.volume] = Path(f"/proc/self/fd/{descriptor}")
            for step in steps:
                self._carry_out(step, covered)

    def _carry_out(self, step: Step, covered: dict[Path, Path]) -> None:
        """Carry out one step. ``covered`` maps volumes that a mount covers to paths that still lead to them."""
        match step:
            case decisions.Take(cid, volume):
                markers.set_aside(volume)
                if rival := self._leases.hold(volume / markers.DIRECTORY):
                    raise VolumeInUseError(f"disk {cid} is in use by {rival}")
            case decisions.Show(volume, place, options):
                volumes.show(volume, place, bind=self._may_bind())
                with _logged(errno.EPERM):
                    volumes.set_options(place, volume, options)
            case decisions.TakeAway(place, is_optional):
                with _logged(errno.EPERM) if is_optional else nullcontext():
                    volumes.take_away(place)
            case decisions.Mark(volume, marker):
                markers.write(volume, marker)
            case decisions.Claim():
                try:
                    self._claim(step)
                except HostError:
                    if step.undo is not None:
                        volumes.take_away(step.undo)
                    raise
            case decisions.Unclaim():
                self._unclaim(step, covered)
            case decisions.Sync(volume):
                with _logged():
                    files.sync_filesystem(volume)
            case decisions.ReleaseVolume(volume):
                self._leases.release(volume / markers.DIRECTORY)

    def _claim(self, step: decisions.Claim) -> None:
        """Record where a disk is mounted. Raises ``HostError`` if the next agent would not mount the disk there.

        A disk on the store is recorded in its marker and in a file on the root file system. One of these records is
        enough, because the marker cannot be written if the disk is full or read-only, and the file cannot be written if
        the root file system is full. A disk on the migration target needs its marker.
        """
        marker, marker_error = step.marker, None
        if not step.is_marked:
            try:
                markers.write(step.volume, marker)
            except HostError as exc:
                existing = markers.read(step.volume)
                is_known = existing is not None and (existing.cid, existing.role) == (marker.cid, marker.role)
                # Fail if the old marker is still there, because it would contradict the file on the root file system.
                # Also fail if there is no other record, which is the case for the migration target.
                if not is_known and (existing is not None or marker.role == "target"):
                    raise
                logger.warning("%s; another container would not recognize the disk", exc)
                marker_error = None if is_known else exc
        self._record_unmounted(marker.cid, is_unmounted=False)
        if marker.role == "store":
            try:
                files.write_atomic(self._paths.managed_disk, marker.cid.encode(), if_changed=True)
            except HostError as exc:
                if marker_error is not None:
                    raise
                logger.warning("%s; the marker on disk %s still records where it belongs", exc, marker.cid)

    def _unclaim(self, step: decisions.Unclaim, covered: dict[Path, Path]) -> None:
        """Record that a disk is unmounted. Raises ``HostError`` if the disk has a marker, but neither the disk nor the
        root file system can be written to. Without a marker, a failure is only logged. For ``covered``, see
        :meth:`_carry_out`.
        """
        if step.is_managed:
            self._paths.managed_disk.unlink(missing_ok=True)
        if step.volume is None or step.marker is None:
            with _logged():
                self._record_unmounted(step.cid, is_unmounted=True)
            return
        volume = covered.get(step.volume, step.volume)
        try:
            markers.write(volume, step.marker)
        except HostError as exc:
            logger.warning("%s", exc)
            try:
                markers.remove(volume)  # removing a file works even on a full disk
            except OSError:
                self._record_unmounted(step.cid, is_unmounted=True)

    def _record_unmounted(self, cid: str, *, is_unmounted: bool) -> None:
        """Add a disk to the file that lists unmounted disks, or remove it from the list. The file contains a JSON
        object, because ``state_backup`` regards anything else as damaged.
        """
        before = self._recorded_unmounted()
        after = before | {cid} if is_unmounted else before - {cid}
        if after != before:
            files.write_atomic(self._paths.taken_down, msgspec.json.encode(dict.fromkeys(sorted(after), "")))


def _read_marker(volume: Path, unmounted: Collection[str], cid: str = "") -> Marker | None:
    """Read a volume's marker. If the disk is recorded as unmounted, the role in the returned marker is ""."""
    marker = markers.read(volume)
    is_unmounted = marker is not None and (cid or marker.cid) in unmounted
    return msgspec.structs.replace(marker, role="") if marker is not None and is_unmounted else marker


def _is_device(place: Path | None) -> bool:
    """Return True for a block device, or for any path in /dev except below /dev/shm, even if nothing exists at that
    path. No volume will ever be mounted at such a path, so there is no point in waiting for one.
    """
    if place is None:
        return False
    if place.is_relative_to(DEVICES) and not place.is_relative_to(SHARED_MEMORY):
        return True
    with suppress(OSError):
        return place.is_block_device()
    return False


@contextmanager
def _logged(only: int | None = None) -> Iterator[None]:
    """Log a ``HostError`` raised in the block instead of raising it. If ``only`` is an errno, all other errors are
    still raised.
    """
    try:
        yield
    except HostError as exc:
        if only not in (None, exc.errno):
            raise
        logger.warning("%s", exc)


def is_plain(name: str) -> bool:
    """Return True if ``name`` can be used as a file name: it is not empty, ``.`` or ``..``, and contains no slash or
    NUL.
    """
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def plain(name: str) -> str:
    """Return ``name``. Raises ``ActionError`` unless it is a plain file name."""
    if not is_plain(name):
        raise ActionError(f"cannot use {name!r} as the name of a link")
    return name
