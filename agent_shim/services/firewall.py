"""Maintains packet filter rules that let only root and the agent's own user connect to the bus addresses.

This makes a stolen bus certificate useless to a job. There is one rule for each address to which a host in
``mbus.urls`` currently resolves (``https`` URLs are ignored). As in the Go agent
(platform/firewall/nftables_firewall.go), a rule matches the user who sends a packet. The rules are replaced
about once a minute, which adds new addresses and restores rules that something has removed. A refused connection fails
immediately, whereas with the Go agent it hangs.

The rules must never cut off the agent itself. They would do so if the agent reached the bus through a proxy that
another user runs, such as the sidecar of a service mesh. The agent therefore tests the rules, and removes them again if
the bus answers only without them. The test only watches the existing connection or the regular connection attempts,
because the server would log an error for a connection that is opened just for the test.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

from agent_shim.core.errors import HostError
from agent_shim.core.events import is_set_within
from agent_shim.core.settings import NATS_PORT, Mbus, bus_address
from agent_shim.host import blocking, clock, nftables

logger = logging.getLogger(__name__)

RULES_PERIOD_S: Final = 50.0
"""Interval at which the rules are replaced."""
LOOKUP_TIMEOUT_S: Final = 3.0
"""Timeout for resolving a host name."""
HEARD_WITH_RULES_S: Final = 3.0
"""How long to wait for a message from the server while the rules are in place."""
HEARD_WITHOUT_RULES_S: Final = 20.0
"""How long to wait for a message from the server while there are no rules. This is longer than the pause between two
connection attempts.
"""

Targets = frozenset[tuple[str, int]]
"""Address and port pairs."""

AWAITED: Final = "the addresses of the bus are not known yet"
NO_BUS: Final = "there is no bus that jobs could reach"
PROXIED: Final = "the bus is reached through a proxy of another user, which the rules would block"


class Firewall:
    """Prevents jobs from connecting to the bus. ``obstacle`` is "" while the rules are in place, otherwise the reason
    why jobs can still connect.

    ``mbus`` returns the bus addresses in use. ``is_linked`` returns True while the agent is connected to one of them.
    ``is_heard`` waits up to the given number of seconds and returns True if a server sends anything. If ``refusal`` is
    set, no rules are ever created, and ``obstacle`` is always ``refusal``.
    """

    def __init__(
        self,
        mbus: Callable[[], Mbus],
        is_linked: Callable[[], bool],
        is_heard: Callable[[float], Awaitable[bool]],
        refusal: str = "",
    ) -> None:
        self.obstacle = refusal or AWAITED  # until ``watch`` has set the rules for the first time
        self._mbus = mbus
        self._is_linked = is_linked
        self._is_heard = is_heard
        self._refusal = refusal
        self.due = asyncio.Event()
        """Callers set this event to have the rules replaced immediately, because the bus may have a new address."""
        self._proven: Targets = frozenset()
        """Addresses at which the agent has been able to reach the bus while the rules were in place."""
        self._proxied: Targets = frozenset()
        """Addresses that the agent can reach only without the rules. As long as they are the current addresses, no
        rules are created.
        """

    async def watch(self) -> NoReturn:
        """Maintain the rules forever."""
        while True:
            self.due.clear()  # clear this first, because an address may change while the rules are being set
            if not self._refusal:
                before = self.obstacle
                try:
                    self.obstacle = await self._apply()
                except HostError as exc:
                    self.obstacle = str(exc)
                self._log_change(before)
            await is_set_within(clock.until_beat(RULES_PERIOD_S), self.due)

    def _log_change(self, before: str) -> None:
        """Log the obstacle if it differs from ``before``. ``NO_BUS`` is not logged, because it is not a problem."""
        if self.obstacle in (before, NO_BUS):
            return
        if self.obstacle:
            logger.warning("jobs can reach the bus: %s", self.obstacle)
        else:
            logger.info("jobs cannot reach the bus")

    async def _apply(self) -> str:
        """Set the rules for the current addresses. Return the obstacle, if any. Raises ``HostError``."""
        urls = [url for url in self._mbus().urls if bus_address(url).scheme == "nats"]
        if not urls:
            return NO_BUS
        targets = await _addresses(urls)
        if not targets:
            return self.obstacle  # keep the rules for the previous addresses
        if targets == self._proxied:
            return PROXIED
        wanted = chains(targets, {0, os.geteuid()})
        if targets != self._proven:
            # Wait until the agent is connected, because the test below needs messages from the server.
            await self._is_heard(HEARD_WITHOUT_RULES_S)
        await nftables.replace(wanted)
        if targets == self._proven and self._is_linked():
            return ""
        if await self._is_heard(HEARD_WITH_RULES_S):
            self._proven = targets
            return ""
        await nftables.remove()
        if await self._is_heard(HEARD_WITHOUT_RULES_S):
            await nftables.replace(wanted)
            if await self._is_heard(HEARD_WITH_RULES_S):  # the server was only unavailable for a moment
                self._proven = targets
                return ""
            await nftables.remove()
            self._proxied = targets
            return PROXIED
        await nftables.replace(wanted)  # the bus is unreachable without the rules too, so restore them
        return ""


def chains(targets: Targets, users: Collection[int]) -> str:
    """Return an nftables chain that allows only ``users`` to send to ``targets``. Packets without a user, which belong
    to closed connections, are also let through. As in the Go agent, the chain runs just before other programs' filter
    chains.
    """
    allowed = ", ".join(map(str, sorted(users)))
    rules = "".join(
        f"    {'ip6' if ':' in address else 'ip'} daddr {address} tcp dport {port} meta skuid != {{ {allowed} }}"
        " counter reject with tcp reset\n"
        for address, port in sorted(targets)
    )
    return f"  chain bus_access {{\n    type filter hook output priority filter - 1; policy accept;\n{rules}  }}\n"


async def _addresses(urls: Collection[str]) -> Targets:
    """Resolve all host names in ``urls``. Names without an address are skipped."""
    found = set()
    for url in urls:
        parts = bus_address(url)
        # Skip an empty host. It would resolve to the loopback address, and the rules would block the jobs' own ports on
        # that address.
        if not parts.hostname:
            continue
        kind, port = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}, parts.port or NATS_PORT
        with suppress(OSError, ValueError):
            lookup = partial(socket.getaddrinfo, parts.hostname, port, **kind)
            entries = await blocking.call(
                f"look up {parts.hostname} for the firewall", lookup, timeout=LOOKUP_TIMEOUT_S, is_urgent=True
            )
            # Leave out the zone of a link-local address (``fe80::1%eth0``).
            found |= {(str(entry[4][0]).partition("%")[0], int(entry[4][1])) for entry in entries}
    return frozenset(found)
