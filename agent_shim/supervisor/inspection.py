"""What the rules of ``check file`` and ``check filesystem`` look at. Blocks, perhaps for ever: see ``host.apart``."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent_shim.host import clock, files, mounts
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.counting import exceeds, percent
from agent_shim.supervisor.monit_values import Change, Changed, Checksum, Limit, Match, Owner, Permission, Rule

MAX_NEW: Final = 1024 * 1024
"""Bytes of new content that are looked through at a time; of more, the last."""
MAX_LINE: Final = 512
CHUNK: Final = 64 * 1024


class Finding(NamedTuple):
    """What one test has found; ``text`` says what, good or bad."""

    fails: bool
    text: str


@dataclass(slots=True)
class Memory:
    """What the last look saw, of which ``changed`` and ``match`` speak."""

    values: dict[tuple[Change | str, str], object] = field(default_factory=dict)
    read_to: int = -1
    """How far the content has been looked through; -1 before the first look."""
    inode: int = 0


def inspect(path: Path, rules: Sequence[Rule], memory: Memory) -> list[Finding | None]:
    """What each rule finds, None where it has nothing to say; raises ``OSError`` when the path cannot be read."""
    status = path.stat()
    lines = _new_lines(path, status, memory) if any(isinstance(rule.test, Match) for rule in rules) else []
    ignored = [rule.test for rule in rules if isinstance(rule.test, Match) and rule.action.kind == "ignore"]
    lines = [line for line in lines if not any(_fits(test, line) for test in ignored)]
    return [_find(path, status, rule, lines, memory) for rule in rules]


def _find(path: Path, status: os.stat_result, rule: Rule, lines: Sequence[str], memory: Memory) -> Finding | None:
    match rule.test:
        case Limit("size") as test:
            return _limit(test, status.st_size, f"{status.st_size} bytes")
        case Limit("timestamp") as test:
            age = int(clock.wall_time() - status.st_mtime)
            return _limit(test, age, f"{age} seconds old")
        case Limit("space" | "inode") as test:
            return _filesystem(path, test)
        case Checksum(algorithm, expected):
            digest = _digest(path, algorithm or "md5")
            known = expected or memory.values.setdefault(("sum", algorithm), digest)
            return Finding(digest != known, f"checksum of {path} is {digest}")
        case Permission(mode):
            found = stat.S_IMODE(status.st_mode)
            return Finding(found != mode, f"mode of {path} is {found:04o}, not {mode:04o}")
        case Owner(what, name):
            number = status.st_uid if what == "uid" else status.st_gid
            return Finding(number != _number(what, name), f"{what} of {path} is {number}, not {name}")
        case Changed(what, algorithm):
            return _changed(path, status, what, algorithm, memory)
        case Match() as test if rule.action.kind != "ignore":
            found_lines = [line for line in lines if _fits(test, line)]
            return Finding(bool(found_lines), f"content match: {found_lines[0]}" if found_lines else "")
    return None


def _limit(test: Limit, value: float, text: str) -> Finding:
    return Finding(exceeds(value, test), f"{test.metric}: {text}, the limit is {test.operator} {test.limit:g}")


def _filesystem(path: Path, test: Limit) -> Finding | None:
    usage = os.statvfs(_mounted(path))
    if test.metric == "space":
        used, total, unit = usage.f_blocks - usage.f_bfree, usage.f_blocks, usage.f_frsize
    else:
        used, total, unit = usage.f_files - usage.f_ffree, usage.f_files, 1
    if not total:
        return None
    value = percent(used, total) if test.percent else used * unit
    sign = "%" if test.percent else ""
    text = f"{test.metric} usage {value:g}{sign} matches {test.operator} {test.limit:g}{sign}"
    return Finding(exceeds(value, test), text)


def _mounted(path: Path) -> Path:
    """Where a device is mounted; any other path stands for the file system it is on."""
    if stat.S_ISBLK(path.stat().st_mode):
        device = path.resolve()
        return next((mount.point for mount in mounts.mounts() if Path(mount.source).resolve() == device), path)
    return path


def _changed(path: Path, status: os.stat_result, what: Change, algorithm: str, memory: Memory) -> Finding:
    value: object
    match what:
        case "size":
            value = status.st_size
        case "timestamp":
            value = status.st_mtime_ns
        case "checksum":
            value = _digest(path, algorithm or "md5")
        case _:
            mount = mounts.mount_of(_mounted(path))
            value = (mount.point, sorted(mount.options)) if mount else None
    key = (what, algorithm)
    before = memory.values.get(key, value)
    memory.values[key] = value
    return Finding(before != value, f"{what} of {path} has changed")


def _digest(path: Path, algorithm: str) -> str:
    found = hashlib.new(algorithm, usedforsecurity=False)
    with open(files.open_plain(path), "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _number(what: str, name: str) -> int:
    """Raises ``ValueError`` for an owner that is not known here."""
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if what == "uid" else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"there is no {'user' if what == 'uid' else 'group'} {name}") from None


def _new_lines(path: Path, status: os.stat_result, memory: Memory) -> list[str]:
    """Whole lines that were written since the last look; none at the first, all of a file that took its place."""
    if memory.read_to < 0:
        memory.read_to, memory.inode = status.st_size, status.st_ino
    if status.st_ino != memory.inode or status.st_size < memory.read_to:
        memory.read_to, memory.inode = 0, status.st_ino
    start = max(memory.read_to, status.st_size - MAX_NEW)
    with open(files.open_plain(path), "rb", buffering=0) as stream:
        stream.seek(start)
        text = stream.read(MAX_NEW)
    whole, end, rest = text.rpartition(b"\n")
    if not end and len(rest) < MAX_NEW:
        return []
    memory.read_to = start + len(text) - (len(rest) if end else 0)
    return [line[:MAX_LINE].decode("latin-1") for line in (whole if end else rest).split(b"\n")]


def _fits(test: Match, line: str) -> bool:
    if test.path:
        patterns = [posix_regex.compiled(each) for each in Path(test.path).read_text().splitlines() if each]
    else:
        patterns = [posix_regex.compiled(test.pattern)]
    return any(pattern.search(line) for pattern in patterns) != test.negated
