"""Decides which steps a disk request needs, given the state of the disks at one moment (:class:`View`).

The functions whose names begin with ``steps_to`` return steps, which ``mounting`` carries out in order. These functions
depend only on the view, and raise ``ActionError`` if the request is rejected. If the agent is killed between any two
steps, the next :func:`steps_to_restore` can continue from the state on disk.

:func:`plan` decides where each disk belongs, using its marker. If the markers leave a choice, it takes the disk that
was mounted last (according to managed_disk_settings.json) or the one that is mounted now. If two disks are marked for
the store and nothing distinguishes them, neither is mounted and the reason is reported, so that no data is lost.

| volume | decision |
|---|---|
| the only one marked for the store | belongs on the store |
| marked as migration target | belongs on the migration target |
| two marked for the store, one a finished copy of the other | the copy belongs on the store, the other is released |
| two others marked for the store | the one mounted last belongs there, else the one mounted now, else neither |
| marked with another cid | not used; ``mount_disk`` fails |
| marked for another instance | not used until the Director sends ``mount_disk`` |
| mounted last, but its marker now says otherwise | not used, and no job starts |
| not marked by an agent, named by managed_disk_settings.json | belongs on the store, unless another disk is there |
| not marked, or unmounted by ``unmount_disk`` | not used |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import ActionError
from agent_shim.services.disks.markers import DIRECTORY, Marker, Role

NOT_FOUND: Final = "Persistent disk with volume id '{}' could not be found"
"""The Go agent's error message (settings/service.go)."""

# --- view -------------------------------------------------------------------------------------------------------------


class Disk(msgspec.Struct, frozen=True):
    """A disk that is named in the settings or in a hint.

    ``volume`` is None while there is no volume at ``place``. In that case, ``missing`` gives the reason, and
    ``unusable``, unless it is "", says why waiting for a volume is pointless. ``is_linkable`` means that a link can
    point to ``place``, because it is a volume or something other than a directory, such as a device. ``is_empty`` means
    that the volume has no job data; it is None if that cannot be determined. ``is_held`` means that this agent has the
    volume's lease.
    """

    cid: str
    place: Path | None
    volume: Path | None = None
    marker: Marker | None = None
    options: tuple[str, ...] = ()
    missing: str = ""
    unusable: str = ""
    is_linkable: bool = False
    is_empty: bool | None = True
    is_held: bool = False

    @property
    def there(self) -> Path:
        """The volume's path, for a disk whose volume is known to be present."""
        assert self.volume is not None, f"the volume of disk {self.cid} is there"
        return self.volume

    @property
    def is_another(self) -> bool:
        """True if the volume's marker belongs to another disk."""
        return self.marker is not None and self.marker.cid != self.cid

    @property
    def role(self) -> Role | None:
        """The role in the disk's own marker, or None if there is no such marker."""
        return None if self.marker is None or self.is_another else self.marker.role


class MountPoint(msgspec.Struct, frozen=True):
    """The store or the migration target.

    The keys of ``shown`` are the cids of the known disks whose volumes are mounted or linked here. A value is True if
    the mount has the right options. If something other than a known disk is mounted here, ``marker`` is the marker
    found on it, or None. ``is_link`` means that the path is a link to something that exists. ``is_mount`` means that
    something is mounted here, or at the target of the link. ``source`` describes that mount in errors.
    """

    path: Path
    shown: Mapping[str, bool] = {}
    marker: Marker | None = None
    is_link: bool = False
    is_mount: bool = False
    source: str = ""


