"""Readings of ``/proc`` about other processes; the only module that makes them. Nothing here changes anything.

Two kinds of files. ``stat``, ``status`` and ``cgroup`` are short, made by the kernel alone, and cost ten microseconds.
``environ``, ``cmdline``, ``maps``, ``smaps_rollup`` and links of descriptors belong to the process: it decides how long
they are (PR_SET_MM_MAP makes an environment of terabytes without any privilege) and can hold up their readers (its
memory lock, a userfaultfd, a FUSE file system of its own). These have a bound in bytes and a bound in time: a thread
reads them, and a process that keeps it waiting is not read again while that read lasts.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_KB: Final = os.sysconf("SC_PAGE_SIZE") // 1024
MAX_KERNEL_BYTES: Final = 64 * 1024
"""Of a file that the kernel makes by itself."""
MAX_ENVIRON_BYTES: Final = 256 * 1024
MAX_COMMAND_LINE_BYTES: Final = 4096
"""As much as monit 5.2.5 matches (``process/sysdep_LINUX.c``)."""
MAX_MAPS_BYTES: Final = 16 << 20
MAX_OPEN_FILES: Final = 1 << 20
READ_TIMEOUT_S: Final = 2.0
"""For what one process keeps a reader waiting."""
MAX_HUNG_READS: Final = 4
"""Reads that hang at the same time; with that many no process is read in this way any more."""


class Stat(msgspec.Struct, frozen=True, gc=False):
    """One line of ``/proc/PID/stat`` (proc(5)); ticks are those of ``host.clock``.

    A struct, because hundreds are made at a time: a frozen dataclass takes six times as long.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    """Time on a processor, user and system, its dead children not included."""
    start_ticks: int
    resident_kb: int
    threads: int = 0
    reaped_ticks: int = 0
    """Time on a processor of the children it has waited for, and of theirs."""

    @property
    def is_alive(self) -> bool:
        """A zombie is dead: it only waits to be reaped."""
        return self.state not in "ZXx"

    @property
    def identity(self) -> tuple[int, int]:
        """Number and start time: a number alone is used again."""
        return self.pid, self.start_ticks


def parse(line: bytes) -> Stat:
    """Read a stat line; the name in it may hold blanks and parentheses, so fields count from its last one."""
    number, _, rest = line.partition(b" (")
    fields = rest.rpartition(b") ")[2].decode().split(None, 22)
    state, parent, group, session, _, _, _, _, _, _, _, user, system, of_dead, of_dead_system, *fields = fields
    _, _, threads, _, start, _, resident, *_ = fields
    return Stat(
        int(number),
        state,
        int(parent),
        int(group),
        int(session),
        int(user) + int(system),
        int(start),
        int(resident) * PAGE_KB,
        int(threads),
        int(of_dead) + int(of_dead_system),
    )


def stat(pid: int) -> Stat | None:
    """The process with this number now, a zombie too; None when there is none."""
    line = _read(pid, "stat")
    return parse(line) if line else None


