"""Tests paths: type, owner, permissions, age, size, checksum, new lines, and file system usage.

All tests block, perhaps forever (see ``host.guarded``). The number of bytes read per cycle, and the time spent on a
checksum, are limited.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from agent_shim.host import clock, guarded
from agent_shim.host.descriptors import closing
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.filesystem_usage import usage
from agent_shim.supervisor.monit.ast import Algorithm, Changed, Match, Rule, Unlike, Unreadable, WrongType
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.rule_counter import MAX_HISTORY, CheckResult, judge

MAX_DIGEST_S: Final = 30.0
"""Maximum seconds for computing a file's checksum. The file may grow faster than it is read."""
DIGEST_CHUNK_BYTES: Final = 256 * 1024
MAX_LOOK_BYTES: Final = 1024 * 1024
"""Maximum amount of new content that is read from a file in one cycle. The rest waits for the next cycle."""
MAX_LINE_BYTES: Final = 511
"""How many bytes of a line are compared, as in monit."""
MAX_HITS: Final = 20
"""Maximum number of matching lines per cycle. It is limited because each line may run a program. Further lines wait for
the next cycle.
"""

Numbered: TypeAlias = tuple[int, CheckResult]
"""The number of a rule, and the result of checking it."""
Opener: TypeAlias = Callable[[], int]
"""A function that opens the file for reading, or raises ``OSError``."""

_TYPES: Final = {
    "file": (stat.S_ISREG, "a regular file"),
    "directory": (stat.S_ISDIR, "a directory"),
    "fifo": (stat.S_ISFIFO, "a fifo"),
}


