"""Sends alerts about processes to the Health Monitor.

Severities, titles and fields are the same as in the Go agent (``agent/alert/monit_adapter.go``). The names of events
are the same as in monit.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NoReturn

import msgspec

from agent_shim.core import safetext
from agent_shim.core.errors import BusError

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 1000
"""Maximum number of alerts queued for the bus."""

REPEAT_INTERVAL_S: Final = 10.0
"""Seconds during which an identical alert is raised only once. The same is true of monit, because its cycle takes ten
seconds.
"""

MAX_SUMMARY_CHARS: Final = 4096

DEFAULT_SEVERITY: Final = 2
"""Severity of an event that is not in ``SEVERITIES``."""

_BOTH: Final = (
    "checksum, connection, data access, execution, filesystem flags, gid, heartbeat, icmp, monit instance, type, "
    "permission, pid, ppid, resource limit, size, timestamp, uid"
)
_BY_SEVERITY: Final = {
    1: "connection failed, execution failed, monit instance failed, does not exist",
    2: "checksum failed, icmp failed, pid failed, ppid failed, timeout, uid failed",
    3: "connection changed, content failed, content doesn't match, data access error, filesystem flags failed, "
    "gid failed, heartbeat failed, invalid type, permission failed, resource limit matched, size failed, size changed, "
    "timestamp failed",
    4: "checksum changed, data access changed, execution changed, filesystem flags changed, gid changed, "
    "heartbeat changed, icmp changed, type changed, existence changed, permission changed, pid changed, ppid changed, "
    "resource limit changed, timeout changed, timestamp changed, uid changed",
}
_ONLY_NOT_CHANGED: Final = ("existence", "timeout")

SEVERITIES: Final = {event: severity for severity, events in _BY_SEVERITY.items() for event in events.split(", ")}

IGNORED: Final = frozenset(
    {"action done", "exists", "content match", "content succeeded", "timeout recovery", "monit instance changed"}
    | {f"{what} succeeded" for what in _BOTH.split(", ")}
    | {f"{what} not changed" for what in (*_BOTH.split(", "), *_ONLY_NOT_CHANGED)}
)
"""Recovery events, which are not sent."""


def alert_of(service: str, event: str, action: str, description: str, ips: Iterable[str], now: float) -> bytes | None:
    """Encode the alert for an event. Return None for a recovery. ``now`` is in seconds since 1970.

    Each alert gets a unique id, because the Health Monitor drops repeated ids.
    """
    if event.lower() in IGNORED:
        return None
    addresses = ", ".join(sorted(ips))
    alert = {
        "id": str(uuid.uuid4()),
        "severity": SEVERITIES.get(event.lower(), DEFAULT_SEVERITY),
        "title": safetext.line(f"{service}{f' ({addresses})' if addresses else ''} - {event} - {action}"),
        "summary": safetext.lines(description[:MAX_SUMMARY_CHARS]),
        "created_at": int(now),
    }
    return msgspec.json.encode(alert)


class Alerts:
    """Sends alerts, and queues them while the bus is disconnected. ``run`` is the root task.

    ``publish`` sends a message to a subject, and raises ``BusError`` while that is not possible. ``encode`` returns the
    message for an event, or None to send nothing. Its parameters are those of ``alert_of``. Identical alerts within
    ``quiet`` seconds are sent only once. The daemon that replaces monit passes functions that send emails instead.
    """

    def __init__(
        self,
        agent_id: str,
        publish: Callable[[str, bytes], Awaitable[None]],
        *,
        quiet: float = REPEAT_INTERVAL_S,
        encode: Callable[[str, str, str, str, Iterable[str], float], bytes | None] = alert_of,
    ) -> None:
        self.sent = 0
        self.dropped = 0
        """Number of queued alerts that were dropped to make room for newer ones."""
        self.collapsed = 0
        """Number of repeated alerts that were not sent."""
        self._subject = f"hm.agent.alert.{agent_id}"
        self._publish = publish
        self._quiet = quiet
        self._encode = encode
        self.waiting: deque[bytes] = deque()
        """Messages that have not been sent yet, oldest first."""
        self._raised_at: dict[tuple[str, str, str], float] = {}
        """When alerts were raised during the last ``quiet`` seconds, by service, event and action."""
        self._wake = asyncio.Event()
        """Set to make ``run`` send the queued alerts."""

    def raise_alert(self, service: str, event: str, action: str, description: str, ips: Iterable[str]) -> None:
        """Queue an alert, unless it is a recovery or a repetition."""
        message = self._encode(service, event, action, description, ips, time.time())  # noqa: TID251 - created_at is wall time
        if message is None:
            return
        if self._is_repeated((service, event, action)):
            self.collapsed += 1
            return
        if len(self.waiting) >= MAX_QUEUED:
            self.waiting.popleft()
            self.dropped += 1
        self.waiting.append(message)
        self._wake.set()

    def flush(self) -> None:
        """Make ``run`` try again to send the queued alerts. Called after a reconnection and, for emails, in each monit
        cycle.
        """
        self._wake.set()

    async def run(self) -> NoReturn:
        """Send queued alerts until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._send_waiting()
            except BusError as exc:
                logger.info("%d alerts queued: %s", len(self.waiting), exc)

    async def _send_waiting(self) -> None:
        """Send the queued alerts, oldest first. An alert that cannot be sent stays queued. Raises ``BusError``."""
        while self.waiting:
            message = self.waiting[0]
            await self._publish(self._subject, message)
            self.sent += 1
            if self.waiting and self.waiting[0] is message:  # the message may have been dropped while it was being sent
                self.waiting.popleft()

    def _is_repeated(self, kind: tuple[str, str, str]) -> bool:
        """Return True if an alert with the same service, event and action was raised less than ``quiet`` seconds ago.
        Otherwise, remember this one.
        """
        now = time.monotonic()
        if now - self._raised_at.get(kind, float("-inf")) < self._quiet:
            return True
        self._raised_at = {other: at for other, at in self._raised_at.items() if now - at < self._quiet}
        self._raised_at[kind] = now
        return False
