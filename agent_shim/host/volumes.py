"""Makes volumes visible at a second path in addition to the path at which the container runtime mounted them. This uses
a bind mount or, where bind mounts are forbidden, a link. Also finds everything that keeps a volume in use.

The volume itself, its mount and its propagation are never changed. Only mounts and links that this module created are
removed. All functions block. Failures raise ``HostError`` with ``errno``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.host import files, mounts, proc

logger = logging.getLogger(__name__)

BLOCK_DEVICES: Final = Path("/sys/block")
FLAGS: Final = {
    "ro": mounts.MS_RDONLY,
    "nosuid": 1 << 1,
    "nodev": 1 << 2,
    "noexec": 1 << 3,
    "nosymfollow": 1 << 8,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "relatime": 1 << 21,
}
"""Options that belong to a mount rather than to its file system (include/uapi/linux/mount.h)."""


def is_directory(path: Path) -> bool:
    """Return True for a reachable directory. An unreachable directory, for example on a dead NFS server, is treated as
    missing.
    """
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises an error for it


def is_there(path: Path) -> bool:
    """Return True if ``path`` exists and is reachable. Symlinks are followed."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises an error for an unreachable path


def shows(place: Path, volume: Path) -> bool:
    """Return True if the two paths lead to the same directory."""
    try:
        return place.samefile(volume)
    except OSError:
        return False


def can_bind(scratch: Path) -> bool:
    """Return True if this container is allowed to create bind mounts. This is tested by creating one below ``scratch``
    in a new mount namespace.
    """
    successes: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            mounts.leave_mount_namespace()
            mounts.try_bind(scratch)
            successes.append(True)

    # The new mount namespace belongs to this thread alone and is removed when the thread ends.
    trial = threading.Thread(target=attempt, name="can_bind")  # noqa: TID251 - needs a new thread
    trial.start()
    trial.join()
    return bool(successes)


def show(volume: Path, place: Path, *, bind: bool) -> None:
    """Make ``volume`` visible at ``place`` with a bind mount or with a link. A link replaces an empty directory at
    ``place``.
    """
    if shows(place, volume):
        return
    if bind:
        if place.is_symlink():  # created by an earlier container with fewer privileges
            files.remove_tree(place)
        if not place.exists():
            files.make_dir(place, 0o700)
        mounts.bind(volume, place)
        return
    try:
        if not place.is_symlink():
            with suppress(FileNotFoundError):
                place.rmdir()  # fails unless the directory is empty
    except OSError as exc:
        why = {
            errno.ENOTEMPTY: "it holds files, and this container may not mount over them",
            errno.EBUSY: "something else is mounted there, and this container may not mount over it",
        }
        what = f"link {place} to {volume}"
        raise files.failed(what, OSError(exc.errno, why.get(exc.errno or 0, exc.strerror))) from exc
    files.swap_link(volume, place)
    parents = volume.resolve().parents
    closed = next((parent for parent in parents if not parent.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None and os.geteuid() == 0:
        logger.warning("jobs of other users cannot reach %s: only root may pass %s", place, closed)


def take_away(place: Path) -> None:
    """Undo ``show``: remove the link or the newest mount. Raises ``HostError`` (EBUSY) if the mount is in use."""
    if place.is_symlink():
        files.remove_tree(place)
    elif mounts.is_mount_point(place):
        mounts.unmount(place)


def set_options(place: Path, like: Path, more: Collection[str] = ()) -> None:
    """Copy the mount options of ``like`` to the mount at ``place``, and add those options in ``more`` that are valid
    for a bind mount.
    """
    flags = flags_to_set(place, like, more, mounts.mounts())
    if flags is not None:
        mounts.set_flags(place, flags)


def flags_to_set(place: Path, like: Path, more: Collection[str], table: Sequence[mounts.Mount]) -> int | None:
    """Return the flags that the mount at ``place`` should get, as a bit mask. Return None if the mount already has
    these flags, or if ``place`` is not a mount point or is ``like`` itself.

    The result includes every option of the mount at ``like``, because a remount replaces all options, and in a user
    namespace, a remount that drops an option fails.
    """
    if place.is_symlink() or place == like or not mounts.is_mount_point(place, table):
        return None
    mount, original = mounts.mount_of(place, table), mounts.mount_of(like, table)
    if mount is None or original is None:
        return None
    wanted = FLAGS.keys() & (original.options | frozenset(more))
    if "noatime" in more:
        wanted -= {"relatime"}
    return sum(FLAGS[name] for name in wanted) if wanted != FLAGS.keys() & mount.options else None


# --- users of a volume ------------------------------------------------------------------------------------------------


class Holder(msgspec.Struct, frozen=True):
    """A process, mount or loop device that keeps a volume in use. ``pid`` is 0 for a mount or a loop device."""

    text: str
    pid: int = 0
    start_ticks: int = 0

    def __str__(self) -> str:
        """Return ``text``, for use in messages to operators."""
        return self.text


def holders(places: Sequence[Path]) -> list[Holder]:
    """Find everything that keeps the volumes at ``places`` in use: mounts below them, loop devices, and processes other
    than this one that use files in them.
    """
    found_holders = [
        Holder(f"{mount.kind} is mounted on {mount.point}")
        for mount in mounts.mounts()
        if any(place in mount.point.parents for place in places)
    ]
    names = [str(place) for place in places]
    found_holders += _loop_devices(names)
    devices = {place.stat().st_dev for place in places if is_directory(place)}
    processes = proc.table()
    del processes[os.getpid()]
    for pid, uses in proc.uses(processes.keys(), lambda path: _is_below(path, names), devices).items():
        if uses:
            name = " ".join(proc.command_line(pid).split())[:80]
            text = f"pid {pid} ({name}) {_USES[uses[0].kind].format(uses[0].path)}"
            found_holders.append(Holder(text, pid, processes[pid].start_ticks))
    return found_holders


_USES: Final = {
    "cwd": "works in {}",
    "root": "has {} as its root",
    "exe": "runs {}",
    "fd": "has {} open",
    "map": "has {} mapped",
}


def _loop_devices(places: Sequence[str]) -> Iterator[Holder]:
    """Yield the loop devices whose backing files are below one of ``places``."""
    for backing in BLOCK_DEVICES.glob("loop*/loop/backing_file"):
        with suppress(OSError):
            path = os.fsdecode(backing.read_bytes()).strip()
            if _is_below(path, places):
                yield Holder(f"loop device {backing.parts[-3]} shows {path}")


def _is_below(path: str, places: Sequence[str]) -> bool:
    """Return True if ``path`` is one of ``places`` or below one."""
    return any(path.startswith(place) and path[len(place) : len(place) + 1] in ("", "/") for place in places)
