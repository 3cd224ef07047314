"""Notifies systemd that the agent is ready, alive or stopping (sd_notify(3)).

Nothing happens if systemd provided no socket. The protocol's variables are removed from the environment, so that jobs
do not inherit them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

BEATS: Final = 3
"""Number of keep-alive messages to send within systemd's watchdog timeout."""


class Notifier(msgspec.Struct, frozen=True):
    """Client of the systemd socket at ``address`` ("" for none). ``patience`` is systemd's watchdog timeout in seconds,
    or 0 if systemd does not watch this process.
    """

    address: str = ""
    patience: float = 0.0

    def ready(self) -> None:
        """Report that the agent is ready."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Report a deliberate shutdown."""
        self._send("STOPPING=1")

    @property
    def period(self) -> float:
        """Return the interval between keep-alive messages in seconds, or 0 if systemd does not expect any."""
        return self.patience / BEATS

    def beat(self) -> None:
        """Report that the agent is alive. The watchdog's thread calls this until the process exits."""
        if self.patience:
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self.address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                # A leading @ represents the NUL at the start of an abstract socket's name.
                sender.sendto(message.encode(), self.address.replace("@", "\0", 1))
        except OSError as exc:
            logger.warning("cannot notify systemd of %s: %s", message, exc.strerror)


def from_environment(environ: MutableMapping[str, str] = os.environ) -> Notifier:
    """Create a notifier from the variables that systemd set for this process, and remove them from ``environ``."""
    address = environ.pop("NOTIFY_SOCKET", "")
    period, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    is_ours = period.isdigit() and pid in ("", str(os.getpid()))
    return Notifier(address, int(period) / 1e6 if is_ours else 0.0)