def table() -> dict[int, Stat]:
    """All processes of this pid namespace by number, zombies too, in one pass."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - numbers, no paths, for hundreds
        if entry.isdigit() and (line := _read(int(entry), "stat")):
            found[int(entry)] = parse(line)
    return found


def children(processes: Mapping[int, Stat]) -> dict[int, list[int]]:
    """The numbers of the direct children of each process that has any."""
    found: dict[int, list[int]] = {}
    for process in processes.values():
        found.setdefault(process.parent, []).append(process.pid)
    return found


def descent(below: Mapping[int, list[int]], roots: Iterable[int]) -> set[int]:
    """``roots`` and everything that descends from them; ``below`` is what ``children`` gives."""
    found: set[int] = set()
    ahead = list(roots)
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead.extend(below.get(pid, ()))
    return found


@dataclass(frozen=True, slots=True)
class Census:
    """One pass over all processes: what they are, who has which children, who carries which value of a variable."""

    processes: Mapping[int, Stat]
    children: Mapping[int, list[int]]
    marked: Mapping[str, set[int]]


def census(mark: str) -> Census:
    """Count all processes, with the value of the environment variable ``mark``; some 20 microseconds each. Blocks."""
    processes = table()
    marked: dict[str, set[int]] = {}
    living = [pid for pid, process in processes.items() if process.is_alive]
    for pid, value in variables(living, mark).items():
        marked.setdefault(value, set()).add(pid)
    return Census(processes, children(processes), marked)


def command_line(pid: int) -> str:
    """The arguments joined by blanks, as monit matches them; empty for a zombie, a kernel thread, or none. Blocks."""
    return command_lines([pid]).get(pid, "")


def command_lines(pids: Collection[int]) -> dict[int, str]:
    """``command_line`` of many, without those that have none. Blocks."""
    found = _of_each(pids, lambda pid: _command_line(_read(pid, "cmdline", MAX_COMMAND_LINE_BYTES)))
    return {pid: line for pid, line in found.items() if line}


def _command_line(arguments: bytes) -> str:
    return arguments.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment the process was started with. Blocks.

    None when it has none or may not be read: without CAP_SYS_PTRACE that is so for processes of other users, and a
    program that writes its title over its arguments destroys what stood there.
    """
    return variables([pid], name).get(pid)


def variables(pids: Collection[int], name: str) -> dict[int, str]:
    """``variable`` of many, without those that have none. Blocks."""
    begin = name.encode() + b"="

    def value(pid: int) -> str | None:
        for entry in _read(pid, "environ", MAX_ENVIRON_BYTES).split(b"\0"):
            if entry.startswith(begin):
                return entry[len(begin) :].decode(errors="replace")
        return None

    return {pid: found for pid, found in _of_each(pids, value).items() if found is not None}


def open_files(pid: int) -> int:
    """How many files it has open; 0 where that may not be seen."""
    path = f"/proc/{pid}/fd"
    try:
        # Since Linux 6.2 the size of the directory says it.
        return os.stat(path).st_size or sum(1 for _ in itertools.islice(os.scandir(path), MAX_OPEN_FILES))  # noqa: PTH116 - a number, for hundreds
    except OSError:
        return 0


