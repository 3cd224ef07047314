"""Tests bus credentials that are replaced while the agent runs, by a new version of a mounted Secret or by the
Director.
"""

from __future__ import annotations

import json
import stat
from typing import Any

import pytest

from agent_shim.demo.director import RpcRemoteError
from agent_shim.demo.pki import HOUR, agent_name
from tests.support.instance import AGENT, RunningAgent
from tests.support.waiting import until

MINUTE = 60.0


@pytest.fixture(autouse=True)
async def _written(instance: RunningAgent) -> None:
    """Write the agent's settings, and add its bootstrap and permanent users to the bus. Do not start the agent."""
    await instance.server.add_agent(AGENT, bootstrap=True, permanent=True)
    instance.write_settings()


class Secret:
    """The agent's settings, mounted as the kubelet mounts a Secret: each version is in a new directory, and a link
    points to the latest one.
    """

    def __init__(self, instance: RunningAgent) -> None:
        self._source = instance.scratch / "settings.json"
        self._mounted = instance.scratch / "secret"
        self.document: dict[str, Any] = json.loads(self._source.read_text())
        self._number = 0
        self._source.unlink()
        self.put()
        self._source.symlink_to(self._mounted / "..data/settings.json")

    def put(self, cert: dict[str, str] | None = None) -> None:
        """Mount a new version of the Secret, with the credentials ``cert`` if they are given."""
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


def cert(instance: RunningAgent, *, age: float, bootstrap: bool = False, name: str = "") -> dict[str, str]:
    """Return credentials that became valid ``age`` seconds ago.

    They identify ``name`` or, by default, the agent's bootstrap or permanent bus user.
    """
    authority = instance.server.authority
    pair = authority.client(name or agent_name(AGENT, bootstrap=bootstrap), valid=(-age, 365 * 24 * HOUR))
    return {"ca": authority.ca, "certificate": pair.certificate, "private_key": pair.private_key}


def count_connections(instance: RunningAgent) -> int:
    """Return how many times the agent has connected."""
    return instance.log_text().count("connected to the bus")


def count_changes(instance: RunningAgent) -> int:
    """Return how many times the agent has noticed a change in its settings."""
    return instance.log_text().count("the settings have changed")


async def admit_only(instance: RunningAgent, *, bootstrap: bool) -> None:
    """Admit only the agent's bootstrap or permanent user to the bus. Check that the agent still answers."""
    await instance.server.add_agent(AGENT, bootstrap=bootstrap, permanent=not bootstrap)
    assert await instance.director.value(AGENT, "ping") == "pong"


async def rotate(instance: RunningAgent, news: dict[str, str]) -> None:
    """Rotate the credentials as a Director does."""
    await instance.director.run(AGENT, "update_settings", {"mbus": {"cert": news}, "trusted_certs": ""})


async def test_bus_reconnects_after_a_secret_rotation_but_not_after_other_changes(instance: RunningAgent) -> None:
    secret = Secret(instance)
    await instance.start_agent()

    secret.put(cert(instance, age=MINUTE, bootstrap=True))
    await until(lambda: count_connections(instance) == 2)
    await admit_only(instance, bootstrap=True)

    secret.document["vm"]["name"] = "another"
    secret.put()
    await until(lambda: count_changes(instance) == 2)
    assert count_connections(instance) == 2


async def test_secret_replaces_credentials_from_the_director_only_if_it_is_newer(instance: RunningAgent) -> None:
    secret = Secret(instance)
    await instance.start_agent()
    await rotate(instance, cert(instance, age=30 * MINUTE))
    assert count_connections(instance) == 2
    await until(lambda: count_changes(instance) == 1)

    secret.put(cert(instance, age=40 * MINUTE, bootstrap=True))
    await until(lambda: count_changes(instance) == 2)
    assert count_connections(instance) == 2

    secret.put(cert(instance, age=10 * MINUTE, bootstrap=True))
    await until(lambda: count_connections(instance) == 3)
    await admit_only(instance, bootstrap=True)

    await instance.stop_agent()
    await instance.start_agent()
    assert "the server does not know us" not in instance.log_text().split("the agent stops")[-1]


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
async def test_agent_falls_back_to_previous_credentials_when_new_ones_fail(
    instance: RunningAgent,
) -> None:
    """An operator may restore the bus from a backup that is older than the rotation. The bus then accepts only the
    former credentials, and those from the CPI may have expired.
    """
    secret = Secret(instance)
    await instance.start_agent()
    await rotate(instance, cert(instance, age=MINUTE, bootstrap=True))
    await instance.stop_agent()
    former = instance.base / "bosh/former_mbus.json"
    assert stat.S_IMODE(former.stat().st_mode) == 0o600

    secret.put(cert(instance, age=HOUR, name="stranger.agent.bosh-internal"))
    await instance.server.add_agent(AGENT, bootstrap=False, permanent=True)
    await instance.start_agent()

    assert "the server does not know us" in instance.log_text()
    assert (
        "the bus cannot be reached with the credentials in the settings, so the agent uses other ones"
        in (await instance.execute("status"))[1]
    )


async def test_expiring_bus_certificate_is_reported(instance: RunningAgent) -> None:
    authority = instance.server.authority
    pair = authority.agent(AGENT, valid=(-99 * HOUR, HOUR))
    Secret(instance).put({"ca": authority.ca, "certificate": pair.certificate, "private_key": pair.private_key})
    await instance.start_agent()

    told = "the client certificate of the bus expires at"
    await until(lambda: told in instance.log_text())
    assert "the CA certificate" not in instance.log_text()
    assert told in (await instance.execute("status"))[1]


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
async def test_invalid_certificate_from_the_director_is_rejected(instance: RunningAgent) -> None:
    """Without an error, the Director would assume that the agent uses the new credentials."""
    await instance.start_agent()

    with pytest.raises(RpcRemoteError, match="cannot use the new bus credentials"):
        await rotate(instance, cert(instance, age=MINUTE) | {"certificate": "nonsense"})

    assert not (instance.base / "bosh/update_settings.json").exists()
    assert await instance.director.value(AGENT, "ping") == "pong"