class View(msgspec.Struct, frozen=True):
    """The state of all disks and mount points at one moment.

    ``managed`` is the disk (cid, or "") that was last mounted on the store. ``unmounted`` are disks that were unmounted
    at the Director's request, but could not be marked as such. ``links`` maps the cids of disks to the links in
    ``instance/disks`` that point to them. ``named`` are the cids of all disks that should have such links. ``binds`` is
    True if this container is allowed to create bind mounts. Otherwise, links are used instead of mounts.
    """

    store: MountPoint
    target: MountPoint
    disks: Mapping[str, Disk] = {}
    managed: str = ""
    unmounted: frozenset[str] = frozenset()
    links: Mapping[str, tuple[Path, ...]] = {}
    named: frozenset[str] = frozenset()
    instance: str = ""
    binds: bool = True

    @property
    def on_store(self) -> str:
        """The cid of the disk that is considered mounted on the store, or ""."""
        return self._mounted_on(self.store)

    @property
    def on_target(self) -> str:
        """The cid of the disk that is considered mounted on the migration target, or ""."""
        return self._mounted_on(self.target)

    def _mounted_on(self, point: MountPoint) -> str:
        """Return the disk (cid, or "") that is considered mounted at a mount point. A disk with a marker is considered
        mounted only while the marker has a role, because ``unmount_disk`` might not be able to remove a mount that was
        created with the container.
        """
        for cid, disk in self.disks.items():
            if cid not in point.shown or disk.is_another:
                continue
            if disk.marker is not None:
                return cid if disk.role else ""
            # Assume that this agent has mounted a disk without a marker if the disk is recorded as the last one
            # mounted, or if its volume is at another path and must have been bind-mounted at this mount point.
            is_ours = cid == self.managed or disk.volume != point.path
            return cid if is_ours and cid not in self.unmounted else ""
        return point.marker.cid if point.marker and point.marker.role else ""  # the disk's hint may have been removed

    @property
    def has_unknown_volume(self) -> bool:
        """True if the store has a volume that the Director does not know about, for example a StatefulSet's volume."""
        # ``shown`` still contains a known disk that was unmounted, but whose mount could not be removed.
        return not self.on_store and self.store.is_mount and self.store.marker is None and not self.store.shown

    def point_of(self, cid: str) -> MountPoint | None:
        """Return where a disk is mounted, or None. The empty cid does not name a disk."""
        if not cid:
            return None
        return self.store if cid == self.on_store else self.target if cid == self.on_target else None


# --- disk locations ---------------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True):
    """The disks (cids, or "") that belong on the store and on the migration target.

    ``replaced`` are disks that are still marked for the store, but have a finished copy that is also marked for the
    store. If there is a ``problem``, no job may start.
    """

    store: str = ""
    target: str = ""
    replaced: frozenset[str] = frozenset()
    problem: str = ""


def plan_of(view: View) -> Placement:
    """Decide where the disks of a view belong."""
    return plan(view.disks.values(), on_store=view.on_store, managed=view.managed, instance=view.instance)


def plan(disks: Collection[Disk], *, on_store: str, managed: str, instance: str) -> Placement:
    """Decide where the disks belong. The markers take precedence. Of several disks that are marked for the store, the
    one mounted last (``managed``) is preferred, then the one mounted now (``on_store``). If no disk is marked for the
    store and the disk mounted last has no marker, the disk mounted now is kept, if there is one.
    """
    foreign = {disk.cid for disk in disks if _belongs_elsewhere(disk, instance)}
    ours = [disk for disk in disks if disk.cid not in foreign]
    # After an interrupted swap, both a disk and its finished copy may be marked for the store. The copy, which has a
    # higher generation, replaces the disk.
    claims = {disk.cid: disk.marker for disk in ours if disk.role == "store" and disk.marker}
    copies = [marker for marker in claims.values() if marker.source]
    replaced = frozenset(
        copy.source for copy in copies if copy.source in claims and copy.generation > claims[copy.source].generation
    )
    rivals = claims.keys() - replaced
    target = next((disk.cid for disk in ours if disk.role == "target"), "")
    last = next((disk for disk in disks if disk.cid == managed and disk.volume), None)
    absent = next((disk for disk in disks if disk.cid == managed and disk.volume is None), None)
    store = problem = ""
    if any(managed == copy.source for copy in copies):  # the swap was interrupted before ``managed`` was updated
        absent = None
    if absent is not None:
        problem = f"disk {managed} was mounted and is not there: no volume at {absent.place}"
    elif last and last.marker and last.is_another:
        problem = f"disk {managed} was mounted and its volume at {last.volume} is marked as disk {last.marker.cid}"
    elif len(rivals) > 1:
        store = next((cid for cid in (managed, on_store) if cid in rivals), "")
        problem = "" if store else f"the disks {' and '.join(sorted(rivals))} both claim the store"
    elif rivals:
        store = next(iter(rivals))
    elif last and last.marker is None:
        store = on_store or managed
    elif foreign:
        problem = f"disk {min(foreign)} belongs to another instance and the Director has not had it mounted here"
    elif last:
        role = last.role or "unmounted"
        problem = f"disk {managed} was mounted last, but its marker says {role} (mount_disk {managed} mounts it again)"
    return Placement(store, target, replaced, problem)


