"""Installs the trusted certificates from the Director on this machine, in addition to those in its image.

The paths, the command and the limits match those of the Go agent (platform/cert/cert_manager.go). There are two
differences. The command, ``update-ca-certificates``, takes a second, so it runs only after a change. If the
certificates are missing in a new container, they are installed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
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
"""The bundle that ``update-ca-certificates`` generates from all certificate directories."""
UPDATE_TIMEOUT_S: Final = 60.0
"""Timeout for one run of ``update-ca-certificates``. It sometimes hangs, so there are several attempts."""
GRACE_S: Final = 5.0
TRIES: Final = 3

PENDING: Final = DIRECTORY / "bosh-trusted-certs.pending"
"""This file exists while a change is incomplete. It is created before the first certificate file is changed, and
removed once ``update-ca-certificates`` has succeeded. That command ignores this file, because it reads only ``*.crt``.
"""

_OURS: Final = "bosh-trusted-cert-"


class TrustedCas:
    """Installs trusted CAs if the agent may configure this machine."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._turn = asyncio.Lock()

    async def install(self, bundle: str, *, tries: int = TRIES) -> str | None:
        """Trust the CAs in ``bundle`` (concatenated PEM) and those in the image, but no others.

        If ``update-ca-certificates`` fails, it is run again, up to ``tries`` times in total.

        Return the reason if nothing is installed, or None. Raises ``ActionError``.
        """
        if not self._paths.is_system or os.geteuid() != 0:
            return "needs root and the base directory /var/vcap"
        found = await asyncio.to_thread(split, bundle)
        wanted = {f"{_OURS}{number}.crt": pem for number, pem in enumerate(found, 1)}
        async with self._turn:
            with errors_as("cannot install trusted certificates"):
                if await asyncio.to_thread(_write, wanted) or await asyncio.to_thread(_is_stale, wanted):
                    await _update(tries)
                    await asyncio.to_thread(PENDING.unlink, missing_ok=True)
        return None


def split(bundle: str) -> list[str]:
    """Return the PEM certificates in ``bundle``, leaving out any text between them.

    PEM blocks that OpenSSL cannot read are left out, because clients could not read a bundle that contains them.
    """
    good, bad = x509.readable(bundle)
    for number in bad:
        text = "cannot trust certificate %d of the Director: it is not a certificate; the others are used"
        logger.error(text, number)
    return good


def _write(wanted: Mapping[str, str]) -> bool:
    """Write the files in ``wanted``. Return True if that changed anything."""
    new = {name: pem for name, pem in wanted.items() if not _holds(DIRECTORY / name, pem)}
    old = [path for path in DIRECTORY.glob(f"{_OURS}*") if path.name not in wanted]
    if not (new or old):
        return False
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # if this fails, writing the certificate files below reports the error
        PENDING.touch()  # so that the next agent runs the command if this one is killed first
    for name, pem in new.items():
        files.write_atomic(DIRECTORY / name, pem.encode())
    for path in old:
        files.remove_tree(path)
    return True


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(errors="replace") == text


def _is_stale(wanted: Mapping[str, str]) -> bool:
    """Return True if the last run of ``update-ca-certificates`` did not produce the certificates in ``wanted``.

    The result is checked using the content of the bundle, and the links that the command creates next to the bundle,
    one for each CA. Modification times cannot be used, because the certificate directories in an image may be newer
    than a bundle that is up to date.
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
    """Run ``update-ca-certificates``. If it fails, try again, up to ``tries`` times in total."""
    for tries_left in reversed(range(tries)):
        try:
            await command.run("/usr/sbin/update-ca-certificates", "-f", timeout=UPDATE_TIMEOUT_S, grace=GRACE_S)
            return
        except HostError as exc:
            if not tries_left:
                raise ActionError(f"Updating certificates with retries: {exc}") from exc
            logger.warning("%s; %d more tries", exc, tries_left)
