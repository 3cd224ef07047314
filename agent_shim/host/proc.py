"""Reads information about other processes from ``/proc``. No other module does this, and this module changes nothing.

There are two kinds of files. ``stat``, ``status`` and ``cgroup`` are short, are written only by the kernel, and take 10
µs to read. ``cmdline``, ``maps``, ``smaps_rollup`` and the descriptor links are controlled by the process, which
decides their length (PR_SET_MM_MAP allows terabytes of arguments without any privilege) and can block their readers
(with its memory lock, a userfaultfd, or its own FUSE file system). Reading them is limited in bytes and time. They are
read by a thread, and if a process blocks this thread, that process is not read again until the blocked read has
finished.

If a process has exited, or we are not allowed to read one of its files, the result is empty. All other errors, such as
running out of descriptors, raise ``OSError``, because otherwise a running process would be mistaken for one that has
exited. In ``open_files``, ``uses``, ``executable``, ``has_our_root`` and ``incarnation``, every error leads to an empty
result.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from agent_shim.host.descriptors import closing

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_KB: Final = os.sysconf("SC_PAGE_SIZE") // 1024
MAX_KERNEL_BYTES: Final = 64 * 1024
"""Maximum size of a file that only the kernel writes."""
MAX_CHILDREN_BYTES: Final = 1 << 20
"""Maximum size of a ``children`` file, in which each child takes about eight bytes."""
MAX_COMMAND_LINE_BYTES: Final = 4096
"""Number of bytes of a command line that monit 5.2.5 matches against its patterns (``process/sysdep_LINUX.c``)."""
MAX_MAPS_BYTES: Final = 16 << 20
MAX_OPEN_FILES: Final = 1 << 20
MAX_USES: Final = 10
"""Maximum number of open files reported for one process, because a job may have a million descriptors."""
READ_TIMEOUT_S: Final = 2.0
"""How long one process may block a reader."""
MAX_HUNG_READS: Final = 4
"""Maximum number of reads that may hang at the same time. While that many hang, ``of_each`` reads no other process."""
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EIO, errno.EFAULT})
"""Errors that occur if a process has exited, if we are not allowed to read the file, or if a part of the process's
arguments is not mapped.
"""


class Stat(msgspec.Struct, frozen=True, gc=False):
    """The content of ``/proc/PID/stat`` (proc(5)). Ticks are counted as in ``host.clock``.

    This is a msgspec struct because hundreds are created at a time, and a frozen dataclass takes six times as long.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    """User and system CPU time, excluding dead children."""
    start_ticks: int
    resident_kb: int
    threads: int = 0
    reaped_ticks: int = 0
    """CPU time of reaped children, including that of their reaped children."""

    @property
    def is_alive(self) -> bool:
        """False for a zombie, which has exited and is only waiting to be reaped.

        The kernel also shows a process as a zombie if its first thread has exited while other threads are still
        running. Such a process is alive.
        """
        return self.state not in "ZXx" or self.threads > 1

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time. The pid alone is not enough, because the kernel reuses pids."""
        return self.pid, self.start_ticks


def parse(line: bytes) -> Stat:
    """Parse a stat line. The name may contain spaces and parentheses, so the fields are counted from the last
    parenthesis.
    """
    pid, _, rest = line.partition(b" (")
    fields = rest.rpartition(b") ")[2].decode().split(None, 22)  # the fields after ``resident`` are not needed
    state, parent, group, session, _, _, _, _, _, _, _, user, system, reaped_user, reaped_system, *fields = fields
    _, _, threads, _, start, _, resident, *_ = fields
    ticks, reaped = int(user) + int(system), int(reaped_user) + int(reaped_system)
    resident_kb = int(resident) * PAGE_KB
    return Stat(
        int(pid),
        state,
        int(parent),
        int(group),
        int(session),
        ticks,
        int(start),
        resident_kb,
        int(threads),
        reaped,
    )


def stat(pid: int) -> Stat | None:
    """Read the stat line of a process, which may be a zombie. Return None if there is no such process."""
    line = read(pid, "stat")
    return parse(line) if line else None


def is_there(identity: tuple[int, int]) -> bool:
    """Return True if the process with this pid and start time is running."""
    process = stat(identity[0])
    return process is not None and process.is_alive and process.identity == identity


def table() -> dict[int, Stat]:
    """Read the stat lines of all processes in this pid namespace, including zombies, and return them as a dictionary
    with the pids as keys.
    """
    return _stats(map(int, _numbers("/proc")))


def small_table(limit: int) -> dict[int, Stat] | None:
    """Like ``table``, but return None if there are more than ``limit`` processes, because reading them all would block
    the event loop for too long.
    """
    pids = _numbers("/proc", limit + 1)
    return _stats(map(int, pids)) if len(pids) <= limit else None


def _stats(pids: Iterable[int]) -> dict[int, Stat]:
    """Read the stat lines of ``pids``. The result is keyed by pid and leaves out processes that no longer exist."""
    return {process.pid: process for pid in pids if (process := stat(pid)) is not None}


def _numbers(directory: str, limit: int | None = None) -> list[str]:
    """Return the names of the directory's entries that are numbers, at most ``limit`` of them. Raises ``OSError``."""
    with os.scandir(directory) as entries:
        return list(itertools.islice((entry.name for entry in entries if entry.name.isdigit()), limit))


