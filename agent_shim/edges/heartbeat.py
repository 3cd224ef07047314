"""Sends heartbeats to the Health Monitor, every 30 s and whenever the agent has connected to the bus.

The message has the same format as the Go agent's (``agent/heartbeat.go``). The Health Monitor considers an agent dead
after 60 s without a heartbeat, so a heartbeat waits only briefly for the vitals to be measured and otherwise contains
the previous vitals. All other values are always current.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from agent_shim.core.errors import BusError
from agent_shim.core.events import is_set_within
from agent_shim.host import clock

logger = logging.getLogger(__name__)

V = TypeVar("V")


class Message(msgspec.Struct, frozen=True):
    """A heartbeat. It has no ``id`` and no ``timestamp``, because the Health Monitor drops messages with repeated ids
    or non-integer times (``events/base.rb``, ``events/heartbeat.rb``).
    """

    deployment: str
    job: str | None
    index: int | None
    job_state: str
    vitals: Any
    node_id: str
    number_of_processes: int | None


class Heartbeat(Generic[V]):
    """Sends heartbeats every ``period`` seconds, and extra ones on request. ``run`` is the root task.

    ``collect`` measures the vitals. A heartbeat waits at most ``collect_s`` seconds for it. If ``collect`` is late or
    fails, the previous vitals are sent. ``compose`` builds the message from the vitals (None before the first
    measurement) and the current state. ``publish`` raises ``BusError`` while disconnected.
    """

    def __init__(
        self,
        collect: Callable[[], Coroutine[Any, Any, V]],
        compose: Callable[[V | None], bytes],
        publish: Callable[[bytes], Awaitable[None]],
        *,
        period: float = 30.0,
        collect_s: float = 1.0,
    ) -> None:
        self.sent_at: float | None = None
        """Monotonic time at which the last heartbeat was sent."""
        self._collect = collect
        self._compose = compose
        self._publish = publish
        self._period = period
        self._collect_s = collect_s
        self._now = asyncio.Event()
        """Set to make ``run`` send an extra heartbeat."""
        self._vitals: V | None = None
        self._measuring: asyncio.Task[V] | None = None

    def beat_now(self) -> None:
        """Make ``run`` send an extra heartbeat, without shifting the regular ones. Called whenever the agent has
        connected to the bus.
        """
        self._now.set()

    async def run(self) -> NoReturn:
        """Send heartbeats until cancelled."""
        due = time.monotonic() + clock.until_beat(self._period)
        try:
            while True:
                if not await is_set_within(due - time.monotonic(), self._now):
                    # Skip heartbeats that are overdue, for example because the process was suspended.
                    due += self._period * ((time.monotonic() - due) // self._period + 1)
                self._now.clear()
                await asyncio.wait({self._measure()}, timeout=self._collect_s)
                try:
                    await self._publish(self._compose(self._vitals))
                    self.sent_at = time.monotonic()
                except BusError as exc:
                    logger.debug("no heartbeat: %s", exc)
        finally:
            if self._measuring is not None:
                self._measuring.cancel()

    def _measure(self) -> asyncio.Task[V]:
        """Return the task that is measuring the vitals, after starting one if there is none."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._collect(), name="vitals")
            self._measuring.add_done_callback(self._measured)
        return self._measuring

    def _measured(self, measuring: asyncio.Task[V]) -> None:
        """Store the vitals that a task has measured."""
        if measuring.cancelled():
            return
        if (exc := measuring.exception()) is None:
            self._vitals = measuring.result()
        else:
            logger.warning("cannot measure the vitals, sending the previous ones", exc_info=exc)
