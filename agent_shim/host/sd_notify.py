"""What systemd is told of us (sd_notify(3)): that we are ready, that we live, that we go.

Silent where nobody listens. The variables of the protocol are taken out of the environment: jobs are not meant by them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

BEATS: Final = 3
"""How often systemd hears of us in the time after which it would kill us."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """``address`` is systemd's socket, "" without one; ``patience`` the seconds it waits for a beat, 0 for ever."""

    address: str = ""
    patience: float = 0.0

    def ready(self) -> None:
        """Whoever asks is answered from now on."""
        self._send("READY=1")

    def stopping(self) -> None:
        """We end, on purpose."""
        self._send("STOPPING=1")

    @property
    def period(self) -> float:
        """Seconds from beat to beat; 0 where none is wanted."""
        return self.patience / BEATS

    def beat(self) -> None:
        """We live; called by the watchdog (``host.watchdog``), from its thread, as long as it does not end us."""
        if self.patience:
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self.address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                # A name that begins with @ is an abstract one.
                sender.sendto(message.encode(), self.address.replace("@", "\0", 1))
        except OSError as exc:
            logger.warning("cannot tell systemd %s: %s", message, exc.strerror)


def from_environment(environ: MutableMapping[str, str] = os.environ) -> Notifier:
    """What systemd has put there, for this process; it is there no longer afterwards."""
    address = environ.pop("NOTIFY_SOCKET", "")
    period, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    is_ours = period.isdigit() and pid in ("", str(os.getpid()))
    return Notifier(address, int(period) / 1e6 if is_ours else 0.0)
