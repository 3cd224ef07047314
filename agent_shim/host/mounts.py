"""Reads this process's mount table, and makes the system calls that change it.

Calls raise :class:`HostError` with ``errno`` and a message that says what was attempted. Only a trial
(:func:`try_bind`) shows whether a container allows mounts, because neither the uid nor the capabilities reveal the
effect of seccomp and AppArmor.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from agent_shim.core.errors import HostError

if TYPE_CHECKING:
    import ctypes

MOUNTINFO: Final = Path("/proc/self/mountinfo")

# Constants from include/uapi/linux/mount.h.
MS_RDONLY: Final = 1
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_MOVE: Final = 8192
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
CLONE_NEWNS: Final = 0x20000

_ESCAPE = re.compile(rb"\\([0-7]{3})")
_ESCAPED = re.compile(rb"[ \t\n\\#]")
"""Matches bytes that the kernel escapes in the table. Not all kernels escape ``#``."""


_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs"})
"""File system types that only one kernel can use at a time, because it caches their content and would not see changes
by another kernel.
"""


class Mount(msgspec.Struct, frozen=True):
    """One line of mountinfo (proc(5)).

    ``device`` is ``major:minor``, and ``root`` is the mounted part of the file system. ``options`` belong to this
    mount, while ``features`` belong to the file system (for example the controllers of a cgroup hierarchy).
    """

    number: int
    parent: int
    device: str
    root: str
    point: Path
    options: frozenset[str]
    kind: str
    source: str
    features: frozenset[str]


def parse(table: bytes) -> list[Mount]:
    """Parse a mountinfo table, oldest mount first. Invalid lines are skipped.

    A line looks like ``36 35 98:0 /root /point rw tag:1 ... - ext4 /dev/root rw``. The number of tags varies, so a dash
    marks where they end.
    """
    parsed = []
    for line in table.split(b"\n"):
        left, dash, right = line.partition(b" - ")
        head, tail = left.split(b" "), right.split(b" ")
        if dash and len(head) >= 6 and len(tail) >= 3 and head[0].isdigit() and head[1].isdigit():
            device, root, point, options = map(_text, head[2:6])
            kind, source, features = map(_text, tail[:3])
            parsed.append(
                Mount(
                    int(head[0]),
                    int(head[1]),
                    device,
                    root,
                    Path(point),
                    frozenset(options.split(",")),
                    kind,
                    source,
                    frozenset(features.split(",")),
                )
            )
    return parsed


def _text(field: bytes) -> str:
    """Decode the kernel's octal escapes (space, tab, newline, backslash, ``#``). Invalid UTF-8 is preserved as
    surrogates.
    """
    if b"\\" in field:
        # ``& 0xFF``, because the pattern also accepts octal numbers that are too large for a byte.
        field = _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)
    return os.fsdecode(field)


def mounts() -> list[Mount]:
    """Return all mounts visible to this process, oldest first."""
    return parse(MOUNTINFO.read_bytes())


def mount_of(path: Path, table: Sequence[Mount] | None = None) -> Mount | None:
    """Return the mount that contains ``path``, after resolving links.

    The search descends as the kernel does, from a mount to its first child on the path. It is not enough to choose the
    last or the deepest mount point in the table, because a later mount on a parent directory hides the mounts below it.
    """
    real = path.resolve()
    ancestors = {real, *real.parents}
    candidates = [mount for mount in (mounts() if table is None else table) if mount.point in ancestors]
    numbers = {mount.number for mount in candidates}
    lowest: Mount | None = None
    # Begin at the root mount, whose parent is either not in the table or the root mount itself.
    children = [mount for mount in candidates if mount.parent not in numbers or mount.parent == mount.number]
    while children:
        lowest = min(children, key=lambda mount: len(mount.point.parts))
        children = [mount for mount in candidates if mount.parent == lowest.number != mount.number]
    return lowest


def is_local(path: Path) -> bool:
    """Return True if no other machine can read or write the file system of ``path`` while it is mounted here."""
    mount = mount_of(path)
    return mount is not None and mount.kind in _LOCAL


