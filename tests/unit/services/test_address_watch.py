"""Tests the watch for addresses that the Director relies on but that no interface has."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from agent_shim.core import settings
from agent_shim.core.settings import Effective, UpdateSettings
from agent_shim.host import network
from agent_shim.services import address_watch
from agent_shim.services.address_watch import AddressWatch, expected

NOWHERE = "192.0.2.17"


def effective(**networks: dict[str, Any]) -> Effective:
    document = {"agent_id": "a-1", "networks": networks}
    return Effective(settings.parse(json.dumps(document).encode(), origin="test"), UpdateSettings())


MANUAL = {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0"}


@pytest.mark.parametrize(
    ("known", "applied", "addresses"),
    [
        ({"a": MANUAL}, {}, {"10.0.0.5": "network a of the settings"}),
        ({"a": MANUAL}, {"a": MANUAL}, {"10.0.0.5": "network a of the applied spec"}),
        (
            {"a": MANUAL},
            {"a": MANUAL | {"ip": "10.0.0.6"}},
            {"10.0.0.5": "network a of the settings", "10.0.0.6": "network a of the applied spec"},
        ),
        ({"a": {"type": "dynamic"}}, {"a": MANUAL}, {"10.0.0.5": "network a of the applied spec"}),
        ({"a": MANUAL | {"type": "dynamic"}}, {}, {}),
        ({"a": MANUAL | {"type": "vip"}}, {"a": MANUAL}, {}),
        ({}, {"a": MANUAL | {"type": "vip"}}, {}),
        ({}, {"a": {"ip": None}, "b": {"ip": ""}, "c": None, "d": "10.0.0.7", "e": {"ip": 7}}, {}),
    ],
)
def test_expected_addresses_come_from_settings_and_spec(
    known: dict[str, Any], applied: dict[str, Any], addresses: dict[str, str]
) -> None:
    assert expected(effective(**known), applied) == addresses


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [("127.0.0.1", True), (NOWHERE, False), ("2001:db8::17", False), ("no address", True), ("", True)],
)
def test_address_watch_recognizes_local_interface_addresses(text: str, is_ours: bool) -> None:
    assert network.has_address(text) is is_ours


def test_address_watch_resolves_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name must not be passed to ``bind``, which would query a name server that might not respond."""
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("it is looked up"))

    assert network.has_address("db.example.org")


def test_missing_address_is_reported_once_per_disappearance() -> None:
    wanted = {"127.0.0.1": "network a of the settings"}
    told: list[tuple[str, str]] = []
    found = AddressWatch(lambda: wanted, lambda *what: told.append(what))
    found.look()
    assert (found.missing, told) == ({}, [])

    wanted[NOWHERE] = "network b of the applied spec"
    found.look()
    found.look()
    assert found.missing == {NOWHERE: "network b of the applied spec"}
    text = f"no interface has the address {NOWHERE} (network b of the applied spec)"
    assert told == [("network b", text)]

    del wanted[NOWHERE]
    found.look()
    assert found.missing == {}
    wanted[NOWHERE] = "network b of the applied spec"
    found.look()
    assert len(told) == 2


def test_address_watch_reports_at_most_ten_missing_addresses() -> None:
    """Each alert lists all the instance's addresses, so thousands of alerts would block the event loop for minutes."""
    wanted = {f"203.0.113.{n}": f"network {n} of the settings" for n in range(100)}
    told: list[str] = []
    found = AddressWatch(lambda: wanted, lambda _, text: told.append(text))
    found.look()

    assert len(found.missing) == 100
    assert len(told) == address_watch.MAX_TOLD
    assert told[0] == "no interface has the address 203.0.113.0 (network 0 of the settings)"


async def test_address_watch_detects_an_address_that_disappears_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_watch, "POLL_S", 0.01)
    wanted: dict[str, str] = {}
    told = asyncio.Event()
    watching = asyncio.create_task(AddressWatch(lambda: wanted, lambda *_: told.set()).watch())
    await asyncio.sleep(0.02)

    wanted[NOWHERE] = "network a of the settings"

    async with asyncio.timeout(60):
        await told.wait()
    watching.cancel()
