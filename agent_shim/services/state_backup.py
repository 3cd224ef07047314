"""The copy of the agent's own state that outlives the root file system, and what a new one gets back of it.

A container that is restarted in place has a new root file system and the old ``data``: what the Director has stored on
the instance would be lost with ``/var/vcap/bosh``, the credentials of the bus first of all. So those files are copied
to ``data/bosh`` before the Director hears that something is done. Two stamps tell what belongs together: one on the
root file system, one beside the copy.

| root file system | copy | then |
|---|---|---|
| no stamp | none | the first agent of this program: the copy is made |
| the stamp of the copy | there | the same container: the copy is brought up to date |
| no stamp, or another one | there | a new root file system: it gets what was copied |
| a stamp | none | a new volume: the copy is made |
| of another agent | any | somebody's used image: its files are set aside |
| any | of another agent | somebody's used volume: the copy is set aside |

State of a newer version of this program is not touched: the boot fails and says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.core import wire
from agent_shim.core.errors import BootError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import files, proc

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
"""Of all state files together; raised when an older version would misread what this one writes."""
STAMP: Final = "agent_shim.json"
SET_ASIDE: Final = "set_aside"
PERIOD: Final = 5.0
"""Seconds between looks for changes that no action has made: a CPI may write into a running container."""


class Stamp(msgspec.Struct, frozen=True):
    """``lineage`` is the same on a root file system and the copy that belongs to it."""

    schema: int
    agent_id: str
    lineage: str
    incarnation: str = ""
    """The container that wrote it last (``host.proc``)."""
    is_prepared: bool = True
    """On the root file system: the pre-start scripts of the jobs have run on it."""


@dataclass(frozen=True, slots=True)
class BackedUpFile:
    """A file of which there is a copy, with the mode and owner that it has when it comes back."""

    path: Path
    mode: int = 0o600
    owner: str | None = None


def kept(paths: Paths) -> dict[str, BackedUpFile]:
    """What is copied, by the name of the copy."""
    return {
        "update_settings.json": BackedUpFile(paths.update_settings),
        "former_mbus.json": BackedUpFile(paths.former_mbus),
        "spec.json": BackedUpFile(paths.spec),
        "tasks.json": BackedUpFile(paths.tasks),
        "persistent_disk_hints.json": BackedUpFile(paths.disk_hints),
        "managed_disk_settings.json": BackedUpFile(paths.managed_disk),
        "shut_down": BackedUpFile(paths.given_up),
        "stopped": BackedUpFile(paths.stopped_marker, 0o644),
        "records.json": BackedUpFile(paths.dns_records, 0o640, paths.shared_owner),
    }


class StateBackup:
    """Keeps the copy. ``begin`` comes before anything is written, ``recover`` as soon as the agent's id is known."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._files = kept(paths)
        self._copied: dict[str, tuple[int, int, int] | None] = {}
        self._stamp: Stamp | None = None
        self._former = ""
        self._writing = asyncio.Lock()
        self._said = ""
        self.root_is_new = False
        """The root file system has just got back what was copied from its predecessor."""

    # --- a new agent ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Empty the directory of run files where they are those of another container. Blocks on the disk.

        Raises ``BootError`` where the state is that of a newer version.
        """
        here, copy = _read(self._paths.stamp), _read(self._copy_stamp)
        for stamp in (here, copy):
            if stamp is not None and stamp.schema > SCHEMA:
                raise BootError(
                    f"cannot use the state below {self._paths.base}: it has schema {stamp.schema} of a newer version, "
                    f"and this one knows {SCHEMA}"
                )
        here = here or Stamp(SCHEMA, "", "")
        self._former = here.agent_id or _agent_id(self._paths.settings_cache)
        now = proc.incarnation()
        if copy is None or (here.lineage == copy.lineage and now in ("", here.incarnation, copy.incarnation)):
            return
        logger.info("the container is another one: what its predecessor left in %s is removed", self._paths.run)
        _empty(self._paths.run)
        # In two places: an agent that finds it in neither would remove the files of jobs that run.
        _write(self._paths.stamp, msgspec.structs.replace(here, incarnation=now))
        _write(self._copy_stamp, msgspec.structs.replace(copy, incarnation=now))

    async def recover(self, agent_id: str) -> None:
        """Give a new root file system what the former one had, if that was this agent's; from now on copy.

        Raises ``BootError`` when that is not possible: an agent without it would be another one.
        """
        try:
            await asyncio.to_thread(self._recover, agent_id)
        except OSError as exc:
            raise BootError(f"cannot restore the state of this agent: {exc}") from exc

    def _recover(self, agent_id: str) -> None:
        here, copy = _read(self._paths.stamp) or Stamp(SCHEMA, "", ""), _read(self._copy_stamp)
        if self._former not in ("", agent_id):
            self._set_aside_root(self._former)
            here = Stamp(SCHEMA, "", "")
        if copy is not None and copy.agent_id != agent_id:
            self._set_aside_copy(copy.agent_id)
            copy = None
        ours = Stamp(SCHEMA, agent_id, here.lineage or secrets.token_hex(8), proc.incarnation(), here.is_prepared)
        if copy is not None and here.lineage != copy.lineage:
            self._restore()
            self.root_is_new = True
            ours = msgspec.structs.replace(ours, lineage=copy.lineage, is_prepared=False)
        # What is restored counts as such from here on; a kill before that has it restored once more.
        _write(self._paths.stamp, ours)
        _write(self._copy_stamp, ours)
        self._stamp = ours
        self._update()

    def _restore(self) -> None:
        for name, file in self._files.items():
            with suppress(FileNotFoundError):
                raw = (self._paths.mirror / name).read_bytes()
                if not file.path.parent.is_dir():
                    files.make_dir(file.path.parent, 0o755)
                files.write_atomic(file.path, raw, mode=file.mode, owner=file.owner)
                logger.info("%s is back, from the copy of the root file system before this one", file.path)

    def _set_aside_root(self, whose: str) -> None:
        aside = self._paths.bosh / SET_ASIDE / _plain(whose)
        self._move(((file.path, name) for name, file in self._files.items()), aside, whose)
        self._move([(self._paths.stamp, STAMP)], aside, whose)
        _empty(self._paths.monit_job)  # they lie in the bundles of the jobs as well

    def _set_aside_copy(self, whose: str) -> None:
        names = [*self._files, self._paths.supervisor_state.name, STAMP]
        aside = self._paths.mirror / SET_ASIDE / _plain(whose)
        self._move(((self._paths.mirror / name, name) for name in names), aside, whose)

    def _move(self, found: Iterable[tuple[Path, str]], aside: Path, whose: str) -> None:
        for path, name in found:
            if path.exists():
                files.make_dir(aside, 0o700)
                shutil.move(path, aside / name)
                logger.warning("%s belongs to another agent, %s: it is set aside in %s", path, whose, aside)

    # --- pre-start on a new root file system ------------------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        """False until the pre-start scripts of jobs that shall run have run on this root file system."""
        return self._stamp is None or self._stamp.is_prepared

    async def prepared(self) -> None:
        """They have."""
        if self._stamp is not None and not self._stamp.is_prepared:
            self._stamp = msgspec.structs.replace(self._stamp, is_prepared=True)
            await asyncio.to_thread(_write, self._paths.stamp, self._stamp)

    # --- copying ----------------------------------------------------------------------------------------------------

    async def update(self) -> None:
        """Copy what has changed. What cannot be copied is said; it is tried again."""
        if self._stamp is None:
            return
        async with self._writing:
            await asyncio.to_thread(self._update)

    async def watch(self) -> NoReturn:
        """For ever: copy what changes without an action, or what could not be copied before."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.update()

    def _update(self) -> None:
        for name, file in self._files.items():
            seen = files.version(file.path)
            if name in self._copied and self._copied[name] == seen:
                continue
            try:
                _make_equal(self._paths.mirror / name, file.path)
            except OSError as exc:
                self._say(f"a restart of the container would lose {file.path}: {exc}")
                continue
            self._copied[name] = seen

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            logger.error("%s", text)

    @property
    def _copy_stamp(self) -> Path:
        return self._paths.mirror / STAMP


