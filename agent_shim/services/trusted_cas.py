"""Authorities that the Director has this machine trust, beside those of its image.

Places, command and limits are the Go agent's (platform/cert/cert_manager.go). What differs: the command, which takes a
second, is run only when something has changed, and the authorities are installed again when a container has come
without them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent_shim.core import x509
from agent_shim.core.errors import ActionError, HostError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.host import command, files

logger = logging.getLogger(__name__)

DIRECTORY: Final = Path("/usr/local/share/ca-certificates")
TRUSTED: Final = Path("/etc/ssl/certs/ca-certificates.crt")
"""What the command makes of the authorities in all places."""
PATIENCE: Final = 60.0
"""Seconds that one try may take: the command sometimes hangs."""
GRACE: Final = 5.0
TRIES: Final = 3

PENDING: Final = DIRECTORY / "bosh-trusted-certs.pending"
"""There from before the first file is changed until the command has come to its end; it reads ``*.crt`` alone."""

_OURS: Final = "bosh-trusted-cert-"


class TrustedCas:
    """Installs trusted authorities where the machine is ours."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._turn = asyncio.Lock()

    async def install(self, bundle: str, *, tries: int = TRIES) -> str | None:
        """Trust exactly the authorities in ``bundle`` (PEM, one after the other) beside those of the image.

        Returns why that is not our business here, if so; raises ``ActionError``.
        """
        if not self._paths.is_system or os.geteuid() != 0:
            return "not root of a container with the real /var/vcap"
        found = await asyncio.to_thread(split, bundle)
        wanted = {f"{_OURS}{number}.crt": pem for number, pem in enumerate(found, 1)}
        async with self._turn:
            with errors_as("cannot install trusted certificates"):
                if await asyncio.to_thread(_write, wanted) or await asyncio.to_thread(_is_stale, wanted):
                    await _update(tries)
                    await asyncio.to_thread(PENDING.unlink, missing_ok=True)
        return None


def split(bundle: str) -> list[str]:
    """The certificates in a text, without what stands between them.

    A block that OpenSSL cannot read is left out: it would make the file of all authorities unreadable for clients.
    """
    found = []
    for number, pem in enumerate(x509.blocks(bundle), 1):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
        except (ssl.SSLError, TypeError, ValueError):
            logger.error("cannot trust certificate %d of the Director: it is none; the others are taken", number)
        else:
            found.append(f"{pem}\n")
    return found


def _write(wanted: Mapping[str, str]) -> bool:
    """Make the files those of ``wanted``; whether that changed anything."""
    new = {name: pem for name, pem in wanted.items() if not _holds(DIRECTORY / name, pem)}
    old = [path for path in DIRECTORY.glob(f"{_OURS}*") if path.name not in wanted]
    if not (new or old):
        return False
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # a place that cannot be written is told of with the file that matters
        PENDING.touch()
    for name, pem in new.items():
        files.write_atomic(DIRECTORY / name, pem.encode())
    for path in old:
        files.remove_tree(path)
    return True


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(errors="replace") == text


def _is_stale(wanted: Mapping[str, str]) -> bool:
    """Whether what the command has made last is not what it would make now, as far as it is ours.

    It leaves a link for each authority beside the file of all. Times tell nothing: in images the directories are as
    young as the file, or younger.
    """
    linked = {path.stem for path in TRUSTED.parent.glob(f"{_OURS}*.pem")}
    if PENDING.exists() or linked != {Path(name).stem for name in wanted}:
        return True
    if not wanted:
        return False
    try:
        trusted = TRUSTED.read_text(errors="replace")
    except FileNotFoundError:
        return True
    return not all(pem.strip() in trusted for pem in wanted.values())


async def _update(tries: int) -> None:
    for left in reversed(range(tries)):
        try:
            await command.run("/usr/sbin/update-ca-certificates", "-f", patience=PATIENCE, grace=GRACE)
            return
        except HostError as exc:
            if not left:
                raise ActionError(f"Updating certificates with retries: {exc}") from exc
            logger.warning("%s; %d more tries", exc, left)
