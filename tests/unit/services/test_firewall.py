"""Tests the text of the packet filter rules, and the cases in which no rules are installed. ``root/test_firewall.py``
tests the effect of the rules.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_shim.core.settings import Mbus
from agent_shim.host import network, nftables
from agent_shim.services import firewall as firewalls
from agent_shim.services.firewall import Firewall, chains
from tests.support.waiting import until


def mbus(*urls: str) -> Mbus:
    return Mbus(urls, "", "", "")


async def bus_answers(_: float) -> bool:
    return True


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace nftables with a list that contains the text of the installed rules, or is empty if none are installed."""
    found: list[str] = []

    async def replace(text: str) -> None:
        found[:] = [text]

    async def remove() -> None:
        found.clear()

    monkeypatch.setattr(nftables, "replace", replace)
    monkeypatch.setattr(nftables, "remove", remove)
    return found


async def obstacle(firewall: Firewall) -> str:
    """Let the firewall set its rules, and return the obstacle that it reports."""
    watching = asyncio.create_task(firewall.watch())
    # `watch` clears `due` and then sets the rules. Once it clears `due` again, the rules have been set.
    for _ in range(2):
        firewall.due.set()
        await until(lambda: not firewall.due.is_set())
    watching.cancel()
    return firewall.obstacle


def test_packet_filter_rejects_connections_to_the_bus_except_from_allowed_users() -> None:
    text = chains(frozenset({("10.0.0.6", 4222), ("2001:db8::6", 4223)}), {0, 500})

    rules = [line.strip() for line in text.splitlines() if "daddr" in line]
    assert rules == [
        "ip daddr 10.0.0.6 tcp dport 4222 meta skuid != { 0, 500 } counter reject with tcp reset",
        "ip6 daddr 2001:db8::6 tcp dport 4223 meta skuid != { 0, 500 } counter reject with tcp reset",
    ]


async def test_packet_filter_sets_no_rules_if_it_is_disabled(rules: list[str]) -> None:
    bus = mbus("nats://10.0.0.6:4222")

    assert (
        await obstacle(Firewall(lambda: bus, lambda: True, bus_answers, "it is switched off")) == "it is switched off"
    )
    assert rules == []


@pytest.mark.parametrize("scheme", ["https", ""])
async def test_packet_filter_reports_a_missing_bus(scheme: str, rules: list[str]) -> None:
    """With ``create-env``, the bosh CLI connects to the agent, so there is no bus to protect."""
    urls = (f"{scheme}://127.0.0.1:6868",) if scheme else ()

    assert await obstacle(Firewall(lambda: mbus(*urls), lambda: False, bus_answers)) == firewalls.NO_BUS
    assert rules == []


def test_network_outside_a_container_is_not_reported_as_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside a container, it is normal for the agent to use the machine's network."""
    monkeypatch.setattr(network, "FIRST_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)

    assert not network.is_of_machine()


@pytest.mark.attack("settings are malformed")
@pytest.mark.parametrize(
    "url", ["nats://[", "nats://127.0.0.1:99999", "nats://u:a#b@127.0.0.1:4222", "nats://\0:1", "nats://:4222", "nats"]
)
async def test_packet_filter_skips_an_invalid_address(url: str, rules: list[str]) -> None:
    assert await obstacle(Firewall(lambda: mbus(url, "nats://127.0.0.1:4222"), lambda: True, bus_answers)) == ""

    assert rules == [chains(frozenset({("127.0.0.1", 4222)}), {0, os.geteuid()})]


@pytest.mark.attack("a neighbour poses as the bus or a name server and never answers")
async def test_hanging_packet_filter_lookup_does_not_block_the_thread_pool(
    monkeypatch: pytest.MonkeyPatch, rules: list[str]
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30) and [])
    monkeypatch.setattr(firewalls, "LOOKUP_TIMEOUT_S", 0.01)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    bus = mbus(*(f"nats://bus{number}:4222" for number in range(6)))
    try:
        assert await obstacle(Firewall(lambda: bus, lambda: True, bus_answers)) == firewalls.AWAITED

        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    finally:
        answered.set()


@pytest.mark.parametrize(("is_reached", "expected"), [(True, ""), (False, firewalls.PROXIED)])
async def test_packet_filter_rules_are_removed_if_the_bus_becomes_unreachable(
    is_reached: bool, expected: str, rules: list[str]
) -> None:
    """If the agent reaches the bus through a proxy that runs as another user, the rules reject the proxy."""

    async def hear(_: float) -> bool:
        return is_reached or not rules

    assert await obstacle(Firewall(lambda: mbus("nats://10.0.0.6"), lambda: True, hear)) == expected
    assert [("ip daddr 10.0.0.6 tcp dport 4222 meta skuid != { 0" in text) for text in rules] == [True] * is_reached


async def test_packet_filter_follows_an_address_that_changes_while_rules_are_being_set(
    monkeypatch: pytest.MonkeyPatch, rules: list[str]
) -> None:
    monkeypatch.setattr(firewalls, "RULES_PERIOD_S", 3600.0)
    bus = mbus("nats://10.0.0.6:4222")

    async def reconnect(_: float) -> bool:
        nonlocal bus
        if "10.0.0.6" in "".join(rules):
            bus = mbus("nats://10.0.0.7:4222")
            firewall.due.set()
        return True

    firewall = Firewall(lambda: bus, lambda: True, reconnect)
    watching = asyncio.create_task(firewall.watch())
    try:
        await until(lambda: "10.0.0.7" in "".join(rules))
    finally:
        watching.cancel()
