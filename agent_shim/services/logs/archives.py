"""Creates log archives, which are uploaded for the Director or kept on disk for a download over ssh.

The log types, names in the archive, patterns and messages match those of the Go agent
(agent/logstarprovider/logs_tar_provider.go, agent/action/fetch_logs.go, bundle_logs.go). There are three differences.
Logs are not copied before they are packed. No link is followed. If files change or vanish, the request does not fail,
but the archive lists these files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from agent_shim.bulk import protocol, workers
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files

REMARKS: Final = "agent_shim.remarks.txt"
"""Archive entry that lists the files that were left out or changed while they were read, if there are any."""
MAX_AGE_S: Final = 24 * 3600.0
"""Age in seconds at which an archive on disk is removed."""
MAX_BUNDLES: Final = 20
"""Maximum number of archives on disk. Creating another one removes the oldest."""
NICE: Final = 5
"""Niceness of packing relative to the agent, so that jobs have priority."""

PACK_TIMEOUT_S: Final = 1500.0
"""Timeout for a whole archive. The packer has a shorter time limit of its own, so this timeout is reached only if a
disk hangs.
"""

_BUNDLE: Final = r"logs-[0-9a-f]{16}\.tgz"


class Logs:
    """Packs and uploads logs. All methods raise ``ActionError``."""

    def __init__(self, paths: Paths, execute: protocol.Execute = workers.execute) -> None:
        self._paths = paths
        self._execute = execute
        self._turn = asyncio.Lock()
        """Serializes calls of ``bundle``."""

    async def send(
        self,
        kinds: str,
        patterns: Sequence[str],
        store: Blobstore,
        report: Callable[[str], None],
        *,
        signed_url: str = "",
        headers: Mapping[str, str] = {},
    ) -> protocol.Done:
        """Pack logs, and upload the archive to the signed URL or, without one, to the blobstore. Return the archive's
        digests and its blob id.

        ``kinds`` is a comma-separated list of ``job``, ``agent`` and ``system``. Without patterns, all files are
        packed. ``report`` is called with a description of each step as it begins.
        """
        archive = files.sibling(self._paths.tmp / "logs")
        put = protocol.Put(str(self._paths.base), store, str(archive), signed_url, dict(headers))
        try:
            done = await self._pack(kinds, patterns, archive, put, report)
            if done.put_error:
                raise ActionError(f"Create file on blobstore: {done.put_error}")
            return done
        finally:
            await asyncio.to_thread(files.remove_tree, archive)

    async def bundle(self, kinds: str, patterns: Sequence[str], owner: str) -> tuple[Path, str]:
        """Create an archive on disk for ``owner`` (a user or ``user:group``). Return its path and its sha512 (hex).
        ``kinds`` and ``patterns`` have the same meaning as in ``send``.

        Concurrent calls are executed one after the other.
        """
        async with self._turn:
            await self.tidy()
            archive = self._paths.bundled_logs / f"logs-{secrets.token_hex(8)}.tgz"
            done = await self._pack(kinds, patterns, archive)
            try:
                if owner:
                    await asyncio.to_thread(files.chown, archive, owner)
            except OSError as exc:
                await asyncio.to_thread(files.remove_tree, archive)
                raise ActionError(str(exc)) from exc
            return archive, done.sha512

    async def remove(self, path: str) -> None:
        """Remove an archive created by ``bundle``, or a file in the temporary directory. If the path is a link, only
        the link is removed.

        Raises ``ActionError`` for any other file that exists. Does nothing if the file does not exist.
        """
        is_ours = Path(path).parent == self._paths.bundled_logs  # only root can write to this directory
        try:
            if is_ours and re.fullmatch(_BUNDLE, Path(path).name):
                await asyncio.to_thread(files.remove_tree, Path(path))
                return
            if Path(path).parent == self._paths.tmp:
                with contextlib.suppress(IsADirectoryError):
                    await asyncio.to_thread(Path(path).unlink, missing_ok=True)
                    return
        except OSError as exc:
            raise ActionError(str(exc)) from exc
        if await asyncio.to_thread(os.path.lexists, path):
            what = f"neither an archive of bundle_logs nor a file in {self._paths.tmp}"
            raise ActionError(f"cannot remove {path}: it is {what}")

    async def tidy(self) -> None:
        """Remove incomplete and expired archives, and the oldest ones if there are too many. If the directory is
        missing, create it.
        """
        with errors_as("Making logs tarball"):
            await asyncio.to_thread(_tidy, self._paths.bundled_logs)

    async def _pack(
        self,
        kinds: str,
        patterns: Sequence[str],
        archive: Path,
        put: protocol.Put | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> protocol.Done:
        """Create an archive and, if ``put`` is given, upload it."""
        # If a kind is repeated, pack it once, at its last position.
        named = reversed(dict.fromkeys(reversed(kinds.split(","))))
        trees = [self._tree(kind, list(patterns) or ["**/*"]) for kind in named]
        pack = protocol.Pack(trees, str(archive), remarks=REMARKS, put=put)
        report("packing")
        try:
            async with asyncio.timeout(PACK_TIMEOUT_S) as timeout:

                def packed(step: protocol.Progress) -> None:
                    """Disable the timeout, because the archive is complete and is now being uploaded."""
                    timeout.reschedule(None)
                    report(step.phase)

                with errors_as("Making logs tarball", ActionError):
                    return await self._execute(pack, nice=NICE, report=packed)
        except TimeoutError:
            raise ActionError(f"Making logs tarball: no result within {PACK_TIMEOUT_S:g} seconds") from None

    def _tree(self, kind: str, patterns: list[str]) -> protocol.Tree:
        """Return the files to pack for one kind of log. Raises ``ActionError`` for an unknown kind."""
        match kind:
            case "job":
                return protocol.Tree(str(self._paths.sys / "log"), patterns=patterns)
            case "agent":
                return protocol.Tree(str(self._paths.agent_log), patterns=patterns)
            case "system":
                return protocol.Tree(str(self._paths.system_log), prefix="var/log/", patterns=patterns)
        raise ActionError("Invalid log type")


def _tidy(directory: Path) -> None:
    """Create the directory for archives, which other users can traverse but not list, and remove old archives."""
    files.make_dir(directory, 0o711)
    # Take the time from the file system, because its clock may differ from the machine's.
    os.utime(directory)
    now = directory.stat().st_mtime
    by_age = sorted(directory.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    # Keep fewer than ``MAX_BUNDLES`` of the newest archives, because another one may be about to be created.
    for number, path in enumerate(by_age, 1):
        if number >= MAX_BUNDLES or files.is_leftover(path.name) or now - path.lstat().st_mtime > MAX_AGE_S:
            files.remove_tree(path)
