"""Creates and removes the user accounts for ``bosh ssh``."""

from __future__ import annotations

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import ActionError
from agent_shim.core.settings import Effective
from agent_shim.host import network


class SshParams(msgspec.Struct, frozen=True):
    user: str = ""
    public_key: str = ""
    user_regex: str = ""


@action("ssh", Mode.NOW)
async def ssh(agent: Agent, command: str, params: SshParams) -> dict[str, str]:
    """Create an operator's user account (``setup``), or remove the accounts that match a pattern (``cleanup``). Start
    or stop the ssh server accordingly (agent/action/ssh.go).
    """
    if command == "cleanup":
        await agent.users.cleanup(params.user_regex)
        await agent.sshd.settle()
        return {"command": "cleanup", "status": "success"}
    if command != "setup":
        raise ActionError("Unknown command for SSH method")
    address = default_ip(agent.settings.current)  # if there is none, fail before the account is created
    await agent.users.setup(params.user, params.public_key)
    try:
        host_key = await agent.sshd.host_key()
        await agent.sshd.settle()
    except ActionError:
        await agent.users.cleanup(f"^{params.user}$")
        raise
    return {"command": "setup", "status": "success", "ip": address, "host_public_key": host_key}


def default_ip(settings: Effective) -> str:
    """Return the instance's IP address in its default network or, if it has none there, in any other network
    (settings/settings.go, DefaultIP).
    """
    networks = sorted(settings.source.networks.values(), key=lambda known: not known.default)
    for known in networks:
        if known.ip:
            return known.ip
        is_ipv6 = known.prefix == "128"  # the prefix length of a single IPv6 address
        if known.is_dynamic and (address := network.default_address(ipv6=is_ipv6)):
            return address.ip
    raise ActionError("No default ip could be found")
