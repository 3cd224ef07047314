"""Tests the HTTPS endpoint with slow, disconnecting, hostile or too many clients, and while its certificate is
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from agent_shim.bulk import workers
from agent_shim.core.errors import ActionError
from agent_shim.demo.pki import Authority
from agent_shim.edges.bus import https, tls
from agent_shim.edges.bus.https import HttpsBus
from tests.support.create_env import (
    AgentClient,
    authority,
    basic,
    dav_path,
    head,
    mbus,
    on_https,
    read_answer,
    trusting,
)
from tests.support.old_tls import lenient, outdated
from tests.support.waiting import TIMEOUT_S, until


class PingAgent:
    """Answers ``ping`` immediately, and other requests once ``released`` is set. Records that a request has begun and
    how it ended.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def handle(self, data: bytes) -> tuple[str, bytes] | None:
        method = json.loads(data)["method"]
        if method == "break":
            raise ValueError
        if method != "ping":
            self.begun.set()
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.ended.put_nowait("cancelled")
                raise
            self.ended.put_nowait("done")
        return "", json.dumps({"value": method}).encode()


@pytest.fixture
def agent() -> PingAgent:
    return PingAgent()


@pytest.fixture
async def bus(agent: PingAgent, tmp_path: Path) -> AsyncIterator[HttpsBus]:
    async with on_https(agent.handle, tmp_path) as one:
        yield one


@pytest.fixture
async def hasty(agent: PingAgent, tmp_path: Path) -> AsyncIterator[HttpsBus]:
    """Run an HTTPS endpoint with short timeouts and small size limits."""
    async with on_https(agent.handle, tmp_path, idle=0.3, stall=0.3, request=1000, blob=2_000_000) as one:
        yield one


def request(method: str) -> bytes:
    body = json.dumps({"method": method}).encode()
    return head("POST", "/agent", len(body), basic()) + body


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return everything that the other side sends until it closes the connection."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except (ConnectionError, ssl.SSLError):
            return b""


# --- clients that disconnect ------------------------------------------------------------------------------------------


async def test_https_action_finishes_after_its_client_disconnects(bus: HttpsBus, agent: PingAgent) -> None:
    async with AgentClient(bus.port).connected() as (_, writer):
        writer.write(request("start"))
        await agent.begun.wait()
    await asyncio.sleep(0.1)

    agent.released.set()

    async with asyncio.timeout(10):
        assert await agent.ended.get() == "done"


@pytest.mark.parametrize("sent", [0, 100, 300_000])
async def test_interrupted_https_upload_keeps_the_earlier_blob_and_leaves_no_other_file(
    bus: HttpsBus, tmp_path: Path, sent: int
) -> None:
    cli = AgentClient(bus.port)
    await cli.put_blob("one", b"old")
    async with cli.connected() as (_, writer):
        writer.write(head("PUT", dav_path("one"), 400_000, basic()) + bytes(sent))
        await until(lambda: len(list(tmp_path.iterdir())) >= 2)

    await until(lambda: [path.name for path in tmp_path.iterdir()] == ["one"])
    assert (tmp_path / "one").read_bytes() == b"old"


