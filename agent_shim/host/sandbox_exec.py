"""Prepares its own process to run a job's program: sets namespaces, limits, user, capabilities and mounts.

This is a separate program, started with ``sandbox.launcher``, so that the daemon runs none of this code between fork
and exec. Finally, it executes the job's program, which keeps the pid. If ``has_init`` is set, an init keeps the pid
instead and runs the program as its child. The argument is the number of a descriptor from which the ``ExecSpec`` is
read as a line of JSON. If a step fails, it is reported on stderr, the job's program is not run, and the exit code is
127.

If ``gate`` is set, descriptor 0 is a socket. The peer receives the pid (as text) if it differs from that of this
program, or the reason for a failure, and sends one byte to let the program run. If the peer closes the socket, this
process exits.

Every mount source is opened before any privilege is dropped, and links are followed only if root created them.
Mounts and Landlock rules are then created from the open descriptors, because a job can replace a directory at any time,
but cannot change which directory an open descriptor refers to.

This program imports only the standard library, so that Python need not search for packages when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import resource
import signal
import stat
import struct
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypedDict

from agent_shim.host import trusted_path

FAILED: Final = 127

# Constants from include/uapi/linux/prctl.h and capability.h.
_CAPBSET_READ, _CAPBSET_DROP, _KEEPCAPS, _CHILD_SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = 23, 24, 8, 36, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_CAPABILITY_VERSION: Final = 0x20080522
_SYS_ADMIN: Final = 21

# System calls added since Linux 5.1 have the same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _MOUNT_SETATTR = 428, 429, 435, 442
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

# Constants from include/uapi/linux/sched.h.
_NAMESPACES: Final[Mapping[str, int]] = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000}
_CLONE_PARENT: Final = 0x8000

# Constants from include/uapi/linux/mount.h and fcntl.h.
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SLAVE, _MS_SHARED = 1 << 12, 1 << 14, 1 << 18, 1 << 19, 1 << 20
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8
_OPEN_TREE_CLONE, _MOVE_FROM_FD, _MOVE_ONTO_FD, _MNT_DETACH = 1, 4, 0x40, 2
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000

# Constants from include/uapi/linux/landlock.h.
_PATH_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_EVERYTHING: Final = (1 << 15) - 1
_FILE_RIGHTS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCOPE_SIGNAL: Final = 2
"""Flag that forbids signals to processes outside the sandbox (since Landlock version 6). Abstract sockets are not
restricted, because they belong to the network, which bpm processes share.
"""

# Contents of a new root file system in addition to the requested mounts (bpm-release
# src/bpm/runc/specbuilder/specbuilder.go).
_NODES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_LINKS: Final[Mapping[str, str]] = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/ptmx": "pts/ptmx",
}
_KERNEL: Final = (
    ("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
    ("devpts", "/dev/pts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"),
    ("tmpfs", "/dev/shm", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=1777,size=65536k"),  # noqa: S108
    ("mqueue", "/dev/mqueue", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
)
_MASKED: Final = (
    "/etc/sv",
    "/proc/kcore",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
)
_READ_ONLY: Final = ("/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_NEW_ROOT: Final = "/dev"
"""Where the new root is mounted while it is built. This directory always exists, and nothing in it is needed any more
in this mount namespace.
"""


class BindMount(TypedDict):
    """A file or a directory tree ``source``, made visible at ``path``.

    It is read-only unless ``write`` is set, and nothing in it is executable unless ``run`` is set. If ``shared`` is
    set, mounts below it propagate in both directions.
    """

    path: str
    source: str
    write: bool
    run: bool
    shared: bool


class ExecSpec(TypedDict):
    """A program and its confinement. If ``uid`` and ``gid`` are None, the program runs as the current user.
    ``capabilities`` contains the numbers of the capabilities that it gets, unless ``keeps_privileges`` is set.

    ``limits`` maps the name of a resource limit (``RLIMIT_NOFILE``) to the value for both its soft and its hard limit.
    ``cgroups`` lists the cgroup directories to join. If ``binds`` is None, every path is accessible. If both ``binds``
    and ``namespaces`` (``mnt``, ``pid``, ``ipc``, ``uts``) are given, these namespaces are created, and only the bind
    mounts are visible, each at its ``path``. If only ``binds`` is given, Landlock restricts access to the sources of
    the bind mounts, and the program can send signals to processes outside its sandbox only if ``may_signal`` is set. If
    ``has_init`` is set, the program runs under an init, which is the first of ``inits`` that can be executed or, if
    none can, this process. ``enter`` is the pid of a process whose namespaces are joined. ``terminal`` is a descriptor
    below 3 that becomes the controlling terminal of a new session.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int | None
    gid: int | None
    keeps_privileges: bool
    capabilities: list[int]
    limits: dict[str, int]
    cgroups: list[str]
    binds: list[BindMount] | None
    namespaces: list[str]
    has_init: bool
    inits: list[str]
    may_signal: bool
    gate: bool
    enter: int | None
    terminal: int | None


