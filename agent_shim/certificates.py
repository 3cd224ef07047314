"""Authorities that the Director has this machine trust, beside those of its image.

Places, command and limits are the Go agent's (platform/cert/cert_manager.go). What differs: the command, which takes a
second, is run only when something has changed, and the authorities are installed again when a container has come
without them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent_shim.errors import ActionError, HostError, saying
from agent_shim.host import command, files
from agent_shim.paths import Paths

logger = logging.getLogger(__name__)

DIRECTORY: Final = Path("/usr/local/share/ca-certificates")
TRUSTED: Final = Path("/etc/ssl/certs/ca-certificates.crt")
"""What the command makes of the authorities in all places."""
PATIENCE: Final = 60.0
"""Seconds that one try may take: the command sometimes hangs."""
GRACE: Final = 5.0
TRIES: Final = 3

_OURS: Final = "bosh-trusted-cert-"
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class Certificates:
    """Installs trusted authorities where the machine is ours."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    async def install(self, bundle: str, *, tries: int = TRIES) -> str | None:
        """Trust exactly the authorities in ``bundle`` (PEM, one after the other) beside those of the image.

        Returns why that is not our business here, if so; raises ``ActionError``.
        """
        if not self._paths.is_system or os.geteuid() != 0:
            return "not root of a container with the real /var/vcap"
        wanted = {f"{_OURS}{number}.crt": pem for number, pem in enumerate(split(bundle), 1)}
        with saying("cannot install trusted certificates"):
            if await asyncio.to_thread(_write, wanted) or await asyncio.to_thread(_is_stale, wanted):
                await _update(tries)
        return None


def split(bundle: str) -> list[str]:
    """The certificates in a text, without what stands between them."""
    return [f"{pem}\n" for pem in _CERTIFICATE.findall(bundle)]


def _write(wanted: Mapping[str, str]) -> bool:
    """Make the files those of ``wanted``; whether that changed anything."""
    changed = False
    for name, pem in wanted.items():
        path = DIRECTORY / name
        if not path.is_file() or path.read_text(errors="replace") != pem:
            DIRECTORY.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, pem.encode())
            changed = True
    for path in DIRECTORY.glob(f"{_OURS}*"):
        if path.name not in wanted:
            files.remove_tree(path)
            changed = True
    return changed


def _is_stale(wanted: Mapping[str, str]) -> bool:
    """Whether the command did not come to its end after the files were last changed."""
    try:
        made = TRUSTED.stat().st_mtime_ns
    except FileNotFoundError:
        return bool(wanted)
    sources = [DIRECTORY, *(DIRECTORY / name for name in wanted)]
    return any(source.stat().st_mtime_ns > made for source in sources if source.exists())


async def _update(tries: int) -> None:
    for left in reversed(range(tries)):
        try:
            await command.run("/usr/sbin/update-ca-certificates", "-f", patience=PATIENCE, grace=GRACE)
            return
        except HostError as exc:
            if not left:
                raise ActionError(f"Updating certificates with retries: {exc}") from exc
            logger.warning("%s; %d more tries", exc, left)
