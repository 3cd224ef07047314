"""The logs of jobs do not fill the disk: what is too large is rotated, what is too old goes.

A stemcell has logrotate and cron for that, by rules that the Go agent writes at each apply
(platform/linux_platform.go): ``*.log`` in three levels below ``sys/log``, larger than 50 MB, seven archives, copied and
cut. Here it is the same, each minute, by a worker process that packs; beyond that all archives together have a limit.

Two who copy and cut the same file make each other lose lines: so the Go agent's rule is out of force while this agent
works, and by ``handback`` into force again.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import files, guarded, worker_client

logger = logging.getLogger(__name__)

DEPTH: Final = 3
"""Levels below ``sys/log`` that are looked at."""
MAX_JOB_ENTRIES: Final = 20_000
"""In the directories of a job that are looked at."""
MAX_DUE: Final = 500
MAX_REMOVED: Final = 500
"""Logs that are rotated, archives that are removed in one round; others wait for the next."""
LOOK_TIMEOUT_S: Final = 10.0
ROTATE_TIMEOUT_S: Final = 1800.0
BLOCK: Final = 512
"""Bytes of what ``st_blocks`` counts."""
ARCHIVE: Final = re.compile(r".*\.log\.[0-9]+\.gz", re.DOTALL)
OUT_OF_FORCE: Final = ".disabled"
"""A suffix that logrotate passes over (``tabooext``)."""
UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: str) -> int:
    """Bytes of ``50M``, as logrotate spells them; raises ``ValueError``."""
    found = re.fullmatch(r"([0-9]{1,15})([kKmMgG]?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: a number, and k, M or G")
    return int(found[1]) * UNITS[found[2].lower()]


@dataclass(frozen=True, slots=True)
class Limits:
    """``size`` of a file, ``keep`` archives of each, ``total`` bytes of all archives; ``period`` in seconds."""

    size: int = 50 << 20
    keep: int = 7
    total: int = 1 << 30
    period: float = 60.0

    @property
    def most(self) -> int:
        """Bytes that are kept of one log at a time.

        Even if they do not shrink, and half as many come while they are packed, their archive has its place within
        ``total``, beside others.
        """
        return self.total // 2


class Found(NamedTuple):
    """A file below ``sys/log``; ``size`` is what it takes, without a hole."""

    path: str
    size: int
    modified: float


class Findings(NamedTuple):
    """``due`` are logs to rotate, the smaller first: a huge one delays no other.

    ``archived`` are the bytes of all archives, ``oldest`` some of them, the oldest first: however many there are, few
    are kept in memory.
    """

    due: Sequence[Found] = ()
    archived: int = 0
    oldest: Sequence[Found] = ()

    def __add__(self, more: Findings) -> Findings:  # type: ignore[override]  # a tuple's would put them side by side
        return Findings(
            heapq.nsmallest(MAX_DUE, [*self.due, *more.due], key=lambda log: log.size),
            self.archived + more.archived,
            heapq.nsmallest(MAX_REMOVED, [*self.oldest, *more.oldest], key=lambda each: each.modified),
        )


class Rotation:
    """``run`` is the root task. ``spec_size`` tells what the deployed spec says of the size, or nothing."""

    def __init__(self, paths: Paths, limits: Limits, spec_size: Callable[[], str]) -> None:
        self._root = paths.log
        self._rule = paths.logrotate_rule
        self._limits = limits
        self._spec_size = spec_size

    async def run(self) -> NoReturn:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._limits.period)
            try:
                if await asyncio.to_thread(_put_out_of_force, self._rule):
                    await self.rotate()
            except (ActionError, OSError) as exc:
                logger.error("logs of jobs grow on: %s", exc)

    async def rotate(self) -> None:
        """Rotate what is too large now, then remove the oldest archives above the limit."""
        limit = self._size()
        found = await self._look(limit)
        if found.due:
            logger.info("rotating %s", ", ".join(guarded.shown(log.path) for log in found.due))
            most = max(self._limits.most, 2 * limit)  # who lets logs grow so large wants to keep them
            paths = [os.fsencode(log.path) for log in found.due]
            async with asyncio.timeout(ROTATE_TIMEOUT_S):
                done = await worker_client.work(
                    worker_client.Rotate(str(self._root), paths, self._limits.keep, most), nice=10
                )
            for log, outcome in zip(found.due, done.outcomes, strict=True):
                if outcome.error:
                    logger.error("%s", outcome.error)
                elif outcome.left_out:
                    logger.warning(
                        "%s was too large to keep: its first %d bytes are gone, the last %d are in its archive",
                        guarded.shown(log.path),
                        outcome.left_out,
                        most,
                    )
            found = await self._look(limit)
        for path in surplus(found, self._limits.total):
            shown = guarded.shown(path)
            logger.info("removing %s: archives of logs take more than %d bytes", shown, self._limits.total)
            await guarded.aside(_whose(path), partial(remove, self._root, path))

    async def _look(self, limit: int) -> Findings:
        """Look at the files of each job by itself: a volume that does not answer keeps no other job from it."""
        findings = Findings()
        for job in await guarded.aside("sys/log", partial(_jobs, self._root)):
            try:
                look = partial(look_at, self._root, job, limit)
                findings += await guarded.aside(_whose(job), look, timeout=LOOK_TIMEOUT_S)
            except OSError as exc:
                logger.warning("logs of %s are not rotated: %s", guarded.shown(job) or self._root, exc)
        return findings

    def _size(self) -> int:
        """What the deployment says goes before our own option, if it can be read."""
        told = self._spec_size()
        try:
            return size(told) if told else self._limits.size
        except ValueError as exc:
            logger.debug("properties.logging.max_log_file_size: %s", exc)
            return self._limits.size


def _put_out_of_force(rule: Path) -> bool:
    """False where that is not possible: then logrotate goes on, and alone. Blocks."""
    try:
        rule.rename(f"{rule}{OUT_OF_FORCE}")
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as exc:
        logger.warning("logs of jobs are left to logrotate: cannot rename %s: %s", rule, exc.strerror)
        return False
    logger.info("logs of jobs are rotated here: %s is out of force", rule)
    return True


def put_into_force(rule: Path) -> None:
    """Have logrotate rotate the logs of jobs again, if it ever has; raises ``HostError``."""
    try:
        rule.with_name(f"{rule.name}{OUT_OF_FORCE}").rename(rule)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise files.failed(f"put {rule} into force", exc) from exc


def leave_to_logrotate(rule: Path) -> None:
    """As ``put_into_force``; where that fails it is said, for nobody rotates then. Blocks."""
    try:
        put_into_force(rule)
    except HostError as exc:
        logger.error("nobody rotates the logs of jobs: %s", exc)


def _whose(path: str) -> str:
    """What names a job's files while they are looked at."""
    return f"sys/log/{path.partition('/')[0]}"