class StepError(Exception):
    """A failed step. The message names the step, the path if there is one, and the reason."""


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Convert an ``OSError`` in the block to a ``StepError`` with the message ``STEP: PATH: REASON``."""
    try:
        yield
    except OSError as exc:
        raise StepError(f"{what}: {_describe(exc)}") from exc


def _describe(exc: OSError) -> str:
    """Return ``PATH: REASON``, or only the reason if the error has no path."""
    return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror or str(exc)


def main(arguments: Sequence[str]) -> int:
    """Read and execute a spec. Returns only on failure or, if the spec contains ``enter``, after the program has
    exited. The return value is an exit code.
    """
    descriptor = int(arguments[1])
    spec, is_open = _read(descriptor)
    try:
        if not spec["gate"]:
            _close_input(descriptor)
        if spec["enter"] is None:  # otherwise, the child that executes the program takes the terminal
            _take_terminal(spec)
        with _step("join a cgroup"):
            _join(spec["cgroups"])
        if spec["enter"] is not None:
            return _enter(spec, spec["enter"])
        rules = []
        if spec["namespaces"]:
            child = _unshare(spec)
            if child:  # this is the original process, whose only remaining task is to report the pid
                os.write(descriptor, b"%d" % child)
                return 0
        elif spec["binds"] is not None:
            with _step("open what bpm.yml shows"):
                rules = _rules(spec["binds"])
        if spec["gate"]:
            if not is_open and os.read(descriptor, 1) == b"":  # the peer has closed the socket
                return FAILED
            _close_input(descriptor)
        _become(spec, rules)
        with _step("execute"):
            if spec["has_init"]:
                _run_below_init(spec)
            _run(spec)
    except (StepError, OSError) as exc:
        text = str(exc) if isinstance(exc, StepError) else _describe(exc)
        sys.stderr.write(f"agent-shim: cannot run {spec['argv'][0]}: {text}\n")
        if spec["gate"]:
            with contextlib.suppress(OSError):
                os.write(descriptor, text.encode(errors="replace"))
    return FAILED


def _read(descriptor: int) -> tuple[ExecSpec, bool]:
    """Read the spec. The second value is True if the byte that lets the program run arrived together with the spec."""
    text = b""
    while b"\n" not in text and (chunk := os.read(descriptor, 65536)):
        text += chunk
    line, _, rest = text.partition(b"\n")
    return json.loads(line), bool(rest)


def _close_input(descriptor: int) -> None:
    """Close the spec's descriptor, so that the program does not inherit it."""
    null = os.open(os.devnull, os.O_RDONLY)
    if descriptor == 0:
        os.dup2(null, 0)
    else:
        os.close(descriptor)
    os.close(null)


def _join(groups: Iterable[str]) -> None:
    """Move this process into the cgroups whose directories are listed in ``groups``."""
    for group in groups:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")  # 0 means the process that writes


