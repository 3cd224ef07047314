"""Tests mutual TLS authentication between agent and bus server."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.core.errors import SettingsError
from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import EXPIRED, NOT_YET_VALID, Authority, Pair
from tests.support.broker import NatsServer, knowing
from tests.support.bus import connected, on_bus
from tests.support.waiting import until

AUTHORITY = Authority()


def with_pair(mbus: Mbus, pair: Pair) -> Mbus:
    return replace(mbus, certificate=pair.certificate, private_key=pair.private_key)


@pytest.mark.attack("a neighbour poses as the bus, or sends requests in the Director's name")
@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (AUTHORITY.server("default.director.bosh-internal"), "CommonName does not match *.nats.bosh-internal"),
        (AUTHORITY.server(hosts=["10.0.0.5"]), "IP address mismatch"),
        (AUTHORITY.server(hosts=[]), "mismatch"),
        (Authority().server(), "certificate signature failure"),
        (Authority("other").server(), "unable to get local issuer certificate"),
        (AUTHORITY.server(valid=EXPIRED), "certificate has expired"),
        (AUTHORITY.server(valid=NOT_YET_VALID), "certificate is not yet valid"),
        (AUTHORITY.client("default.nats.bosh-internal"), "unsuitable certificate purpose"),
    ],
    ids=["name", "address", "no address", "forged", "authority", "expired", "not yet valid", "client's"],
)
async def test_t1_bus_server_with_a_wrong_certificate_is_rejected(tmp_path: Path, pair: Pair, why: str) -> None:
    """The agent must send its certificate only to a server that has proved its identity."""
    async with NatsServer(tmp_path / "wrong", AUTHORITY, pair=pair) as wrong:
        await wrong.add_agent("agent")
        async with on_bus(wrong.mbus("agent")) as bus:
            await until(lambda: bus.stats.attempts >= 3 and why in bus.stats.last_error)

            assert not bus.is_connected

            right = NatsServer(tmp_path / "right", AUTHORITY)
            right.port = wrong.port
            await wrong.stop()
            async with right:
                await right.add_agent("agent")
                await connected(bus)


@pytest.mark.parametrize(
    "pair",
    [
        Authority().agent("agent"),
        AUTHORITY.agent("agent", valid=EXPIRED),
        AUTHORITY.agent("agent", valid=NOT_YET_VALID),
    ],
    ids=["authority", "expired", "not yet valid"],
)
async def test_agent_certificate_rejected_by_the_bus_server_is_reported_and_retried(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async with knowing(tmp_path, AUTHORITY) as server:
        good = server.mbus("agent")
        asked = []

        def reread(refused: Mbus) -> Mbus:
            asked.append(refused)
            return refused if len(asked) < 3 else good

        bad = with_pair(good, pair)
        async with on_bus(bad, reread=reread) as bus:
            await connected(bus)

    # If the server closes the connection before the agent has read the TLS alert, the agent reports a socket error.
    refused = ("the server refuses our certificate", "Broken pipe", "Connection reset")
    assert any(text in caplog.text for text in refused)
    assert asked == [bad] * 3


async def test_unreadable_bus_credentials_are_read_again(tmp_path: Path) -> None:
    async with knowing(tmp_path, AUTHORITY) as server:
        good = server.mbus("agent")
        asked = []

        def reread(refused: Mbus) -> Mbus:
            asked.append(refused)
            if len(asked) == 1:
                raise SettingsError("cannot read settings")
            return good

        async with on_bus(replace(good, private_key="half"), reread=reread) as bus:
            await connected(bus)

            assert bus.stats.connects == 1
    assert len(asked) == 2


async def test_t1_certificates_with_3072_bit_keys_are_accepted(tmp_path: Path) -> None:
    """Certificates that a real Director creates have RSA keys of this size."""
    async with knowing(tmp_path, Authority(bits=3072)) as server, on_bus(server.mbus("agent", bootstrap=True)) as bus:
        await connected(bus)


async def test_intermediate_bus_ca_is_trusted_without_its_root(tmp_path: Path) -> None:
    """As with the Go agent, the CA in the settings need not be a root CA."""
    async with NatsServer(tmp_path, Authority(issuer=Authority("root"))) as server:
        await server.add_agent("agent")
        async with on_bus(server.mbus("agent")) as bus:
            await connected(bus)


@pytest.mark.parametrize("bits", [0, 2048])
async def test_bus_server_certificate_is_verified_with_each_ca_that_has_the_same_name(
    tmp_path: Path, bits: int
) -> None:
    """During a CA rotation, the settings contain two CAs with the same name. OpenSSL alone would try only the first."""
    async with knowing(tmp_path, AUTHORITY) as server:
        mbus = server.mbus("agent")
        both = replace(mbus, ca=Authority(bits=bits).ca + mbus.ca)
        async with on_bus(both) as bus:
            await connected(bus)
            await bus.rotate(replace(both, ca=Authority().ca + both.ca))

            assert bus.stats.connects == 2


async def test_bus_server_certificate_from_an_unknown_ca_is_rejected_despite_a_known_ca_name(tmp_path: Path) -> None:
    async with knowing(tmp_path, AUTHORITY, pair=Authority().server()) as server:
        mbus = server.mbus("agent")
        async with on_bus(replace(mbus, ca=Authority().ca + mbus.ca)) as bus:
            await until(lambda: bus.stats.attempts >= 9 and "certificate signature failure" in bus.stats.last_error)

            assert not bus.is_connected
