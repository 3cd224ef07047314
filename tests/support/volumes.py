"""Provides volumes as a container runtime would, directory trees that are hard to copy, and private mounts."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import hashlib
import inspect
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.bulk import copytree
from agent_shim.bulk.protocol import Progress
from agent_shim.core import settings
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Effective, UpdateSettings
from agent_shim.host import files, mounts, volumes
from agent_shim.services.disks import Disks, DiskTimeouts, markers
from agent_shim.services.disks.markers import OURS, Marker
from agent_shim.services.disks.service import Copy, in_worker

# --- private mounts ---------------------------------------------------------------------------------------------------


SKIPPED = 77
"""Exit code that a child process uses to report that its test was skipped."""


def alone(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test in a child process with its own mount namespace. The test may be a coroutine function."""

    @functools.wraps(test)
    def in_child(*args: Any, **kwargs: Any) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run_in_child(test, args, kwargs, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as report:
            text = report.read().decode(errors="replace")
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == SKIPPED:
            pytest.skip(text)
        if status != 0:
            pytest.fail(text or f"the child ended with wait status {status:#x}", pytrace=False)

    return in_child


def _run_in_child(test: Callable[..., Any], args: Any, kwargs: Any, report: int) -> None:
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: kill this child when pytest exits
        mounts.leave_mount_namespace()
        outcome = test(*args, **kwargs)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
        status = 0
    except pytest.skip.Exception as exc:
        os.write(report, str(exc).encode())
        status = SKIPPED
    except BaseException:  # noqa: BLE001 - reported through the pipe, because the child must not return to pytest
        os.write(report, traceback.format_exc().encode())
    finally:
        os._exit(status)


def by(*ways: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test once for each of ``ways``, with an ``instance`` that makes disks visible to jobs in that way.

    ``links`` uses symlinks in a scratch directory and does not need root. ``mounts`` needs root, and uses bind mounts
    in its own mount namespace, with a real ``/var/vcap`` and volumes in memory.
    """

    def decorated(test: Callable[..., Any]) -> Callable[..., None]:
        def by_links(tmp_path: Path, **given: Any) -> None:
            asyncio.run(test(instance=InstanceWithVolumes(tmp_path, bind=False), **given))

        @alone
        async def by_mounts(tmp_path: Path, **given: Any) -> None:
            await test(instance=InstanceWithVolumes(tmp_path, bind=True, system=True), **given)

        @functools.wraps(test)
        def run(way: str, tmp_path: Path, **given: Any) -> None:
            {"links": by_links, "mounts": by_mounts}[way](tmp_path=tmp_path, **given)

        signature = inspect.signature(test)
        kind = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, kind) for name in ("way", "tmp_path")]
        others = [
            parameter.replace(kind=kind) for name, parameter in signature.parameters.items() if name != "instance"
        ]
        run.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        marked = [pytest.param(way, marks=pytest.mark.root if way == "mounts" else ()) for way in ways]
        parametrized: Callable[..., None] = pytest.mark.parametrize("way", marked)(run)
        return parametrized

    return decorated


def drop_capabilities() -> None:
    """Drop every capability permanently, as ``capabilities: drop: [ALL]`` does in a pod. The user is still root."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    assert libc.capset(header, nothing) == 0, os.strerror(ctypes.get_errno())


def mount_tmpfs(point: Path) -> Path:
    """Mount a tmpfs, like an emptyDir in memory."""
    point.mkdir(parents=True, exist_ok=True)
    mounts.mount_tmpfs(point)
    return point


def mount_overlay(point: Path, layers: Path) -> Path:
    """Mount an overlay like a container's root file system.

    ``layers`` must be on a file system that overlayfs accepts for the upper layer.
    """
    for name in ("lower", "upper", "work"):
        (layers / name).mkdir(parents=True, exist_ok=True)
    point.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(point)], check=True)
    return point


def mount_ext4(point: Path, image: Path, size: int = 16 << 20, *more: str) -> Path:
    """Mount an ext4 file system from an image file. Skip the test if no loop device is available.

    ``more`` are additional mkfs options.
    """
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", *more, str(image)], check=True)
    point.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    return point


