"""Shows another tree as ``/var/vcap`` to this process and its children, because release jobs refer to that path.

In a new mount namespace, the tree is mounted over the real directory. An ordinary user also gets a user namespace, in
which the user's id stays the same. Nothing changes outside the namespaces. The process must have only one thread.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agent_shim.core.paths import VCAP
from agent_shim.host import mounts

CLONE_NEWUSER: Final = 0x10000000
_CAPABILITIES_VERSION: Final = 0x20080522


def show_as_vcap(tree: Path) -> None:
    """Show ``tree``, an existing directory, as ``/var/vcap``. Raises ``OSError`` if that is forbidden."""
    tree, user, group = tree.resolve(), os.geteuid(), os.getegid()
    if user == 0:
        mounts.leave_mount_namespace()
    else:
        mounts.leave_mount_namespace(CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if not VCAP.is_dir():
        _make_place(VCAP, tree)
    mounts.bind_all(tree, VCAP)
    if user != 0:
        _drop_capabilities()


def _make_place(place: Path, tree: Path) -> None:
    """Create the directory ``place`` in this namespace only.

    To do this, a tmpfs is mounted over the parent of ``place``. The tmpfs contains ``place``, and bind mounts of the
    parent's other entries.
    """
    parent = place.parent
    copy = tree / ".parent"  # where the tmpfs is filled before it is moved to ``parent``
    copy.mkdir(exist_ok=True)
    mounts.mount_tmpfs(copy)
    for entry in parent.iterdir():
        target = copy / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
            continue
        if entry.is_dir():
            target.mkdir()
        else:
            target.touch()
        mounts.bind_all(entry, target)
    (copy / place.name).mkdir()
    mounts.move(copy, parent)
    copy.rmdir()


def _drop_capabilities() -> None:
    """Drop the capabilities in the user namespace, because only the mounts needed them."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
