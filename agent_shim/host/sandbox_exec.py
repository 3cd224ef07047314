"""The last steps of a process before it becomes the program of a job: namespaces, limits, user, capabilities, view.

A program of its own, run as ``python -I -S jail.py FD``: so nothing of it happens in the daemon between fork and exec,
and nothing of it is left once the program runs, which has the same process number; only in a pid namespace of its own
an init stays above it. ``FD`` holds the ``ExecSpec`` as a line of JSON. What cannot be done is said on stderr; then
nothing is run (exit 127).

With a ``gate`` FD 0 is a socket. The other side gets the process number (as text) where that is another one than that
of this program, or why there is none, and answers with a byte when the program may run; without it all ends here.

Everything that is shown is opened once, before anything is given up: links are followed only where root has made them,
and mounts and rules are made of descriptors. A job can exchange a directory at any moment, but not what is held.

Only the standard library: the file is run by its path.
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

FAILED: Final = 127

# include/uapi/linux/prctl.h, capability.h
_CAPBSET_READ, _CAPBSET_DROP, _KEEPCAPS, _CHILD_SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = 23, 24, 8, 36, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_CAPABILITY_VERSION: Final = 0x20080522
_SYS_ADMIN: Final = 21

# System calls since 5.1 have the same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _MOUNT_SETATTR = 428, 429, 435, 442
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

# include/uapi/linux/sched.h
_NAMESPACES: Final[Mapping[str, int]] = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000}
_CLONE_PARENT: Final = 0x8000

# include/uapi/linux/mount.h, fcntl.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SLAVE, _MS_SHARED = 1 << 12, 1 << 14, 1 << 18, 1 << 19, 1 << 20
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8
_OPEN_TREE_CLONE, _MOVE_FROM_FD, _MOVE_ONTO_FD, _MNT_DETACH = 1, 4, 0x40, 2
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000

# include/uapi/linux/landlock.h
_PATH_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_EVERYTHING: Final = (1 << 15) - 1
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCOPE_SIGNAL: Final = 2
"""No signals to processes outside; from version 6 on. Abstract sockets belong to the network, which bpm shares."""

# What a root file system of its own has beside the view (bpm-release src/bpm/runc/specbuilder/specbuilder.go).
_NODES: Final = ("null", "zero", "full", "random", "urandom", "tty")
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
"""Where the new root is put together: some directory that is surely there. Nobody else sees it there."""
_MAX_LINKS: Final = 40
"""On one way, as for the kernel."""


class BindMount(TypedDict):
    """What can be opened, with all below it: the directory or file ``source``, seen at ``path``.

    It is read-only unless ``write`` and cannot be executed unless ``run``. What is mounted below one that is ``shared``
    is seen on both sides.
    """

    path: str
    source: str
    write: bool
    run: bool
    shared: bool


class ExecSpec(TypedDict):
    """What to become. ``uid`` and ``gid`` are None to stay who we are; ``capabilities`` are numbers.

    ``limits`` maps names (``RLIMIT_NOFILE``) to one value for both limits, ``cgroups`` are directories to join. Without
    ``places`` everything can be opened. ``namespaces`` (``mnt``, ``pid``, ``ipc``, ``uts``) are made anew and the
    places are all that there is, each where its ``path`` says; without namespaces Landlock guards them where they are,
    and ``may_signal`` allows signals to processes outside. With ``has_init`` the program runs below an init, which is
    the first of ``inits`` that is there, or this process. With ``enter`` the namespaces are those of that process, and
    the ``terminal`` is a descriptor below 3 that becomes the controlling terminal of a session of its own.
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
    places: list[BindMount] | None
    namespaces: list[str]
    has_init: bool
    inits: list[str]
    may_signal: bool
    gate: bool
    enter: int | None
    terminal: int | None