class PathWatch:
    """A check of a path, and the values that it found last time. Not thread-safe."""

    def __init__(self, spec: ProcessSpec, path: Path) -> None:
        self._spec = spec
        self._path = path
        self._seen: dict[int, object] = {}
        """The values to compare with, keyed by the number of the rule: the previous values or, for a checksum, the
        first.
        """
        self._digests: dict[Algorithm, tuple[tuple[int, ...], str]] = {}
        """The last checksum by algorithm, with the state of the file for which it was computed."""
        self._inode = 0
        """Inode number of the file whose lines were compared last, or 0 before the first time."""
        self._read_to = 0
        """Offset up to which lines have been compared."""

    def look(self) -> list[Numbered]:
        """Examine the path and return the findings. A missing path has no findings, because the service itself reports
        that it is missing.
        """
        troubles: list[str] = []
        found: list[Numbered] = []
        try:
            with guarded.held(self._path) as held:
                found = list(self._findings(partial(guarded.reopen, held, os.O_RDONLY), os.fstat(held), troubles))
        except FileNotFoundError:
            return []
        except OSError as exc:
            if exc.errno == errno.ELOOP:  # a job's link leads to the file, so check its metadata but not its content
                found = list(self._findings(partial(_refuse, exc), self._path.stat(), troubles))
            else:
                troubles.append(exc.strerror or str(exc))
        text = f"cannot read {self._path}: {'; '.join(troubles)}" if troubles else f"{self._path} can be read"
        return [*found, *((number, CheckResult(bool(troubles), text)) for number, _ in self._rules(Unreadable))]

    def _rules(self, *kinds: type) -> Iterator[tuple[int, Rule]]:
        """Yield a pair (number, rule) for each rule whose test is one of ``kinds``."""
        return ((number, rule) for number, rule in enumerate(self._spec.rules) if isinstance(rule.test, kinds))

    def _findings(self, opened: Opener, status: os.stat_result, troubles: list[str]) -> Iterator[Numbered]:
        """Yield the results of all rules except ``Unreadable``. If the path has the wrong type, yield only the result
        of the ``WrongType`` rule. Errors that occur while a file is read are appended to ``troubles``.
        """
        if self._spec.kind in _TYPES:
            is_right, noun = _TYPES[self._spec.kind]
            is_wrong = not is_right(status.st_mode)
            for number, _ in self._rules(WrongType):
                yield number, CheckResult(is_wrong, f"{self._path} is {'not ' if is_wrong else ''}{noun}")
            if is_wrong:
                return
        figures = self._figures(status)
        yield from judge(self._spec.rules, figures)
        for number, rule in self._rules(Unlike, Changed):
            try:
                yield from self._compared(number, rule.test, figures, opened, status)
            except OSError as exc:
                troubles.append(exc.strerror or str(exc))
        if any(self._rules(Match)):
            try:
                yield from self._matches(opened, status)
            except OSError as exc:
                troubles.append(exc.strerror or str(exc))

    def _figures(self, status: os.stat_result) -> Mapping[str, float]:
        """Return the figures that rules can compare with a limit."""
        if self._spec.kind == "filesystem":
            return usage(self._path)
        changed_at = max(status.st_mtime, status.st_ctime)
        return {"size": status.st_size, "timestamp": int(clock.wall_time() - changed_at)}

    def _compared(
        self, number: int, test: object, figures: Mapping[str, float], opened: Opener, status: os.stat_result
    ) -> Iterator[Numbered]:
        """Yield the result of a test that compares a value with the expected or the previous one."""
        if isinstance(test, Unlike):
            wanted, actual = self._wanted(number, test, opened, status)
            yield number, CheckResult(wanted != actual, f"{test.what} of {self._path} is {actual}, not {wanted}")
        elif isinstance(test, Changed):
            now: object
            match test.what:
                case "checksum":
                    now = self._digest(opened, status, test.algorithm)
                case "fsflag":
                    now = figures["flags"]
                case "size":
                    now = status.st_size
                case _:
                    now = max(status.st_mtime_ns, status.st_ctime_ns)
            before, self._seen[number] = self._seen.get(number, now), now
            verb = "was changed" if before != now else "was not changed"
            # monit reports every change of the flags, but never a recovery.
            if before != now or test.what != "fsflag":
                yield number, CheckResult(before != now, f"{test.what} {verb} for {self._path}")

    def _wanted(self, number: int, test: Unlike, opened: Opener, status: os.stat_result) -> tuple[object, object]:
        """Return the value that the test expects, and the actual value. If the test does not contain a checksum, it
        expects the first checksum that was computed for the rule ``number``.
        """
        match test.what:
            case "permission":
                return f"{int(test.value, 8):04o}", f"{stat.S_IMODE(status.st_mode):04o}"
            case "uid":
                return _uid(test.value), status.st_uid
            case "gid":
                return _gid(test.value), status.st_gid
        actual = self._digest(opened, status, test.algorithm)
        return test.value or self._seen.setdefault(number, actual), actual

    def _digest(self, opened: Opener, status: os.stat_result, algorithm: Algorithm) -> str:
        """Return the file's checksum. If the file has not changed since the last call, it is not read again. Raises
        ``OSError`` if the file cannot be read within ``MAX_DIGEST_S`` seconds.
        """
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._digests.get(algorithm)
        if known is not None and known[0] == state:
            return known[1]
        digest, until = hashlib.new(algorithm, usedforsecurity=False), time.monotonic() + MAX_DIGEST_S
        with closing(opened()) as descriptor:
            while chunk := os.read(descriptor, DIGEST_CHUNK_BYTES):
                digest.update(chunk)
                if time.monotonic() > until:
                    raise OSError(errno.ETIMEDOUT, f"its checksum takes more than {MAX_DIGEST_S:g} seconds")
        self._digests[algorithm] = state, digest.hexdigest()
        return digest.hexdigest()

    # --- lines --------------------------------------------------------------------------------------------------------

    def _matches(self, opened: Opener, status: os.stat_result) -> Iterator[Numbered]:
        """Apply the rules' patterns to the lines written since the last call, and yield the findings. The first call
        begins at the end of the file. A rule fails if its pattern matches.
        """
        misses: dict[int, int] = {}
        """Number of lines since the last match, by rule."""
        hits = 0
        for line, end in self._lines(opened, status):
            for number, finding in self._match(line):
                misses[number] = 0 if finding.fails else misses.get(number, 0) + 1
                hits += finding.fails
                if misses[number] <= MAX_HISTORY:  # further lines without a match make no difference
                    yield number, finding
            self._read_to = end
            if hits >= MAX_HITS:  # the next call continues after this line
                return

    def _lines(self, opened: Opener, status: os.stat_result) -> Iterator[tuple[bytes, int]]:
        """Yield each complete new line, and the offset at which it ends."""
        if not self._inode:
            self._read_to = status.st_size
        elif status.st_ino != self._inode or self._read_to > status.st_size:  # the file was replaced or truncated
            self._read_to = 0
        self._inode = status.st_ino
        if self._read_to == status.st_size:
            return
        with closing(opened()) as descriptor:
            content = os.pread(descriptor, MAX_LOOK_BYTES, self._read_to)
        begin, at = self._read_to, 0
        while (end := content.find(b"\n", at)) >= 0:
            yield content[at : min(end, at + MAX_LINE_BYTES)], begin + end + 1
            at = end + 1
        if at == 0 and len(content) == MAX_LOOK_BYTES:  # a line longer than one read is split
            yield content[:MAX_LINE_BYTES], begin + len(content)

    def _match(self, line: bytes) -> Iterator[Numbered]:
        """Yield the results of ``Match`` rules for one line. If an ``ignore match`` statement excludes the line, stop
        before the first rule that matches the line.
        """
        for number, rule in self._rules(Match):
            assert isinstance(rule.test, Match)
            is_match = _is_match(rule.test, line)
            if is_match and any(_is_match(test, line) for test in self._spec.passed_over):
                return
            shown = line.partition(b"\0")[0].decode(errors="replace")  # in monit, a string ends at the first NUL
            yield number, CheckResult(is_match, f"content {'matches' if is_match else 'does not match'} [{shown}]")


def _refuse(why: OSError) -> int:
    """Raise ``why``. Used as the ``Opener`` for a file whose content must not be read."""
    raise why


def _is_match(test: Match, line: bytes) -> bool:
    """Return True if the line matches the pattern or, for a negated test, does not match it."""
    return posix_regex.compiled(test.pattern).search(line) != test.is_negated


def _uid(owner: str) -> int:
    """Return the uid of a user, which is a name or a number. If there is no such user, raise ``OSError``. The rule then
    has no result, as for an unreadable path.
    """
    try:
        return int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise OSError(errno.ENOENT, f"there is no user {owner}") from None


def _gid(owner: str) -> int:
    """Return the gid of a group, which is a name or a number. If there is no such group, raise ``OSError``. The rule
    then has no result, as for an unreadable path.
    """
    try:
        return int(owner) if owner.isdecimal() else grp.getgrnam(owner).gr_gid
    except KeyError:
        raise OSError(errno.ENOENT, f"there is no group {owner}") from None
