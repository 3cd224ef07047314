"""Identity of volumes and the decision where each disk belongs: by a marker on the volume, never by the mount table.

The marker, ``.agent_shim/disk.json`` at the top of the volume, is written when the Director has a disk mounted, and
outlives containers. The decision (:func:`plan`) is pure and loses no data: if two disks claim the store and nothing
tells them apart, neither is mounted and the reason is reported.

| volume | decision |
|---|---|
| one marked for the store | belongs on the store |
| one marked as migration target | belongs on the migration target |
| two marked for the store, one a finished copy of the other | the copy; the other is released |
| two marked for the store | the one named by managed_disk_settings.json; else neither |
| marked with another cid, or for another instance | not used without a ``mount_disk`` of the Director |
| mounted last, and marked otherwise meanwhile | not used, and no job starts |
| not marked by an agent, named by managed_disk_settings.json | belongs on the store |
| not marked, or taken down by ``unmount_disk`` | not used |
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import HostError
from agent_shim.host import files, guarded, trusted_path, user_namespace
from agent_shim.host.descriptors import closing

logger = logging.getLogger(__name__)

DIRECTORY: Final = ".agent_shim"
NAME: Final = "disk.json"
OURS: Final = frozenset({DIRECTORY, "lost+found"})
"""Names at the top of a volume that are not data of jobs."""
_MAX_BYTES: Final = 65536

Role = Literal["store", "target", ""]
"""Place of a disk. "" means that it was mounted once and then unmounted."""


class Marker(msgspec.Struct, frozen=True):
    """Identity of a volume, stored on it.

    ``source`` is the cid of the disk that was copied here: completely with the role ``store``, perhaps in part with
    another role. ``generation`` counts migrations: after one there and one back each disk is the source of the other.
    ``instance`` is the id in the apply spec, or "" before there is one.
    """

    cid: str
    role: Role = ""
    source: str = ""
    generation: int = 0
    instance: str = ""
    version: int = 1

    @property
    def is_unfinished(self) -> bool:
        return self.role != "store" and self.source != ""


def read(volume: Path) -> Marker | None:
    """Read the marker of a volume. None without a readable marker of an agent.

    Jobs own the top of many volumes, and may put a directory of their own in the place of the marker's.
    """
    try:
        with guarded.held(volume / DIRECTORY, volume) as directory:
            inside = Path(f"/proc/self/fd/{directory}")
            with closing(guarded.open_file(inside / NAME, inside)) as file:
                for found in (os.fstat(directory), os.fstat(file)):
                    if not _is_of_agents(found):
                        raise OSError(errno.EPERM, f"user {found.st_uid} put it there")
                return wire.decode(os.pread(file, _MAX_BYTES, 0), Marker)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the marker of the volume %s: %s", volume, exc)
    except ValueError as exc:
        logger.warning("cannot use the marker of the volume %s: %s", volume, exc)
    return None


def _is_of_agents(found: os.stat_result) -> bool:
    """Return True for a file of root, of this user, or of root on a file server that takes it for another."""
    return found.st_uid in {*trusted_path.trusted_users(), user_namespace.overflow_user()}


def set_aside(volume: Path) -> None:
    """Rename what a job has put in the place of the marker's directory. Raises ``HostError``."""
    with suppress(OSError):
        if _is_of_agents(guarded.status(volume / DIRECTORY, volume)):
            return
    files.move_away(volume / DIRECTORY)


def write(volume: Path, marker: Marker) -> None:
    """Write the marker atomically. Raises ``HostError``.

    Where root writes it, a new volume gets the mode of a new file system, 0755, whatever mode its provisioner gave:
    jobs of every user must reach their directories. The right of others to write at the top is taken from every
    volume: a job could exchange the directory of the marker.
    """
    if os.geteuid() == 0:
        is_new = not os.path.lexists(volume / DIRECTORY / NAME)
        try:
            files.close_to_others(volume, None, more=0o755 if is_new else 0)
        except HostError as exc:
            logger.warning("%s: jobs may exchange its marker", exc)
    with files.attempting(f"mark the volume {volume} as disk {marker.cid}"):
        set_aside(volume)
        files.make_dir(volume / DIRECTORY, 0o700)
        # Through a descriptor: a directory that replaced it meanwhile is not written to.
        with guarded.held(volume / DIRECTORY, volume) as fd:
            files.write_atomic(Path(f"/proc/self/fd/{fd}", NAME), msgspec.json.encode(marker), mode=0o600)


def remove(volume: Path) -> None:
    """Remove the marker where no other can be written. Raises ``OSError``."""
    with guarded.held(volume / DIRECTORY, volume) as directory:
        os.unlink(NAME, dir_fd=directory)


# --- the decision ---------------------------------------------------------------------------------------------------


class Disk(msgspec.Struct, frozen=True):
    """A disk named by the settings or a hint. ``volume`` is None while no volume is at ``place``."""

    cid: str
    place: Path | None
    volume: Path | None = None
    marker: Marker | None = None

    @property
    def there(self) -> Path:
        """Volume of a disk that is known to be present."""
        assert self.volume is not None, f"the volume of disk {self.cid} is there"
        return self.volume

    @property
    def is_another(self) -> bool:
        """True if the marker at its place belongs to another disk."""
        return self.marker is not None and self.marker.cid != self.cid

    @property
    def role(self) -> Role | None:
        """Role in its own marker. None without one."""
        return None if self.marker is None or self.is_another else self.marker.role


class Plan(msgspec.Struct, frozen=True):
    """Disks (cids, or "") that belong on the store and on the migration target.

    ``replaced`` are disks that claim the store although a finished copy of them does too. ``problem`` forbids a start.
    """

    store: str = ""
    target: str = ""
    replaced: frozenset[str] = frozenset()
    problem: str = ""


def plan(disks: Collection[Disk], *, on_store: str, managed: str, instance: str) -> Plan:
    """Decide by markers, then by the disk mounted last (``managed``), then by the one mounted now (``on_store``)."""
    strangers = {disk.cid for disk in disks if _is_strange(disk, instance)}
    ours = [disk for disk in disks if disk.cid not in strangers]
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
    if any(managed == copy.source for copy in copies):  # the swap was interrupted before it was recorded
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
    elif strangers:
        problem = f"disk {min(strangers)} belongs to another instance and the Director has not had it mounted here"
    elif last:
        said = last.role or "unmounted"
        problem = f"disk {managed} was mounted last, but its marker says {said} (mount_disk {managed} mounts it again)"
    return Plan(store, target, replaced, problem)


def _is_strange(disk: Disk, instance: str) -> bool:
    owner = disk.marker.instance if disk.marker else ""
    return disk.role in ("store", "target") and "" not in (owner, instance) and owner != instance