async def test_https_drain_waits_until_answers_are_sent(agent: PingAgent, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with on_https(agent.handle, tmp_path) as bus:
            await bus.drain(60)
            reader, writer = await stack.enter_async_context(AgentClient(bus.port).connected())
            writer.write(request("get_task"))
            await agent.begun.wait()
            draining = asyncio.create_task(bus.drain(60))
            await asyncio.wait({draining}, timeout=0.05)
            assert not draining.done()
            agent.released.set()
            async with asyncio.timeout(10):
                await draining
            assert agent.ended.get_nowait() == "done"

        assert (await read_answer(reader)).status == 200


async def test_https_shutdown_closes_all_connections(agent: PingAgent, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with on_https(agent.handle, tmp_path, goodbye=0.1) as bus:
            reader, writer = await stack.enter_async_context(AgentClient(bus.port).connected())
            writer.write(request("ping"))
            assert (await read_answer(reader)).status == 200

        assert await until_closed(reader) == b""


# --- slow clients and many clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /ag", head("GET", "/", 0, "")])
async def test_https_connection_without_a_request_is_closed(hasty: HttpsBus, said: bytes) -> None:
    async with AgentClient(hasty.port).connected() as (reader, writer):
        writer.write(said)

        await until_closed(reader)


@pytest.mark.parametrize(
    ("begun", "status", "said"),
    [
        (head("POST", "/agent", 100, basic()) + b"{", 400, None),
        (head("PUT", dav_path("one"), 100, basic()) + b"x", 500, b"cannot store the blob: timeout"),
    ],
    ids=["request", "upload"],
)
async def test_stalled_https_request_body_is_rejected_and_removed(
    hasty: HttpsBus, tmp_path: Path, begun: bytes, status: int, said: bytes | None
) -> None:
    async with AgentClient(hasty.port).connected() as (reader, writer):
        writer.write(begun)

        answer = await read_answer(reader)

    assert (answer.status, answer.body if said else None) == (status, said)
    assert list(tmp_path.iterdir()) == []


async def test_https_client_that_reads_nothing_is_disconnected(hasty: HttpsBus, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(64 * 1024 * 1024))
    async with AgentClient(hasty.port).connected() as (reader, writer):
        writer.write(head("GET", dav_path("big"), 0, basic()))
        await reader.readexactly(1000)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

        await asyncio.sleep(1)

        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await until_closed(reader)) < 32 * 1024 * 1024
    assert await AgentClient(hasty.port).value("ping") == "ping"


async def test_finished_https_connections_leave_no_objects_in_memory(bus: HttpsBus) -> None:
    """The CLI polls every second, each time on a new connection, so remaining objects would accumulate."""
    for _ in range(30):
        assert await AgentClient(bus.port).value("ping") == "ping"

    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, web.RequestHandler | asyncio.Task) for each in gc.get_objects())

    await until(lambda: kept() < 20)


async def test_https_bodies_of_maximum_size_are_accepted(hasty: HttpsBus, tmp_path: Path) -> None:
    cli, body = AgentClient(hasty.port), request("ping").partition(b"\r\n\r\n")[2].ljust(1000)

    assert (await cli.send("POST", "/agent", body)).status == 200
    assert (await cli.put_blob("one", bytes(2_000_000))).status == 201
    async with cli.connected() as (reader, writer):
        head_of_chunks = head("POST", "/agent", 0, basic()).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        assert b"chunked" in head_of_chunks
        writer.write(head_of_chunks + b"3e8\r\n" + body + b"\r\n0\r\n\r\n")
        assert (await read_answer(reader)).status == 200


async def test_https_bytes_and_messages_are_counted(bus: HttpsBus, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"method": "ping"}'
    await AgentClient(bus.port).send("POST", "/agent", body)

    stats = bus.stats
    assert (stats.attempts, stats.connects, stats.received, stats.sent, stats.rejected) == (1, 1, 1, 1, 0)
    assert (stats.received_bytes, stats.sent_bytes) == (len(body), len(b'{"value": "ping"}'))
    assert stats.last_error == ""
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_https_shutdown_cancels_running_actions(agent: PingAgent, tmp_path: Path) -> None:
    async with on_https(agent.handle, tmp_path, goodbye=0.1) as bus, AgentClient(bus.port).connected() as (_, writer):
        writer.write(request("start"))
        await agent.begun.wait()

    assert agent.ended.get_nowait() == "cancelled"


async def test_https_bodies_above_the_limit_are_rejected(hasty: HttpsBus, tmp_path: Path) -> None:
    cli = AgentClient(hasty.port)

    assert (await cli.send("POST", "/agent", bytes(1001))).status == 413
    assert (await cli.put_blob("one", bytes(2_000_001))).status == 413
    async with cli.connected() as (reader, writer):
        writer.write(head("PUT", dav_path("one"), 2_000_001, basic()))
        assert (await read_answer(reader)).status == 413, "refused before it is sent"
    chunked = head("PUT", dav_path("one"), 0, basic(), **{"Transfer-Encoding": "chunked"})
    chunked = chunked.replace(b"Content-Length: 0\r\n", b"")
    async with cli.connected() as (reader, writer):
        writer.write(chunked + b"1e8481\r\n" + bytes(2_000_001))
        assert (await read_answer(reader)).status == 413
    assert list(tmp_path.iterdir()) == []
    assert await cli.value("ping") == "ping"


