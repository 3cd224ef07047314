"""Rotates large job logs and removes old archives, so that they do not fill the disk.

A stemcell uses logrotate and cron for this purpose, with a rule that the Go agent writes during each apply
(platform/linux_platform.go). The rule rotates each ``*.log`` that is larger than 50 MB, in three directory levels below
``sys/log``, with copytruncate, and keeps seven archives of each. In this agent, a worker process does the same every
minute. In addition, the total size of all archives is limited.

If two programs copy and truncate the same file, lines are lost. Therefore, the Go agent's rule is disabled while this
agent rotates the logs, and ``handback`` enables it again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec

from agent_shim.bulk import protocol, workers
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import blocking, clock, files, guarded
from agent_shim.host.descriptors import closing

logger = logging.getLogger(__name__)

MAX_DEPTH: Final = 3
"""How many directory levels below ``sys/log`` are searched."""
MAX_JOB_ENTRIES: Final = 20_000
"""Maximum number of directory entries read per job."""
LOOK_TIMEOUT_S: Final = 10.0
ROTATE_TIMEOUT_S: Final = 1800.0
NICE: Final = 10
"""Niceness of rotation relative to the agent, so that jobs have priority."""
ARCHIVE: Final = re.compile(r".*\.log\.[0-9]+\.gz", re.DOTALL)
DISABLED_SUFFIX: Final = ".disabled"
"""Suffix that disables a rule, because logrotate skips files with it (``tabooext``)."""
UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: str) -> int:
    """Parse a size in logrotate's notation, such as ``50M``. Raises ``ValueError``."""
    found = re.fullmatch(r"([0-9]{1,15})([kKmMgG]?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: a number, and k, M or G")
    return int(found[1]) * UNITS[found[2].lower()]


class RotationLimits(msgspec.Struct, frozen=True):
    """Rotation limits. Files above ``size`` bytes are rotated, ``keep`` is the number of archives per file, and
    ``total`` is the maximum size of all archives in bytes. ``period`` is in seconds.
    """

    size: int = 50 << 20
    keep: int = 7
    total: int = 1 << 30
    period: float = 60.0

    @property
    def most(self) -> int:
        """Maximum number of bytes that a rotation keeps of each log.

        With this limit, a single archive cannot exceed ``total``, even if its content is incompressible and the log
        grows by half during the rotation.
        """
        return self.total // 2


class Found(NamedTuple):
    """A file below ``sys/log``. ``size`` is the size of its content, not counting holes."""

    path: str
    size: int
    modified: float


class Findings(NamedTuple):
    """Logs to rotate, and each job's archives."""

    due: list[Found]
    archives: dict[str, list[Found]]


class Rotation:
    """Rotates job logs. ``spec_size`` returns the size limit in the deployed spec, such as ``50M``, or ""."""

    def __init__(self, paths: Paths, limits: RotationLimits, spec_size: Callable[[], str]) -> None:
        self._root = paths.log
        self._rule = paths.logrotate_rule  # the Go agent's rule, which is disabled while this agent rotates the logs
        self._limits = limits
        self._spec_size = spec_size

    async def run(self) -> NoReturn:
        """Rotate logs periodically, forever. As long as the Go agent's rule cannot be disabled, leave the logs to
        logrotate.
        """
        while True:
            await asyncio.sleep(clock.until_beat(self._limits.period))
            try:
                if await asyncio.to_thread(_disable_rule, self._rule):
                    await self.rotate()
            except (ActionError, OSError) as exc:
                logger.error("cannot rotate the logs of jobs: %s", exc)

    async def rotate(self) -> None:
        """Rotate the logs that exceed the size limit. Then remove the oldest archives until the others are within the
        total limit.
        """
        limit = self._size()
        found = await self._look(limit)
        # Rotate the smallest logs first, so that they do not have to wait for huge ones.
        if due := sorted(found.due, key=lambda log: log.size):
            logger.info("rotating %s", ", ".join(guarded.shown(log.path) for log in due))
            # The deployed spec's size limit may exceed ``most``. A log that has just reached that limit must be
            # archived in full.
            most = max(self._limits.most, 2 * limit)
            paths = [os.fsencode(log.path) for log in due]
            request = protocol.Rotate(str(self._root), paths, self._limits.keep, most)
            async with asyncio.timeout(ROTATE_TIMEOUT_S):
                done = await workers.execute(request, nice=NICE)
            for log, outcome in zip(due, done.outcomes, strict=True):
                if outcome.error:
                    logger.error("%s", outcome.error)
                elif outcome.left_out:
                    text = "%s was too large to keep: its first %d bytes are lost, the last %d are in its archive"
                    logger.warning(text, guarded.shown(log.path), outcome.left_out, most)
            found = await self._look(limit)
        for path in surplus(found, self._limits.total):
            shown = guarded.shown(path)
            logger.info("removing %s: archives of logs exceed %d bytes", shown, self._limits.total)
            await blocking.call(_call_owner(path), partial(remove, self._root, path))

    async def _look(self, limit: int) -> Findings:
        """Return the findings for all jobs. Each job is examined in a separate thread with a timeout, so that a job
        whose volume hangs does not hold up the others for long.
        """
        findings = Findings([], {})
        for job in await blocking.call("sys/log", partial(_jobs, self._root)):
            look = partial(look_at, self._root, job, limit)
            try:
                due, findings.archives[job] = await blocking.call(_call_owner(job), look, timeout=LOOK_TIMEOUT_S)
                findings.due.extend(due)
            except OSError as exc:
                logger.warning("cannot rotate the logs of %s: %s", guarded.shown(job) or self._root, exc)
        return findings

    def _size(self) -> int:
        """Return the size limit in bytes: the one in the deployed spec if it is valid, otherwise the one in
        agent.json.
        """
        from_spec = self._spec_size()
        try:
            return size(from_spec) if from_spec else self._limits.size
        except ValueError as exc:
            logger.debug("properties.logging.max_log_file_size: %s", exc)
            return self._limits.size