def _become(spec: ExecSpec, rules: Sequence[tuple[int, int]] = ()) -> None:
    """Apply the rest of the spec to this process: limits, user, capabilities, directory and Landlock ``rules``."""
    with _step("set its limits"):
        _set_limits(spec["limits"])
        reset_oom_score()
    with _step("give up capabilities"):
        if not spec["keeps_privileges"]:
            _drop_bounding(spec["capabilities"])
        if spec["capabilities"]:
            _prctl(_KEEPCAPS, 1)  # keep capabilities when the user changes
    if spec["uid"] is not None and spec["gid"] is not None:
        with _step(f"become user {spec['uid']}"):
            os.setgroups([])
            os.setresgid(spec["gid"], spec["gid"], spec["gid"])
            os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    if not spec["keeps_privileges"]:
        with _step("take its capabilities"):
            _set_capabilities(spec["capabilities"])
            _prctl(_NO_NEW_PRIVS, 1)
    with _step("enter its directory"):
        os.chdir(spec["cwd"])
        if os.getcwd() != spec["cwd"]:  # noqa: PTH109 - getcwd resolves links, so PWD has to name the given path
            spec["env"].setdefault("PWD", spec["cwd"])
    may_mount = spec["keeps_privileges"] or _SYS_ADMIN in spec["capabilities"]
    with _step("confine it"):
        if spec["binds"] is not None and not spec["namespaces"]:
            _restrict(rules, may_signal=spec["may_signal"])
        elif spec["namespaces"] and not may_mount and landlock_version():
            # This rule allows access to all files. It is used only because Landlock, once any rule is in force, forbids
            # mounting, even in a new user namespace.
            _restrict([(trusted_path.hold("/"), _EVERYTHING)], may_signal=True)