def is_mount_point(path: Path, table: Sequence[Mount] | None = None) -> bool:
    """Return True if something is mounted exactly on ``path``, which may be a directory or a file. Bind mounts count
    too.
    """
    real = path.resolve()
    if table is None:
        raw = MOUNTINFO.read_bytes()
        encoded = os.fsencode(real)
        # Search for the name before parsing the table. Parsing takes a hundred times longer, this function is called
        # before each write of a file, and most tables do not contain the name.
        if not _ESCAPED.search(encoded) and b" " + encoded + b" " not in raw:
            return False
        table = parse(raw)
    mount = mount_of(real, table)
    return mount is not None and mount.point == real


def bind(source: Path, target: Path) -> None:
    """Bind mount ``source`` (a file or a directory) at ``target``, without the mounts below it."""
    _mount(source, target, MS_BIND, f"bind {source} on {target}")


def bind_all(source: Path, target: Path) -> None:
    """Bind mount ``source`` at ``target`` with the mounts below it."""
    _mount(source, target, MS_BIND | MS_REC, f"bind {source} on {target}")


def move(source: Path, target: Path) -> None:
    """Move the mount at ``source`` to ``target``."""
    _mount(source, target, MS_MOVE, f"move {source} to {target}")


def set_flags(target: Path, flags: int) -> None:
    """Replace the flags of the mount at ``target``. The flags of its file system are not changed."""
    _mount(Path("none"), target, MS_BIND | MS_REMOUNT | flags, f"change the mount options of {target}")


def unmount(target: Path, *, lazy: bool = False) -> None:
    """Unmount the newest mount at ``target``. If ``lazy`` is set, detach it immediately, and let the kernel unmount it
    when it is no longer in use.
    """
    if _libc().umount2(os.fsencode(target), MNT_DETACH if lazy else 0) != 0:
        raise _refused(f"unmount {target}")


def make_private() -> None:
    """Stop mounts from propagating into and out of this namespace, for all mount points."""
    _mount(Path("none"), Path("/"), MS_REC | MS_PRIVATE, "make mounts private")


def mount_tmpfs(target: Path, options: str = "mode=755") -> None:
    """Mount an empty tmpfs on ``target``."""
    _mount(Path("tmpfs"), target, 0, f"mount a tmpfs on {target}", kind=b"tmpfs", options=options.encode())


def leave_mount_namespace(flags: int = 0) -> None:
    """Enter a new mount namespace. Later changes are visible only to this process and its children.

    ``flags`` are the flags of further namespaces to create (``CLONE_NEW…``).
    """
    if _libc().unshare(CLONE_NEWNS | flags) != 0:
        raise _refused("leave the mount namespace")
    make_private()


def try_bind(scratch: Path) -> None:
    """Check whether bind mounts are allowed, by binding a new directory below ``scratch`` to itself. Raises
    ``HostError`` with the reason if they are not.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="bind-", dir=scratch) as name:
        bind(Path(name), Path(name))
        unmount(Path(name), lazy=True)  # a process that is reading the directory would make a normal unmount fail


def _mount(source: Path, target: Path, flags: int, what: str, *, kind: bytes = b"none", options: bytes = b"") -> None:
    """Call mount(2). Raises ``HostError`` "cannot WHAT: why"."""
    if _libc().mount(os.fsencode(source), os.fsencode(target), kind, flags, options) != 0:
        raise _refused(what)


def _refused(what: str) -> HostError:
    """Return a ``HostError`` "cannot WHAT: why" for the system call that has just failed."""
    import ctypes

    code = ctypes.get_errno()
    error = HostError(f"cannot {what}: {os.strerror(code)}")
    error.errno = code
    return error


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library, with the argument types of the functions that are called here."""
    import ctypes  # imported late, because it uses half a megabyte and most pods never need it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
    libc.unshare.argtypes = (ctypes.c_int,)
    return libc
