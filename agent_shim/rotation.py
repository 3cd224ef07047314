"""The logs of jobs do not fill the disk: what is too large is rotated, what is too old goes.

A stemcell has logrotate and cron for that, by rules that the Go agent writes at each apply
(platform/linux_platform.go): ``*.log`` in three levels below ``sys/log``, larger than 50 MB, seven archives, copied and
cut. Here it is the same, each minute, by a worker process that packs; beyond that all archives together have a limit.

Two who copy and cut the same file make each other lose lines: so the Go agent's rule is out of force while this agent
works, and by ``handback`` into force again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from agent_shim.errors import ActionError, HostError
from agent_shim.host import files, helper
from agent_shim.paths import Paths

logger = logging.getLogger(__name__)

DEPTH: Final = 3
"""Levels below ``sys/log`` that are looked at."""
BLOCK: Final = 512
"""Bytes of what ``st_blocks`` counts."""
ARCHIVE: Final = re.compile(r".*\.log\.[0-9]+\.gz")
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
        due, archives = await asyncio.to_thread(look, self._root, limit)
        if due:
            logger.info("rotating %s", ", ".join(due))
            most = max(self._limits.most, 2 * limit)  # who lets logs grow so large wants to keep them
            request = helper.Rotate(str(self._root), due, self._limits.keep, most)
            done = await helper.work(request, nice=10)
            for path, outcome in zip(due, done.outcomes, strict=True):
                if outcome.error:
                    logger.error("%s", outcome.error)
                elif outcome.left_out:
                    logger.warning(
                        "%s was too large to keep: its first %d bytes are gone, the last %d are in its archive",
                        path,
                        outcome.left_out,
                        most,
                    )
            _, archives = await asyncio.to_thread(look, self._root, limit)
        for path in surplus(archives, self._limits.total):
            logger.info("removing %s: archives of logs take more than %d bytes", path, self._limits.total)
            await asyncio.to_thread(remove, self._root, path)

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


def look(root: Path, limit: int) -> tuple[list[str], list[Found]]:
    """The logs below ``root`` of more than ``limit`` bytes, and all archives; no link is followed or named. Blocks.

    The smaller a log the earlier it comes: a huge one delays nobody.
    """
    logs: list[Found] = []
    archives: list[Found] = []
    for found in _walk(root, "", DEPTH):
        if found.path.endswith(".log"):
            if found.size > limit:
                logs.append(found)
        elif ARCHIVE.fullmatch(found.path):
            archives.append(found)
    return [log.path for log in sorted(logs, key=lambda log: log.size)], archives


def _walk(root: Path, below: str, depth: int) -> Iterator[Found]:
    try:
        entries = os.scandir(root / below)
    except OSError:
        return  # gone, or none of ours
    with entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth > 1:
                        yield from _walk(root, path, depth - 1)
                    continue
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield Found(path, min(status.st_size, status.st_blocks * BLOCK), status.st_mtime)


def surplus(archives: list[Found], total: int) -> list[str]:
    """The oldest archives, whose removal brings all together to ``total`` bytes at most."""
    excess = sum(each.size for each in archives) - total
    found = []
    for each in sorted(archives, key=lambda each: each.modified):
        if excess <= 0:
            break
        found.append(each.path)
        excess -= each.size
    return found


def remove(root: Path, path: str) -> None:
    """Remove a file below ``root``, through no link. Blocks."""
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        parent, _, name = path.rpartition("/")
        directory = files.open_beneath(held, parent, os.O_RDONLY | os.O_DIRECTORY) if parent else os.dup(held)
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        finally:
            os.close(directory)
    except HostError as exc:
        logger.info("cannot remove %s: %s", path, exc)
    finally:
        os.close(held)