def _belongs_elsewhere(disk: Disk, instance: str) -> bool:
    """Return True if the disk is marked for the store or the migration target of another instance. Return False if the
    id of either instance is unknown.
    """
    owner = disk.marker.instance if disk.marker else ""
    return disk.role in ("store", "target") and "" not in (owner, instance) and owner != instance


# --- steps ------------------------------------------------------------------------------------------------------------


class Take(msgspec.Struct, frozen=True):
    """Acquire a volume's lease before using the volume. Fails while another agent holds the lease."""

    cid: str
    volume: Path


class Show(msgspec.Struct, frozen=True):
    """Mount or link a volume at a mount point. ``options`` are added to those of the volume's own mount."""

    volume: Path
    place: Path
    options: tuple[str, ...] = ()


class TakeAway(msgspec.Struct, frozen=True):
    """Remove the agent's own mount or link. If ``is_optional`` is set and this container is not allowed to remove the
    mount, the step does not fail.
    """

    place: Path
    is_optional: bool = False


class Mark(msgspec.Struct, frozen=True):
    """Write a marker to a volume. If it cannot be written, the request fails."""

    volume: Path
    marker: Marker


class Claim(msgspec.Struct, frozen=True):
    """Record where a disk is mounted.

    The disk's marker is written, unless ``is_marked`` says that it is already correct. For the disk on the store, a
    file on the root file system is written too. If no usable record can be written, unmount the disk from ``undo`` (if
    set) and fail, because the next agent would not know that it has to mount the disk.
    """

    volume: Path
    marker: Marker
    is_marked: bool = False
    undo: Path | None = None


class Unclaim(msgspec.Struct, frozen=True):
    """Record that a disk is unmounted.

    The role is removed from the disk's marker. If the disk has no marker, or the marker can be neither written nor
    removed, a file on the root file system is written instead. ``is_managed`` means that the disk is recorded as the
    one last mounted on the store.
    """

    cid: str
    volume: Path | None = None
    marker: Marker | None = None
    is_managed: bool = False


class Sync(msgspec.Struct, frozen=True):
    """Flush all writes to a volume. Errors are only logged, so that a broken volume can be unmounted too."""

    volume: Path


class ReleaseVolume(msgspec.Struct, frozen=True):
    """Release a volume's lease, so that another agent can acquire it."""

    volume: Path


Step = Take | Show | TakeAway | Mark | Claim | Unclaim | Sync | ReleaseVolume

# --- decisions --------------------------------------------------------------------------------------------------------


def steps_to_restore(view: View) -> list[Step]:
    """Return the steps that mount every disk where it belongs, after a restart or an interrupted request."""
    decided, disks, steps = plan_of(view), view.disks, list[Step]()
    for cid in (decided.store, decided.target, *sorted(decided.replaced)):
        steps += _take(disks[cid]) if cid in disks else []
    for cid in sorted(decided.replaced):
        steps += [*_unclaim(view, disks[cid]), ReleaseVolume(disks[cid].there)]
    on_store, on_target = view.on_store, view.on_target
    if decided.store in disks:
        disk = disks[decided.store]
        if on_store in ("", disk.cid):
            steps += _show(disk, view.store)
        else:  # another disk may be unmounted only if an interrupted swap left it there
            occupant = disks.get(on_store)
            if occupant is None or not (occupant.role == "target" or on_store in decided.replaced):
                raise ActionError(f"disk {disk.cid} belongs on {view.store.path}, but disk {on_store} is there")
            if occupant.volume != view.store.path:  # a mount that was created with the container is covered instead
                steps.append(TakeAway(view.store.path))
            steps.append(Show(disk.there, view.store.path, disk.options))
        steps += _claim(view, disk, "store")
    # Do not unmount a disk that has no marker, because an older agent may have mounted it.
    is_unmarked = on_target in disks and disks[on_target].marker is None
    if decided.target != on_target and (decided.target or not is_unmarked):
        steps += [TakeAway(view.target.path)] if on_target else []
        if decided.target:
            steps.append(Show(disks[decided.target].there, view.target.path, disks[decided.target].options))
    return steps