def _run(spec: ExecSpec) -> NoReturn:
    """Execute the program without a shell, with the default action for signals that Python ignores."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


def _set_limits(limits: Mapping[str, int]) -> None:
    """Set each limit, but not above the current hard limit. A lower value than requested is reported on stderr."""
    for name, value in limits.items():
        number = getattr(resource, name)
        try:
            resource.setrlimit(number, (value, value))
        except (OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (hard, hard))
            sys.stderr.write(f"agent-shim: {name} is {hard}, the hard limit, instead of {value}\n")


def reset_oom_score(score: str = "/proc/self/oom_score_adj") -> None:
    """Reset a negative OOM score. The agent may be protected from the OOM killer, but jobs must not inherit that."""
    with contextlib.suppress(OSError), open(score, "r+") as file:
        if int(file.read()) < 0:
            file.write("0")


# --- capabilities -----------------------------------------------------------------------------------------------------


def _drop_bounding(kept: Iterable[int]) -> None:
    """Drop capabilities from the bounding set. Without CAP_SETPCAP, this is not possible, and only NO_NEW_PRIVS keeps
    the program from gaining capabilities.
    """
    for number in range(64):
        if number not in kept and _libc().prctl(_CAPBSET_READ, number, 0, 0, 0) == 1:
            _libc().prctl(_CAPBSET_DROP, number, 0, 0, 0)


def _set_capabilities(wanted: Sequence[int]) -> None:
    """Set exactly these capabilities, and keep them across exec with the ambient set. Raises ``OSError`` if one is
    unavailable.
    """
    mask = sum(1 << number for number in wanted)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    # The low 32 bits of the effective, permitted and inheritable sets come first, then the high 32 bits of all three.
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, low, high, high, high))
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    _checked(_libc().capset(header, data), "capset")
    for number in wanted:
        _prctl(_AMBIENT, _AMBIENT_RAISE, number)


# --- namespaces -------------------------------------------------------------------------------------------------------


def _unshare(spec: ExecSpec) -> int:
    """Clone a sibling of this process into new namespaces. The sibling's root file system contains only the bind
    mounts. Like fork, this returns 0 in the new process, and the new process's pid in this one.
    """
    binds = spec["binds"] or []
    with _step("share a volume"):
        for bind in binds:
            if bind["shared"]:
                make_shared(bind["source"])
    flags = _CLONE_PARENT | functools.reduce(int.__or__, (_NAMESPACES[name] for name in spec["namespaces"]))
    # struct clone_args: the flags and seven numbers that are not used.
    arguments = ctypes.create_string_buffer(struct.pack("8Q", flags, *[0] * 7))
    with _step("create namespaces"):
        child = _checked(_libc().syscall(_CLONE3, arguments, ctypes.c_size_t(64)), "")
    if child == 0:
        with _step("mount what bpm.yml shows"):
            os.setsid()
            _make_root(binds, is_masked=not spec["keeps_privileges"])
    return child


def make_shared(path: str) -> None:
    """Make a mount point shared, so that mounts below it propagate to every namespace that contains it.

    If ``path`` is not a mount point yet, it is first bind-mounted on itself. An open descriptor is used for this, so
    that a job cannot redirect the mount by replacing ``path``.
    """
    path_fd = trusted_path.hold(path)
    try:
        path_of_fd = f"/proc/self/fd/{path_fd}"
        with open(f"/proc/self/fdinfo/{path_fd}", "rb") as file:
            number = next(line.split()[1] for line in file if line.startswith(b"mnt_id:"))
        with open("/proc/self/mountinfo", "rb") as file:
            fields = next((fields for line in file if (fields := line.split())[0] == number), [])
        # Field 4 is the mount point, and the optional fields begin with field 6.
        directory = os.readlink(path_of_fd)  # noqa: PTH115 - only this would need pathlib
        is_mounted = len(fields) > 4 and _unescaped(fields[4]) == directory
        if not is_mounted:
            _mount(path_of_fd, path_of_fd, None, _MS_BIND | _MS_REC)
            os.close(path_fd)
            path_fd = trusted_path.hold(path)  # the first descriptor refers to the directory under the new mount
            path_of_fd = f"/proc/self/fd/{path_fd}"
        if not is_mounted or not any(field.startswith(b"shared:") for field in fields[6:]):
            _mount(None, path_of_fd, None, _MS_SHARED | _MS_REC)
    finally:
        os.close(path_fd)


def _unescaped(field: bytes) -> str:
    """Decode a path in mountinfo, where spaces and some other characters are written as octal escapes."""
    head, *rest = field.split(b"\\")
    return os.fsdecode(head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))


# --- view -------------------------------------------------------------------------------------------------------------


def _is_our_link(path: str) -> bool:
    """Return True for a link that belongs to our user (root). Other links are not used, because a job could redirect
    its own links at any moment.
    """
    try:
        status = os.lstat(path)
    except OSError:  # the path need not exist outside the new root
        return False
    return stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid()


def _make_root(binds: Sequence[BindMount], *, is_masked: bool) -> None:
    """Build a root file system that contains only the bind mounts and the kernel's own mounts, and enter it.

    If ``is_masked`` is set, sensitive kernel files are hidden, and setuid bits have no effect. All sources are opened
    first, because the new root hides the old one. A bind mount at ``/`` becomes the root itself, and the others are
    mounted on top.
    """
    nodes = [BindMount(path=node, source=node, write=True, run=False, shared=False) for node in _NODES]
    mounts = sorted([*binds, *nodes], key=lambda bind: bind["path"].count("/"))  # parents before their children
    trees = {bind["path"]: tree for bind in mounts if (tree := _tree(bind, is_masked=is_masked)) is not None}
    # A parent mount may contain a link at the path of a bind mount, as in /var/vcap/jobs. In that case, the mount is
    # created at the link's target.
    nested = [path for path in trees if any(path.startswith(f"{parent}/") for parent in trees)]
    link_targets = {path: os.path.realpath(path) for path in nested if _is_our_link(path)}
    is_writable = any(bind["write"] for bind in binds if bind["path"] == "/")
    root = trees.pop("/", None)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    empty = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0755,size=1m"
    if root is None:
        _mount("tmpfs", _NEW_ROOT, "tmpfs", *empty)
    else:
        _attach(root, _NEW_ROOT)
    os.chdir(_NEW_ROOT)
    if root is not None:
        _mount("tmpfs", "dev", "tmpfs", *empty)
        # Leave out paths that are links in the requested root, such as /bin, because the root contains their targets
        # too.
        trees = {path: tree for path, tree in trees.items() if not os.path.islink(path[1:])}  # noqa: PTH114
    umask = os.umask(0o022)
    for kind, path, flags, options in _KERNEL:
        _make_point(path[1:], is_directory=True)
        # A kernel without POSIX message queues cannot mount an mqueue.
        with contextlib.suppress(OSError) if kind == "mqueue" else contextlib.nullcontext():
            _mount(kind, path[1:], kind, flags, options)
    for path, tree in trees.items():
        if root is None or path.startswith("/dev/"):  # do not modify a directory that was requested as the root
            for point in {path, link_targets.get(path, path)}:
                _make_point(point[1:], is_directory=stat.S_ISDIR(os.fstat(tree).st_mode))
    for path, target in _LINKS.items():
        with contextlib.suppress(FileExistsError):
            os.symlink(target, path[1:])  # noqa: PTH211 - only this would need pathlib
    os.umask(umask)
    # With two equal arguments, pivot_root(2) needs no directory for the old root: it mounts the old root over the new
    # one, where it can be unmounted.
    _checked(_libc().pivot_root(b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    for path, tree in trees.items():
        _attach(tree, path)
    if is_masked:
        _mask()
    if not is_writable:
        _set_attributes(_AT_FDCWD, "/", _ATTR_RDONLY)


def _tree(bind: BindMount, *, is_masked: bool) -> int | None:
    """Clone the mount tree at a bind mount's source, and set its mount attributes. If ``is_masked`` is set, setuid bits
    in it have no effect. Device files can be used only below ``/dev``. Unless the bind mount is shared, later mounts
    outside propagate into the tree, but not the other way round. Return None if the source does not exist.
    """
    try:
        tree = _open_tree(bind["source"])
    except FileNotFoundError:
        return None
    attributes = _ATTR_NOSUID if is_masked else 0
    attributes |= 0 if bind["path"].split("/")[1] == "dev" else _ATTR_NODEV
    attributes |= (0 if bind["write"] else _ATTR_RDONLY) | (0 if bind["run"] else _ATTR_NOEXEC)
    _set_attributes(tree, "", attributes, 0 if bind["shared"] else _MS_SLAVE)
    return tree


def _open_tree(path: str) -> int:
    """Clone the mount tree at ``path`` without mounting the clone anywhere, and return its descriptor."""
    path_fd = trusted_path.hold(path)
    try:
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH
        return _checked(_libc().syscall(_OPEN_TREE, path_fd, b"", flags), "mount", path)
    finally:
        os.close(path_fd)


def _set_attributes(tree: int, path: str, attributes: int, propagation: int = 0) -> None:
    """Set attributes of the whole mount tree ``tree`` or, if ``path`` is not empty, of the single mount at ``path``."""
    # struct mount_attr: the attributes to set and to clear, the propagation, and a user namespace.
    values = ctypes.create_string_buffer(struct.pack("4Q", attributes, 0, propagation, 0))
    flags = 0 if path else _AT_EMPTY_PATH | _AT_RECURSIVE
    result = _libc().syscall(_MOUNT_SETATTR, tree, path.encode(), flags, values, ctypes.c_size_t(32))
    _checked(result, "mount_setattr", path)


def _attach(tree: int, path: str) -> None:
    """Mount a tree at ``path``. The target is an open descriptor, because a job may replace a path that it can write
    to.
    """
    path_fd = trusted_path.hold(path)
    flags = _MOVE_FROM_FD | _MOVE_ONTO_FD
    _checked(_libc().syscall(_MOVE_MOUNT, tree, b"", path_fd, b"", flags), "mount", path)
    os.close(path_fd)
    os.close(tree)


def _mask() -> None:
    """Hide sensitive kernel files and make kernel controls read-only."""
    for path in _READ_ONLY:
        with contextlib.suppress(FileNotFoundError):
            tree = _open_tree(path)
            _set_attributes(tree, "", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV | _ATTR_NOEXEC)
            _attach(tree, path)
    for path in _MASKED:
        if os.path.isdir(path):  # noqa: PTH112 - only this would need pathlib
            _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0000,size=4k")
        elif os.path.exists(path):  # noqa: PTH110
            _attach(_open_tree(os.devnull), path)


def _make_point(path: str, *, is_directory: bool) -> None:
    """Create a directory or an empty file at ``path`` as a mount point."""
    os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if not is_directory and not os.path.exists(path):  # noqa: PTH110
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _enter(spec: ExecSpec, pid: int) -> int:
    """Run the program in the namespaces of the process ``pid``, and forward signals to the program. Like a shell,
    return the program's exit code, or 128+N if signal N killed it.
    """
    flags = functools.reduce(int.__or__, (_NAMESPACES[name] for name in spec["namespaces"]))
    with _step("enter its namespaces"):
        descriptor = os.pidfd_open(pid)
        _checked(_libc().setns(descriptor, flags), "setns")
        os.close(descriptor)
    child = os.fork()  # setns changes the PID namespace only for future children
    if child == 0:
        _take_terminal(spec)
        _become(spec)
        _run(spec)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # keep no copies, so that a reader gets EOF when the program closes its output
        os.dup2(null, stream)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda sig, _: os.kill(child, sig))
    return _exit_code(os.waitpid(child, 0)[1])


def _run_below_init(spec: ExecSpec) -> None:
    """Prepare to run the program under an init, as release scripts expect. Returns in the process that has to
    execute the program.

    If none of ``inits`` can be executed, this process becomes the init: it forwards signals to the program alone, reaps
    orphans, and exits with the program's status. In a pid namespace its exit kills all other processes.
    """
    program = spec["argv"][0]
    os.stat(program)  # noqa: PTH116 - raises if the program is missing
    if not os.access(program, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)
    if os.getpid() != 1:
        _prctl(_CHILD_SUBREAPER, 1)  # the init keeps this across exec, but the program does not inherit it
    for init in spec["inits"]:
        if os.access(init, os.X_OK):
            spec["argv"] = [init, "--", *spec["argv"]]
            return
    everything = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # otherwise, it would get a terminal's signals twice
        if spec["terminal"] is not None:
            os.tcsetpgrp(spec["terminal"], os.getpid())  # would stop this process if SIGTTOU were not blocked
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    for descriptor in (0, 1, 2):  # keep no copies, so that a reader gets EOF when the program closes its output
        os.close(descriptor)
    while True:
        number = signal.sigwait(everything)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == child:
                    os._exit(_exit_code(ended[1]))


def _take_terminal(spec: ExecSpec) -> None:
    """Create a session whose controlling terminal is the spec's ``terminal``, if there is one."""
    if spec["terminal"] is not None:
        with _step("take the terminal"):
            os.setsid()
            fcntl.ioctl(spec["terminal"], termios.TIOCSCTTY, 0)