class StepError(Exception):
    """Names the step that failed, the place where there is one, and the reason."""


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Tell an ``OSError`` as the failure of a step: ``WHAT: PLACE: REASON``."""
    try:
        yield
    except OSError as exc:
        raise StepError(f"{what}: {_told(exc)}") from exc


def _told(exc: OSError) -> str:
    return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror or str(exc)


def main(arguments: Sequence[str]) -> int:
    """Follow the order; returns only when that fails, or when what it has started has ended."""
    descriptor = int(arguments[1])
    order, is_open = _read(descriptor)
    try:
        if not order["gate"]:
            _release(descriptor)
        if order["enter"] is None:
            _take_terminal(order)
        with _step("join a cgroup"):
            _join(order["cgroups"])
        if order["enter"] is not None:
            return _enter(order, order["enter"])
        rules = []
        if order["namespaces"]:
            child = _be_apart(order)
            if child:
                os.write(descriptor, b"%d" % child)
                return 0
        elif order["places"] is not None:
            with _step("open what bpm.yml shows"):
                rules = _rules(order["places"])
        if order["gate"]:
            if not is_open and os.read(descriptor, 1) == b"":
                return FAILED
            _release(descriptor)
        _become(order, rules)
        with _step("execute"):
            if order["has_init"]:
                _run_below_init(order)
            _run(order)
    except (StepError, OSError) as exc:
        text = str(exc) if isinstance(exc, StepError) else _told(exc)
        sys.stderr.write(f"agent-shim: cannot run {order['argv'][0]}: {text}\n")
        if order["gate"]:
            with contextlib.suppress(OSError):
                os.write(descriptor, text.encode(errors="replace"))
    return FAILED


def _read(descriptor: int) -> tuple[ExecSpec, bool]:
    """The order, and whether the byte that opens the gate has come along."""
    text = b""
    while b"\n" not in text and (chunk := os.read(descriptor, 65536)):
        text += chunk
    line, _, more = text.partition(b"\n")
    return json.loads(line), bool(more)


def _release(descriptor: int) -> None:
    """The program does not get what the order came through."""
    null = os.open(os.devnull, os.O_RDONLY)
    if descriptor == 0:
        os.dup2(null, 0)
    else:
        os.close(descriptor)
    os.close(null)


def _join(groups: Iterable[str]) -> None:
    for group in groups:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")


def _become(order: ExecSpec, rules: Sequence[tuple[int, int]] = ()) -> None:
    with _step("set its limits"):
        _set_limits(order["limits"])
        _be_killable()
    with _step("give up capabilities"):
        if not order["keeps_privileges"]:
            _drop_bounding(order["capabilities"])
        if order["capabilities"]:
            _prctl(_KEEPCAPS, 1)
    if order["uid"] is not None and order["gid"] is not None:
        with _step(f"become user {order['uid']}"):
            os.setgroups([])
            os.setresgid(order["gid"], order["gid"], order["gid"])
            os.setresuid(order["uid"], order["uid"], order["uid"])
    if not order["keeps_privileges"]:
        with _step("take its capabilities"):
            _set_capabilities(order["capabilities"])
            _prctl(_NO_NEW_PRIVS, 1)
    with _step("enter its directory"):
        os.chdir(order["cwd"])
        if os.getcwd() != order["cwd"]:  # noqa: PTH109 - reached over a link, which the kernel does not remember
            order["env"].setdefault("PWD", order["cwd"])
    with _step("confine it"):
        if order["places"] is not None and not order["namespaces"]:
            _restrict(rules, may_signal=order["may_signal"])
        elif order["namespaces"] and not (order["keeps_privileges"] or _SYS_ADMIN in order["capabilities"]):
            _forbid_mounts()


def _run(order: ExecSpec) -> NoReturn:
    """No shell between; what Python ignores for itself the program does not."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(order["argv"][0], order["argv"], order["env"])


def _set_limits(limits: Mapping[str, int]) -> None:
    """One above what may be had becomes what may be had."""
    for name, value in limits.items():
        which = getattr(resource, name)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            hard = resource.getrlimit(which)[1]
            resource.setrlimit(which, (hard, hard))
            sys.stderr.write(f"agent-shim: {name} is {hard}, the most that may be had, not {value}\n")


def _be_killable(score: str = "/proc/self/oom_score_adj") -> None:
    """The agent may be spared when memory runs out; jobs are not."""
    with contextlib.suppress(OSError), open(score, "r+") as file:
        if int(file.read()) < 0:
            file.write("0")


# --- capabilities ---------------------------------------------------------------------------------------------------


def _drop_bounding(kept: Iterable[int]) -> None:
    """Nothing that is run later can have more; without SETPCAP the set stays, and NO_NEW_PRIVS has to do."""
    for number in range(64):
        if number not in kept and _libc().prctl(_CAPBSET_READ, number, 0, 0, 0) == 1:
            _libc().prctl(_CAPBSET_DROP, number, 0, 0, 0)


