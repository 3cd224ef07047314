"""Credentials of the bus from two sides, a Secret and the Director, over the life of an agent process."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_shim.host import process
from agent_shim_demo.director import RpcRemoteError
from agent_shim_demo.pki import HOUR, agent_name
from benchmarks.world import AGENT, COMMAND, World
from benchmarks.world import world as made
from tests.support.waiting import until

MINUTE = 60.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """With settings that were written, and no agent yet. Both users of the agent are let in."""
    async with made(COMMAND) as one:
        await one.server.add_agent(AGENT, bootstrap=True, permanent=True)
        one.write_settings()
        yield one


class Secret:
    """The settings of an agent as the kubelet mounts a Secret: each content in a new directory, behind a link."""

    def __init__(self, world: World) -> None:
        self._source = world.scratch / "settings.json"
        self._mounted = world.scratch / "secret"
        self.document: dict[str, Any] = json.loads(self._source.read_text())
        self._number = 0
        self._source.unlink()
        self.put()
        self._source.symlink_to(self._mounted / "..data/settings.json")

    def put(self, cert: dict[str, str] | None = None) -> None:
        """Mount it again, with other credentials or the same."""
        if cert is not None:
            self.document["env"]["bosh"]["mbus"]["cert"] = cert
        former = self._mounted / f"..{self._number}"
        self._number += 1
        (self._mounted / f"..{self._number}").mkdir(parents=True)
        (self._mounted / f"..{self._number}/settings.json").write_text(json.dumps(self.document))
        (self._mounted / "..data_tmp").symlink_to(f"..{self._number}")
        (self._mounted / "..data_tmp").replace(self._mounted / "..data")
        if former.exists():
            (former / "settings.json").unlink()
            former.rmdir()


def cert(world: World, *, age: float, bootstrap: bool = False, name: str = "") -> dict[str, str]:
    """Credentials that became valid ``age`` seconds ago, for one of the two users of the agent or a stranger."""
    authority = world.server.authority
    pair = authority.client(name or agent_name(AGENT, bootstrap=bootstrap), valid=(-age, 365 * 24 * HOUR))
    return {"ca": authority.ca, "certificate": pair.certificate, "private_key": pair.private_key}


def log(world: World) -> str:
    return (world.scratch / "agent.log").read_text()


def links(world: World) -> int:
    """How often the agent has connected."""
    return log(world).count("connected to the bus")


def changes(world: World) -> int:
    """How often the agent has seen that its settings say something else."""
    return log(world).count("the settings have changed")


async def status(world: World) -> str:
    """Return the output of ``agent-shim status``."""
    out = world.scratch / "status.out"
    argv = [sys.executable, "-m", "agent_shim.cli", "status", "-b", str(world.base)]
    assert await process.spawn(argv, env=dict(os.environ), stdout=out).wait() == 0
    return out.read_text()


async def only(world: World, *, bootstrap: bool) -> None:
    """Let in but one user, and see that the agent is there."""
    await world.server.add_agent(AGENT, bootstrap=bootstrap, permanent=not bootstrap)
    assert await world.director.value(AGENT, "ping") == "pong"


async def rotated(world: World, news: dict[str, str]) -> None:
    """The Director's rotation."""
    await world.director.run(AGENT, "update_settings", {"mbus": {"cert": news}, "trusted_certs": ""})


async def test_a_rotated_secret_is_taken_and_one_with_the_same_credentials_is_not(world: World) -> None:
    secret = Secret(world)
    await world.start_agent()

    secret.put(cert(world, age=MINUTE, bootstrap=True))
    await until(lambda: links(world) == 2)
    await only(world, bootstrap=True)

    secret.document["vm"]["name"] = "another"
    secret.put()
    await until(lambda: changes(world) == 2)
    assert links(world) == 2


async def test_the_certificate_that_begins_later_is_used_also_by_the_next_start(world: World) -> None:
    secret = Secret(world)
    await world.start_agent()
    await rotated(world, cert(world, age=30 * MINUTE))
    assert links(world) == 2
    await until(lambda: changes(world) == 1)

    secret.put(cert(world, age=40 * MINUTE, bootstrap=True))
    await until(lambda: changes(world) == 2)
    assert links(world) == 2

    secret.put(cert(world, age=10 * MINUTE, bootstrap=True))
    await until(lambda: links(world) == 3)
    await only(world, bootstrap=True)

    await world.stop_agent()
    await world.start_agent()
    assert "the server does not know us" not in log(world).split("the agent stops")[-1]


async def test_an_agent_returns_with_its_former_credentials_when_the_new_ones_fail(
    world: World,
) -> None:
    """As when a bus is restored from a backup that is older than the rotation; those of the CPI are old by then."""
    secret = Secret(world)
    await world.start_agent()
    await rotated(world, cert(world, age=MINUTE, bootstrap=True))
    await world.stop_agent()
    former = world.base / "bosh/former_mbus.json"
    assert stat.S_IMODE(former.stat().st_mode) == 0o600

    secret.put(cert(world, age=HOUR, name="stranger.agent.bosh-internal"))
    await world.server.add_agent(AGENT, bootstrap=False, permanent=True)
    await world.start_agent()

    assert "the server does not know us" in log(world)
    assert "the credentials of the settings do not lead to the bus, which is reached with other ones" in await status(
        world
    )


async def test_a_certificate_near_its_end_is_reported(world: World) -> None:
    """Until it is rotated."""
    authority = world.server.authority
    pair = authority.agent(AGENT, valid=(-99 * HOUR, HOUR))
    Secret(world).put({"ca": authority.ca, "certificate": pair.certificate, "private_key": pair.private_key})
    await world.start_agent()

    told = "the client certificate of the bus ends at"
    await until(lambda: told in log(world))
    assert "the CA certificate" not in log(world)
    assert told in await status(world)


async def test_an_invalid_certificate_is_refused_beside_a_good_one_of_the_settings(world: World) -> None:
    """The Director has to learn of it: it would believe the agent on its new credentials."""
    await world.start_agent()

    with pytest.raises(RpcRemoteError, match="cannot use the new bus credentials"):
        await rotated(world, cert(world, age=MINUTE) | {"certificate": "nonsense"})

    assert not (world.base / "bosh/update_settings.json").exists()
    assert await world.director.value(AGENT, "ping") == "pong"
