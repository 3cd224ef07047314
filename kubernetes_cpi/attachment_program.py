"""The program that helper pods run: bind a disk into a running VM, unmount it, or restart the VM.

The CPI passes the text of this file to a container as an argument, and the container runs it with any Python from 3.9
on. The file therefore imports only the standard library, and no module imports it.

    attach DISK TARGET POD_UID              mount DISK on TARGET, wait for SIGTERM, unmount DISK, and exit
    detach TARGET POD_UID HOLDER PATIENCE   unmount the disk of the attachment whose pod has the UID HOLDER
    bound DIRECTORY                         stop root in a user namespace from filling the VM's directory
    reboot POD_UID GRACE                    terminate PID 1 of the VM's container, so that the kubelet restarts it

DISK is the path at which the claim is mounted in the helper. TARGET lies below a directory on the node that is mounted
into both the helper and the VM. PATIENCE and GRACE are in seconds. A process belongs to the VM if its cgroup path
contains the UID of the VM's pod. To see these processes, the helper must run in the node's PID namespace.

If a VM is allowed to mount, its root user can move a mount, bind it elsewhere, clone it and rename its directory. A
path therefore does not identify a disk. Instead, this program looks for the disk's device and root in its own mount
table and in those of all threads of the VM, and for the disk's device among the open descriptors of these threads.

Any unprivileged process on the node can have a hundred thousand mounts with long names in each of its mount namespaces.
This program therefore reads mount tables line by line, and reads each table only once even if several processes share
it. Such a process may also have files open on a file system that never answers, so this program makes no system call
that would query the file system of an open file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

MS_BIND = 0x1000
UMOUNT_NOFOLLOW = 8
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40
MOUNT_ATTR_IDMAP = 0x00100000
AT_STATX_DONT_SYNC = 0x4000
KCMP_FILES, KCMP_FS = 2, 3
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
STATX, KCMP = (332, 312) if os.uname().machine == "x86_64" else (291, 272)
"""System call numbers. Architectures newer than x86-64 share one table (asm-generic/unistd.h)."""
LINE_BYTES = 1 << 16
"""Maximum number of bytes kept of each mount table line. Lines for the CPI's own disks are shorter, so truncation
affects only other mounts.
"""
DISK = "/disk"
DONE = "/tmp/done"  # noqa: S108 - in a container with a single process
TERMINATION_LOG = "/dev/termination-log"
RETRY_S = 0.05
REPORT_S = 5.0
"""Seconds between two messages that an unmount is still waiting for the VM."""
KILL_S = 5.0
"""Seconds to wait for a process to exit after SIGKILL."""
STALE_S = 24 * 3600.0
"""Age in seconds at which a deleted VM's empty directory is removed."""
SWEEP_S = 10.0
"""Time limit in seconds for finding out which old VM directories are mounted in any process."""
IN_USE = "the VM uses it"
UNMAPPED = 2**32 - 2
"""A group id that no pod's user namespace maps. Root in a user namespace cannot create or remove files in a directory
with this group (inode_permission in the kernel).
"""

libc = ctypes.CDLL(None, use_errno=True)


