"""Determines the usage and mount flags for ``check filesystem``. Blocks, perhaps forever (see ``host.guarded``)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agent_shim.host import guarded, mounts
from agent_shim.supervisor.rule_counter import percent


def usage(path: Path) -> dict[str, float]:
    """Return the used space (``space``, in bytes) and the used inodes (``inode``), both also as percentages
    (``space %``, ``inode %``), and the mount flags (``flags``, such as ``ST_RDONLY``).

    Raises ``OSError`` if the path cannot be read.
    """
    with guarded.held(path) as held:
        is_device = stat.S_ISBLK(os.fstat(held).st_mode)
        found = os.statvfs(_mounted(path) if is_device else held)
    figures: dict[str, float] = {"flags": found.f_flag}
    for name, free, total, unit in (
        ("space", found.f_bfree, found.f_blocks, found.f_frsize),
        ("inode", found.f_ffree, found.f_files, 1),
    ):
        if total:  # some file systems do not count inodes, and pseudo file systems count nothing
            figures |= {name: (total - free) * unit, f"{name} %": percent(total - free, total)}
    return figures


def _mounted(device: Path) -> Path:
    """Return the mount point of a block device, or the device itself if it is not mounted. Symlinks in the path can be
    followed safely, because no job can create the block device to which they lead.
    """
    real = device.resolve()
    return next((mount.point for mount in mounts.mounts() if Path(mount.source).resolve() == real), device)
