"""Tests bus connections that are refused, cut, silently lost or replaced. The agent always connects again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent_shim.core.errors import BusError
from agent_shim.core.settings import Mbus
from agent_shim.demo.director import Director
from agent_shim.demo.pki import SERVER, Authority
from agent_shim.edges.bus import link
from agent_shim.edges.bus.nats import REREAD_AFTER_FAILURES, BusTiming, NatsBus
from tests.support.broker import NatsServer, knowing
from tests.support.bus import FAST, ClientConnection, connected, echo, facing, on_bus, sockets_to, talking
from tests.support.proxy import Proxy
from tests.support.waiting import until


def settings_through_proxy(proxy: Proxy, server: NatsServer) -> Mbus:
    """Return the agent's bus settings for the server, with the proxy's port instead of the server's."""
    return replace_urls(server.mbus("agent"), f"nats://127.0.0.1:{proxy.port}")


def replace_urls(mbus: Mbus, *urls: str) -> Mbus:
    return replace(mbus, urls=urls)


async def test_t2_bus_retries_until_the_server_knows_the_agent(tmp_path: Path) -> None:
    """nats-sync adds an agent only after the agent has booted, so an agent that the server rejects must not exit and
    must not log much.
    """
    async with NatsServer(tmp_path) as server, on_bus(server.mbus("agent")) as bus:
        await until(lambda: bus.stats.attempts >= 5)

        assert not bus.is_connected
        assert "Authorization Violation" in bus.stats.last_error

        await server.add_agent("agent")
        await connected(bus)

        assert bus.stats.last_error == ""