class MountAttr(ctypes.Structure):
    """struct mount_attr, the argument of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class Mount(NamedTuple):
    """One line of a mount table. Device and root together identify a directory of a file system."""

    number: int
    parent: int
    device: str
    root: str
    point: str


class FsDirectory(NamedTuple):
    """A directory of a file system, regardless of the mount through which it is seen."""

    device: str
    root: str


def main(arguments: list[str]) -> None:
    """Run one of the commands in the module's docstring.

    After ``detach`` and ``bound``, the program waits until the CPI deletes its pod, because the kubelet reports a ready
    pod sooner than a pod that has exited.
    """
    what, *rest = arguments
    if what == "attach":
        attach(*rest)
    elif what == "detach":
        target, uid, holder, patience = rest
        detach(disk_of(holder), target, uid, float(patience))
        done()
        signal.pause()
    elif what == "bound":
        bound(rest[0])
        done()
        signal.pause()
    else:
        reboot(rest[0], float(rest[1]))


def attach(disk: str, target: str, uid: str) -> None:
    """Mount ``disk`` on ``target`` for the VM whose pod has the UID ``uid``, and create a file that reports success.

    Then wait for SIGTERM and unmount the disk.
    """
    # SIGTERM must not interrupt the mount. ``sigwait`` below receives the signal, even if it arrives during the mount.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    place = directory(target)
    wanted = mounted_on(disk)
    if found := points(wanted, target):
        # A previous container of this pod mounted the disk and was then killed, so the disk is already mounted.
        if target not in found:
            raise SystemExit(f"cannot mount the disk: the VM has moved it from {target}")
    elif is_mounted(target):
        raise SystemExit(f"cannot mount the disk: another file system is mounted on {target}")
    else:
        mount(disk, place, uid)
        if not is_mounted(target):
            libc.umount2(f"/proc/self/fd/{place}".encode(), 0)
            raise SystemExit(f"cannot mount the disk: the VM has moved {target} meanwhile")
    os.close(place)  # An open descriptor would keep the mount busy.
    done()
    say("mounted")
    sweep(os.path.dirname(os.path.dirname(target)))  # This is the parent directory of all VMs' directories.
    signal.sigwait({signal.SIGTERM})
    detach(wanted, target, uid)


def detach(disk: Mount, target: str, uid: str, patience: float = float("inf")) -> None:
    """Unmount the disk from ``target``. If the VM uses the disk, retry for up to ``patience`` seconds (by default,
    without a limit), then exit with an error.

    ``uid`` is the UID of the VM's pod.
    """
    reported, until = 0.0, time.monotonic() + patience
    while not try_unmount(disk, target, uid):
        if time.monotonic() >= until:
            raise SystemExit(f"cannot unmount the disk within {patience:g} s: {IN_USE}")
        if time.monotonic() - reported >= REPORT_S:
            say(f"cannot unmount the disk yet: {IN_USE}")
            reported = time.monotonic()
        time.sleep(RETRY_S)
    with contextlib.suppress(OSError):
        os.rmdir(target)
    if not any(processes(uid)):
        # The VM is gone, so its directory is removed too, unless other disks are still mounted in it.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(target))
    say("unmounted")


def try_unmount(disk: Mount, target: str, uid: str) -> bool:
    """Try to unmount the disk. Return False if the disk stays mounted because the VM uses it."""
    vm_directory = directory_of(os.path.dirname(target))
    # An unmount propagates only to the mount in the VM's directory. Any other mount was created by the VM itself.
    if any(parent != vm_directory for parent in parents_in_vm(disk, uid)):
        return False
    for point in points(disk, target):
        # Keep a clone of the mount so that the unmount can be undone. On kernels before 5.2, cloning fails, and the
        # unmount is final.
        tree = libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(point), OPEN_TREE_CLONE | os.O_CLOEXEC)
        try:
            if libc.umount2(os.fsencode(point), UMOUNT_NOFOLLOW) != 0:
                if ctypes.get_errno() == errno.EBUSY:
                    return False
                raise SystemExit(f"cannot unmount the disk: {os.strerror(ctypes.get_errno())}")
            if any(parents_in_vm(disk, uid)):
                # The unmount did not propagate to the VM, which can still write to the disk, so restore the mount.
                place = directory(target)
                flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
                check(libc.syscall(MOVE_MOUNT, tree, b"", place, b"", flags), f"mount the disk again although {IN_USE}")
                os.close(place)
                return False
        finally:
            if tree >= 0:
                os.close(tree)
    return True


def points(disk: Mount, target: str) -> list[str]:
    """Return the disk's mount points in the VM's directory, topmost mount last."""
    above = os.path.realpath(os.path.dirname(target)) + "/"
    found = [one.point for one in mounts() if is_same(one, disk) and one.point.startswith(above)]
    # Callers compare the result with ``target``, which may contain links, whereas mountinfo contains resolved paths.
    name = os.path.basename(target)
    return [target if point == above + name else point for point in found]


def parents_in_vm(disk: Mount, uid: str) -> Iterator[FsDirectory]:
    """For each mount through which the VM's threads see the disk or a part of it, yield the root of its parent mount.

    Yield ``FsDirectory("", "")``, which equals no real directory, if the parent is not in the same mount table. Also
    yield it if a process has the disk open through a mount that is in no mount table.
    """
    pids = list(processes(uid))
    listed = bytearray()
    for thread in different_tables(thread for pid in pids for thread in different_threads(pid, KCMP_FS)):
        parents: set[int] = set()
        for one in mounts(thread):
            add(listed, one.number)
            if one.device == disk.device and (one.root + "/").startswith(disk.root.rstrip("/") + "/"):
                parents.add(one.parent)
        # Read the table again to find the parents, because it may be too long to keep in memory.
        for one in mounts(thread) if parents else ():
            if one.number in parents:
                parents.remove(one.number)
                yield FsDirectory(one.device, one.root)
        if parents:
            yield FsDirectory("", "")
    # A job with its own mount namespace may have open descriptors of mounts that its mount table does not list.
    if any(device == disk.device for pid in pids for device in devices_of_unlisted_mounts(pid, listed)):
        yield FsDirectory("", "")


def devices_of_unlisted_mounts(pid: int, listed: bytearray) -> Iterator[str]:
    """Yield the device of each mount on which a process has files open, unless the mount is in ``listed``.

    ``listed`` is a set of mount ids (see ``add``). The mounts whose devices are yielded are added to it.
    """
    for link in links_of(pid):
        with contextlib.suppress(OSError):
            # The fdinfo of a descriptor contains the mount's id. Other links must be opened to find it.
            if "/fd/" in link and has(listed, number_in(link.replace("/fd/", "/fdinfo/"))):
                continue
            fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
            try:
                number = number_in(f"/proc/self/fdinfo/{fd}")
                if not has(listed, number):
                    add(listed, number)
                    yield device_of(fd)
            finally:
                os.close(fd)


def links_of(pid: int) -> Iterator[str]:
    """Return the /proc links to the files and directories that the threads of a process have open."""
    for thread in different_threads(pid, KCMP_FS):
        yield f"/proc/{thread}/cwd"
        yield f"/proc/{thread}/root"
    for thread in different_threads(pid, KCMP_FILES):
        with contextlib.suppress(OSError), os.scandir(f"/proc/{thread}/fd") as entries:
            yield from (entry.path for entry in entries)


def different_threads(pid: int, what: int) -> Iterator[str]:
    """Yield one thread for each group of threads that share a resource.

    ``what`` is ``KCMP_FILES`` for the open descriptors, or ``KCMP_FS`` for the working directory, root and mount
    namespace. Usually all threads of a process share these, so only one thread is yielded.
    """
    found: list[int] = []
    for thread in threads(pid):
        number = int(os.path.basename(thread))
        # kcmp(2) returns 0 if two threads share the resource.
        if all(libc.syscall(KCMP, number, one, what, 0, 0) != 0 for one in found):
            found.append(number)
            yield thread


def number_in(fdinfo: str) -> int:
    """Return the id of the mount through which a file was opened, or 0 if it is unknown. ``fdinfo`` is the path of the
    file's fdinfo below /proc.
    """
    with open(fdinfo, "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"mnt_id:")), 0)


def device_of(fd: int) -> str:
    """Return the device of an open file's file system without querying the file system itself."""
    # struct statx is 256 bytes long. The kernel always fills in stx_dev_major and stx_dev_minor (bytes 136 and 140),
    # even if no field is requested.
    found = (ctypes.c_uint32 * 64)()
    if libc.syscall(STATX, fd, b"", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, found) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"{found[34]}:{found[35]}"


