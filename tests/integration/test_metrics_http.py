"""Tests the HTTP server for metrics and probes over real sockets, with well-behaved clients, slow or misbehaving
clients, and too many clients at once.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from agent_shim.edges import http_server, metrics
from agent_shim.edges.metrics import Metrics, Readings, Routes, listening
from agent_shim.supervisor.process_stats import ProcessInfo, ServiceInfo

Where = tuple[str, int]


class Readiness:
    """A stand-in for the agent's readiness check, which returns the answers that a test has set."""

    def __init__(self) -> None:
        self.answers = {"jobs": (True, "ready"), "agent": (True, "connected")}

    def __call__(self, level: str) -> tuple[bool, str]:
        return self.answers[level]


def routes(ready: Readiness, read: Callable[[], Readings] = Readings) -> Routes:
    shown = Metrics(read)
    return Routes(shown.render, ready, shown.recent)


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def where(readiness: Readiness) -> AsyncIterator[Where]:
    """Run a server with a free port. Provide its address."""
    async with listening("127.0.0.1:0", routes(readiness)) as found:
        assert found is not None
        yield found


async def ask(where: Where, request: bytes) -> bytes:
    """Send ``request``, and return everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*where)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def get(where: Where, target: str, *headers: str, method: str = "GET") -> tuple[int, str, bytes]:
    """Send a request. Return the status, headers and body."""
    lines = [f"{method} {target} HTTP/1.1", "Host: agent", *headers]
    answer = await ask(where, ("\r\n".join(lines) + "\r\n\r\n").encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0", False), ("br", False), ("identity", False)],
)
async def test_metrics_are_compressed_for_a_scraper_that_accepts_gzip(
    where: Where, accepted: str, is_packed: bool
) -> None:
    status, head, body = await get(where, "/metrics", f"accept-encoding: {accepted}")

    assert (status, "Content-Encoding: gzip" in head) == (200, is_packed)
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert "Connection: close" in head
    assert "Vary: Accept-Encoding" in head
    assert f"Content-Length: {len(body)}" in head
    assert b"agent_shim_build_info{" in (gzip.decompress(body) if is_packed else body)


async def test_landing_page_has_links_and_a_list_of_processes(readiness: Readiness) -> None:
    process = ProcessInfo("<b>web</b>", "running", 3, 20480)
    service = ServiceInfo(process, "web", "process", (), "running", 7, 2, "", "secret words of the job")
    instance = {"deployment": "shop", "group": "front", "index": "0", "id": "i-1", "az": "z1"}
    readings = Readings(processes=[service], instance=instance)
    readiness.answers["jobs"] = (False, "jobs are failing")
    async with listening("127.0.0.1:0", routes(readiness, lambda: readings)) as found:
        assert found is not None
        status, head, body = await get(found, "/")
    text = body.decode()

    assert status == 200
    assert "Content-Type: text/html; charset=utf-8" in head
    assert "shop / front/i-1" in text
    assert "<strong>jobs are failing</strong>" in text
    assert [href in text for href in ('href="/metrics"', 'href="/readyz"', 'href="/healthz"')] == [True] * 3
    assert "&lt;b&gt;web&lt;/b&gt;<td>web<td>running" in text
    assert "<script" not in text
    assert "<b>" not in text
    assert "secret words" not in text


async def test_metrics_are_served_as_openmetrics_on_request(where: Where) -> None:
    """Prometheus asks for OpenMetrics first and for the text format second."""
    accept = "accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    _, head, body = await get(where, "/metrics", accept)

    assert "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8" in head
    assert body.endswith(b"# EOF\n")


async def test_health_and_readiness_endpoints_give_the_reason(where: Where, readiness: Readiness) -> None:
    readiness.answers["jobs"] = (False, "web is failing")

    _, head, body = await get(where, "/healthz", method="HEAD")
    assert ("Content-Length: 3" in head, body) == (True, b"")
    assert (await get(where, "/healthz"))[::2] == (200, b"ok\n")
    assert (await get(where, "/readyz"))[::2] == (503, b"web is failing\n")
    assert (await get(where, "/readyz?level=jobs"))[::2] == (503, b"web is failing\n")
    assert (await get(where, "/readyz?level=agent"))[::2] == (200, b"connected\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /other HTTP/1.1", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1", 404),
        ("GET //metrics HTTP/1.1", 404),
        ("GET /readyz?level=x HTTP/1.1", 400),
        ("GET /[:: HTTP/1.1", 404),
        ("GET //[::/metrics HTTP/1.1", 404),
        ("GET /metrics", 400),
        ("GET metrics HTTP/1.1", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM", 400),
        ("\x16\x03\x01 not a request", 400),
        ("POST /metrics HTTP/1.1", 405),
        ("DELETE /healthz HTTP/1.1", 405),
    ],
)
async def test_metrics_requests_with_an_unknown_path_or_method_or_bad_syntax_are_rejected(
    where: Where, request_line: str, status: int
) -> None:
    answer = await ask(where, f"{request_line}\r\n\r\n".encode())

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (await get(where, "/healthz"))[0] == 200


async def test_client_that_sends_a_body_to_metrics_receives_the_whole_error(where: Where) -> None:
    """If the server closed the connection while the body was still arriving, the kernel would reset the connection and
    discard the error.
    """
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"POST /metrics HTTP/1.1\r\nContent-Length: 20000\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 405 Method Not Allowed\r\n"
    for _ in range(10):
        writer.write(b"x" * 2000)
        await writer.drain()
        await asyncio.sleep(0)
    rest = await reader.read()
    writer.close()

    assert b"\r\nAllow: GET, HEAD\r\n" in rest
    assert rest.endswith(b"only GET and HEAD\n")


@pytest.mark.parametrize("filler", [b"X: " + b"y" * 9000, b"X: y\r\n" * 2000])
async def test_oversized_metrics_request_headers_are_rejected(where: Where, filler: bytes) -> None:
    answer = await ask(where, b"GET /metrics HTTP/1.1\r\n" + filler)

    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_metrics_client_that_closes_its_sending_half_gets_a_response(where: Where) -> None:
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    writer.write_eof()
    answer = await reader.read()
    writer.close()

    assert answer.endswith(b"ok\n")


@pytest.mark.attack("a neighbour occupies all connections of an open port")
async def test_slow_metrics_client_is_disconnected(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(*where)
    dropped = asyncio.create_task(reader.read())
    writer.write(b"GET / HTTP/1.1\r\nX: ")
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while not dropped.done():
                writer.write(b"x")
                await writer.drain()
                assert (await get(where, "/healthz"))[0] == 200
    writer.close()

    with suppress(ConnectionError):
        assert await dropped == b""


async def keep_sending(writer: asyncio.StreamWriter, piece: bytes, pause: float) -> None:
    """Send ``piece`` repeatedly until the other side has closed the connection."""
    async with asyncio.timeout(60):
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)


@pytest.mark.attack("a neighbour occupies all connections of an open port")
async def test_metrics_client_that_never_closes_is_disconnected(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"ok\n")

    with pytest.raises(ConnectionError):
        await keep_sending(writer, b"x", 0.01)
    writer.close()


@pytest.mark.attack("a neighbour occupies all connections of an open port")
async def test_idle_metrics_connections_do_not_starve_a_probe(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 600.0)
    idle = [await asyncio.open_connection(*where) for _ in range(http_server.MAX_CONNECTIONS + 10)]
    try:
        assert (await get(where, "/healthz"))[0] == 200
        with suppress(ConnectionError):
            assert await asyncio.wait_for(idle[0][0].read(), 60) == b""
        assert not idle[-1][0].at_eof()
    finally:
        for _, writer in idle:
            writer.close()


@pytest.mark.attack("a job listens on the port for metrics or sshd")
async def test_agent_runs_without_a_metrics_port_if_the_port_is_in_use_or_disabled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for wanted in (address, "off"):
            async with listening(wanted, routes(Readiness())) as found:
                assert found is None

    assert caplog.record_tuples == [
        (
            "agent_shim.edges.http_server",
            logging.ERROR,
            f"cannot listen on {address} for metrics and probes: Address already in use",
        )
    ]


async def test_metrics_server_frees_its_port_and_connections_at_exit() -> None:
    answers = routes(Readiness())
    async with listening("127.0.0.1:0", answers) as where:
        assert where is not None
        reader, writer = await asyncio.open_connection(*where)
        assert (await get(where, "/healthz"))[0] == 200

    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    async with listening(f"127.0.0.1:{where[1]}", answers) as again:
        assert again == where


async def test_event_loop_lag_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAG_PERIOD_S", 0.01)
    made = Metrics(Readings)
    watch = asyncio.create_task(made.watch_lag())
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 - blocking the loop is intended
    await asyncio.sleep(0.05)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    counts = {
        sample.labels["le"]: sample.value
        for family in made.registry().collect()
        for sample in family.samples
        if sample.name == "agent_shim_loop_lag_seconds_bucket"
    }

    assert counts["+Inf"] > 1
    assert counts["+Inf"] - counts["0.25"] == 1


async def test_http_handler_that_never_answers_affects_only_its_own_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_TIMEOUT_S", 0.2)

    async def late(_request: http_server.HttpRequest) -> http_server.HttpResponse:
        await asyncio.Event().wait()
        raise AssertionError

    def answer(request: http_server.HttpRequest) -> http_server.HttpResponse | Awaitable[http_server.HttpResponse]:
        return late(request) if request.target == "/late" else http_server.HttpResponse(200, b"here")

    async with http_server.listening("127.0.0.1:0", answer, "a test") as found:
        assert found is not None
        with suppress(ConnectionError):
            assert await ask(found, b"GET /late HTTP/1.1\r\n\r\n") == b""
        assert (await get(found, "/"))[2] == b"here"