def _set_capabilities(wanted: Sequence[int]) -> None:
    """Exactly these, kept over exec by the ambient set; what we do not have is an error."""
    mask = sum(1 << number for number in wanted)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, low, high, high, high))
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    _checked(_libc().capset(header, data), "capset")
    for number in wanted:
        _prctl(_AMBIENT, _AMBIENT_RAISE, number)


# --- namespaces -----------------------------------------------------------------------------------------------------


def _be_apart(order: ExecSpec) -> int:
    """A child, of our parent, in new namespaces with the view as its root; 0 in the child, as fork does it."""
    places = order["places"] or []
    with _step("share a volume"):
        for place in places:
            if place["shared"]:
                _make_shared(place["source"])
    flags = _CLONE_PARENT | functools.reduce(int.__or__, (_NAMESPACES[name] for name in order["namespaces"]))
    arguments = ctypes.create_string_buffer(struct.pack("8Q", flags, *[0] * 7))
    with _step("make namespaces"):
        child = _checked(_libc().syscall(_CLONE3, arguments, ctypes.c_size_t(64)), "")
    if child == 0:
        with _step("mount what bpm.yml shows"):
            os.setsid()
            _make_root(places, is_masked=not order["keeps_privileges"])
    return child


def _make_shared(path: str) -> None:
    """Have what is mounted below it seen by all who have it mounted.

    ``path`` is opened once: the mount is made on what is held, not on what may be there by then.
    """
    held = _open(path)
    try:
        place = f"/proc/self/fd/{held}"
        with open(f"/proc/self/fdinfo/{held}", "rb") as file:
            number = next(line.split()[1] for line in file if line.startswith(b"mnt_id:"))
        with open("/proc/self/mountinfo", "rb") as file:
            fields = next((fields for line in file if (fields := line.split())[0] == number), [])
        there = os.readlink(place)  # noqa: PTH115 - pathlib would be loaded for nothing
        is_mounted = len(fields) > 4 and _unescaped(fields[4]) == there
        if not is_mounted:
            _mount(place, place, None, _MS_BIND | _MS_REC)
            os.close(held)
            held = _open(path)  # what was held lies below the new mount
            place = f"/proc/self/fd/{held}"
        if not is_mounted or not any(field.startswith(b"shared:") for field in fields[6:]):
            _mount(None, place, None, _MS_SHARED | _MS_REC)
    finally:
        os.close(held)


def _unescaped(field: bytes) -> str:
    """A path of mountinfo: blanks and the like are written as octal numbers there."""
    head, *rest = field.split(b"\\")
    return os.fsdecode(head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))


# --- paths ----------------------------------------------------------------------------------------------------------


def _open(path: str) -> int:
    """Hold what is at the absolute ``path``, without opening it; links that a job may have put there are refused.

    Step by step: a link in the place of a directory is met here, and named in the error, or is not on the way any more.
    The rules are those of ``host.guarded``, which this program cannot import.
    """
    rest, links = _parts(path), 0
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.pop()
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            status = os.fstat(below)
            if not stat.S_ISLNK(status.st_mode):
                os.close(here)
                here = below
                continue
            try:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                _refuse_link(name, status, os.fstat(here))
                target = os.readlink("", dir_fd=below)
            finally:
                os.close(below)
            rest += _parts(target)
            if target.startswith("/"):
                os.close(here)
                here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        os.close(here)
        exc.filename = path
        raise
    return here


def _refuse_link(name: str, link: os.stat_result, directory: os.stat_result) -> None:
    """Raise ``OSError`` for a link that a job may have made, or may have moved to this directory."""
    if link.st_uid not in _trusted():
        raise OSError(errno.ELOOP, f"on the way there is a link, {name!a}, of user {link.st_uid}")
    is_open = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX
    if os.geteuid() == 0 and (directory.st_uid not in _trusted() or is_open):
        raise OSError(errno.ELOOP, f"on the way there is a link, {name!a}, in a directory that others may write")


