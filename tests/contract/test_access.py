"""Tests ``ssh`` requests that can be tested without root, and trusted certificates in ``update_settings``.

Codes such as ``a3`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import json

import pytest

from tests.support.world import LocalAgent

KEY = "ssh-rsa AAAAB3NzaC1yc2E= jane"


@pytest.mark.parametrize("command", ["", "Setup", "shell"])
async def test_a3_unknown_ssh_command_is_rejected(world: LocalAgent, command: str) -> None:
    assert await world.error("ssh", command, {}) == "Action Failed ssh: Unknown command for SSH method"


async def test_a3_ssh_cleanup_without_a_matching_user_succeeds(world: LocalAgent) -> None:
    assert await world.call("ssh", "cleanup", {"user_regex": "^bosh_x"}) == {
        "value": {"command": "cleanup", "status": "success"}
    }


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"user": "Jane", "public_key": KEY}, "Creating user: cannot use the name 'Jane': "),
        ({"user": "bosh_a", "public_key": KEY, "password": "old"}, "Creating user: the agent works below "),
        ({}, "Creating user: cannot use the name '': "),
        (None, "Creating user: cannot use the name '': "),
    ],
)
async def test_a3_rejected_ssh_setup_leaves_the_machine_unchanged(world: LocalAgent, params: object, text: str) -> None:
    assert (await world.error("ssh", "setup", params)).startswith(f"Action Failed ssh: {text}")
    assert not (world.paths.etc / "ssh").exists()
    assert not world.paths.ssh_home.exists()


async def test_a3_invalid_ssh_cleanup_expression_is_rejected(world: LocalAgent) -> None:
    error = await world.error("ssh", "cleanup", {"user_regex": "(a"})

    assert error.startswith("Action Failed ssh: SSH Cleanup: Deleting Ephemeral Users: ")


async def test_a7_trusted_certificates_are_kept_for_the_next_boot(world: LocalAgent) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"

    assert await world.value("update_settings", {"trusted_certs": pem}) == "ok"
    assert json.loads(world.paths.update_settings.read_bytes())["trusted_certs"] == pem
    assert await world.value("update_settings", {}) == "ok"
    assert json.loads(world.paths.update_settings.read_bytes())["trusted_certs"] == ""