async def test_https_requests_beyond_the_total_size_limit_get_503(agent: PingAgent, tmp_path: Path) -> None:
    """Without this limit, a client with the password could occupy two gigabytes of memory by sending a body of 16 MiB
    on each connection.
    """
    async with on_https(agent.handle, tmp_path, requests=3000) as bus, AsyncExitStack() as stack:
        cli = AgentClient(bus.port)
        for _ in range(2):
            _, writer = await stack.enter_async_context(cli.connected())
            writer.write(head("POST", "/agent", 2000, basic()) + bytes(1400))
        async with asyncio.timeout(30):
            while (await cli.send("POST", "/agent", bytes(1400))).status != 503:
                await asyncio.sleep(0.01)
        await stack.aclose()

        async with asyncio.timeout(30):
            while (await cli.send("POST", "/agent", bytes(2900))).status != 500:
                await asyncio.sleep(0.01)
        assert await cli.value("ping") == "ping"
        assert bus.stats.flooded >= 1


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
async def test_unauthenticated_https_connections_do_not_evict_authenticated_ones(
    agent: PingAgent, tmp_path: Path
) -> None:
    async with on_https(agent.handle, tmp_path, connections=8) as bus, AsyncExitStack() as stack:
        cli = AgentClient(bus.port)
        reader, writer = await stack.enter_async_context(cli.connected())
        writer.write(request("ping"))
        assert (await read_answer(reader)).status == 200
        for _ in range(30):
            await stack.enter_async_context(cli.connected())

        assert await cli.value("ping") == "ping"
        writer.write(request("ping"))
        assert (await read_answer(reader)).status == 200


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
@pytest.mark.parametrize("begins_tls", [False, True])
async def test_full_https_server_drops_the_oldest_unauthenticated_connection(
    agent: PingAgent, tmp_path: Path, begins_tls: bool
) -> None:
    """Each silent connection holds a descriptor for ten seconds, so the number of such connections is limited."""
    async with on_https(agent.handle, tmp_path, connections=8) as bus, AsyncExitStack() as stack:
        silent = []
        for _ in range(20):
            if begins_tls:
                reader, _ = await stack.enter_async_context(AgentClient(bus.port).connected())
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", bus.port)
                stack.callback(writer.close)
            silent.append(reader)

        for reader in silent[:12]:
            await until_closed(reader)
        assert [reader.at_eof() for reader in silent[12:]] == [False] * 8
        assert await AgentClient(bus.port).value("ping") == "ping"


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
async def test_https_connections_do_not_evict_a_handshake_from_another_address(
    agent: PingAgent, tmp_path: Path
) -> None:
    async with on_https(agent.handle, tmp_path, connections=8) as bus, AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", bus.port)
        for _ in range(20):
            _, stranger = await asyncio.open_connection("127.0.0.1", bus.port, local_addr=("127.0.0.2", 0))
            stack.callback(stranger.close)
        await writer.start_tls(AgentClient(bus.port).context, server_hostname="127.0.0.1")
        writer.write(request("ping"))
        assert (await read_answer(reader)).status == 200
        writer.close()


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
async def test_flood_of_https_handshakes_does_not_lock_out_other_callers(agent: PingAgent, tmp_path: Path) -> None:
    """Sixteen clients compete for eight connections. Each of them repeatedly completes a TLS handshake and
    disconnects.
    """
    done = 0

    async def stranger(port: int, context: ssl.SSLContext) -> None:
        nonlocal done
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", port, local_addr=("127.0.0.2", 0), ssl=context, server_hostname="127.0.0.1"
                )
                done += 1
                writer.transport.abort()

    async with on_https(agent.handle, tmp_path, connections=8) as bus, asyncio.TaskGroup() as group:
        cli = AgentClient(bus.port)
        strangers = [group.create_task(stranger(bus.port, cli.context)) for _ in range(16)]
        while done < 200:
            assert await cli.value("ping") == "ping"
        for each in strangers:
            each.cancel()


async def test_https_server_full_of_authenticated_callers_accepts_no_more_connections(
    agent: PingAgent, tmp_path: Path
) -> None:
    async with on_https(agent.handle, tmp_path, connections=3) as bus, AsyncExitStack() as stack:
        callers = []
        for _ in range(3):
            reader, writer = await stack.enter_async_context(AgentClient(bus.port).connected())
            writer.write(request("ping"))
            assert (await read_answer(reader)).status == 200
            callers.append((reader, writer))

        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await AgentClient(bus.port).value("ping")
        for reader, writer in callers:
            writer.write(request("ping"))
            assert (await read_answer(reader)).status == 200
        callers[0][1].transport.abort()
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await AgentClient(bus.port).value("ping") == "ping"
                    break
                except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.05)


