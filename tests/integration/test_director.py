"""The Director and the Health Monitor of the tests do what the real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import ShimError
from agent_shim_demo.director import Director, RpcRemoteError, RpcTimeoutError, joined
from tests.support.broker import NatsServer
from tests.support.bus import until


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


async def test_task_is_polled(tmp_path: Path) -> None:
    """An answer that is a running task is followed to its end."""
    async with answering(tmp_path, RUNNING, RUNNING, RUNNING, {"value": "stopped"}) as (director, requests):
        assert await director.run("agent", "stop") == "stopped"

    assert [(request["method"], request["arguments"]) for request in requests] == [
        ("stop", []),
        *[("get_task", ["t1"])] * 3,
    ]
    assert requests[0]["protocol"] == 3
    words = requests[0]["reply_to"].split(".")
    assert (words[0], words[1], words[2], len(words)) == ("director", director.uuid, "agent", 4)


async def test_value_is_the_result(tmp_path: Path) -> None:
    """A reply that names no running task is the result."""
    async with answering(tmp_path, {"value": ["a"]}, {"value": None}) as (director, _):
        assert await director.run("agent", "list_disk") == ["a"]
        assert await director.run("agent", "other") is None


async def test_exception(tmp_path: Path) -> None:
    """The reply of an action, of a task, and one without a valid form."""
    bad = {"exception": {"message": "Action Failed get_task: no"}}
    async with answering(tmp_path, bad, RUNNING, bad, {"exception": "text"}) as (director, _):
        for _ in range(2):
            with pytest.raises(RpcRemoteError, match="^Action Failed get_task: no$"):
                await director.run("agent", "apply")
        with pytest.raises(RpcRemoteError, match="^text$"):
            await director.run("agent", "apply")


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


async def test_ready(tmp_path: Path) -> None:
    """The first answered ping ends the wait; the silence of another agent does not."""
    async with answering(tmp_path, {"value": "pong"}) as (director, _):
        await director.wait_until_ready("agent")
        with pytest.raises(TimeoutError):
            await director.wait_until_ready("nobody", timeout=0.05)


async def test_on_no_bus() -> None:
    """Asking without a bus is a mistake that says so."""
    with pytest.raises(ShimError, match="on no bus"):
        await Director().call("agent", "ping")


async def test_comes_back(tmp_path: Path) -> None:
    """A peer whose server goes joins the next one."""
    async with NatsServer(tmp_path) as server:
        heard = asyncio.Event()
        await server.add_agent("agent")
        async with (
            joined(server.mbus("agent"), ("agent.agent",), lambda *_: heard.set()),
            Director().on(server.peer()) as director,
        ):
            await server.kill()
            await server.start()
            async with asyncio.timeout(20):
                while not heard.is_set():
                    with contextlib.suppress(RpcTimeoutError):
                        await director.call("agent", "ping", timeout=0.1)