def forget(paths: Paths) -> None:
    """Remove the copy and both stamps: another agent takes over, and what it does from now on is not copied."""
    names = [*kept(paths), paths.supervisor_state.name, SET_ASIDE]
    for path in (paths.mirror / STAMP, *(paths.mirror / name for name in names), paths.stamp):
        files.remove_tree(path)


def _read(path: Path) -> Stamp | None:
    """A stamp; one that cannot be read is nobody's, and what it belongs to is not used."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stamp)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        logger.error("cannot read %s: %s", path, exc)
        return Stamp(SCHEMA, "", "")


def _write(path: Path, stamp: Stamp) -> None:
    """Write a stamp; a full disk is no reason to stay down."""
    if _read(path) == stamp:
        return
    try:
        files.write_atomic(path, msgspec.json.encode(stamp), mode=0o600)
    except HostError as exc:
        logger.error("%s", exc)


def _agent_id(settings_cache: Path) -> str:
    """Whose settings lie on this root file system; "" if nobody's."""

    class Named(msgspec.Struct):
        agent_id: str = ""

    try:
        return wire.convert(wire.decode_json(settings_cache.read_bytes()), Named).agent_id
    except (OSError, ValueError):
        return ""


def _plain(agent_id: str) -> str:
    """An id out of a file as the name of a directory."""
    return agent_id.replace("/", "_").replace("\0", "_").strip(".")[:100] or "unnamed"


def _make_equal(copy: Path, path: Path) -> None:
    """Make ``copy`` what ``path`` is, absent too; what is equal is not written."""
    if path.is_symlink():  # to memory, which is where it stays
        copy.unlink(missing_ok=True)
        return
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        copy.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        if copy.read_bytes() == raw:
            return
    files.write_atomic(copy, raw, mode=0o600)


def _empty(directory: Path) -> None:
    """Remove what is in a directory; what is mounted there stays."""
    try:
        inside = list(directory.iterdir())
    except FileNotFoundError:
        return
    for path in inside:
        try:
            files.remove_tree(path)
        except HostError as exc:
            logger.warning("%s", exc)
