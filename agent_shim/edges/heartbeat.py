"""Heartbeats: what the Health Monitor knows of us, every 30 s and whenever there is a link to the bus again.

The message is that of the Go agent (``agent/heartbeat.go``). The Health Monitor gives an agent up after 60 s of
silence, so a beat leaves when it is due, with the vitals that are there; the rest of it is put together at that moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from agent_shim.core.errors import BusError

logger = logging.getLogger(__name__)

V = TypeVar("V")


def build(
    *,
    deployment: str,
    job: str | None,
    index: int | None,
    job_state: str,
    vitals: Any,
    node_id: str,
    number_of_processes: int | None,
) -> bytes:
    """The bytes of a heartbeat.

    It has neither ``id`` nor ``timestamp``: the Health Monitor drops what repeats an id and what carries a time that is
    no integer (``events/base.rb``, ``events/heartbeat.rb``).
    """
    return msgspec.json.encode(
        {
            "deployment": deployment,
            "job": job,
            "index": index,
            "job_state": job_state,
            "vitals": vitals,
            "node_id": node_id,
            "number_of_processes": number_of_processes,
        }
    )


class Heartbeat(Generic[V]):
    """Beats on a grid of ``period`` seconds, and out of turn when told to; ``run`` is the root task.

    ``collect`` measures the vitals. It is begun ``patience`` seconds before a beat; if it is not done by then, or
    fails, the last vitals are sent. ``compose`` makes the message of the vitals (None before the first are there) and
    of what else is true now; ``publish`` raises ``BusError`` while there is no link.
    """

    def __init__(
        self,
        collect: Callable[[], Awaitable[V]],
        compose: Callable[[V | None], bytes],
        publish: Callable[[bytes], Awaitable[None]],
        *,
        period: float = 30.0,
        patience: float = 1.0,
    ) -> None:
        self.sent_at: float | None = None
        """Monotonic time of the last beat that went out."""
        self.sent = 0
        self.missed = 0
        """Beats that found no link."""
        self.failed = 0
        """Times that the vitals could not be measured or the message not be made."""
        self._collect = collect
        self._compose = compose
        self._publish = publish
        self._period = period
        self._patience = patience
        self._now = asyncio.Event()
        self._vitals: V | None = None
        self._measuring: asyncio.Task[V] | None = None

    def beat_now(self) -> None:
        """Beat out of turn, because there is a link again or something changed; the grid stays as it is."""
        self._now.set()

    async def run(self) -> NoReturn:
        """Beat for ever."""
        due = time.monotonic() + self._period
        try:
            while True:
                if await self._is_told(due - self._patience):
                    self._now.clear()
                    await asyncio.wait({self._measure()}, timeout=self._patience)
                else:
                    self._measure()
                    await asyncio.sleep(due - time.monotonic())
                    due += self._period * ((time.monotonic() - due) // self._period + 1)
                await self._beat()
        finally:
            if self._measuring is not None:
                self._measuring.cancel()

    async def _is_told(self, until: float) -> bool:
        """Wait for being told to beat; False when it did not come until then."""
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await self._now.wait()
        except TimeoutError:
            return False

    def _measure(self) -> asyncio.Task[V]:
        """Begin to measure, if that is not going on."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._collected(), name="vitals")
            self._measuring.add_done_callback(self._measured)
        return self._measuring

    async def _collected(self) -> V:
        return await self._collect()

    def _measured(self, measuring: asyncio.Task[V]) -> None:
        if measuring.cancelled():
            return
        if (exc := measuring.exception()) is None:
            self._vitals = measuring.result()
        else:
            self.failed += 1
            logger.warning("cannot measure the vitals, the last ones are sent", exc_info=exc)

    async def _beat(self) -> None:
        """Send one; in an asyncio task of its own, so that whatever goes wrong in it stays there."""
        sending = asyncio.create_task(self._send(), name="beat")
        await asyncio.wait({sending})
        exc = sending.exception()
        if exc is None:
            self.sent += 1
            self.sent_at = time.monotonic()
        elif isinstance(exc, BusError):
            self.missed += 1
        else:
            self.failed += 1
            logger.error("cannot make a heartbeat", exc_info=exc)

    async def _send(self) -> None:
        await self._publish(self._compose(self._vitals))