def _jobs(root: Path) -> list[str]:
    """Directories of jobs, and "" for what lies beside them. Blocks."""
    with guarded.held(root) as top:
        directory = guarded.open_directory(top, "")
        try:
            return ["", *sorted(guarded.names(directory))]
        finally:
            os.close(directory)


def look_at(root: Path, job: str, limit: int) -> Findings:
    """The logs of a job (or of none, "") of more than ``limit`` bytes, and its archives. Blocks.

    No link is followed or named. Of a job with too many files only so many are looked at.
    """
    logs: list[Found] = []
    archives: list[Found] = []
    with guarded.held(root) as top:
        for path, status in guarded.walk(top, job, depth=DEPTH - 1 if job else 1, limit=MAX_JOB_ENTRIES):
            size = min(status.st_size, status.st_blocks * BLOCK)
            if path.endswith(".log"):
                if size > limit:
                    logs.append(Found(path, size, status.st_mtime))
            elif size and ARCHIVE.fullmatch(path):
                archives.append(Found(path, size, status.st_mtime))
    return Findings() + Findings(logs, sum(each.size for each in archives), archives)


def surplus(found: Findings, total: int) -> list[str]:
    """The oldest archives, whose removal brings all together to ``total`` bytes, or nearer to that."""
    excess = found.archived - total
    paths = []
    for each in found.oldest:
        if excess <= 0:
            break
        paths.append(each.path)
        excess -= each.size
    return paths


def remove(root: Path, path: str) -> None:
    """Remove a file below ``root``, through no link. Blocks."""
    parent, _, name = path.rpartition("/")
    try:
        with guarded.held(root / parent, root) as directory:
            os.unlink(name, dir_fd=directory)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.info("cannot remove %s: %s", guarded.shown(path), exc)