def has(numbers: bytearray, number: int) -> bool:
    """Return True if ``add`` has put the number into the set."""
    return number < len(numbers) and numbers[number] == 1


def add(numbers: bytearray, number: int) -> None:
    """Add ``number`` to a set of mount ids, which is stored as one byte for each possible id.

    The set stays small because the kernel gives each new mount the lowest free id.
    """
    if number >= len(numbers):
        numbers.extend(bytes(number + 1 - len(numbers)))
    numbers[number] = 1


def directory_of(path: str) -> FsDirectory:
    """Return a directory's device and root, which are the same in every mount that shows the directory."""
    real = os.path.realpath(path)
    around = (one for one in mounts() if real == one.point or real.startswith(one.point.rstrip("/") + "/"))
    inner = max(around, key=lambda one: len(one.point))
    # Append the part of the path that lies below the innermost mount point to the root of that mount.
    return FsDirectory(inner.device, (inner.root.rstrip("/") + real[len(inner.point.rstrip("/")) :]) or "/")


def disk_of(holder: str) -> Mount:
    """Return the disk of the attachment whose pod has the UID ``holder``. It is read from the mount table of the
    process that mounted the disk.
    """
    for pid in processes(holder):
        for one in mounts(str(pid)):
            if one.point == DISK:
                return one
    raise SystemExit("cannot unmount the disk: its attachment has no process")