def steps_to_mount(view: View, cid: str) -> list[Step]:
    """Return the steps that mount a disk on the store, or on the migration target while another disk is on the
    store.
    """
    disk = present(view, cid)
    if disk.is_another and disk.marker:
        hint = f"(if it really is {cid}, remove {DIRECTORY} from it)"
        raise ActionError(f"the volume at {disk.volume} is marked as disk {disk.marker.cid}, not {cid} {hint}")
    steps = _take(disk)
    if cid == view.on_target:
        return steps + _claim(view, disk, "target")  # an agent may have been killed before it recorded the claim
    occupant = view.on_store
    if not occupant and disk.is_empty is None:
        raise ActionError(f"cannot read the volume of disk {cid} at {disk.volume}")
    # If the CPI recreated the container to attach this disk, the first disk goes back to the store (see ``_former``).
    if not occupant and (former := _former(view, disk)):
        steps += [*_take(former), *_settle(view, former, "store")]
        occupant = former.cid
    if occupant not in ("", cid):
        steps += steps_to_unmount(view, view.on_target) if view.on_target else []
        return steps + _settle(view, disk, "target")
    if disk.marker and disk.marker.is_unfinished:
        raise ActionError(f"disk {cid} holds an unfinished copy of disk {disk.marker.source}")
    # Never mount over an unknown mount or link.
    if (view.store.is_mount or view.store.is_link) and not view.store.shown:
        raise ActionError(f"{view.store.path} is not a known disk ({view.store.source or 'nothing known'})")
    return steps + _settle(view, disk, "store")


def present(view: View, cid: str) -> Disk:
    """Return a disk if its volume is present, otherwise raise ``ActionError``."""
    disk = view.disks.get(cid)
    if disk is None:
        raise ActionError(NOT_FOUND.format(cid))
    if disk.volume is None:
        raise ActionError(disk.unusable or f"the volume of disk {cid} is not there: {disk.missing}")
    return disk


def _former(view: View, new: Disk) -> Disk | None:
    """Return the disk that has to be mounted on the store before ``new``, or None. There is such a disk only if ``new``
    is empty and exactly one other disk has files but no marker.

    This happens if a CPI recreates the container to attach a second disk: without a marker on the first disk, nothing
    records where that disk was mounted.
    """
    if new.role == "store" or not new.is_empty:
        return None
    # Leave out disks that the Director has unmounted, and ``named`` disks, which have links in ``instance/disks`` and
    # therefore do not belong on the store.
    excluded = {new.cid, *view.named, *view.unmounted}
    others = [
        disk
        for disk in view.disks.values()
        if disk.cid not in excluded and disk.marker is None and disk.volume and not disk.is_empty
    ]
    return others[0] if len(others) == 1 else None


def steps_to_unmount(view: View, cid: str) -> list[Step]:
    """Return the steps that unmount a disk wherever it is mounted, and prevent a restarted agent from mounting it
    again.
    """
    disk, point, steps = view.disks.get(cid), view.point_of(cid), list[Step]()
    volume = disk.volume if disk else None
    if volume is not None:
        steps.append(Sync(volume))
    # If the volume's own path is the mount point, the container was created with this mount, and it stays.
    if point is not None and point.path != volume:
        # This container might not be allowed to remove the mount. The disk is considered unmounted either way.
        steps.append(TakeAway(point.path, is_optional=True))
    if disk is not None and disk.role is not None:
        steps += _unclaim(view, disk, is_managed=view.managed == cid)
    elif point is not None or volume is None or view.managed == cid:
        # Without this record, ``steps_to_restore`` could mount the disk again.
        steps.append(Unclaim(cid, is_managed=view.managed == cid))
    if volume is not None:
        steps.append(ReleaseVolume(volume))
    return steps


def steps_to_begin_copy(view: View, old: str, new: str) -> list[Step]:
    """Return the steps to carry out before the disk on the store is copied to the disk on the migration target.

    ``old`` and ``new`` are the expected cids of these disks; "" matches any disk. If the migration has already
    finished, there are no steps.
    """
    if _is_migrated(view, old, new):
        return []
    source, target = _pair(view, old, new)
    why = ""
    if not view.binds and not view.store.is_link:
        why = f"disk {source.cid} cannot leave {view.store.path}: this container may not mount"
    elif not target.is_empty and (target.marker is None or target.marker.source != source.cid):
        why = f"disk {target.cid} holds files that are not a copy of disk {source.cid}"
    elif not target.is_empty and source.is_empty:
        why = f"disk {source.cid} is empty and disk {target.cid} is not"
    if why:
        raise ActionError(why)
    marker = _copied(view, source, target, "target")
    # The source is mounted read-only, so that it does not change while it is copied.
    return [Mark(target.there, marker), Show(source.there, view.store.path, (*source.options, "ro"))]


