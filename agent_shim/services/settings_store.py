"""Finds the settings on disk, waiting for them if necessary, and reloads and caches them.

The sources are the files that agent.json names, in the order given there, and then ``settings.json``, which is a copy
of the last valid document. Values in ``update_settings.json`` override those of every source (settings/service.go in
the Go agent). If no source is valid, the store waits, because some CPIs write the files only after the container has
started. An error is logged only once.

The store also keeps the bus credentials from before the last rotation, in case the current ones are rejected after a
restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core import settings, wire
from agent_shim.core.errors import HostError, SettingsError
from agent_shim.core.paths import Paths
from agent_shim.host import clock, files

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Poll interval. A poll costs one stat call for each file, and there are only a few files."""
IDLE_POLL_FACTOR: Final = 20
"""Once settings are loaded, the poll interval is longer by this factor."""


class SettingsStore:
    """Loads the settings and stores updates to them (``update_settings``). ``current`` returns the settings that were
    last loaded or updated.

    ``look`` is the poll interval in seconds. Settings without a bus address are rejected if ``needs_bus`` is set.
    """

    def __init__(self, paths: Paths, sources: Sequence[Path], *, look: float = POLL_S, needs_bus: bool = True) -> None:
        self._paths = paths
        self._sources = tuple(sources)
        self._look = look
        self._needs_bus = needs_bus
        self._current: settings.Effective | None = None
        self._former: settings.Mbus | None = None
        """The credentials from before the last rotation."""
        self._said = ""
        """The last message that was logged by ``_say``."""
        self._ignored: list[str] = []
        """Invalid members of the settings that have already been reported."""
        self._turn = asyncio.Lock()
        """Serializes reads and writes of the files, so that ``current`` is always the result of the last operation."""

    @property
    def current(self) -> settings.Effective:
        """The settings. Available once ``wait`` has returned."""
        if self._current is None:
            raise SettingsError("cannot use the settings: none were read yet")
        return self._current

    async def wait(self) -> settings.Effective:
        """Wait for valid settings, without a timeout."""
        while True:
            try:
                return await self.refreshed()
            except SettingsError as exc:
                self._say(logging.WARNING, f"{exc}; waiting for it to change")
            await asyncio.sleep(self._look)

    async def refreshed(self) -> settings.Effective:
        """Reload everything. On failure, raises ``SettingsError`` and keeps the current settings."""
        async with self._turn:
            source, raw, origin = await asyncio.to_thread(self._read_source)
            update = await asyncio.to_thread(self._read_update)
            self._former = await asyncio.to_thread(_read_mbus, self._paths.former_mbus)
            found = settings.Effective(source, update)
            if self._needs_bus:
                settings.require_bus(found, str(origin))
            if origin != self._paths.settings_cache:
                await self._keep(raw)
            self._current = found
            return found

    def merged(self, news: settings.UpdateSettings) -> settings.Effective:
        """Return the settings that would result from storing ``news``. ``update_settings`` uses this to test new
        credentials before it stores them.
        """
        return settings.Effective(self.current.source, self.current.update.merged(news))

    async def save_update(self, update: settings.UpdateSettings) -> None:
        """Store ``update`` and apply it to the current settings."""
        async with self._turn:
            path = files.behind(self._paths.update_settings)
            await asyncio.to_thread(files.write_atomic, path, msgspec.json.encode(update), mode=0o600)
            self._current = settings.Effective(self.current.source, update)

    async def keep_former(self, mbus: settings.Mbus) -> None:
        """During a rotation, store the credentials that have worked so far. If storing them fails, the rotation
        continues.
        """
        async with self._turn:
            self._former = mbus
            try:
                path = files.behind(self._paths.former_mbus)
                await asyncio.to_thread(files.write_atomic, path, msgspec.json.encode(mbus), mode=0o600)
            except HostError as exc:
                self._say(logging.WARNING, f"cannot keep the former credentials of the bus: {exc}")

    def other_mbus(self, refused: settings.Mbus) -> settings.Mbus:
        """Return the credentials to try after ``refused``. They are tried in this order: the current ones, the former
        ones, the CPI's, those from ``update_settings``, and then the current ones again.

        A restart during a rotation, a CPI that recreated the container, or a restored bus can make any of these stale.
        """
        present, *others = self.current.known_mbus
        known = list(dict.fromkeys([present, *([self._former] if self._former else []), *others]))
        return known[(known.index(refused) + 1) % len(known)] if refused in known else present

    async def watch(self, changed: Callable[[settings.Effective], Awaitable[None]]) -> None:
        """Poll the settings files forever, and call ``changed`` with the new settings whenever they change."""
        seen = self._stamps()
        reported = self._current
        while True:
            await asyncio.sleep(clock.until_beat(IDLE_POLL_FACTOR * self._look))
            stamps = self._stamps()
            if stamps == seen:
                continue
            try:
                found = await self.refreshed()
            except SettingsError as exc:
                self._say(logging.WARNING, f"{exc}; keeping the settings read before")
                continue
            finally:
                seen = stamps
            # Compare with the last reported settings, because an action may already have loaded the change without
            # reporting it.
            if found != reported:
                logger.info("the settings have changed")
                reported = found
                await changed(found)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Return the versions of the watched files."""
        # Make these stat calls in the event loop, where they take only about 10 µs. Starting a thread for each poll
        # would take up a quarter of an idle agent's CPU time.
        return [files.version(path) for path in (*self._sources, self._paths.update_settings)]

    def _read_source(self) -> tuple[settings.Settings, bytes, Path]:
        """Load the first valid source. If there is none, raise the error of the first existing file."""
        problem: SettingsError | None = None
        for path in (*self._sources, self._paths.settings_cache):
            try:
                raw = files.read(path, is_own=True) if path == self._paths.settings_cache else files.read(path)
                ignored: list[str] = []
                found = settings.parse(raw, origin=str(path), ignored=ignored)
                if ignored != self._ignored:
                    self._ignored = ignored
                    for member in ignored:
                        logger.warning("ignoring a member of the settings in %s: %s", path, member)
                return found, raw, path
            except SettingsError as exc:
                problem = problem or exc
            except FileNotFoundError:
                continue
            except OSError as exc:
                problem = problem or SettingsError(f"cannot read settings from {path}: {exc.strerror}")
        raise problem or SettingsError(f"cannot read settings from {', '.join(map(str, self._sources))}: no such file")

    def _read_update(self) -> settings.UpdateSettings:
        """Load the stored update. If the file is unreadable, return the update that was last read."""
        path = self._paths.update_settings
        try:
            return settings.parse_update(files.read(path, is_own=True), origin=str(path))
        except FileNotFoundError:
            return settings.UpdateSettings()
        except (OSError, SettingsError) as exc:
            # This error is never fatal. If the file is still being written, it will change again, and the agent will
            # then reread it.
            self._say(logging.ERROR, f"cannot use {path}: {exc}; ignoring its latest change")
            return self._current.update if self._current else settings.UpdateSettings()

    async def _keep(self, raw: bytes) -> None:
        """Cache the document in case its source is unavailable later. A failure to do so is only logged."""
        try:
            # The first copy after a start is written even if the content has not changed, so that it gets the right
            # mode.
            path, is_known = files.behind(self._paths.settings_cache), self._current is not None
            await asyncio.to_thread(files.write_atomic, path, raw, mode=0o600, if_changed=is_known)
        except OSError as exc:
            self._say(logging.WARNING, f"cannot keep a copy of the settings in {self._paths.settings_cache}: {exc}")

    def _say(self, level: int, text: str) -> None:
        """Log a message unless it is the same as the previous one."""
        if text != self._said:
            self._said = text
            logger.log(level, "%s", text)


def _read_mbus(path: Path) -> settings.Mbus | None:
    """Load the stored credentials. Return None if they are missing or unreadable."""
    try:
        return wire.decode(files.read(path, is_own=True), settings.Mbus)
    except (OSError, ValueError):
        return None