async def test_https_blob_transfers_are_counted(
    hasty: HttpsBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = workers.Transfers()
    monkeypatch.setattr(https, "transfers", transfers)
    cli = AgentClient(hasty.port)
    await cli.put_blob("one", bytes(300_000))
    await cli.put_blob("two", bytes(2_000_001))
    assert (await cli.send("GET", dav_path("one"))).body == bytes(300_000)
    assert (await cli.send("GET", dav_path("none"))).status == 404
    (tmp_path / "big").write_bytes(bytes(64 * 1024 * 1024))
    async with cli.connected() as (reader, writer):
        writer.write(head("GET", dav_path("big"), 0, basic()))
        await reader.readexactly(1000)
        writer.transport.abort()
    await until(lambda: transfers.counts["download", "failed"])

    assert dict(transfers.counts) == {
        ("upload", "done"): 1,
        ("upload", "failed"): 1,
        ("download", "done"): 1,
        ("download", "failed"): 1,
    }
    assert (transfers.sizes["upload"], transfers.sizes["download"]) == (300_000, 300_000)


# --- faulty clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"\r\n\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % number for number in range(5000)) + b"\r\n",
        head("POST", "/agent", 0, basic(), **{"Transfer-Encoding": "chunked"}) + b"zz\r\n",
        b"POST /agent HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST %zz HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(10_000),
    ],
)
async def test_invalid_http_or_tls_data_closes_only_the_connection_that_sent_it(hasty: HttpsBus, said: bytes) -> None:
    cli = AgentClient(hasty.port)
    async with cli.connected() as (reader, writer):
        writer.write(said)
        await until_closed(reader)
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(said)
    await until_closed(reader)
    writer.close()

    assert await cli.value("ping") == "ping"