def steps_to_swap(view: View, old: str, new: str) -> list[Step]:
    """Return the steps that replace the source on the store with its finished copy.

    The copy takes effect once its marker says ``store``. If the swap fails before that, the next
    :func:`steps_to_restore` undoes it; if it fails afterwards, the next :func:`steps_to_restore` completes it.
    """
    source, target = _pair(view, old, new)
    store = view.store.path
    return [
        # Remove nothing if links are used, or if the container was created with the mount, which is covered instead.
        *([TakeAway(store)] if view.binds and source.volume != store else []),
        Show(target.there, store, target.options),
        Mark(target.there, _copied(view, source, target, "store")),
        *_unclaim(view, source),
        ReleaseVolume(source.there),
        TakeAway(view.target.path),
    ]


def _pair(view: View, old: str, new: str) -> tuple[Disk, Disk]:
    """Return the source and the target of the copy. Raises ``ActionError`` unless ``old`` is the disk mounted on the
    store and ``new`` the disk mounted on the migration target. "" matches any disk.
    """
    found = []
    for point, mounted, wanted in (view.store, view.on_store, old), (view.target, view.on_target, new):
        if mounted == "" or wanted not in ("", mounted):
            text = f"disk {wanted} is not on {point.path}" if wanted else f"no disk is on {point.path}"
            raise ActionError(f"{text}: disk {mounted} is" if mounted else text)
        if mounted not in view.disks:
            raise ActionError(NOT_FOUND.format(mounted))
        found.append(view.disks[mounted])
    return found[0], found[1]


def _is_migrated(view: View, old: str, new: str) -> bool:
    """Return True if the disk on the store is already the finished copy that was requested."""
    disk = view.disks.get(view.on_store)
    if disk is None or disk.marker is None or disk.role != "store" or not disk.marker.source or view.on_target:
        return False
    return new in ("", disk.cid) and old in ("", disk.marker.source)


# --- parts of decisions -----------------------------------------------------------------------------------------------


def _take(disk: Disk) -> list[Step]:
    """Return the step that acquires the volume's lease, unless this agent already has it."""
    return [] if disk.is_held else [Take(disk.cid, disk.there)]


def _show(disk: Disk, point: MountPoint) -> list[Step]:
    """Return the step that mounts a disk at ``point``, unless it is already mounted there with the right options."""
    return [] if point.shown.get(disk.cid) else [Show(disk.there, point.path, disk.options)]


def _settle(view: View, disk: Disk, role: Role) -> list[Step]:
    """Return the steps that mount a disk on the store or the migration target, depending on ``role``, and record the
    role.
    """
    point = view.store if role == "store" else view.target
    undo = None if point.path == disk.volume else point.path
    return [*_show(disk, point), *_claim(view, disk, role, undo)]


def _claim(view: View, disk: Disk, role: Role, undo: Path | None = None) -> list[Step]:
    """Return the step that records a disk's role, unless it is already recorded. For ``undo``, see :class:`Claim`.

    Callers have already rejected volumes with another disk's marker.
    """
    before = disk.marker or Marker(disk.cid)
    # An unfinished copy must keep its source. The source of a finished copy is dropped when the role changes.
    source = before.source if before.role == role or before.is_unfinished else ""
    marker = msgspec.structs.replace(before, role=role, source=source, instance=view.instance)
    is_marked = marker == disk.marker
    if is_marked and disk.cid not in view.unmounted and (role != "store" or view.managed == disk.cid):
        return []
    return [Claim(disk.there, marker, is_marked, undo)]


def _unclaim(view: View, disk: Disk, *, is_managed: bool = False) -> list[Step]:
    """Return the step that removes the role from a disk's marker. Return no step if the disk has no marker."""
    if disk.marker is None:
        return []
    source = disk.marker.source if disk.marker.is_unfinished else ""
    marker = msgspec.structs.replace(disk.marker, role="", source=source, instance=view.instance)
    return [Unclaim(disk.cid, disk.there, marker, is_managed)]


def _copied(view: View, source: Disk, target: Disk, role: Role) -> Marker:
    """Return a marker that identifies ``target`` as a copy of ``source``. The copy is finished if ``role`` is
    ``store``.
    """
    generation = source.marker.generation + 1 if source.marker else 1
    return Marker(target.cid, role, source.cid, generation, view.instance)