def proportional_kb(pid: int) -> int:
    """Memory in use, what is shared divided among those who share it; 0 where the kernel does not tell. Blocks."""
    for line in _of_each([pid], lambda pid: _read(pid, "smaps_rollup", MAX_KERNEL_BYTES)).get(pid, b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return 0


class Use(NamedTuple):
    """A file that a process uses: ``cwd``, ``root``, ``exe``, ``fd`` or ``map``."""

    kind: str
    path: str


def uses(pids: Collection[int], is_wanted: Callable[[str], bool], devices: Collection[int]) -> dict[int, list[Use]]:
    """The files that processes have open, run, or map, of those paths that ``is_wanted`` and that are on ``devices``.

    Maps are told of processes of our own mount namespace alone: they name no device that ``stat`` knows. Blocks.
    """

    def of_one(pid: int) -> list[Use]:
        about = Path("/proc", str(pid))
        links = [(kind, about / kind) for kind in ("cwd", "root", "exe")]
        with suppress(OSError):
            links += [("fd", Path(each.path)) for each in itertools.islice(os.scandir(about / "fd"), MAX_OPEN_FILES)]
        found = []
        for kind, link in links:
            with suppress(OSError):
                path = str(link.readlink())
                if is_wanted(path) and link.stat().st_dev in devices:
                    found.append(Use(kind, path))
        with suppress(OSError):
            if (about / "ns/mnt").samefile("/proc/self/ns/mnt"):
                paths = dict.fromkeys(_mapped(_read(pid, "maps", MAX_MAPS_BYTES)))
                found += [Use("map", path) for path in paths if is_wanted(path)]
        return found

    return _of_each(pids, of_one)


def _mapped(maps: bytes) -> Iterator[str]:
    for line in maps.splitlines():
        _, slash, rest = os.fsdecode(line).partition("/")
        if slash:
            yield slash + rest


def name(pid: int) -> str:
    """The name the kernel shows, 15 bytes that the process may have chosen; empty without such a process."""
    return _read(pid, "comm", 64).decode(errors="replace").rstrip("\n")


def user(pid: int) -> int | None:
    """The number of its real user; None without such a process."""
    for line in _read(pid, "status", MAX_KERNEL_BYTES).splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def groups(pid: int) -> dict[str, str]:
    """The path of its cgroup by controller, as ``/proc/PID/cgroup`` shows it to us; ``""`` is version 2."""
    return parse_groups(_read(pid, "cgroup", MAX_KERNEL_BYTES).decode(errors="surrogateescape"))


def parse_groups(text: str) -> dict[str, str]:
    """Read lines like ``4:memory:/a`` (version 1) and ``0::/a`` (version 2)."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def last_number() -> int | None:
    """The number that was given to a process or thread of this pid namespace last; None where it is hidden."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def incarnation() -> str:
    """Differs when process numbers start anew: another boot of the kernel, another pid namespace (container).

    The number of a namespace is given to the next one when it is free, so the age of its first process is part of it.
    """
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        boot = boot_id()
    except OSError:
        return ""
    first = stat(1)
    return f"{boot}/{namespace}/{first.start_ticks if first else 0}"


def boot_id() -> str:
    """The same for all processes on this kernel until it is booted anew; raises ``OSError`` where it is hidden."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read(pid: int, name: str, limit: int = MAX_KERNEL_BYTES) -> bytes:
    """The first ``limit`` bytes of a file of a process; empty when process or permission are missing."""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        # A short read does not tell the end: the kernel fills a page or less at a time.
        while len(content) < limit and (chunk := os.read(descriptor, limit - len(content))):
            content += chunk
    except OSError:
        pass  # e.g. an environment that is not mapped as far as it is said to be
    finally:
        os.close(descriptor)
    return content


class _Pass(Generic[T]):
    """One thread's way through some processes; it ends after the one at which nobody waits for it any more."""

    def __init__(self, pids: Collection[int], work: Callable[[int], T]) -> None:
        self.found: dict[int, T] = {}
        self.at: int | None = None
        self.count = 0
        """How many are done."""
        self.is_left = False
        self.is_over = threading.Event()
        self._pids, self._work = pids, work

    def run(self) -> None:
        try:
            for pid in self._pids:
                self.at = pid
                self.found[pid] = self._work(pid)
                self.count += 1
                if self.is_left:
                    break
        finally:
            self.is_over.set()


_hung: dict[int, threading.Event] = {}
"""The processes that keep a thread waiting, and what tells its end."""
_hung_lock = threading.Lock()


def _of_each(pids: Collection[int], work: Callable[[int], T]) -> dict[int, T]:
    """``work`` for each process, in a thread that is left behind where a process keeps it waiting for too long."""
    found: dict[int, T] = {}
    ahead = list(pids)
    while ahead:
        with _hung_lock:
            for pid in [pid for pid, is_over in _hung.items() if is_over.is_set()]:
                del _hung[pid]
            ahead = [pid for pid in ahead if pid not in _hung]
            if len(_hung) >= MAX_HUNG_READS:
                break
        way = _Pass(ahead, work)
        try:
            threading.Thread(target=way.run, name="reads of processes", daemon=True).start()
        except RuntimeError:
            break  # no thread to be had: nothing is known
        done = -1
        while not way.is_over.wait(READ_TIMEOUT_S):
            if way.count == done and way.at is not None:
                way.is_left = True
                _leave(way.at, way.is_over)
                break
            done = way.count
        found |= dict(way.found)
        ahead = ahead[way.count + 1 :] if way.is_left else []
    return found


def _leave(pid: int, is_over: threading.Event) -> None:
    with _hung_lock:
        _hung[pid] = is_over
        count = len(_hung)
    logger.warning("process %d keeps its readers waiting: its environment and arguments are not read", pid)
    if count >= MAX_HUNG_READS:
        logger.error("%d processes keep their readers waiting: environments and arguments are not read", count)