def children(processes: Mapping[int, Stat]) -> dict[int, list[int]]:
    """Map each process that has children to the pids of its direct children."""
    by_parent: dict[int, list[int]] = {}
    for process in processes.values():
        by_parent.setdefault(process.parent, []).append(process.pid)
    return by_parent


def descent(below: Mapping[int, list[int]], roots: Iterable[int]) -> set[int]:
    """Return ``roots`` and all their descendants. ``below`` is the result of ``children``."""
    pids: set[int] = set()
    pending = list(roots)
    while pending:
        pid = pending.pop()
        if pid not in pids:
            pids.add(pid)
            pending.extend(below.get(pid, ()))
    return pids


def below(root: int) -> dict[int, Stat]:
    """Return the stat lines of all descendants of a process, including zombies, by pid. Other processes are not read.
    This function blocks.

    Processes may fork during the search, so some descendants may be missing from the result. If ``root`` is a child
    subreaper, they cannot escape from it, and the next call finds them.
    """
    if not _has_children_files():
        processes = table()
        return {pid: processes[pid] for pid in descent(children(processes), [root]) if pid in processes and pid != root}
    descendants: dict[int, Stat] = {}
    pending = _children_of(root)
    while pending:
        pid = pending.pop()
        if pid not in descendants and (process := stat(pid)) is not None:
            descendants[pid] = process
            pending.extend(_children_of(pid))
    return descendants


def nearest(identity: tuple[int, int], roots: Collection[int]) -> int | None:
    """Return the pid of a process's nearest ancestor in ``roots``. A process in ``roots`` counts as its own ancestor.
    Return None if no ancestor is in ``roots``, or if the process is gone.

    ``identity`` is the pid and start time of the process. ``roots`` are pids of child subreapers, which remain
    ancestors of a process even if its parent exits.

    A parent may exit at any time, and its pid may be reused. The parent's stat line is therefore used only if the child
    still has that parent afterwards, which shows that the line really was the parent's.
    """
    current = stat(identity[0])
    if current is None or current.identity != identity:
        return None
    while current.pid not in roots:
        if current.parent <= 1:
            return None
        parent, again = stat(current.parent), stat(current.pid)
        if again is None or again.identity != current.identity:
            # This ancestor has exited in the meantime, so its children have another parent. Start again from the given
            # process.
            return nearest(identity, roots) if current.identity != identity else None
        if parent is None and again.parent == current.parent:
            return None  # the kernel hides the parent from this user
        current = parent if parent is not None and parent.pid == again.parent else again
    return current.pid