HOLDER = """
import ctypes, os, sys
place, how = sys.argv[1:]
if how == "cwd":
    os.chdir(place)
elif how == "map":
    with open(place + "/file", "r+b") as file:
        ctypes.CDLL(None).mmap(None, ctypes.c_size_t(1), 1, 1, file.fileno(), ctypes.c_long(0))
else:
    held = open(place + "/file")
if how == "deleted":
    os.unlink(place + "/file")
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(place: Path, how: str = "open", *, within: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that keeps ``place`` busy: with its working directory, or with an open, deleted or mapped file.

    ``within`` is prepended to the process's command line.
    """
    command = [*within, sys.executable, "-c", HOLDER, str(place), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            yield program
        finally:
            program.kill()


# --- an instance ------------------------------------------------------------------------------------------------------

HASTY = DiskTimeouts(arrival=0.3, use=0.3, grace=1.0, look=0.02, rival=0.3)
PATIENT = msgspec.structs.replace(HASTY, arrival=60.0)
"""Timeouts that are long enough for a volume that appears late, even on a busy machine."""


async def copy_here(source: Path, target: Path, report: Callable[[Progress], None]) -> list[str]:
    """Copy in this process instead of in a worker."""
    return await asyncio.to_thread(copytree.mirror, source, target, spared=OURS, report=report)


class InstanceWithVolumes:
    """An instance with volumes. Its agent can be restarted, and its container can be recreated.

    With ``bind``, the agent makes disks visible with bind mounts. ``persistent`` lists the disks as the settings
    describe them.
    """

    def __init__(
        self, scratch: Path, *, bind: bool | None, copy: Copy | None = copy_here, system: bool = False
    ) -> None:
        """Create an instance. If ``bind`` is None, the agent decides how to mount. If ``copy`` is None, a worker
        process copies the files.
        """
        self.holder: Callable[[Path], str] = lambda _: ""
        """Returns the name of the other agent that holds a volume's lease, or "" if there is none."""
        self.released: list[Path] = []
        """Private directories of the volumes that this agent has released."""
        self.timeouts = HASTY
        self.scratch = scratch
        self.paths = Paths() if system else Paths(scratch / "vcap")
        self.bind = bind
        self.copy = copy
        self.persistent: dict[str, Any] = {}
        self.env: dict[str, Any] = {}
        self.update = UpdateSettings()
        self.id = ""
        self.of_jobs: set[int] = set()
        self.start_container()

    def start_container(self) -> None:
        """Create the empty directories that an image contains. If the instance uses ``/var/vcap`` itself, mount a tmpfs
        there first.
        """
        if self.paths.is_system:
            mount_tmpfs(self.paths.base)
        for path in (self.paths.bosh, self.paths.data, self.paths.store, self.paths.shim_run):
            path.mkdir(parents=True)
        self.start_agent()

    def start_agent(self) -> None:
        """Start a new agent, which knows only what the previous agent has saved."""

        async def copy(*what: Any) -> list[str]:
            return await (self.copy or in_worker)(*what)

        self.disks = Disks(
            self.paths,
            self.effective,
            lambda: self.id,
            lambda: self.of_jobs,
            self,
            copy=copy,
            timeouts=self.timeouts,
            binds=self.bind,
        )

    def hold(self, directory: Path) -> str:
        """Pretend to acquire a volume's lease. Return the name of the other agent that already holds it, or ""."""
        return self.holder(directory)

    def release(self, directory: Path) -> None:
        """Record that a lease was released."""
        self.released.append(directory)

    def is_held(self, _directory: Path) -> bool:
        """Return False so that every request tries to acquire the lease."""
        return False

    def effective(self) -> Effective:
        """Return the current settings."""
        document = {"agent_id": "a-1", "disks": {"persistent": self.persistent}, "env": self.env}
        return Effective(settings.parse(json.dumps(document).encode(), origin="test"), self.update)

    def remake_container(self) -> None:
        """Recreate the container as a CPI does to attach a disk.

        The new container has a fresh root file system, an empty data directory and no mounts, but the same volumes.
        """
        for place in (self.paths.store, self.paths.store_migration_target, self.paths.base):
            while not place.is_symlink() and mounts.is_mount_point(place):
                mounts.unmount(place)
        if not self.paths.is_system:
            files.remove_tree(self.paths.base)
        self.start_container()

    def volume(self, cid: str) -> Path:
        """Return the path of a volume, attached or not."""
        return self.scratch / "volumes of others" / cid

    def attach(self, cid: str, make: Callable[[Path], object] | None = None) -> Path:
        """Add a volume to the settings, creating it if necessary."""
        if not self.volume(cid).exists():
            self.volume(cid).parent.mkdir(exist_ok=True)
            (make or (mount_tmpfs if self.paths.is_system else Path.mkdir))(self.volume(cid))
        self.persistent[cid] = str(self.volume(cid))
        return self.volume(cid)

    async def mount(self, *cids: str) -> None:
        """Attach and mount disks: the first at the store, the second at the migration target."""
        for cid in cids:
            self.attach(cid)
            await self.disks.mount(cid)

    def cid_at(self, place: Path) -> str:
        """Return the cid of the disk whose volume is visible at ``place``, or "" if there is none."""
        return next((cid for cid in self.persistent if volumes.shows(place, self.volume(cid))), "")

    def mounts_on_store(self) -> int:
        return sum(mount.point == self.paths.store for mount in mounts.mounts())

    def marker(self, cid: str) -> Marker | None:
        return markers.read(self.volume(cid))

    def write(self, name: str, text: str) -> None:
        """Write a file into the store as a job does, even if no disk is mounted there."""
        (self.paths.store / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.paths.store / name).read_text()


class Asked:
    """The parts of an agent that disk actions use."""

    def __init__(self, instance: InstanceWithVolumes) -> None:
        self.disks: Any = instance.disks
        self.settings = self

    async def refreshed(self) -> None:
        """Do nothing, because the settings are always current here."""


class Killed(BaseException):
    """Raised to simulate SIGKILL. As a BaseException, it is not handled by the code under test."""


STEPS = [
    (markers, "write"),
    (volumes, "show"),
    (volumes, "set_options"),
    (volumes, "take_away"),
    (copytree, "mirror"),
    (files, "write_atomic"),
    (files, "swap_link"),
    (files, "remove_tree"),
]
"""The functions through which requests make all their changes to disks and mount points."""
MORE_THAN_ALL = 17
"""A step number that no migration reaches. A migration makes 15 changes with links, or 14 with mounts."""


async def migrate_until(step: int, instance: InstanceWithVolumes, old: str = "a", new: str = "b") -> bool:
    """Migrate a disk, and simulate a kill before change number ``step``.

    Return True if the migration finished without the kill because it needed fewer changes.
    """
    return await killed_before(step, lambda: instance.disks.migrate(old, new))


async def killed_before(step: int, request: Callable[[], Awaitable[object]]) -> bool:
    """Make a request, and simulate a kill before change number ``step``.

    Return True if the request finished without the kill because it needed fewer changes.
    """
    left = step

    def until_then(real: Callable[..., object]) -> Callable[..., object]:
        def change(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patched:
        for module, name in STEPS:
            patched.setattr(module, name, until_then(getattr(module, name)))
        with suppress(Killed):
            await request()
    return left >= 0


# --- trees ------------------------------------------------------------------------------------------------------------

ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, permission, who)
    for tag, permission, who in [
        (0x01, 6, 0xFFFFFFFF),
        (0x02, 4, 1234),
        (0x04, 4, 0xFFFFFFFF),
        (0x10, 6, 0xFFFFFFFF),
        (0x20, 0, 0xFFFFFFFF),
    ]
)
"""An ACL in the form of its extended attribute, as set by ``setfacl -m u:1234:r,m::rw`` on mode 0640."""
FILE_CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""A file capability in the form of its extended attribute, as set by ``setcap cap_net_bind_service+ep``."""


def fill(tree: Path, *, as_root: bool = False) -> None:
    """Fill a directory with the kinds of files that are easy to copy incorrectly."""
    tree.mkdir(exist_ok=True)
    (tree / "db/wal").mkdir(parents=True)
    (tree / "db/data").write_bytes(os.urandom(300_000))
    (tree / "db/data").chmod(0o640)
    (tree / "db/wal/000001").write_bytes(b"")
    os.link(tree / "db/data", tree / "db/wal/same as data")
    os.link(tree / "db/data", tree / "a third name")
    (tree / "twin").write_bytes(b"twin")
    (tree / "another twin").write_bytes(b"twin")
    with (tree / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"island")
        file.truncate(4 << 20)
    (tree / "to data").symlink_to("db/data")
    (tree / "to nowhere").symlink_to("/does/not/exist")
    (tree / "to above").symlink_to("..")
    os.mkfifo(tree / "pipe", 0o622)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket"))
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe not UTF-8\n")).write_text("x")
    (tree / ("n" * 255)).write_text("long name")
    os.setxattr(tree / "db/data", "user.checksum", b"\x00\x01binary\xff")
    os.setxattr(tree / "db/data", "system.posix_acl_access", ACL)
    os.setxattr(tree / "db", "system.posix_acl_default", ACL)
    (tree / "db/made with the default ACL").write_text("x")
    (tree / "setgid").mkdir()
    (tree / "setgid").chmod(0o2775)
    (tree / "tool").write_text("#!/bin/sh\n")
    (tree / "tool").chmod(0o4755)
    (tree / "read-only").mkdir()
    (tree / "read-only/inside").write_text("x")
    (tree / "read-only/inside").chmod(0o400)
    deep = tree
    for level in range(12):
        deep /= f"level {level}"
        deep.mkdir()
    (deep / "bottom").write_text("x")
    if as_root:
        os.chown(tree / "db/data", 1000, 1001)
        os.chown(tree / "to nowhere", 1000, 1000, follow_symlinks=False)
        os.setxattr(tree / "tool", "security.capability", FILE_CAPABILITY)
        os.setxattr(tree / "db", "trusted.mark", b"t")
        os.mknod(tree / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for path in [tree / "twin", tree / "another twin", tree / "db/wal", tree / "read-only/inside"]:
        os.utime(path, ns=(1_000_000_000_123_456_789, 1_000_000_000_987_654_321))
    os.utime(tree / "to data", ns=(1, 999_999_999), follow_symlinks=False)
    (tree / "read-only").chmod(0o500)


def fingerprint(tree: Path, *, spared: frozenset[str] = frozenset({"lost+found", ".agent_shim"})) -> dict[str, Any]:
    """Map each path in a tree to everything that a copy must preserve. For a hard-linked file, this includes all its
    names.
    """
    found: dict[str, Any] = {}
    names: dict[tuple[int, int], list[str]] = {}
    for here, below, inside in os.walk(tree):
        if here == str(tree):
            below[:] = [name for name in below if name not in spared]
        for name in (*below, *inside):
            path = Path(here, name)
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode):  # Leave sockets out, because no process listens on a copied socket.
                continue
            entry: list[Any] = [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev]
            if stat.S_ISREG(status.st_mode):
                names.setdefault((status.st_dev, status.st_ino), []).append(str(path.relative_to(tree)))
                entry += [status.st_size, hashlib.sha256(path.read_bytes()).hexdigest(), _attributes(path)]
                entry.append(names[status.st_dev, status.st_ino])
            elif stat.S_ISDIR(status.st_mode):
                entry.append(_attributes(path))
            elif stat.S_ISLNK(status.st_mode):
                entry.append(str(path.readlink()))
            found[str(path.relative_to(tree))] = entry
    for entry in found.values():
        if isinstance(entry[-1], list):
            entry[-1] = sorted(entry[-1])
    return found


def _attributes(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}