def sweep(above: str) -> None:
    """Remove old, empty directories of deleted VMs in the directory ``above``, except those that a process has mounted.

    The kubelet creates a directory for each VM, and ``detach`` removes only those in which a disk was mounted. If the
    mount tables of all processes cannot be read in time, or if this program receives SIGTERM in the meantime, no
    directory is removed.
    """
    # Maps each directory's root, as in mountinfo, to its path.
    old = {}
    with os.scandir(above) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_ctime > STALE_S:
                    old[directory_of(entry.path).root] = entry.path
    until = time.monotonic() + SWEEP_S
    for pid in different_tables(filter(str.isdigit, os.listdir("/proc"))) if old else ():
        for one in mounts(pid):
            old.pop(one.root, None)
            if time.monotonic() > until or signal.sigpending():
                return
    for path in old.values():
        with contextlib.suppress(OSError):
            os.rmdir(path)


def different_tables(tasks: Iterable[str]) -> Iterator[str]:
    """Yield one process or thread for each distinct mount table. Tasks with the same mount namespace and root share a
    table.
    """
    found = set()
    for task in tasks:
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{task}/root", os.O_PATH | os.O_CLOEXEC)
            try:
                # Since Linux 5.14, fdinfo contains the inode. The inode is needed because the path in the link does not
                # identify a directory that was removed.
                root = text_of(f"self/fdinfo/{fd}"), os.readlink(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
            table = (os.readlink(f"/proc/{task}/ns/mnt"), *root)
            if table not in found and any(mounts(task)):  # The table of a task that has exited is empty.
                found.add(table)
                yield task


def directory(target: str) -> int:
    """Return a descriptor of the directory to mount on, which is created if it is missing.

    Links are not followed, because the VM's root user can write to the parent directory and may put links there.
    """
    above, name = os.path.split(target)
    os.makedirs(above, mode=0o755, exist_ok=True)
    parent = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode=0o755, dir_fd=parent)
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        raise SystemExit(f"cannot mount the disk: something in the VM has put a link or a file at {target}") from None
    finally:
        os.close(parent)


def mount(disk: str, place: int, uid: str) -> None:
    """Bind-mount the disk on the directory that is open as descriptor ``place``. If the VM has its own user namespace,
    the mount is idmapped.
    """
    userns = foreign_userns(uid)
    if userns is None:
        target = f"/proc/self/fd/{place}".encode()
        check(libc.mount(disk.encode(), target, None, MS_BIND, None), "mount the disk")
        return
    tree = check(libc.syscall(OPEN_TREE, AT_FDCWD, disk.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC), "clone the mount")
    try:
        attr = MountAttr(attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns)
        size = ctypes.c_size_t(ctypes.sizeof(attr))
        check(libc.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attr), size), "idmap the mount")
        flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
        check(libc.syscall(MOVE_MOUNT, tree, b"", place, b"", flags), "mount the disk")
    finally:
        # Close both descriptors, because either would keep the mount busy.
        os.close(tree)
        os.close(userns)


def foreign_userns(uid: str) -> int | None:
    """Return a descriptor of the VM's user namespace, or None if the VM has no process or is in the same user namespace
    as this program.

    The namespace is read from the VM's oldest process, because jobs can create further user namespaces.
    """
    own = os.stat("/proc/self/ns/user").st_ino
    for pid in sorted(processes(uid), key=lambda pid: int(start_of(pid) or sys.maxsize)):
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(fd).st_ino != own:
                return fd
            os.close(fd)
            return None
    return None


def bound(directory: str) -> None:
    """Prevent the root user in the VM's user namespace from creating files in the VM's directory. Otherwise, that user
    could mount the directory writable and fill the node's disk.

    The parent directory is protected in the same way. Its setgid bit passes the unmapped group on to the directories
    that the kubelet later creates for other VMs.
    """
    for path in (os.path.dirname(directory), directory):
        os.chown(path, -1, UNMAPPED)
        os.chmod(path, 0o2755)


def reboot(uid: str, grace: float) -> None:
    """Send SIGTERM to PID 1 of the container, then SIGKILL after the grace period."""
    found = [pid for pid in processes(uid) if is_first(pid)]
    if not found:
        raise SystemExit("cannot reboot: the VM has no process")
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_S)):
        signalled = []
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                signalled.append((pid, start_of(pid)))
                os.kill(pid, number)
        until = time.monotonic() + patience
        while any(start_of(pid) == start and start for pid, start in signalled):
            if time.monotonic() > until:
                break
            time.sleep(RETRY_S)
        else:
            say("ended")
            return
    raise SystemExit("cannot reboot: PID 1 of the VM does not exit")


