"""Tests of ``check file`` and ``check filesystem``. Blocks, perhaps forever: see ``host.guarded``."""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent_shim.host import clock, guarded, mounts
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit.ast import (
    Change,
    Changed,
    Checksum,
    Limit,
    Match,
    Owner,
    Permission,
    Rule,
)
from agent_shim.supervisor.rule_counter import exceeds, percent

MAX_NEW_BYTES: Final = 1024 * 1024
"""Maximum new content searched at a time; the end of it if there is more."""
MAX_LINE_BYTES: Final = 512
MAX_LINES: Final = 10_000
"""Maximum lines of new content searched, counted from the end."""
MAX_PATTERNS_BYTES: Final = 64 * 1024
"""Maximum size of a file of expressions."""
DIGEST_TIMEOUT_S: Final = 30.0
CHUNK: Final = 64 * 1024


class Finding(NamedTuple):
    """Result of one test; ``text`` describes it, good or bad."""

    fails: bool
    text: str


class Memory(msgspec.Struct):
    """State of the last check, needed by ``changed`` and ``match``."""

    values: dict[tuple[Change | str, str], object] = msgspec.field(default_factory=dict)
    read_to: int = -1
    """Offset up to which the content has been searched; -1 before the first check."""
    inode: int = 0


def inspect(path: Path, rules: Sequence[Rule], memory: Memory) -> list[Finding | None]:
    """Evaluate each rule, None for one without a result; raises ``OSError`` if the path cannot be read."""
    with guarded.held(path) as held:
        status = os.fstat(held)
        expressions = {rule.test: _expressions(rule.test) for rule in rules if isinstance(rule.test, Match)}
        lines = _new_lines(held, status, memory) if expressions else []
        ignored = [rule.test for rule in rules if isinstance(rule.test, Match) and rule.action.kind == "ignore"]
        lines = [line for line in lines if not any(_fits(test, expressions[test], line) for test in ignored)]
        content = _Content(held, path, expressions, lines)
        return [_find(content, status, rule, memory) for rule in rules]


class _Content(NamedTuple):
    """An open path, and the content read once for all rules."""

    held: int
    path: Path
    expressions: Mapping[Match, Sequence[posix_regex.Pattern]]
    lines: Sequence[bytes]


def _find(content: _Content, status: os.stat_result, rule: Rule, memory: Memory) -> Finding | None:
    path = content.path
    match rule.test:
        case Limit("size") as test:
            return _limit(test, status.st_size, f"{status.st_size} bytes")
        case Limit("timestamp") as test:
            age = int(clock.wall_time() - status.st_mtime)
            return _limit(test, age, f"{age} seconds old")
        case Limit("space" | "inode") as test:
            return _filesystem(content, status, test)
        case Checksum(algorithm, expected):
            digest = _digest(content.held, algorithm or "md5")
            known = expected or memory.values.setdefault(("sum", algorithm), digest)
            return Finding(digest != known, f"checksum of {path} is {digest}")
        case Permission(mode):
            found = stat.S_IMODE(status.st_mode)
            return Finding(found != mode, f"mode of {path} is {found:04o}, not {mode:04o}")
        case Owner(what, name):
            number = status.st_uid if what == "uid" else status.st_gid
            return Finding(number != _number(what, name), f"{what} of {path} is {number}, not {name}")
        case Changed(what, algorithm):
            return _changed(content, status, what, algorithm, memory)
        case Match() as test if rule.action.kind != "ignore":
            found_line = next((each for each in content.lines if _fits(test, content.expressions[test], each)), None)
            if found_line is None:
                return Finding(fails=False, text="")
            return Finding(fails=True, text=f"content match: {guarded.shown(found_line.decode(errors='replace'))}")
    return None


def _limit(test: Limit, value: float, text: str) -> Finding:
    return Finding(exceeds(value, test), f"{test.metric}: {text}, the limit is {test.operator} {test.limit:g}")


def _filesystem(content: _Content, status: os.stat_result, test: Limit) -> Finding | None:
    usage = os.statvfs(_mounted(content.path) if stat.S_ISBLK(status.st_mode) else content.held)
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


def _mounted(device: Path) -> Path:
    """Return the mount point of a block device, which no job can create; else its own path."""
    real = device.resolve()
    return next((mount.point for mount in mounts.mounts() if Path(mount.source).resolve() == real), device)


def _changed(content: _Content, status: os.stat_result, what: Change, algorithm: str, memory: Memory) -> Finding:
    value: object
    match what:
        case "size":
            value = status.st_size
        case "timestamp":
            value = status.st_mtime_ns
        case "checksum":
            value = _digest(content.held, algorithm or "md5")
        case _:
            mount = mounts.mount_of(_mounted(content.path) if stat.S_ISBLK(status.st_mode) else content.path)
            value = (mount.point, sorted(mount.options)) if mount else None
    key = (what, algorithm)
    before = memory.values.get(key, value)
    memory.values[key] = value
    return Finding(before != value, f"{what} of {content.path} has changed")


def _digest(held: int, algorithm: str) -> str:
    """Digest a file; raises ``OSError`` after ``DIGEST_TIMEOUT_S``, since a hole of terabytes costs nothing to make."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    give_up_at = time.monotonic() + DIGEST_TIMEOUT_S
    with open(guarded.reopen(held, os.O_RDONLY), "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
            if time.monotonic() > give_up_at:
                raise OSError(errno.EFBIG, f"its checksum takes more than {DIGEST_TIMEOUT_S:g} seconds")
    return found.hexdigest()


def _number(what: str, name: str) -> int:
    """Return the id of an owner; raises ``ValueError`` for an unknown one."""
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if what == "uid" else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"there is no {'user' if what == 'uid' else 'group'} {name}") from None


def _new_lines(held: int, status: os.stat_result, memory: Memory) -> list[bytes]:
    """Return complete lines written since the last check; none at the first, all of a replaced file."""
    if memory.read_to < 0:
        memory.read_to, memory.inode = status.st_size, status.st_ino
    if status.st_ino != memory.inode or status.st_size < memory.read_to:
        memory.read_to, memory.inode = 0, status.st_ino
    start = max(memory.read_to, status.st_size - MAX_NEW_BYTES)
    with open(guarded.reopen(held, os.O_RDONLY), "rb", buffering=0) as stream:
        stream.seek(start)
        text = stream.read(MAX_NEW_BYTES)
    whole, end, rest = text.rpartition(b"\n")
    if not end and len(rest) < MAX_NEW_BYTES:
        return []
    memory.read_to = start + len(text) - (len(rest) if end else 0)
    return [line[:MAX_LINE_BYTES] for line in (whole if end else rest).split(b"\n")[-MAX_LINES:]]


def _expressions(test: Match) -> list[posix_regex.Pattern]:
    """Compile the expressions of a rule, or of the file that it names."""
    if not test.path:
        return [posix_regex.compiled(test.pattern)]
    text = guarded.read(Path(test.path), MAX_PATTERNS_BYTES).decode(errors="surrogateescape")
    return [posix_regex.compiled(each) for each in text.splitlines() if each]


def _fits(test: Match, expressions: Sequence[posix_regex.Pattern], line: bytes) -> bool:
    return any(pattern.search(line) for pattern in expressions) != test.negated
