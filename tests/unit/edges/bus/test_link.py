"""Tests nats-py's private interface, on which the bus link relies."""

from __future__ import annotations

import asyncio
from urllib.parse import ParseResult

import pytest
from nats.aio.client import Client
from nats.aio.transport import Transport


async def test_nats_client_connects_with_the_given_transport() -> None:
    """All supported nats-py versions must have this interface, so ``./dev test-dependencies`` runs this test with
    the oldest and the newest of them.
    """
    asked: list[str] = []

    class Ours(Transport):
        async def connect(self, uri: ParseResult, *_: int, **__: int) -> None:
            asked.append(uri.netloc)

        async def readline(self) -> bytes:
            raise ConnectionResetError

        def __bool__(self) -> bool:
            return True

        connect_tls = read = drain = wait_closed = write = writelines = close = at_eof = None  # type: ignore[assignment]

    async def ignore(_: Exception) -> None:
        await asyncio.sleep(0)

    client = Client()
    client._transport = Ours()  # noqa: SLF001
    with pytest.raises(ConnectionResetError):
        await client.connect(["nats://192.0.2.1:1"], allow_reconnect=False, error_cb=ignore)

    assert asked == ["192.0.2.1:1"]
