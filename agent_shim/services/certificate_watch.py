"""Warns about certificates that will expire soon, with a metric, a line in ``status`` and a warning in the log.

Unlike the rest of the agent, this module uses the wall clock even though it may be wrong, because a certificate's
validity is given in wall-clock time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn

from agent_shim.core.x509 import Validity, validities
from agent_shim.host.clock import until_beat

logger = logging.getLogger(__name__)

POLL_S: Final = 60.0
"""Poll interval. It is short, because a new VM's credentials are valid for an hour or less."""
DAY_S: Final = 86400.0
WARNING_PERIOD_S: Final = 30 * DAY_S
"""Warning period: the last 30 days of a certificate's validity, or its last fifth if that is shorter."""
WARNING_SHARE: Final = 0.2
HTTPS: Final = "server"
"""Name of the certificate for the HTTPS endpoint that the bosh CLI uses. All other certificates belong to the agent's
bus connection.
"""


class CertificateWatch:
    """Watches certificates. ``ends`` maps their names to their expiry (seconds since 1970), and ``warnings`` are the
    messages for ``status``, both as of the last check.
    """

    def __init__(self, certificates: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.time) -> None:  # noqa: TID251 - validity is wall time
        """``certificates`` returns PEM data by name. If an entry contains several certificates, such as the old and the
        new CA during a rotation, the latest expiry is used.
        """
        self.ends: dict[str, float] = {}
        self.warnings: list[str] = []
        self._certificates = certificates
        self._clock = clock

    async def watch(self) -> NoReturn:
        """Check the certificates periodically, forever."""
        while True:
            self.look()
            await asyncio.sleep(until_beat(POLL_S))

    def look(self) -> None:
        """Check the certificates once and log new warnings."""
        now, before = self._clock(), self.warnings
        latest = {
            name: max(found, key=lambda validity: validity.ends)
            for name, pem in self._certificates().items()
            if (found := validities(pem))
        }
        self.ends = {name: validity.ends for name, validity in latest.items()}
        self.warnings = [text for name, validity in latest.items() if (text := _warning(name, validity, now))]
        for text in self.warnings:
            if text not in before:
                logger.warning("%s", text)


def _warning(name: str, validity: Validity, now: float) -> str:
    """Return the warning for a certificate, or "". The text changes only when the certificate expires, so that the
    warning is not logged at every check.
    """
    if validity.ends - now > min(WARNING_PERIOD_S, WARNING_SHARE * (validity.ends - validity.begins)):
        return ""
    end = datetime.fromtimestamp(validity.ends, UTC).strftime("%Y-%m-%d %H:%M UTC")
    what, consequence = f"the {name} certificate of the bus", "the agent cannot reconnect to the bus"
    if name == HTTPS:
        what = "the certificate of the HTTPS endpoint"
        consequence = "the bosh CLI refuses it (put another one into the manifest)"
    if validity.ends <= now:
        return f"{what} expired at {end}: {consequence}"
    return f"{what} expires at {end}: rotate it before then"