@functools.cache
def _has_children_files() -> bool:
    """Return True if the kernel lists children (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")  # noqa: PTH110 - the path is a str


def _children_of(pid: int) -> list[int]:
    """Return the pids of a process's children, whichever of its threads is their parent."""
    try:
        threads = _numbers(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    pids: list[int] = []
    for thread in threads:
        pids += map(int, read(pid, f"task/{thread}/children", MAX_CHILDREN_BYTES).split())
    return pids


def command_line(pid: int) -> str:
    """Return a process's arguments, joined with spaces as in monit. The result is "" for a zombie or kernel thread.
    This function blocks.
    """
    return command_lines([pid]).get(pid, "")


def command_lines(pids: Collection[int]) -> dict[int, str]:
    """Return the ``command_line`` of each process by pid, leaving out empty ones. This function blocks."""
    lines = of_each(pids, lambda pid: read(pid, "cmdline", MAX_COMMAND_LINE_BYTES).rstrip(b"\0"))
    return {pid: line.replace(b"\0", b" ").decode(errors="replace") for pid, line in lines.items() if line}


def open_files(pid: int) -> int:
    """Return how many files a process has open, or 0 if that cannot be read."""
    path = f"/proc/{pid}/fd"
    try:
        # Since Linux 6.2, the size of the directory is the number of open files.
        return os.stat(path).st_size or sum(1 for _ in itertools.islice(os.scandir(path), MAX_OPEN_FILES))  # noqa: PTH116
    except OSError:
        return 0


def proportional_kb(pid: int) -> int:
    """Return a process's memory, with each shared page divided by the number of processes that use it, or 0 if the
    kernel does not report it. This function blocks.
    """
    # ``of_each`` is used for a single process, because reading this file may block (see its docstring).
    text = of_each([pid], lambda pid: read(pid, "smaps_rollup")).get(pid, b"")
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(b"Pss:")), 0)


class Use(NamedTuple):
    """A file that a process uses, and how: as ``cwd``, ``root``, ``exe``, ``fd`` or ``map``."""

    kind: str
    path: str


def uses(pids: Collection[int], is_wanted: Callable[[str], bool], devices: Collection[int]) -> dict[int, list[Use]]:
    """Find out which of the wanted files each process has open, executes or maps, at most ``MAX_USES`` files per
    process. A file is wanted if ``is_wanted`` accepts its path and its device is one of ``devices``.

    For mapped files, only the paths are compared, because the device numbers in ``maps`` may differ from those of
    ``stat``. Therefore, ``maps`` is read only for processes in our mount namespace. This function blocks.
    """

    def of_one(pid: int) -> Iterator[Use]:
        directory = f"/proc/{pid}"
        with suppress(OSError):
            yield from filter(None, (found(kind, f"{directory}/{kind}") for kind in ("cwd", "root", "exe")))
            with os.scandir(f"{directory}/fd") as entries:
                yield from filter(None, (found("fd", entry.path) for entry in entries))
        with suppress(OSError):
            if Path(directory, "ns/mnt").samefile("/proc/self/ns/mnt"):
                paths = dict.fromkeys(parse_maps(read(pid, "maps", MAX_MAPS_BYTES)))
                yield from (Use("map", path) for path in paths if is_wanted(path))

    def found(kind: str, link: str) -> Use | None:
        """Return a ``Use`` for the file to which ``link`` refers, or None if the file is not wanted."""
        try:
            path = os.readlink(link)  # noqa: PTH115 - twice as fast
            return Use(kind, path) if is_wanted(path) and os.stat(link).st_dev in devices else None  # noqa: PTH116
        except OSError:
            return None

    return of_each(pids, lambda pid: list(itertools.islice(of_one(pid), MAX_USES)))


def parse_maps(maps: bytes) -> Iterator[str]:
    """Yield the path of each file mapping in ``/proc/PID/maps``."""
    for line in maps.split(b"\n"):
        _, slash, rest = os.fsdecode(line).partition("/")
        if slash:
            yield slash + rest


def name(pid: int) -> str:
    """Return the name of a process (``comm``), or "" if there is no such process. The process itself can choose the
    name, which has up to 15 bytes.
    """
    return read(pid, "comm", 64).decode(errors="replace").rstrip("\n")


def executable(pid: int) -> str:
    """Return the path of the program that a process executes, or "" if that cannot be read, for example because there
    is no such process or we do not have permission.
    """
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def user(pid: int) -> int | None:
    """Return a process's real uid, or None if there is no such process.

    The process's name precedes the uid in ``status``, and the kernel escapes only newlines in the name. A carriage
    return must therefore not be treated as the start of a line.
    """
    _, label, rest = read(pid, "status").partition(b"\nUid:")
    return int(rest.split(None, 1)[0]) if label else None