def _exit_code(status: int) -> int:
    """Convert a wait status to an exit code, or to 128+N for signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# --- Landlock ---------------------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """Return the kernel's Landlock version, or 0 if Landlock is missing or a sandbox forbids its use."""
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)  # 1 asks only for the version
    return max(0, version)


def _rules(binds: Sequence[BindMount]) -> list[tuple[int, int]]:
    """Open the sources, and return a Landlock rule (descriptor and access rights) for each. Paths that do not exist are
    skipped.

    Listing is allowed for all directories, because Landlock cannot allow it only for the parent directories of a
    bind mount.
    """
    rules = [(trusted_path.hold("/"), _READ_DIR)]
    for bind in binds:
        allowed = _EVERYTHING & ~_EXECUTE if bind["write"] else _READ_FILE | _READ_DIR
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            rules.append((trusted_path.hold(bind["source"]), allowed | (_EXECUTE if bind["run"] else 0)))
    return rules


def _restrict(rules: Sequence[tuple[int, int]], *, may_signal: bool) -> None:
    """Restrict this process to the files below the descriptors in ``rules``, and close these descriptors. Unless
    ``may_signal`` is set, also forbid signals to processes outside the sandbox, if the kernel supports this (Landlock
    version 6).
    """
    version = landlock_version()
    everything = _EVERYTHING & ~(_REFER if version < 2 else 0) & ~(_TRUNCATE if version < 3 else 0)
    # struct landlock_ruleset_attr: file rights, network rights and scopes. Older versions do not have the last fields.
    fields = struct.pack("QQQ", everything, 0, 0 if version < 6 or may_signal else _SCOPE_SIGNAL)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = ctypes.create_string_buffer(fields[:size])
    ruleset = _checked(_libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "Landlock")
    for descriptor, allowed in rules:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = struct.pack("=Qi", allowed & everything & (_EVERYTHING if is_directory else _FILE_RIGHTS), descriptor)
        _checked(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule), 0), "Landlock")
        os.close(descriptor)
    _checked(_libc().syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


# --- the C library ----------------------------------------------------------------------------------------------------


@functools.cache
def _libc() -> Any:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int) -> None:
    """Call prctl(2), with 0 for the arguments that are not given. Raises ``OSError``."""
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc().prctl(option, *words), f"prctl {option}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2). Raises ``OSError`` with the target."""
    encoded = [None if text is None else text.encode(errors="surrogateescape") for text in (source, target, kind)]
    _checked(_libc().mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), "mount", target)


def _checked(result: int, what: str, path: str | None = None) -> int:
    """Return a system call's result. If the call failed, raise ``OSError`` with ``path`` as the file name, or with
    ``what`` if there is no path.
    """
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path or what)
    return result
