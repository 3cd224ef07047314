"""Applies the keys in ``env.bosh`` that configure the machine. :data:`KEYS` lists every key that the Go agent reads,
with its effect in a container.

Keys are named as in the Go agent's ``BoshEnv`` (settings/settings.go). docs/configuration.md has the same table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from agent_shim.core.paths import Paths
from agent_shim.core.settings import BoshEnv
from agent_shim.host import files, mounts
from agent_shim.host.descriptors import closing

SETTINGS_SIZE: Final = "16m"
"""Size of the tmpfs for the settings (platform/linux_platform.go, SetupBoshSettingsDisk)."""


class Key(NamedTuple):
    """A key, identified by its path ``name`` under ``env.bosh``. ``outcome`` describes the key's effect or, if
    ``is_done`` is False, why the key is rejected.
    """

    name: str
    outcome: str
    is_done: bool = True


KEYS: Final = (
    Key(
        "agent.settings.tmpfs",
        "settings, values from `update_settings`, and disk hints are kept only in memory, not on disk",
    ),
    Key("authorized_keys", "SSH keys for the `vcap` user"),
    Key("blobstores", "only the first one is used"),
    Key("ipv6.enable", "the network belongs to the container runtime", is_done=False),
    Key("job_dir.tmpfs", "rendered jobs and blobs with secrets are kept in a tmpfs"),
    Key("job_dir.tmpfs_size", "size of that tmpfs, default `100m`"),
    Key("keep_root_password", "applies `password` only to `vcap`"),
    Key("mbus.cert", "bus credentials"),
    Key("mbus.urls", "bus addresses"),
    Key("ntp", "written to `/var/vcap/bosh/etc/ntpserver`; the clock itself is the host's"),
    Key("parallel", "number of blobs downloaded at the same time, default `5`"),
    Key(
        "password",
        "password hash (crypt) for `root` and `vcap`; if it is missing, neither user can log in with a password",
    ),
    Key("remove_dev_tools", "files listed in `/var/vcap/bosh/etc/dev_tools_file_list` are removed"),
    Key("remove_static_libraries", "files listed in `/var/vcap/bosh/etc/static_libraries_list` are removed"),
    Key(
        "run_dir.tmpfs_size",
        "`sys/run` is a tmpfs of this size. The older `run_dir.tmpfs` key has the same effect with a size of `16m`",
    ),
    Key("swap_size", "swap belongs to the host", is_done=False),
)


def refused(bosh: BoshEnv) -> str | None:
    """Boot step: return the keys that are set but not supported, with reasons, or None if there are none."""
    given = {"ipv6.enable": bosh.ipv6.enable, "swap_size": bosh.swap_size}
    return "; ".join(f"env.bosh.{key.name}: {key.outcome}" for key in KEYS if given.get(key.name)) or None


# --- unwanted files ---------------------------------------------------------------------------------------------------


async def remove_listed(listing: Path, *, is_wanted: bool) -> str | None:
    """Boot step: remove the image's development tools or static libraries, which the file ``listing`` names, one per
    line. Directories are not removed.

    ``is_wanted`` is True if ``env.bosh`` requests the removal. Return the reason if the files are kept, or None. Raises
    ``OSError``.
    """
    if not is_wanted:
        return "not requested"
    try:
        await asyncio.to_thread(_remove_listed, listing)
    except FileNotFoundError:
        return f"the image has no {listing}"
    return None


def _remove_listed(listing: Path) -> None:
    """Do the blocking part of :func:`remove_listed`. Lines that are not absolute paths are ignored."""
    for line in files.read(listing).decode(errors="surrogateescape").splitlines():
        if line.startswith("/"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                Path(line).unlink()


# --- settings in memory -----------------------------------------------------------------------------------------------


async def settings_in_memory(paths: Paths, bosh: BoshEnv) -> str | None:
    """Boot step: move the files with credentials to a tmpfs. Return the reason if they are not moved, or None. Raises
    ``HostError``.
    """
    if not bosh.agent.settings.tmpfs:
        return "not requested"
    await asyncio.to_thread(_move_to_memory, paths)
    return None


def _move_to_memory(paths: Paths) -> None:
    """Move the files with credentials to the tmpfs, leaving a link at each original path.

    When the container stops, the tmpfs is lost, but the links remain. If the agent in the restarted container writes
    through them before a new tmpfs is mounted, the files end up on the disk. Those files are moved to the new tmpfs
    too.
    """
    tmpfs = paths.settings_tmpfs
    files.make_dir(tmpfs, 0o700)
    if not mounts.is_mount_point(tmpfs):
        # Files on the disk are removed through this descriptor, because the mount hides them.
        with closing(os.open(tmpfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as hidden:
            misplaced = {path.name: files.read(path, is_own=True) for path in tmpfs.iterdir() if path.is_file()}
            mounts.mount_tmpfs(tmpfs, f"size={SETTINGS_SIZE},mode=0700")
            for name, raw in misplaced.items():
                files.write_atomic(tmpfs / name, raw, mode=0o600)
                os.unlink(name, dir_fd=hidden)
    for path in paths.with_credentials:
        if not path.is_symlink():
            if path.exists():
                files.write_atomic(tmpfs / path.name, files.read(path, is_own=True), mode=0o600)
            files.swap_link(Path(tmpfs.name, path.name), path)
