"""Maintains a backup of the agent's own state, which outlives the root file system and is restored on a new one.

A container that is restarted in place has a new root file system but the old ``data``. Without a backup,
``/var/vcap/bosh`` would be lost, including the bus credentials. The agent therefore copies its files to ``data/bosh``
before the Director gets the reply to an action. One stamp on the root file system and another in the backup show
whether the two belong together.

| root file system | backup | action |
|---|---|---|
| no stamp | none | first start of this program: create the backup |
| same stamp as the backup | present | same container: update the backup |
| no stamp, or another one | present | new root file system: restore the backup |
| a stamp | none | new volume: create the backup |
| another agent's stamp | any | image with another agent's files: set them aside |
| any | another agent's stamp | volume used by another agent: set its backup aside |

If a stamp is missing or damaged, other evidence is used. The container is still the same one if a job process is alive
in it, or if the remaining stamp names the current pid namespace and the root file system contains state. A backup
without a usable stamp belongs to this agent if the container is the same, or if this agent was the last one to hold the
volume's lease (``volume_lease``). If there is no stamp at all, it also belongs to this agent if the last holder is
unknown.

A damaged file never replaces its intact copy, but is restored from it. A missing file is restored too, except for files
that agents also delete on purpose.

State written by a newer version of this program is not changed. The boot fails with an error instead.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import BootError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files, proc

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
"""Format version of all state files together. It is increased whenever an older agent would misread a file that a new
agent writes.
"""
STAMP: Final = "agent_shim.json"
SET_ASIDE: Final = "set_aside"
POLL_S: Final = 10.0
"""Interval between checks for changes that were not made by actions. For example, a CPI may write files into a running
container.
"""


class Stamp(msgspec.Struct, frozen=True):
    """The stamp of a root file system or a backup. The stamps of a root file system and its backup have the same
    ``lineage``.
    """

    schema: int
    agent_id: str
    lineage: str
    """The id shared by a root file system and its backup. It is "" on a root file system while it is being restored."""
    incarnation: str = ""
    """Identifies the container in which the stamp was last written (``host.proc.incarnation``)."""
    is_prepared: bool = True
    """In the root file system's stamp, True if the jobs' pre-start scripts have run on that file system."""


class BackedUpFile(msgspec.Struct, frozen=True):
    """A file to back up, with the mode and owner to restore."""

    path: Path
    mode: int = 0o600
    owner: str | None = None
    is_removed: bool = False
    """True if agents also delete this file on purpose, so that a missing file does not mean that it was lost."""
    is_json: bool = True
    may_be_empty: bool = False

    def is_whole(self, raw: bytes) -> bool:
        """Return True if the content is intact. It may be corrupt after a machine crash or a disk failure."""
        if not self.is_json:
            return self.may_be_empty or raw.strip(b"\0 \n") != b""
        try:
            return isinstance(wire.decode_json(raw), dict)
        except ValueError:
            return False


NOTHING: Final = Stamp(SCHEMA, "", "")
"""The stamp that is assumed if the real one is missing or damaged."""


def backup_files(paths: Paths) -> list[BackedUpFile]:
    """Return the files to back up. Each copy in the backup has the same name as the original."""
    return [
        *map(BackedUpFile, (paths.update_settings, paths.former_mbus, paths.spec, paths.disk_hints, paths.taken_down)),
        BackedUpFile(paths.tasks, is_removed=True),
        BackedUpFile(paths.managed_disk, is_removed=True, is_json=False),
        BackedUpFile(paths.shut_down, is_json=False),
        BackedUpFile(paths.stopped_marker, 0o644, is_removed=True, is_json=False, may_be_empty=True),
        BackedUpFile(paths.dns_records, 0o640, paths.shared_owner),
    ]


class StateBackup:
    """Maintains the backup. Call ``begin`` before any write, and ``recover`` once the agent id is known."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._files = backup_files(paths)
        self._copied: dict[Path, tuple[int, int, int] | None] = {}
        """The version of each file when it was last copied; None if the file was missing then."""
        self._stamp: Stamp | None = None
        """The stamp to write to both places; None until ``recover`` has finished."""
        self._former = ""
        """The id of the agent that has used this root file system, or "" if unknown."""
        self._is_same_container: bool | None = None
        """True if this is the container in which the backup was made; None if there is no backup."""
        self._former_holder = ""
        """The id of the agent that held the volume before, or "" if unknown."""
        self._writing = asyncio.Lock()
        self._logged = ""
        """The last error that was logged by ``_say``."""
        self._are_stamps_due = False
        """True if a stamp could not be written and has to be written later."""
        self.root_is_new = False
        """True if the backup was restored on a new root file system."""
        self.unwritable = ""
        """The error if the file system with the backup is read-only or broken, otherwise "". In the case of an error,
        the backup may be older than the last stop or start of the jobs. A full file system is not an error, because
        recording a stop or start needs no space.
        """

    # --- a new agent --------------------------------------------------------------------------------------------------

    def begin(self, jobs_live: Callable[[], bool] = lambda: False, former_holder: str = "") -> None:
        """Find out whether this is a new container, which ``recover`` needs to know. If it is, clear the run directory
        that its predecessor used. Blocks on disk I/O.

        ``jobs_live`` returns True if a job process is alive in this container. ``former_holder`` is the id of the
        agent that held the volume before. Raises ``BootError`` if the state was written by a newer version. Without a
        backup, the agent cannot know whether the container is new, so nothing is cleared.
        """
        here, copy = _read(self._paths.stamp), _read(self._copy_stamp)
        for stamp in (here, copy):
            if stamp is not None and stamp.schema > SCHEMA:
                why = f"schema {stamp.schema} is of a newer version, this one supports {SCHEMA}"
                raise BootError(f"cannot use the state below {self._paths.base}: {why}")
        here = here or NOTHING
        self._former = here.agent_id or _agent_id(self._paths.settings_cache)
        self._former_holder = former_holder
        if copy is None and not self._has_copies():
            return
        self._is_same_container = self._is_continued(here, copy or NOTHING) or jobs_live()
        if not self._is_same_container:
            logger.info("this is a new container: clearing %s of its predecessor", self._paths.run)
            _empty(self._paths.run)

    def _is_continued(self, here: Stamp, copy: Stamp) -> bool:
        """Return True if this is still the container in which the stamps were written. ``here`` is the stamp of the
        root file system, and ``copy`` is the stamp of the backup.
        """
        incarnation = proc.incarnation()
        if here.lineage and copy.lineage:
            return here.lineage == copy.lineage and incarnation in ("", here.incarnation, copy.incarnation)
        if here.agent_id and not here.lineage:
            # An earlier agent was killed while restoring this root file system.
            return False
        # The pid namespace alone does not identify the container, because a new container may share its pod's pid
        # namespace. However, the root file system of a new container contains no state, except for the
        # ``update_settings.json`` that the Docker CPI copies into it.
        is_root_used = here.lineage != "" or any(
            file.path.exists() for file in self._files if file.path != self._paths.update_settings
        )
        return is_root_used and incarnation in {here.incarnation, copy.incarnation} - {""}

    def _has_copies(self) -> bool:
        """Return True if the volume contains any backup, even one without a stamp."""
        return self._paths.supervisor_state.exists() or any(self._copy_of(file).exists() for file in self._files)

    async def recover(self, agent_id: str) -> None:
        """Restore this agent's backup if the root file system is new, and update the backup. From then on, ``update``
        keeps it up to date.

        Raises ``BootError`` on failure, because without its state, the agent would have a different identity.
        """
        try:
            await asyncio.to_thread(self._recover, agent_id)
        except OSError as exc:
            raise BootError(f"cannot restore the state of this agent: {exc}") from exc

    def _recover(self, agent_id: str) -> None:
        """Set aside the files of other agents, restore the backup on a new root file system, and write both stamps (see
        the module's table).
        """
        here, copy = _read(self._paths.stamp) or NOTHING, _read(self._copy_stamp)
        if self._former not in ("", agent_id):
            aside = self._paths.bosh / SET_ASIDE / _plain(self._former)
            self._move([*(file.path for file in self._files), self._paths.stamp], aside, self._former)
            _empty(self._paths.monit_job)  # the directory contains links to files of the previous agent's jobs
            here = NOTHING
        is_ours = copy is not None and copy.agent_id == agent_id
        if (copy is None or not copy.agent_id) and self._has_copies():
            # The backup has no usable stamp. If the stamp is damaged, it may have been another agent's, so this agent
            # must have been the last holder. If there is no stamp, the last holder may also be unknown.
            owners = (agent_id,) if copy is not None else (agent_id, "")
            is_ours = bool(self._is_same_container) or self._former_holder in owners
            copy = Stamp(SCHEMA, agent_id, "") if is_ours else copy or NOTHING
        if copy is not None and not is_ours:
            aside = self._paths.mirror / SET_ASIDE / _plain(copy.agent_id)
            copies = [self._copy_of(file) for file in self._files]
            self._move([*copies, self._paths.supervisor_state, self._copy_stamp], aside, copy.agent_id)
            copy = None
        is_same_root = here.lineage == copy.lineage != "" if copy is not None else here.lineage != ""
        if copy is not None and self._is_same_container and self._former in ("", agent_id):
            is_same_root = True  # even if a stamp is missing or damaged
        former = here if here.lineage else copy or here
        lineage = (copy.lineage if copy is not None else "") or here.lineage or secrets.token_hex(8)
        stamp = Stamp(SCHEMA, agent_id, lineage, proc.incarnation(), former.is_prepared)
        if copy is not None:
            if not is_same_root:
                # An empty lineage shows that this root file system is being restored.
                files.write_atomic(self._paths.stamp, msgspec.json.encode(Stamp(SCHEMA, agent_id, "")), mode=0o600)
            self._restore(is_root_new=not is_same_root)
            if not is_same_root:
                self.root_is_new = True
                stamp = msgspec.structs.replace(stamp, is_prepared=False)
        # Writing the stamp completes the restore. If the agent is killed before that, the next agent restores the
        # backup again.
        self._stamp = stamp
        self._update()

    def _restore(self, *, is_root_new: bool) -> None:
        """Restore the files that the root file system has lost. If ``is_root_new``, this includes files that agents
        delete on purpose, and a failed write raises ``OSError`` instead of being logged.
        """
        for file in self._files:
            # A link leads to a tmpfs, whose content is never in the backup.
            if file.path.is_symlink() or not self._is_lost(file, is_root_new=is_root_new):
                continue
            try:
                raw = files.read(self._copy_of(file), is_own=True)
                if not file.is_whole(raw):
                    logger.error("the copy of %s is damaged too", file.path)
                    continue
                if not file.path.parent.is_dir():
                    files.make_dir(file.path.parent, 0o755)
                files.write_atomic(file.path, raw, mode=file.mode, owner=file.owner)
                logger.warning("%s was missing or damaged: it is restored from its copy", file.path)
            except FileNotFoundError:
                continue
            except OSError as exc:
                if is_root_new:
                    raise
                logger.error("cannot restore %s: %s", file.path, exc)

    @staticmethod
    def _is_lost(file: BackedUpFile, *, is_root_new: bool) -> bool:
        """Return True if a file is damaged or lost. A missing file counts as lost if the root file system is new, or if
        agents never delete the file.
        """
        try:
            return not file.is_whole(files.read(file.path, is_own=True))
        except FileNotFoundError:
            return is_root_new or not file.is_removed
        except OSError:
            return True

    def _move(self, paths: Iterable[Path], aside: Path, whose: str) -> None:
        """Move the ``paths`` that exist to the directory ``aside``. ``whose`` is the id of the agent that owns them."""
        for path in paths:
            if path.exists():
                files.make_dir(aside, 0o700)
                shutil.move(path, aside / path.name)
                logger.warning("%s belongs to another agent, %s: moved to %s", path, whose, aside)

    # --- pre-start on a new root file system --------------------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        """True if the current jobs' pre-start scripts have run on this root file system. Otherwise, job recovery runs
        them before it starts the jobs. Also True before ``recover`` has finished.
        """
        return self._stamp is None or self._stamp.is_prepared

    async def prepared(self) -> None:
        """Record that the pre-start scripts have run on this root file system, so that job recovery does not run them
        again.
        """
        if self._stamp is not None and not self._stamp.is_prepared:
            self._stamp = msgspec.structs.replace(self._stamp, is_prepared=True)
            await asyncio.to_thread(self._write_stamps)

    # --- copying ------------------------------------------------------------------------------------------------------

    async def update(self) -> None:
        """Copy changed files. A failure is logged, and the copy is tried again later."""
        if self._stamp is None:
            return
        async with self._writing:
            # Make these stat calls in the event loop, because starting a thread would take longer.
            # The default () differs from every version, so a file that has not been copied yet counts as changed.
            is_changed = any(files.version(file.path) != self._copied.get(file.path, ()) for file in self._files)
            if is_changed or self._are_stamps_due:
                await asyncio.to_thread(self._update)

    async def watch(self) -> NoReturn:
        """Copy files that changed outside of actions, or whose last copy failed. Never returns."""
        while True:
            await asyncio.sleep(clock.until_beat(POLL_S))
            await self.update()

    def _update(self) -> None:
        """Write the stamps, and update the copies of changed files. A copy that already has the same content is not
        written.
        """
        self._write_stamps()
        for file in self._files:
            if (seen := files.version(file.path)) == self._copied.get(file.path, ()):
                continue
            if seen is None and not file.is_removed:
                self._copied[file.path] = seen  # keep any copy, so that the next agent can restore the missing file
                continue
            copy, raw = self._copy_of(file), None
            try:
                with suppress(FileNotFoundError):
                    if not file.path.is_symlink():  # a link leads to a tmpfs, whose content must not be copied to disk
                        raw = files.read(file.path, is_own=True)
                if raw is None:
                    copy.unlink(missing_ok=True)
                elif file.is_whole(raw):
                    files.write_atomic(copy, raw, mode=0o600, if_changed=True)
                else:
                    self._say(f"{file.path} is damaged: its copy is kept")
            except OSError as exc:
                self._say(f"a restart of the container would lose {file.path}: {exc}")
                continue
            self._copied[file.path] = seen

    def _write_stamps(self) -> None:
        """Write both stamps. On a full disk, the agent works without stamps and tries again later."""
        assert self._stamp is not None
        self._are_stamps_due, self.unwritable = False, ""
        for path in (self._paths.stamp, self._copy_stamp):
            if _read(path) == self._stamp:
                continue
            try:
                files.write_atomic(path, msgspec.json.encode(self._stamp), mode=0o600)
            except HostError as exc:
                self._are_stamps_due = True
                self._say(str(exc))
                if path == self._copy_stamp and exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self.unwritable = str(exc)

    def _say(self, text: str) -> None:
        """Log an error unless it is the same as the previous one."""
        if text != self._logged:
            self._logged = text
            logger.error("%s", text)

    def _copy_of(self, file: BackedUpFile) -> Path:
        return self._paths.mirror / file.path.name

    @property
    def _copy_stamp(self) -> Path:
        return self._paths.mirror / STAMP


def forget(paths: Paths) -> None:
    """Remove the backup and both stamps, because another agent is taking over and will not update the backup."""
    names = [STAMP, *(file.path.name for file in backup_files(paths)), paths.supervisor_state.name, SET_ASIDE]
    for path in (*(paths.mirror / name for name in names), paths.stamp):
        files.remove_tree(path)


def _read(path: Path) -> Stamp | None:
    """Read a stamp. If it is unreadable, return ``NOTHING``, so that other evidence decides which agent owns the
    files.
    """
    try:
        return wire.decode(files.read(path, is_own=True), Stamp)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        logger.error("cannot read %s: %s", path, exc)
        return NOTHING


def _agent_id(settings_cache: Path) -> str:
    """Return the agent id in the settings on this root file system, or ""."""

    class SettingsOwner(msgspec.Struct):
        agent_id: str = ""

    try:
        return wire.convert(wire.decode_json(files.read(settings_cache, is_own=True)), SettingsOwner).agent_id
    except (OSError, ValueError):
        return ""


def _plain(agent_id: str) -> str:
    """Convert an agent id that was read from a file to a safe directory name."""
    return agent_id.replace("/", "_").replace("\0", "_").strip(".")[:100] or "unnamed"


def _empty(directory: Path) -> None:
    """Remove the contents of a directory, except mount points."""
    with suppress(FileNotFoundError):
        for path in list(directory.iterdir()):
            try:
                files.remove_tree(path)
            except HostError as exc:
                logger.warning("%s", exc)