def processes(uid: str) -> Iterator[int]:
    """Return the pod's processes.

    They are recognized by their cgroup paths, which contain the pod's UID with dashes or, under systemd, underscores.
    """
    forms = (uid, uid.replace("-", "_"))
    for name in os.listdir("/proc"):
        for thread in threads(name)[-1:] if name.isdigit() else ():
            # Read the cgroup of the last thread, because the first thread may have exited and is then in no cgroup.
            text = text_of(f"{thread}/cgroup")
            if any(form in text for form in forms):
                yield int(name)


def threads(pid: int | str) -> list[str]:
    """Return the threads of a process as paths relative to /proc, main thread first.

    Each thread may be in a different mount namespace.
    """
    with contextlib.suppress(OSError):
        return [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    return []


def is_first(pid: int) -> bool:
    """Return True for PID 1 of one of the pod's containers, but not for PID 1 of the sandbox or of a namespace within a
    container.
    """
    fields = dict(line.split(":", 1) for line in text_of(f"{pid}/status").split("\n") if ":" in line)
    # NSpid lists the process's pid in each PID namespace, from the node's to the innermost. "pause" is the program that
    # runs in the sandbox.
    return fields.get("NSpid", "").split()[1:] == ["1"] and fields["Name"].strip() != "pause"


def start_of(pid: int) -> str:
    """Return a process's start time, or "" if it has exited. The start time distinguishes the process from a later one
    with the same pid.
    """
    # The fields after the process name begin with field 3, the state (proc_pid_stat(5)). Field 22 is the start time.
    fields = text_of(f"{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def is_mounted(target: str) -> bool:
    """Return True if the path is a mount point, even if a directory from the same file system is bind-mounted there.

    Symlinks are not followed.
    """
    above, name = os.path.split(target)
    real = os.path.join(os.path.realpath(above), name)
    return any(one.point == real for one in mounts())


def mounted_on(path: str) -> Mount:
    """Return the topmost mount on a path."""
    found = [one for one in mounts() if one.point == os.path.realpath(path)]
    if not found:
        raise SystemExit(f"cannot mount the disk: nothing is mounted on {path}")
    return found[-1]


def is_same(one: Mount, other: Mount) -> bool:
    """Return True if both mounts show the same directory of the same file system."""
    return (one.device, one.root) == (other.device, other.root)


def mounts(task: str = "self") -> Iterator[Mount]:
    """Return the mount table of a process or thread, or nothing if it has exited."""
    with contextlib.suppress(OSError), open(f"/proc/{task}/mountinfo", "rb", LINE_BYTES) as file:
        for line in lines(file):
            # In a truncated line, fields may be missing.
            number, parent, device, root, point = (*line.split(b" ", 5), b"", b"")[:5]
            yield Mount(int(number), int(parent), device.decode(), unescaped(root), unescaped(point))


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines of a file, each truncated to ``LINE_BYTES``."""
    while line := file.readline(LINE_BYTES):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES)


def unescaped(field: bytes) -> str:
    """Decode a path from mountinfo, where spaces and similar characters are octal escapes.

    An escape that exceeds a byte, which the kernel never writes, is truncated instead of raising an error.
    """
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 0xFF]), field))


def text_of(name: str) -> str:
    """Return the content of a file below /proc, or "" if the process is gone.

    Process and mount names can contain any bytes. The kernel escapes newlines in both, and spaces in mount paths, but
    no other character that Python treats as a line break or as whitespace. Callers therefore split the text at newlines
    instead of calling ``splitlines``.
    """
    with contextlib.suppress(OSError), open(f"/proc/{name}", "rb") as file:
        return os.fsdecode(file.read())
    return ""


def check(result: int, what: str) -> int:
    """Return the result of a system call, or exit with the reason if the call failed."""
    if result < 0:
        raise SystemExit(f"cannot {what}: {os.strerror(ctypes.get_errno())}")
    return result


def done() -> None:
    """Create the file that the pod's postStart hook waits for. The kubelet then reports the pod as ready."""
    with open(DONE, "w"):
        pass


def say(text: str) -> None:
    """Print a line. If a disk is not unmounted in time, the CPI reports the last line that the attachment printed."""
    print(text, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SystemExit, OSError) as exc:
        if exc.args and exc.args[0] != 0:
            text = str(exc)
            with contextlib.suppress(OSError), open(TERMINATION_LOG, "w") as file:
                file.write(text)
            say(text)
            sys.exit(1)