def _parts(path: str) -> list[str]:
    """The names on the way, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


@functools.cache
def _trusted() -> frozenset[int]:
    """Root, this user, and in a user namespace the number of all that it has no number for: no job is that."""
    with open("/proc/self/uid_map") as file:
        is_whole = file.read().split() == ["0", "0", "4294967295"]
    if is_whole:
        return frozenset((0, os.geteuid()))
    with open("/proc/sys/kernel/overflowuid") as file:
        return frozenset((0, os.geteuid(), int(file.read())))


# --- the view -------------------------------------------------------------------------------------------------------


def _make_root(places: Sequence[BindMount], *, is_masked: bool) -> None:
    """A root of our own with the places and what every root has; nothing else is there any more.

    All that is shown is taken hold of first: while the new root is put together the old one gets covered. Where ``/``
    is one of the places it is the root, below the others.
    """
    shown = [
        *places,
        *(
            BindMount(path=f"/dev/{each}", source=f"/dev/{each}", write=True, run=False, shared=False)
            for each in _NODES
        ),
    ]
    shown.sort(key=lambda place: place["path"].count("/"))  # What lies below another is mounted after it.
    trees = {place["path"]: tree for place in shown if (tree := _tree(place, is_masked=is_masked)) is not None}
    is_writable = any(place["write"] for place in places if place["path"] == "/")
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
        # Links like /bin are those of that root, and lead to what is shown as well.
        trees = {path: tree for path, tree in trees.items() if not os.path.islink(path[1:])}  # noqa: PTH114
    umask = os.umask(0o022)
    for path, tree in trees.items():
        if root is None or path.startswith("/dev/"):  # all else is in that root, which is not ours to change
            _make_point(path[1:], is_directory=_is_directory(tree))
    for kind, path, flags, options in _KERNEL:
        _make_point(path[1:], is_directory=True)
        with contextlib.suppress(OSError) if kind == "mqueue" else contextlib.nullcontext():
            _mount(kind, path[1:], kind, flags, options)
    for path, target in _LINKS.items():
        with contextlib.suppress(FileExistsError):
            os.symlink(target, path[1:])  # noqa: PTH211 - pathlib would be loaded for nothing
    os.umask(umask)
    _checked(_libc().pivot_root(b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    for path, tree in trees.items():
        _attach(tree, path)
    if is_masked:
        _mask()
    if not is_writable:
        _set_attributes(_AT_FDCWD, "/", _ATTR_RDONLY)


def _tree(place: BindMount, *, is_masked: bool) -> int | None:
    """A copy of what is mounted there with what may be done to it; None where nothing is."""
    try:
        tree = _open_tree(place["source"])
    except FileNotFoundError:
        return None
    attributes = _ATTR_NOSUID if is_masked else 0
    attributes |= 0 if place["path"].split("/")[1] == "dev" else _ATTR_NODEV
    attributes |= (0 if place["write"] else _ATTR_RDONLY) | (0 if place["run"] else _ATTR_NOEXEC)
    _set_attributes(tree, "", attributes, 0 if place["shared"] else _MS_SLAVE)
    return tree


def _open_tree(path: str) -> int:
    held = _open(path)
    try:
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH
        return _checked(_libc().syscall(_OPEN_TREE, held, b"", flags), "mount", path)
    finally:
        os.close(held)


def _set_attributes(tree: int, path: str, attributes: int, propagation: int = 0) -> None:
    """Of a tree with all that is mounted in it, or of the one mount at ``path``."""
    values = ctypes.create_string_buffer(struct.pack("4Q", attributes, 0, propagation, 0))
    flags = 0 if path else _AT_EMPTY_PATH | _AT_RECURSIVE
    found = _libc().syscall(_MOUNT_SETATTR, tree, path.encode(), flags, values, ctypes.c_size_t(32))
    _checked(found, "mount_setattr", path)


def _attach(tree: int, path: str) -> None:
    """Mount it there: on what is held, which below a place that a job may write is not what it was a moment ago."""
    held = _open(path)
    flags = _MOVE_FROM_FD | _MOVE_ONTO_FD
    _checked(_libc().syscall(_MOVE_MOUNT, tree, b"", held, b"", flags), "mount", path)
    os.close(held)
    os.close(tree)


def _mask() -> None:
    """Of the kernel's own files what no job has to see cannot be seen, and what sets it up cannot be written."""
    for path in _READ_ONLY:
        with contextlib.suppress(FileNotFoundError):
            tree = _open_tree(path)
            _set_attributes(tree, "", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV | _ATTR_NOEXEC)
            _attach(tree, path)
    for path in _MASKED:
        if os.path.isdir(path):  # noqa: PTH112 - pathlib would be loaded for nothing
            _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0000,size=4k")
        elif os.path.exists(path):  # noqa: PTH110
            _attach(_open_tree(os.devnull), path)


