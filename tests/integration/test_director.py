"""The Director and the Health Monitor of the tests do what the real ones do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_shim_demo.director import Director, RpcTimeoutError, joined
from tests.support.broker import NatsServer
from tests.support.waiting import until


@asynccontextmanager
async def answering(where: Path, *answers: Any) -> AsyncIterator[tuple[Director, list[dict[str, Any]]]]:
    """A Director and a peer that gives these answers in turn, None for silence; with the requests it got."""
    requests: list[dict[str, Any]] = []
    left = list(answers)
    async with NatsServer(where) as server:
        await server.add_agent("agent")

        def received(_: str, data: bytes) -> None:
            requests.append(json.loads(data))
            answer = left.pop(0)
            if answer is not None:
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                sending.append(asyncio.create_task(peer.publish(requests[-1]["reply_to"], raw)))

        sending: list[asyncio.Task[None]] = []
        async with (
            joined(server.mbus("agent"), ("agent.agent",), received) as peer,
            Director(poll=0.01).on(server.peer()) as director,
        ):
            yield director, requests
            await asyncio.gather(*sending)


RUNNING = {"value": {"agent_task_id": "t1", "state": "running"}}


@pytest.mark.parametrize(
    ("method", "times"), [("get_task", 5), ("get_state", 3), ("upload_blob", 4), ("ping", 1), ("start", 1)]
)
async def test_silence(tmp_path: Path, method: str, times: int) -> None:
    """Some requests are repeated, each with another subject for the reply; then they fail."""
    async with answering(tmp_path, *[None] * times) as (director, requests):
        with pytest.raises(RpcTimeoutError):
            await director.call("agent", method, timeout=0.05)
        await until(lambda: len(requests) >= times)

    assert len({request["reply_to"] for request in requests}) == len(requests) == times


@pytest.mark.parametrize("nothing", [b"", b"{}", b"[]", b"no json", b"null"])
async def test_reply_that_is_none(tmp_path: Path, nothing: bytes) -> None:
    """An empty reply or one that is no object is dropped."""
    async with answering(tmp_path, nothing) as (director, _):
        with pytest.raises(RpcTimeoutError):
            await director.call("agent", "ping", timeout=0.1)


async def test_polling_has_a_limit(tmp_path: Path) -> None:
    """A stop is not waited for without end."""
    async with answering(tmp_path, *[RUNNING] * 1000) as (director, _):
        with pytest.raises(RpcTimeoutError, match="Timed out waiting for 'stop'"):
            await director.run("agent", "stop", limit=0.05)
