"""Reads and writes the marker that identifies a disk: the ``.agent_shim/disk.json`` file at the top of its volume.

The marker is written when a disk is mounted at the Director's request, and it outlives containers. ``decisions`` uses
the markers to determine where each disk belongs.
"""

from __future__ import annotations

import errno
import logging
import os
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
"""Names at the top of a volume that are not job data."""
_MAX_BYTES: Final = 65536

Role = Literal["store", "target", ""]
"""Where a disk belongs. "" means that the disk was mounted before and then unmounted."""


class Marker(msgspec.Struct, frozen=True):
    """The identity of a volume, stored in a file on the volume.

    ``source`` is the cid of the disk that was copied here. With the ``store`` role, the copy is complete; with any
    other role it may be partial. ``generation`` counts migrations. It shows which copy is newer after a migration to
    another disk and back, when each disk is recorded as the source of the other. ``instance`` is the id in the apply
    spec, or "" before there is one.
    """

    cid: str
    role: Role = ""
    source: str = ""
    generation: int = 0
    instance: str = ""
    version: int = 1

    @property
    def is_unfinished(self) -> bool:
        """True if a disk was copied here, but the copy may be partial."""
        return self.role != "store" and self.source != ""


def read(volume: Path) -> Marker | None:
    """Read a volume's marker. Return None if there is no readable marker written by an agent.

    The owners of the file and its directory are checked, because jobs own the top directory of many volumes and can
    therefore replace the directory with the marker.
    """
    try:
        with guarded.held(volume / DIRECTORY, volume) as directory:
            inside = Path(f"/proc/self/fd/{directory}")
            with closing(guarded.open_file(inside / NAME, inside)) as file:
                for found in (os.fstat(directory), os.fstat(file)):
                    if not _is_written_by_agent(found):
                        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}")
                return wire.decode(os.pread(file, _MAX_BYTES, 0), Marker)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the marker of the volume %s: %s", volume, exc)
    except ValueError as exc:
        logger.warning("cannot use the marker of the volume %s: %s", volume, exc)
    return None


def _is_written_by_agent(found: os.stat_result) -> bool:
    """Return True for a file that only an agent can have written: its owner is root, this user, or the user to which a
    file server maps root.
    """
    return found.st_uid in {*trusted_path.trusted_users(), user_namespace.overflow_user()}


def set_aside(volume: Path) -> None:
    """Rename a file or directory that a job has put in place of the marker's directory. Raises ``HostError``."""
    with suppress(OSError):
        if _is_written_by_agent(guarded.status(volume / DIRECTORY, volume)):
            return
    files.move_away(volume / DIRECTORY)


def write(volume: Path, marker: Marker) -> None:
    """Write the marker atomically. Raises ``HostError``.

    If root writes the marker, a new volume gets mode 0755 regardless of the mode that its provisioner set, because jobs
    must be able to reach their directories whatever user they run as. Write permission for others is removed from the
    top of every volume, because a job could otherwise replace the marker's directory.
    """
    if os.geteuid() == 0:
        is_new = not os.path.lexists(volume / DIRECTORY / NAME)
        try:
            files.close_to_others(volume, owner=None, more=0o755 if is_new else 0)
        except HostError as exc:
            logger.warning("%s: jobs may replace the marker", exc)
    with files.attempting(f"mark the volume {volume} as disk {marker.cid}"):
        set_aside(volume)
        files.make_dir(volume / DIRECTORY, 0o700)
        # Write through the descriptor, because a job may replace the directory at any time.
        with guarded.held(volume / DIRECTORY, volume) as fd:
            files.write_atomic(Path(f"/proc/self/fd/{fd}", NAME), msgspec.json.encode(marker), mode=0o600)


def remove(volume: Path) -> None:
    """Remove the marker. This works even on a full volume, where no new marker can be written. Raises ``OSError``."""
    with guarded.held(volume / DIRECTORY, volume) as directory:
        os.unlink(NAME, dir_fd=directory)