async def test_t2_bus_reconnects_when_a_dead_server_returns(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        await talk.server.kill()
        before = talk.bus.stats.attempts
        await until(lambda: talk.bus.stats.attempts > before + 5)
        await talk.server.start()
        await connected(talk.bus)
        await talk.director.wait_until_ready("agent")

        assert talk.bus.stats.reconnects == 1


@contextlib.asynccontextmanager
async def connected_through_proxy(where: Path, **options: Any) -> AsyncIterator[tuple[NatsBus, Proxy]]:
    """Run a bus client that connects to its server through a proxy. Yield the client and the proxy."""
    async with (
        knowing(where) as server,
        Proxy(server.port) as proxy,
        on_bus(settings_through_proxy(proxy, server), **options) as bus,
    ):
        await connected(bus)
        yield bus, proxy


async def test_dead_bus_connection_is_noticed_and_replaced(tmp_path: Path) -> None:
    """The socket must be closed immediately, without waiting half a minute for TLS's closing message."""
    async with connected_through_proxy(tmp_path, timing=replace(FAST, connect=0.2, ping=0.2)) as (bus, proxy):
        sockets = sockets_to(proxy.port)
        assert len(sockets) == 1
        proxy.swallow()
        await until(lambda: not bus.is_connected)
        await until(lambda: not sockets & sockets_to(proxy.port), timeout=10)
        before = bus.stats.attempts
        await until(lambda: bus.stats.attempts > before + 2)
        proxy.flow()
        await connected(bus)

        assert bus.stats.connects == 2


async def test_bus_is_reachable_while_its_server_answers(tmp_path: Path) -> None:
    """Before and after the agent sets packet filter rules, it checks whether the bus is reachable. The rules must not
    cut the agent off from the bus.
    """
    async with talking(tmp_path) as talk:
        assert await talk.bus.is_heard(20)
        talk.server.pause()
        assert not await talk.bus.is_heard(0.1)
        await until(lambda: "no answer to a ping within 0.1 s" in talk.bus.stats.last_error)
        assert not talk.bus.is_connected
        assert not await talk.bus.is_heard(0.1)
        talk.server.resume()
        assert await talk.bus.is_heard(20)


async def test_bus_rereads_settings_while_no_server_is_reachable(tmp_path: Path) -> None:
    """The new settings may contain a new bus address."""
    async with knowing(tmp_path) as server:
        good = server.mbus("agent")
        gone = replace_urls(good, "nats://127.0.0.1:1")
        async with on_bus(gone, reread=lambda _: good) as bus:
            await connected(bus)

            assert bus.stats.attempts == REREAD_AFTER_FAILURES + 2


async def test_bus_counts_as_reachable_if_the_server_rejects_the_agent(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server, on_bus(server.mbus("agent")) as bus:
        assert await bus.is_heard(20)
        assert not bus.is_connected


async def test_slow_network_does_not_break_the_bus_connection(tmp_path: Path) -> None:
    """The answer to a ping arrives only after the next ping has been sent."""
    async with connected_through_proxy(tmp_path, timing=replace(FAST, ping=0.5, unanswered=3)) as (bus, proxy):
        proxy.delay = 0.4  # This applies in each direction, so an answer takes longer than the interval between pings.
        await asyncio.sleep(3)

        assert (bus.is_connected, bus.stats.connects) == (True, 1)


async def test_t7_blocked_event_loop_does_not_break_the_bus_connection(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        for _ in range(3):
            time.sleep(0.5)  # noqa: ASYNC251 - the test blocks the loop
            await asyncio.sleep(0.01)

        assert await talk.director.value("agent", "ping") == "ping"
        assert talk.bus.stats.connects == 1


async def test_bus_reconnects_after_repeated_resets_and_frees_lost_connections(tmp_path: Path) -> None:
    """The TLS state of a lost connection takes up half a megabyte, so it must be freed immediately and not only by the
    garbage collector.
    """
    async with connected_through_proxy(tmp_path) as (bus, proxy):
        await asyncio.sleep(0.05)
        gc.collect()
        before, contexts = _descriptors(), _tls()
        gc.disable()
        try:
            for _ in range(10):
                proxy.cut()
                await until(lambda: not bus.is_connected)
                await connected(bus)
            await until(lambda: _descriptors() <= before and _tls() <= contexts)
        finally:
            gc.enable()

        assert bus.stats.connects == 11


def _tls() -> int:
    """Return the number of TLS connections in memory."""
    return sum(type(each) is ssl.SSLObject for each in gc.get_objects())


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_bus_pauses_between_connections_that_are_dropped_immediately(is_greeted: bool) -> None:
    async def slam(wire: ClientConnection) -> None:
        if is_greeted:
            await wire.greet()
            await wire.expect("PING")

    async with facing(slam, timing=replace(FAST, ping=0.2, step=0.2, longest=10)) as bus:
        began_at = time.monotonic()
        await until(lambda: bus.stats.attempts >= 5)

        assert time.monotonic() - began_at >= 0.3  # a busy machine can only lengthen the pauses


@pytest.mark.attack("a neighbour stalls the connection to the bus")
async def test_publishing_to_a_bus_server_that_reads_nothing_fails_without_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_BACKLOG_BYTES", 1 << 20)

    async def greet_and_freeze(wire: ClientConnection) -> None:
        await wire.greet()
        await asyncio.sleep(60)

    async with facing(greet_and_freeze, timing=replace(FAST, ping=20)) as bus:
        await connected(bus)
        async with asyncio.timeout(20):
            with pytest.raises(BusError, match="does not accept"):
                await _flood(bus)

        assert bus.is_connected


async def _flood(bus: NatsBus) -> None:
    while True:
        await bus.publish("hm.agent.heartbeat.agent", bytes(1 << 17))
        await asyncio.sleep(0)


async def test_bus_skips_unreachable_addresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agent_shim.edges.bus")
    authority = Authority()
    async with NatsServer(tmp_path / "a", authority) as first, NatsServer(tmp_path / "b", authority) as second:
        for server in (first, second):
            await server.add_agent("agent")
        mbus = replace_urls(
            first.mbus("agent"), "nats://127.0.0.1:1", first.url, "nats://nowhere.invalid:4222", second.url
        )
        async with on_bus(mbus) as bus:
            await connected(bus)
            used, other = (first, second) if f"127.0.0.1:{first.port}" in caplog.messages[-1] else (second, first)
            await used.kill()
            await until(lambda: bus.stats.connects == 2)

            assert caplog.messages[-1] == f"connected to the bus at 127.0.0.1:{other.port}"


def make_lookups_return(monkeypatch: pytest.MonkeyPatch, *answers: str | OSError) -> list[str | OSError]:
    """Make name lookups return ``answers`` one after the other, and then the last answer repeatedly.

    Return the list of the remaining answers.
    """
    left = list(answers)

    def getaddrinfo(*_: object, **__: object) -> list[tuple[Any, ...]]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return left


def by_name(server: NatsServer, port: int) -> Mbus:
    return replace_urls(server.mbus("agent"), f"nats://{SERVER}:{port}")


async def test_bus_host_name_is_resolved_for_each_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recreated Director may have the same name but a new address."""
    async with NatsServer(tmp_path) as server:
        left = make_lookups_return(monkeypatch, "127.0.0.2", OSError("no answer"), "127.0.0.2", "127.0.0.1")
        await server.add_agent("agent")
        async with on_bus(by_name(server, server.port)) as bus:
            await connected(bus)

    assert left == ["127.0.0.1"]


async def test_bus_reconnects_when_the_server_name_resolves_to_a_new_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server at the old address may still answer. A failed lookup or a single different answer is not a reason to
    reconnect.
    """
    old, new = "127.0.0.1", "127.0.0.2"
    async with (
        NatsServer(tmp_path) as server,
        Proxy(server.port, old) as here,
        Proxy(server.port, new, here.port) as there,
    ):
        await server.add_agent("agent")
        left = make_lookups_return(monkeypatch, old, OSError("no answer"), new, old, new, new)
        async with on_bus(by_name(server, here.port), timing=replace(FAST, look=0.01, gone=2)) as bus:
            await connected(bus)
            assert (here.connections, there.connections) == (1, 0)
            await until(lambda: there.connections == 1)
            assert left == [new]
            await until(lambda: bus.stats.connects == 2)
            assert bus.is_connected
            assert here.connections == 1


async def test_silent_name_server_does_not_delay_bus_connections_or_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups must not use the default thread pool. Otherwise, a hanging lookup would block the next connection
    attempt, the exit, and everything else that uses the pool.
    """
    silence = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silence.wait())
    try:
        async with (
            knowing(tmp_path) as server,
            on_bus(by_name(server, server.port), timing=replace(FAST, connect=0.05)) as bus,
        ):
            await until(lambda: bus.stats.attempts >= 10)
            others = asyncio.create_task(asyncio.to_thread(int, 7))
            await asyncio.wait({others}, timeout=20)
            is_held_up = not others.done()
            silence.set()
            assert not is_held_up
    finally:
        silence.set()


@pytest.mark.attack("a reader finds secrets in the log")
@pytest.mark.parametrize(
    "urls",
    [
        (),
        ("nats://",),
        ("ws://127.0.0.1:1",),
        ("nats://127.0.0.1:99999999",),
        ("://",),
        ("nats://[fd00::1:4222",),
        ("nats://127.0.0.1:0",),
        ("nats://a\nb:1",),
    ],
)
async def test_bus_without_a_usable_address_reports_an_error_and_continues(
    tmp_path: Path, urls: tuple[str, ...]
) -> None:
    """Retrying does not help, but the agent must not exit, because its jobs still need it."""
    async with NatsServer(tmp_path) as server, on_bus(replace_urls(server.mbus("agent"), *urls)) as bus:
        await until(lambda: bus.stats.last_error != "")
        await asyncio.sleep(0.1)

        assert not bus.is_connected
        assert bus.stats.last_error.startswith("cannot ")


@pytest.mark.attack("a reader finds secrets in the log")
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("joe:hun/ter2@127.0.0.1:1", "an unreadable address"),
        ("joe:hun?ter2@127.0.0.1:1", "an unreadable address"),
        ("joe:4711/hun@127.0.0.1:1", "an unreadable address"),
        ("joe:hun@[bad", "an unreadable address"),
        ("joe:hun#x@h:1", "an unreadable address"),
        ("joe:hunter2@127.0.0.1:1", "127.0.0.1:1"),
    ],
)
async def test_bus_address_is_reported_without_its_password(address: str, told: str) -> None:
    """A ``/``, ``?`` or ``#`` in the password would end the host part of the URL early."""
    authority = Authority()
    pair = authority.agent("agent")
    async with on_bus(Mbus((f"nats://{address}",), authority.ca, pair.certificate, pair.private_key)) as bus:
        await until(lambda: bus.stats.last_error != "")

        assert bus.stats.last_error.startswith(f"cannot connect to the bus at {told}: ")
        assert not any(secret in bus.stats.last_error for secret in ("hun", "joe", "4711"))


@pytest.mark.parametrize("part", ["_read_loop", "_flusher", "_wait_for_msgs"])
async def test_bus_connection_with_a_dead_client_task_is_replaced(tmp_path: Path, part: str) -> None:
    """nats-py still reports that it is connected, so the agent must notice the missing answers to its pings."""
    async with (
        knowing(tmp_path) as server,
        on_bus(server.mbus("agent"), timing=replace(FAST, ping=0.2)) as bus,
        Director(poll=0.01).on(server.peer()) as director,
    ):
        await connected(bus)
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__name__", "") == part:
                task.cancel()
        await director.wait_until_ready("agent")

        assert await director.value("agent", "ping") == "ping"


async def test_bus_cancelled_at_any_step_leaves_no_task_or_descriptor(tmp_path: Path) -> None:
    async with knowing(tmp_path) as server:
        mbus = server.mbus("agent")
        before, tasks = _descriptors(), len(asyncio.all_tasks())
        for steps in [*range(40), *range(40, 400, 11)]:
            running = asyncio.create_task(NatsBus("agent", mbus, echo, timing=FAST).run())
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running}, timeout=10)

            assert running.done(), f"after {steps} steps"
        await until(lambda: _descriptors() <= before and len(asyncio.all_tasks()) <= tasks)


def test_t2_bus_retry_delay_grows_to_at_most_ten_seconds() -> None:
    timing = BusTiming()
    for _ in range(100):
        for failures, least, most in [(1, 0.4, 2), (2, 0.8, 4), (3, 1.2, 6), (4, 1.6, 8), (5, 5, 10), (50, 5, 10)]:
            assert least <= timing.pause(failures) <= most
        assert 0 <= timing.pause(0) <= 2
        assert 0.75 <= timing.early_pause() <= 1.25
    assert min(timing.pause(0) for _ in range(100)) < 1


def test_reconnects_of_a_thousand_agents_are_spread_over_time() -> None:
    timing, chance, tries = BusTiming(), random.getstate(), [0] * 40
    random.seed(6)
    try:
        for _ in range(1000):
            at, failures = timing.pause(0), 0
            while at < 40:
                tries[int(at)] += 1
                failures += 1
                at += timing.pause(failures)
    finally:
        random.setstate(chance)

    assert max(tries[12:]) <= 200


async def test_early_bus_refusals_are_retried_quickly(tmp_path: Path) -> None:
    """The bus rejects a new agent until nats-sync has added it, which takes only seconds."""
    slow = replace(FAST, step=30.0, longest=30.0)
    async with NatsServer(tmp_path) as server:
        async with on_bus(server.mbus("agent"), timing=slow) as early:
            await until(lambda: early.stats.attempts > 3)
        async with on_bus(server.mbus("agent"), timing=replace(slow, early=0.0)) as late:
            await asyncio.sleep(0.3)

            assert late.stats.attempts == 1


async def test_bus_tries_the_next_address_of_a_host_name_if_the_first_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with knowing(tmp_path) as server:
        with socket.create_server(("127.0.0.2", server.port), backlog=0), contextlib.ExitStack() as filling:
            for _ in range(5):  # fill the queue, so that the kernel drops further connection requests
                waiting = filling.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", server.port))

            async def both(_: object) -> list[str]:
                return ["127.0.0.2", "127.0.0.1"]

            monkeypatch.setattr(link, "look_up", both)
            async with on_bus(server.mbus("agent"), timing=replace(FAST, dial=0.2)) as bus:
                await connected(bus)

                assert bus.stats.attempts == 1