def _disable_rule(rule: Path) -> bool:
    """Disable the Go agent's rule. Return False if that fails, in which case logrotate rotates the logs. Blocks."""
    try:
        rule.rename(f"{rule}{DISABLED_SUFFIX}")
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as exc:
        logger.warning("cannot rename %s: %s; logrotate rotates the logs of jobs", rule, exc.strerror)
        return False
    logger.info("the agent rotates the logs of jobs: %s is disabled", rule)
    return True


def enable_rule(rule: Path) -> None:
    """Enable the Go agent's rule again, if there is one, so that logrotate rotates the job logs. Raises
    ``HostError``.
    """
    with files.attempting(f"enable {rule}"), suppress(FileNotFoundError):
        rule.with_name(f"{rule.name}{DISABLED_SUFFIX}").rename(rule)


def leave_to_logrotate(rule: Path) -> None:
    """Enable the Go agent's rule again. A failure is logged as an error, because in that case nothing rotates the logs.
    Blocks.
    """
    try:
        enable_rule(rule)
    except HostError as exc:
        logger.error("cannot leave the logs of jobs to logrotate: %s", exc)


def _call_owner(path: str) -> str:
    """Return the owner key for ``host.blocking``, which runs the calls of each owner one after another. All files of a
    job have the same owner, so a job whose volume hangs blocks only one thread.
    """
    return f"sys/log/{path.partition('/')[0]}"


def _jobs(root: Path) -> list[str]:
    """Return the jobs for :func:`look_at`: "" and every name in ``root``. A name may belong to a file instead of a job
    directory, but ``look_at`` finds nothing below a file. Blocks.
    """
    with guarded.held(root) as top, closing(guarded.open_directory(top, "")) as directory:
        return ["", *sorted(guarded.names(directory))]


def look_at(root: Path, job: str, limit: int) -> tuple[list[Found], list[Found]]:
    """Find a job's archives, and those of its logs that exceed ``limit`` bytes. The job "" stands for files that
    belong to no job. Blocks.

    Links are neither followed nor returned. Files with a second hard link are not rotated, and therefore not returned,
    because a job could give one file hundreds of names. At most ``MAX_JOB_ENTRIES`` directory entries are examined.
    """
    logs: list[Found] = []
    archives: list[Found] = []
    with guarded.held(root) as top:
        # ``depth`` counts from the start of the walk. A job's directory is already the second level. For the job "",
        # only the first level is searched.
        for path, status in guarded.walk(top, job, depth=MAX_DEPTH - 1 if job else 1, limit=MAX_JOB_ENTRIES):
            # Do not count holes. Files with a second hard link get size 0, so that they are left out below.
            size = min(status.st_size, status.st_blocks * guarded.BLOCK_BYTES) if status.st_nlink == 1 else 0
            if path.endswith(".log"):
                if size > limit:
                    logs.append(Found(path, size, status.st_mtime))
            elif size and ARCHIVE.fullmatch(path):
                archives.append(Found(path, size, status.st_mtime))
    return logs, archives


def surplus(found: Findings, total: int) -> list[str]:
    """Return the archives to remove, so that the remaining ones have at most ``total`` bytes.

    The next archive to remove is always the oldest of the job whose remaining archives take the most space, so a job
    with huge logs does not cause the removal of other jobs' archives.
    """
    by_age = {
        job: deque(sorted(archives, key=lambda archive: archive.modified))
        for job, archives in found.archives.items()
        if archives
    }
    sizes = {job: sum(archive.size for archive in archives) for job, archives in by_age.items()}
    excess = sum(sizes.values()) - total
    paths: list[str] = []
    while excess > 0:
        job = min(by_age, key=lambda job: (-sizes[job], by_age[job][0].modified))
        oldest = by_age[job].popleft()
        paths.append(oldest.path)
        excess -= oldest.size
        sizes[job] -= oldest.size
        if not by_age[job]:
            del by_age[job]
    return paths


def remove(root: Path, path: str) -> None:
    """Remove a file below ``root`` without following links. Blocks."""
    parent, _, name = path.rpartition("/")
    try:
        with guarded.held(root / parent, root) as directory:
            os.unlink(name, dir_fd=directory)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.info("cannot remove %s: %s", guarded.shown(path), exc)
