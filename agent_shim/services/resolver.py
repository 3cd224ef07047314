"""Configures the container's resolver with the name servers that the Director's cloud-config lists under a network's
``dns`` key.

The Go agent writes resolvconf's base file or a drop-in for systemd-resolved (platform/net/dnsresolver). A container has
neither program, unless its PID 1 is systemd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_shim.host import command, files, network

RESOLV_CONF: Final = Path("/etc/resolv.conf")
SYSTEMD: Final = Path("/run/systemd/system")
RESOLVED_DROP_IN: Final = Path("/etc/systemd/resolved.conf.d/10-bosh.conf")
FIRST: Final = "# set by resolvectl"
"""Comment at the end of lines that put bosh-dns first in resolv.conf. The agent's replacement for resolvectl adds these
lines.
"""


async def write_servers(servers: Sequence[str]) -> str | None:
    """Boot step: use ``servers`` for name lookups. Return the reason if nothing was changed, or None.

    Raises ``HostError`` and ``OSError``. Needs root.
    """
    wanted = [server for server in servers if network.is_address(server)]
    if not wanted:
        return "no servers in the settings"
    if await asyncio.to_thread(_belongs_to_resolved):
        return await _configure_resolved(wanted)
    before = await asyncio.to_thread(files.text, RESOLV_CONF)
    if (after := resolv_conf(before, wanted)) == before:
        return "they are already configured"
    await asyncio.to_thread(files.write_atomic, RESOLV_CONF, after.encode())
    return None


def _belongs_to_resolved() -> bool:
    """Return True if systemd-resolved is running and maintains resolv.conf."""
    return SYSTEMD.is_dir() and RESOLV_CONF.resolve().is_relative_to("/run/systemd/resolve")


async def _configure_resolved(servers: Sequence[str]) -> str | None:
    """Pass ``servers`` to systemd-resolved. Return the reason if nothing was changed, or None."""
    drop_in = f"[Resolve]\nDNS={' '.join(servers)}\n"
    if await asyncio.to_thread(files.text, RESOLVED_DROP_IN) == drop_in:
        return "they are already configured"
    await asyncio.to_thread(files.make_dir, RESOLVED_DROP_IN.parent, 0o755)
    await asyncio.to_thread(files.write_atomic, RESOLVED_DROP_IN, drop_in.encode())
    await command.run("systemctl", "restart", "systemd-resolved")
    return None


def resolv_conf(before: str, servers: Sequence[str]) -> str:
    """Return a resolv.conf that uses ``servers``.

    If the text ``before`` already contains all ``servers``, it is returned unchanged, because a job may have put its
    own server first. Otherwise ``servers`` replace the container runtime's name servers. Search domains and options are
    kept, and so is a name server that bosh-dns put first.
    """
    lines = before.splitlines()
    named = [words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "nameserver"]
    if set(servers) <= set(named):
        return before
    first = [line for line in lines if line.endswith(FIRST)]
    others = [line for line in lines if line.split()[:1] != ["nameserver"]]
    return "\n".join([*first, *(f"nameserver {server}" for server in servers), *others, ""])