def _make_point(path: str, *, is_directory: bool) -> None:
    """Something to mount on."""
    os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if not is_directory and not os.path.exists(path):  # noqa: PTH110
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _is_directory(tree: int) -> bool:
    return os.fstat(tree).st_mode & 0o170000 == 0o040000


def _enter(order: ExecSpec, pid: int) -> int:
    """Run the program beside ``pid``, which may be ours to signal; its exit code, as a shell has it."""
    flags = functools.reduce(int.__or__, (_NAMESPACES[name] for name in order["namespaces"]))
    with _step("enter its namespaces"):
        descriptor = os.pidfd_open(pid)
        _checked(_libc().setns(descriptor, flags), "setns")
        os.close(descriptor)
    child = os.fork()  # A process cannot change its own pid namespace, only that of its children.
    if child == 0:
        _take_terminal(order)
        _become(order)
        _run(order)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda sig, _: os.kill(child, sig))
    return _exit_code(os.waitpid(child, 0)[1])


def _run_below_init(order: ExecSpec) -> None:
    """Leave this place to an init; the program runs below it, as the scripts of releases count on.

    It passes signals on to the program alone, reaps what is left to it, and ends as the program does; in a pid
    namespace of its own its end is that of all others.
    """
    program = order["argv"][0]
    os.stat(program)  # noqa: PTH116 - raises
    if not os.access(program, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)
    if os.getpid() != 1:
        _prctl(_CHILD_SUBREAPER, 1)  # outlives what is executed, not what is forked
    for init in order["inits"]:
        if os.access(init, os.X_OK):
            order["argv"] = [init, "--", *order["argv"]]
            return
    everything = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    for descriptor in (0, 1, 2):
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


def _take_terminal(order: ExecSpec) -> None:
    if order["terminal"] is not None:
        with _step("take the terminal"):
            os.setsid()
            fcntl.ioctl(order["terminal"], termios.TIOCSCTTY, 0)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# --- Landlock -------------------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 where there is none or a sandbox forbids it."""
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, version)


def _rules(places: Sequence[BindMount]) -> list[tuple[int, int]]:
    """What is held of the places, and what may be done below it. Paths that do not exist are passed over.

    Names may be listed everywhere: Landlock cannot show those along the way to a place alone.
    """
    rules = [(_open("/"), _READ_DIR)]
    for place in places:
        allowed = _EVERYTHING & ~_EXECUTE if place["write"] else _READ_FILE | _READ_DIR
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            rules.append((_open(place["source"]), allowed | (_EXECUTE if place["run"] else 0)))
    return rules


def _restrict(rules: Sequence[tuple[int, int]], *, may_signal: bool) -> None:
    """From here on only what these descriptors hold can be opened; they are closed."""
    version = landlock_version()
    everything = _EVERYTHING & ~(_REFER if version < 2 else 0) & ~(_TRUNCATE if version < 3 else 0)
    fields = struct.pack("QQQ", everything, 0, 0 if version < 6 or may_signal else _SCOPE_SIGNAL)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = ctypes.create_string_buffer(fields[:size])
    ruleset = _checked(_libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "Landlock")
    for held, allowed in rules:
        is_directory = stat.S_ISDIR(os.fstat(held).st_mode)
        rule = struct.pack("=Qi", allowed & everything & (-1 if is_directory else _OF_FILES), held)
        _checked(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule), 0), "Landlock")
        os.close(held)
    _checked(_libc().syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _forbid_mounts() -> None:
    """Nothing under any rule can mount, in a user namespace of its own neither: so one that allows everything."""
    if landlock_version():
        _restrict([(_open("/"), _EVERYTHING)], may_signal=True)


# --- the C library --------------------------------------------------------------------------------------------------


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int) -> None:
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc().prctl(option, *words), f"prctl {option}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = [None if text is None else text.encode(errors="surrogateescape") for text in (source, target, kind)]
    _checked(_libc().mount(*given, ctypes.c_ulong(flags), options.encode() or None), "mount", target)


def _checked(result: int, what: str, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path or what)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv))
