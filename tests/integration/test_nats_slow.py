"""If a bus server greets the agent but does not complete the handshake in time, the agent tries less often and gives
the server more time.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import Authority
from agent_shim.edges.bus.nats import BusTiming, NatsBus
from tests.support.bus import ClientConnection, connected, echo, facing
from tests.support.serving import serving
from tests.support.waiting import until


class Hasty(BusTiming, frozen=True):
    """Timing with short timeouts, which also records how many slow attempts preceded each attempt."""

    connect: float = 0.3
    step: float = 0.01
    longest: float = 0.02
    early_step: float = 0.01
    slow: list[int] = msgspec.field(default_factory=list)

    def handshake_timeout_s(self, slow: int) -> float:
        self.slow.append(slow)
        return super().handshake_timeout_s(slow)


def test_bus_retry_delays_and_timeouts_grow_at_most_threefold() -> None:
    """The delays and timeouts must stay well below the 45 s for which a Director waits for an agent."""
    timing = BusTiming()

    assert [timing.handshake_timeout_s(slow) for slow in (0, 1, 2, 9)] == [10, 20, 30, 30]
    for slow, most in ((0, 10), (1, 20), (9, 30)):
        pauses = [timing.pause(9, slow) for _ in range(200)]
        assert most / 2 <= min(pauses) <= max(pauses) <= most
    assert timing.pause(0, 9) <= timing.step


@pytest.mark.parametrize("how", ["greets", "is silent", "is away"])
async def test_bus_timeouts_grow_only_if_the_server_sends_info(how: str) -> None:
    """While the server is down, attempts cost nothing, so the timeouts stay short in case it comes back."""

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "greets":
            writer.write(b'INFO {"server_id":"S","version":"2.10.0","max_payload":1048576,"tls_required":true}\r\n')
        await asyncio.Event().wait()

    authority = Authority()
    pair = authority.agent("agent")
    timing = Hasty()
    async with contextlib.AsyncExitStack() as opened:
        port = await opened.enter_async_context(serving(take))
        if how == "is away":
            await opened.aclose()
        mbus = Mbus((f"nats://127.0.0.1:{port}",), authority.ca, pair.certificate, pair.private_key)
        running = asyncio.create_task(NatsBus("agent", mbus, echo, timing=timing).run())
        try:
            await until(lambda: len(timing.slow) >= 4)

            assert timing.slow[:4] == ([0, 1, 2, 3] if how == "greets" else [0] * 4)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_successful_bus_connection_resets_timeouts_and_delays() -> None:
    greeted, cut = 0, asyncio.Event()

    async def script(wire: ClientConnection) -> None:
        nonlocal greeted
        greeted += 1
        if greeted <= 2:
            await wire.expect("CONNECT ")
            await asyncio.Event().wait()
        await wire.greet()
        await (cut.wait() if greeted == 3 else wire.answer_pings())

    timing = Hasty()
    async with facing(script, timing=timing) as bus:
        await connected(bus)
        cut.set()
        await until(lambda: len(timing.slow) >= 4)

        assert timing.slow[:4] == [0, 1, 2, 0]
