"""Parses the various forms of disk hints that CPIs send, and stores the hints that arrive in requests.

The fields have the same names and meanings as in the Go agent (settings/settings.go, DiskSettings;
persistent_disk_hints.json).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.core import wire
from agent_shim.core.settings import Env
from agent_shim.host import files

logger = logging.getLogger(__name__)


class IscsiSettings(msgspec.Struct, frozen=True, rename="pascal"):
    """iSCSI settings. This agent does not support iSCSI, but keeps the settings so that the file stays compatible."""

    initiator_name: str = ""
    username: str = ""
    target: str = ""
    password: str = ""


_NAMES: Final = {
    "cid": "ID",
    "device_id": "DeviceID",
    "volume_id": "VolumeID",
    "lun": "Lun",
    "host_device_id": "HostDeviceID",
    "path": "Path",
    "iscsi": "ISCSISettings",
    "file_system": "FileSystemType",
    "mount_options": "MountOptions",
    "partitioner": "Partitioner",
}


class DiskSettings(msgspec.Struct, frozen=True, rename=_NAMES):
    """One disk in the hints file. As with the Go agent, the file contains every field, even empty ones."""

    cid: str = ""
    device_id: str = ""
    volume_id: str = ""
    lun: str = ""
    host_device_id: str = ""
    path: str = ""
    iscsi: IscsiSettings = IscsiSettings()
    file_system: str = ""
    mount_options: list[str] | None = None
    partitioner: str = ""

    @property
    def place(self) -> Path | None:
        """Path of the volume: the first absolute path among ``path``, ``volume_id`` and ``device_id``, or None."""
        named = (self.path, self.volume_id, self.device_id)
        return next((Path(os.path.normpath(text)) for text in named if text.startswith("/")), None)

    def __str__(self) -> str:
        """Format the settings as the Go agent does in replies, without secrets."""
        return f"{{ID:{self.cid} DeviceID:{self.device_id} VolumeID:{self.volume_id} Path:{self.path}}}"


_MEMBERS: Final = {"id": "device_id", **{name: name for name in ("path", "volume_id", "lun", "host_device_id")}}
_ISCSI_MEMBERS: Final = {name: name for name in ("initiator_name", "username", "target", "password")}


def from_hint(cid: str, hint: Any, env: Env) -> DiskSettings:
    """Parse a hint. A string is used as both the path and the volume id. A mapping may contain any of the disk's
    fields. Any other hint is ignored.

    Values that are not strings are converted (the Go agent crashes on them). Null is treated as missing.
    """
    options, partitioner = env.persistent_disk_mount_options or None, env.persistent_disk_partitioner
    disk = DiskSettings(cid, file_system=env.persistent_disk_fs, mount_options=options, partitioner=partitioner)
    if isinstance(hint, str):
        return msgspec.structs.replace(disk, path=hint, volume_id=hint)
    if not isinstance(hint, Mapping):
        return disk
    iscsi = hint.get("iscsi_settings")
    if isinstance(iscsi, Mapping):
        disk = msgspec.structs.replace(disk, iscsi=IscsiSettings(**_texts(iscsi, _ISCSI_MEMBERS)))
    return msgspec.structs.replace(disk, **_texts(hint, _MEMBERS))


def _texts(given: Mapping[str, Any], members: Mapping[str, str]) -> dict[str, str]:
    """Return the values in ``given`` as strings. ``members`` maps the keys in ``given`` to field names."""
    return {field: str(given[key]) for key, field in members.items() if given.get(key) is not None}


def known(persistent: Mapping[str, Any], env: Env, stored: Mapping[str, DiskSettings]) -> dict[str, DiskSettings]:
    """Return the disks in the settings (``persistent``, used by older CPIs) and in the stored hints, keyed by cid.

    If a disk is in both, the stored hint takes precedence, unless it has no path. Entries with an empty cid are
    ignored.
    """
    found = {cid: from_hint(cid, hint, env) for cid, hint in persistent.items() if cid}
    for cid, disk in stored.items():
        if cid and (disk.place is not None or cid not in found or found[cid].place is None):
            found[cid] = disk
    return found


def load(path: Path) -> dict[str, DiskSettings]:
    """Load the stored hints. An unreadable file is renamed and treated as missing, because the Director sends the hint
    again whenever it attaches the disk.
    """
    try:
        return wire.convert(wire.decode_json(files.read(path, is_own=True)), dict[str, DiskSettings])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        logger.error("cannot use %s: %s", path, exc)
        files.keep_unreadable(path)
        return {}


def save(path: Path, stored: Mapping[str, DiskSettings]) -> None:
    """Store hints in a private file, because they may contain passwords. If ``path`` is a link to a tmpfs, write the
    file on the tmpfs.
    """
    files.write_atomic(files.behind(path), msgspec.json.encode(stored), mode=0o600)