def has_our_root(pid: int) -> bool:
    """Return True if a process has the same root directory as this process. Return False if the root is different
    or the kernel hides it, as for PID 1 in a container that shares the host's pids.
    """
    try:
        return Path(f"/proc/{pid}/root").samefile("/")
    except OSError:
        return False


def groups(pid: int) -> dict[str, str]:
    """Return a process's cgroup paths by controller, as ``/proc/PID/cgroup`` shows them to us. For version 2, the key
    is "".
    """
    return parse_groups(read(pid, "cgroup").decode(errors="surrogateescape"))


def parse_groups(text: str) -> dict[str, str]:
    """Parse ``/proc/PID/cgroup``, whose lines look like ``4:memory:/a`` (version 1) or ``0::/a`` (version 2)."""
    paths: dict[str, str] = {}
    for line in filter(None, text.split("\n")):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def incarnation() -> str:
    """Return an identifier for the current pid namespace (container). It changes when the machine is rebooted and
    differs between namespaces, so pids that were recorded at different times can be compared if the identifiers are
    equal.

    The inode of a namespace may be reused, so the start time of its first process is part of the identifier. The result
    is "" if the kernel hides the boot id or the namespace.
    """
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        boot = boot_id()
    except OSError:
        return ""
    first = stat(1)
    return f"{boot}/{namespace}/{first.start_ticks if first else 0}"


@functools.cache
def boot_id() -> str:
    """Return the kernel's boot id. Raises ``OSError`` if it is hidden."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read(pid: int, name: str, limit: int = MAX_KERNEL_BYTES) -> bytes:
    """Read the first ``limit`` bytes of ``/proc/PID/NAME``. Return b"" if the process is gone or we do not have
    permission.
    """
    content = b""
    try:
        with closing(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
            # A short read does not mean that the end was reached, because the kernel returns at most a page at a time.
            while len(content) < limit and (chunk := os.read(descriptor, limit - len(content))):
                content += chunk
    except OSError as exc:
        if exc.errno not in _GONE:
            raise
    return content


_blocked: dict[int, threading.Thread] = {}  # noqa: TID251 - see ``of_each``
"""Threads that are blocked by the process whose files they read, by the pid of that process."""


def of_each(pids: Iterable[int], work: Callable[[int], T]) -> dict[int, T]:
    """Call ``work`` with the pid of each process, in a separate thread, and return the results by pid. An ``OSError``
    from ``work`` is raised here too. If no thread can be started, raises ``OSError`` (EAGAIN).

    If reading a process blocks the thread, that process is missing from the result. Later calls skip it too, until the
    blocked thread has finished. While ``MAX_HUNG_READS`` threads are blocked, no more processes are read.
    """
    for pid in [pid for pid, reader in list(_blocked.items()) if not reader.is_alive()]:
        _blocked.pop(pid, None)
    answers: dict[int, Future[T]] = {pid: Future() for pid in pids if pid not in _blocked}
    remaining = iter(list(answers))  # shared, so that the next reader skips a process that blocks
    results: dict[int, T] = {}

    def read_on() -> None:
        for pid in remaining:
            try:
                answers[pid].set_result(work(pid))
            except OSError as exc:
                answers[pid].set_exception(exc)

    reader = None
    for pid, answer in answers.items():
        if reader is None:
            if len(_blocked) >= MAX_HUNG_READS:
                break
            # This is the first reader, or it replaces one that hangs.
            reader = threading.Thread(target=read_on, name="reads of processes", daemon=True)  # noqa: TID251 - no event loop
            try:
                reader.start()
            except RuntimeError as exc:
                raise OSError(errno.EAGAIN, str(exc)) from None
        try:
            results[pid] = answer.result(READ_TIMEOUT_S)
        except TimeoutError:
            logger.warning("process %d blocks its readers: its arguments and open files are not read", pid)
            _blocked[pid] = reader
            reader = None
    deque(remaining, maxlen=0)  # a reader that is still blocked then finds nothing left to read
    return results
