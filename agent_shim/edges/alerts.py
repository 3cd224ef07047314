"""Alerts: what the Health Monitor is told of failing processes.

Severities, titles and fields are those the Go agent makes of monit's mails (``agent/alert/monit_adapter.go``); event
names are monit's.
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

LIMIT: Final = 1000
"""Alerts that wait for the bus."""

QUIET: Final = 10.0
"""Seconds in which the same alert is raised once: monit looks every ten seconds and would tell no more."""

MAX_SUMMARY: Final = 4096

UNKNOWN: Final = 2
"""The severity of an event that no list names."""

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
"""Events that are good news, and not sent."""


def alert_of(service: str, event: str, action: str, description: str, ips: Iterable[str], now: float) -> bytes | None:
    """The message for an event, None for good news; ``now`` is the wall clock in seconds since 1970.

    The Health Monitor drops an alert whose id it has seen, so each has its own.
    """
    if event.lower() in IGNORED:
        return None
    places = ", ".join(sorted(ips))
    return msgspec.json.encode(
        {
            "id": str(uuid.uuid4()),
            "severity": SEVERITIES.get(event.lower(), UNKNOWN),
            "title": safetext.line(f"{service}{f' ({places})' if places else ''} - {event} - {action}"),
            "summary": safetext.lines(description[:MAX_SUMMARY]),
            "created_at": int(now),
        }
    )


class Alerts:
    """Alerts on their way; they wait while there is no link. ``run`` is the root task.

    ``publish`` sends to a subject and raises ``BusError`` while it cannot.
    """

    def __init__(
        self, agent_id: str, publish: Callable[[str, bytes], Awaitable[None]], *, quiet: float = QUIET
    ) -> None:
        self.sent = 0
        self.dropped = 0
        """Alerts that gave way to newer ones."""
        self.collapsed = 0
        """Alerts that only repeated another."""
        self._subject = f"hm.agent.alert.{agent_id}"
        self._publish = publish
        self._quiet = quiet
        self._waiting: deque[bytes] = deque()
        self._raised_at: dict[tuple[str, str, str], float] = {}
        self._wake = asyncio.Event()

    def raise_alert(self, service: str, event: str, action: str, description: str, ips: Iterable[str]) -> None:
        """Send an alert as soon as that is possible; good news and repetitions are passed over."""
        message = alert_of(service, event, action, description, ips, time.time())
        if message is None:
            return
        if self._is_repeated((service, event, action)):
            self.collapsed += 1
            return
        if len(self._waiting) >= LIMIT:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)
        self._wake.set()

    def flush(self) -> None:
        """Try what waits once more: there is a link."""
        self._wake.set()

    async def run(self) -> NoReturn:
        """Send for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._send_waiting()
            except BusError as exc:
                logger.info("%d alerts wait: %s", len(self._waiting), exc)

    async def _send_waiting(self) -> None:
        while self._waiting:
            message = self._waiting[0]
            await self._publish(self._subject, message)
            self.sent += 1
            if self._waiting and self._waiting[0] is message:  # it may have given way meanwhile
                self._waiting.popleft()

    def _is_repeated(self, kind: tuple[str, str, str]) -> bool:
        now = time.monotonic()
        if now - self._raised_at.get(kind, -self._quiet) < self._quiet:
            return True
        self._raised_at = {other: at for other, at in self._raised_at.items() if now - at < self._quiet}
        self._raised_at[kind] = now
        return False