@pytest.mark.attack("a neighbour calls the create-env endpoint without the password")
async def test_https_server_rejects_old_tls_versions(
    agent: PingAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL is configured to accept TLS 1.1 here, so only the agent's own minimum version rejects the client."""

    async def spoken() -> str:
        context = trusting(authority().ca)
        context.check_hostname = False
        async with on_https(agent.handle, tmp_path) as bus:
            _, writer = await asyncio.open_connection("127.0.0.1", bus.port, ssl=outdated(context))
            version = str(writer.get_extra_info("ssl_object").version())
            writer.close()
            return version

    real = tls.server_context
    monkeypatch.setattr(tls, "server_context", lambda mbus: lenient(real(mbus)))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await spoken()
    monkeypatch.setattr(tls, "server_context", lambda mbus: outdated(real(mbus)))
    assert await spoken() == "TLSv1.1"


@pytest.mark.attack("a neighbour calls the create-env endpoint without the password")
@pytest.mark.parametrize(
    ("to", "body", "status"),
    [(("PUT", dav_path("one")), b"abc", 201), (("POST", "/agent"), b'{"method":"break"}', 500)],
    ids=["upload", "handler that breaks"],
)
async def test_https_request_with_expect_100_continue_gets_both_responses(
    bus: HttpsBus, caplog: pytest.LogCaptureFixture, to: tuple[str, str], body: bytes, status: int
) -> None:
    cli = AgentClient(bus.port)
    async with cli.connected() as (reader, writer), asyncio.timeout(10):
        writer.write(head(*to, len(body), basic(), Expect="100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        with caplog.at_level(logging.CRITICAL):
            writer.write(body)
            assert (await read_answer(reader)).status == status
    async with cli.connected() as (reader, writer), asyncio.timeout(10):
        writer.write(head(*to, len(body), "", Expect="100-continue"))
        assert (await read_answer(reader)).status == 401
    with caplog.at_level(logging.CRITICAL):
        assert (await cli.send(*to, body)).status == status

    assert await cli.value("ping") == "ping"


async def test_compressed_https_request_body_is_not_decoded(bus: HttpsBus, tmp_path: Path) -> None:
    answer = await AgentClient(bus.port).send("PUT", dav_path("one"), b"no gzip", **{"Content-Encoding": "gzip"})

    assert answer.status == 201
    assert (tmp_path / "one").read_bytes() == b"no gzip"


# --- address and certificate ------------------------------------------------------------------------------------------


async def test_https_port_in_use_is_retried(agent: PingAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    bus = HttpsBus(mbus(port), agent.handle, tmp_path, bounds=https.CallerLimits(retry=0.05))
    running = asyncio.create_task(bus.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: bus.stats.attempts >= 5)
            assert bus.port == 0
            assert "cannot listen at 127.0.0.1" in bus.stats.last_error
            taken.close()
            await until(lambda: bus.is_connected)
        assert await AgentClient(port).value("ping") == "ping"
        assert bus.stats.last_error == ""
        assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.attack("a neighbour calls the create-env endpoint without the password")
async def test_https_address_without_a_password_admits_nobody(agent: PingAgent, tmp_path: Path) -> None:
    async with on_https(agent.handle, tmp_path, mbus(urls=("https://127.0.0.1:0",))) as bus:
        for auth in ("", basic("", ""), "Basic "):
            assert (await AgentClient(bus.port).send("POST", "/agent", b"{}", auth=auth)).status == 401
        assert "has no password" in bus.stats.last_error


async def test_new_https_certificate_applies_to_new_connections_only(bus: HttpsBus) -> None:
    other = Authority("other", bits=2048)
    pair = other.server("agent")
    port = bus.port
    async with AgentClient(port).connected() as (reader, writer):
        wanted = mbus(port, certificate=pair.certificate, private_key=pair.private_key)
        await bus.rotate(wanted)

        assert bus.mbus == wanted
        writer.write(request("ping"))
        assert (await read_answer(reader)).status == 200
    assert await AgentClient(port, trusting(other.ca)).value("ping") == "ping"
    with pytest.raises(ssl.SSLCertVerificationError):
        await AgentClient(port, trusting(authority().ca)).value("ping")


async def test_invalid_https_certificate_or_address_does_not_replace_the_current_one(bus: HttpsBus) -> None:
    before = bus.mbus
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)

    with pytest.raises(ActionError, match="cannot use the new bus credentials: the certificate is not a PEM"):
        await bus.rotate(mbus(bus.port, certificate="nonsense"))
    async with taken:
        with pytest.raises(ActionError, match="cannot listen at 127.0.0.1"):
            await bus.rotate(mbus(taken.sockets[0].getsockname()[1]))

    assert bus.mbus == before == mbus()
    assert await AgentClient(bus.port).value("ping") == "ping"


@pytest.mark.attack("a reader finds secrets in the log")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("u:p@198.51.100.7", "cannot listen at 198.51.100.7:443: "),
        ("u:p@198.51.100.7:6868", "cannot listen at 198.51.100.7:6868: "),
        ("mbus:hush/hush@127.0.0.1", ""),
    ],
    ids=["the port of https", "its own port", "broken"],
)
async def test_https_listen_error_names_the_address_without_its_password(
    agent: PingAgent, tmp_path: Path, address: str, said: str
) -> None:
    bus = HttpsBus(mbus(urls=(f"https://{address}",)), agent.handle, tmp_path)
    running = asyncio.create_task(bus.run())
    await until(lambda: bus.stats.last_error)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert said in bus.stats.last_error
    assert "hush" not in bus.stats.last_error


# --- endless unauthenticated requests ---------------------------------------------------------------------------------


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"GET /agent HTTP/1.1\r\n", b"X-Next: " + b"a" * 1000 + b"\r\n"),
        (b"GET /agent HTTP/1.1\r\nX-Long: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (b"POST /agent HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 1000),
        (b"POST /agent HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"Trailer: " + b"a" * 1000 + b"\r\n"),
        (b"POST /agent HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"a" * 1000),
        (b"", b"GET /agent HTTP/1.1\r\n\r\n" * 40),
    ],
    ids=["headers", "header", "line", "chunk", "trailers", "body", "requests"],
)
async def test_endless_unauthenticated_https_request_is_not_kept_in_memory(
    bus: HttpsBus, begin: bytes, again: bytes
) -> None:
    taken, most = 0, 32_000_000
    async with AgentClient(bus.port).connected() as (_, writer):
        writer.write(begin)
        try:
            while taken < most:
                writer.write(again)
                taken += len(again)
                # Without this sleep, drain() may never let the event loop report that the connection is lost.
                await asyncio.sleep(0)
                async with asyncio.timeout(5):
                    await writer.drain()
        except (ConnectionError, TimeoutError, ssl.SSLError):
            pass

    assert taken < most
    assert (await AgentClient(bus.port).call("ping")) == {"value": "ping"}


@pytest.mark.attack("a neighbour overloads the create-env endpoint with slow, endless or many requests")
@pytest.mark.parametrize(("begin", "again"), [(b"GET /agent HTTP/1.1\r\nX: ", b"a"), (b"", b"\r\n")])
async def test_slow_unauthenticated_https_client_is_disconnected(hasty: HttpsBus, begin: bytes, again: bytes) -> None:
    """The client keeps sending single bytes, but the complete headers must arrive within the time limit."""
    async with AgentClient(hasty.port).connected() as (reader, writer):
        ended = asyncio.create_task(until_closed(reader))
        writer.write(begin)
        async with asyncio.timeout(20):
            while not ended.done():
                writer.write(again)
                await asyncio.sleep(0.05)
