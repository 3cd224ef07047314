"""What ``/proc`` tells of processes. Reading one costs about ten microseconds; nothing here changes anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

PAGE_KB: Final = os.sysconf("SC_PAGE_SIZE") // 1024
_CHUNK: Final = 65536


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
    """Count everybody, with the value of the environment variable ``mark``; some 20 microseconds each."""
    processes = table()
    marked: dict[str, set[int]] = {}
    for pid, process in processes.items():
        if process.is_alive and (value := variable(pid, mark)) is not None:
            marked.setdefault(value, set()).add(pid)
    return Census(processes, children(processes), marked)


def command_line(pid: int) -> str:
    """The arguments joined by blanks, as monit matches them; empty for a zombie, a kernel thread, or none."""
    return _read(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment the process was started with.

    None when it has none or may not be read: without CAP_SYS_PTRACE that is so for processes of other users, and a
    program that writes its title over its arguments destroys what stood there.
    """
    begin = name.encode() + b"="
    for entry in _read(pid, "environ").split(b"\0"):
        if entry.startswith(begin):
            return entry[len(begin) :].decode(errors="replace")
    return None


def open_files(pid: int) -> int:
    """How many files it has open; 0 where that may not be seen."""
    path = f"/proc/{pid}/fd"
    try:
        # Since Linux 6.2 the size of the directory says it.
        return os.stat(path).st_size or len(os.listdir(path))  # noqa: PTH116, PTH208 - numbers, for hundreds
    except OSError:
        return 0


def proportional_kb(pid: int) -> int:
    """Memory in use, what is shared divided among those who share it; 0 where the kernel does not tell."""
    for line in _read(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return 0


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


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty when process or permission are missing."""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = chunk = os.read(descriptor, _CHUNK)
        while len(chunk) == _CHUNK:
            chunk = os.read(descriptor, _CHUNK)
            content += chunk
        return content
    except OSError:
        return b""
    finally:
        os.close(descriptor)
