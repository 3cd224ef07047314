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
| not marked, named by managed_disk_settings.json (of an older agent) | belongs on the store |
| not marked, or taken down by ``unmount_disk`` | not used |
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import HostError
from agent_shim.host import files, guarded

logger = logging.getLogger(__name__)

DIRECTORY: Final = ".agent_shim"
NAME: Final = "disk.json"
OURS: Final = frozenset({DIRECTORY, "lost+found"})
"""Names at the top of a volume that are not data of jobs."""
_MAX_BYTES: Final = 65536

Role = Literal["store", "target", ""]
"""Place of a disk; "" means that it was mounted once and then unmounted."""


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
    """Read the marker of a volume, which jobs may replace; None without a readable one."""
    try:
        return wire.decode(guarded.read(volume / DIRECTORY / NAME, _MAX_BYTES, volume), Marker)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the marker of the volume %s: %s", volume, exc)
    except ValueError as exc:
        logger.warning("cannot use the marker of the volume %s: %s", volume, exc)
    return None


def write(volume: Path, marker: Marker) -> None:
    """Write the marker atomically; raises ``HostError``.

    Where root writes it, the right of others to write at the top of the volume, with which some provisioners make it,
    is taken: a job could exchange the directory of the marker.
    """
    if os.geteuid() == 0:
        try:
            files.close_to_others(volume, None)
        except HostError as exc:
            logger.warning("%s: jobs may exchange its marker", exc)
    with files.attempting(f"mark the volume {volume} as disk {marker.cid}"):
        files.make_dir(volume / DIRECTORY, 0o700)
        # Through a descriptor: a directory that replaced it meanwhile is not written to.
        with guarded.held(volume / DIRECTORY, volume) as fd:
            files.write_atomic(Path(f"/proc/self/fd/{fd}", NAME), msgspec.json.encode(marker), mode=0o600)


def remove(volume: Path) -> None:
    """Remove the marker where no other can be written; raises ``OSError``."""
    with guarded.held(volume / DIRECTORY, volume) as directory:
        os.unlink(NAME, dir_fd=directory)


# --- the decision ---------------------------------------------------------------------------------------------------


class Disk(msgspec.Struct, frozen=True):
    """A disk named by the settings or a hint; ``volume`` is None while no volume is at ``place``."""

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
        """Role in its own marker; None without one."""
        return None if self.marker is None or self.is_another else self.marker.role


class Plan(msgspec.Struct, frozen=True):
    """Disks (cids, or "") that belong on the store and on the migration target.

    ``replaced`` are disks that claim the store although a finished copy of them does too; ``problem`` forbids a start.
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
    absent = next((disk for disk in disks if disk.cid == managed and disk.volume is None), None)
    store = problem = ""
    if any(managed == copy.source for copy in copies):  # the swap was interrupted before it was recorded
        absent = None
    if absent is not None:
        problem = f"disk {managed} was mounted and is not there: no volume at {absent.place}"
    elif len(rivals) > 1:
        store = next((cid for cid in (managed, on_store) if cid in rivals), "")
        problem = "" if store else f"the disks {' and '.join(sorted(rivals))} both claim the store"
    elif rivals:
        store = next(iter(rivals))
    elif any(disk.cid == managed and disk.volume and disk.marker is None for disk in ours):
        store = on_store or managed
    elif strangers:
        problem = f"disk {min(strangers)} belongs to another instance and the Director has not had it mounted here"
    return Plan(store, target, replaced, problem)


def _is_strange(disk: Disk, instance: str) -> bool:
    owner = disk.marker.instance if disk.marker else ""
    return disk.role in ("store", "target") and "" not in (owner, instance) and owner != instance
