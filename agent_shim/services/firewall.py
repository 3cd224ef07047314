"""Jobs are kept from the bus: only root, and the agent's own user, may open connections to its addresses.

A job that has got hold of a certificate has no use for it then. What is kept from whom is what the Go agent does with
nftables (platform/firewall/nftables_firewall.go): by user, for each address that the names in ``mbus.urls`` have now,
``https`` left out. The rules are made anew again and again, so that new addresses count and what a job has removed is
back within a minute. A connection that is refused is refused at once; the Go agent lets it hang.

They must never cut off the agent itself. Where a proxy of another user stands between it and the bus (the sidecar of a
service mesh) they would: so they are tried, and taken away again if the bus is heard only without them. The link and
the attempts at one tell; no connection is opened to find out, which a server would log as a broken one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NoReturn

from agent_shim.core.errors import HostError
from agent_shim.core.settings import Mbus, bus_address
from agent_shim.host import nftables

logger = logging.getLogger(__name__)

PERIOD: Final = 50.0
"""Seconds until the rules are made anew."""
PATIENCE: Final = 3.0
"""Seconds for a name."""
HEARD_WITH_RULES_S: Final = 3.0
HEARD_WITHOUT_RULES_S: Final = 20.0
"""For a word of the server; the second is longer than the pause between two attempts at a link."""
DEFAULT_PORT: Final = 4222

Targets = frozenset[tuple[str, int]]
"""Addresses and ports."""

AWAITED: Final = "the addresses of the bus are not known yet"
NO_BUS: Final = "there is no bus that jobs could reach"
PROXIED: Final = "the bus is reached by way of a process of another user, which rules would cut off"


class Firewall:
    """``watch`` is the root task; ``obstacle`` says why jobs can reach the bus, "" while rules keep them from it.

    ``mbus`` are the addresses in use, ``is_linked`` says whether there is a link to one of them, ``is_heard`` whether a
    server says something within so many seconds. With a ``refusal``, which is the obstacle then, nothing is ever done.
    """

    def __init__(
        self,
        mbus: Callable[[], Mbus],
        is_linked: Callable[[], bool],
        is_heard: Callable[[float], Awaitable[bool]],
        refusal: str = "",
    ) -> None:
        self.obstacle = refusal or AWAITED
        self._mbus = mbus
        self._is_linked = is_linked
        self._is_heard = is_heard
        self._refusal = refusal
        self._due = asyncio.Event()
        self._proven: Targets = frozenset()
        """With rules for these the bus was reached."""
        self._proxied: Targets = frozenset()

    def look_again(self) -> None:
        """Make the rules anew now: the bus may be at another address."""
        self._due.set()

    async def watch(self) -> NoReturn:
        """Keep the rules, for ever."""
        while True:
            if not self._refusal:
                before = self.obstacle
                try:
                    self.obstacle = await self._settle()
                except HostError as exc:
                    self.obstacle = str(exc)
                self._tell(before)
            self._due.clear()
            try:
                async with asyncio.timeout(PERIOD):
                    await self._due.wait()
            except TimeoutError:
                continue

    def _tell(self, before: str) -> None:
        if self.obstacle in (before, NO_BUS):
            return
        if self.obstacle:
            logger.warning("jobs are not kept from the bus: %s", self.obstacle)
        else:
            logger.info("jobs are kept from the bus")

    async def _settle(self) -> str:
        """Have the rules that are right now; the obstacle, if there is one. Raises ``HostError``."""
        urls = [url for url in self._mbus().urls if bus_address(url).scheme == "nats"]
        if not urls:
            return NO_BUS
        targets = await _addresses(urls)
        if not targets:
            return self.obstacle  # whatever holds for the addresses that were known goes on
        if targets == self._proxied:
            return PROXIED
        wanted = chains(targets, {0, os.geteuid()})
        if targets != self._proven:  # a link that there is shows at once what rules do to it
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
            if await self._is_heard(HEARD_WITH_RULES_S):  # it came back just now
                self._proven = targets
                return ""
            await nftables.remove()
            self._proxied = targets
            return PROXIED
        await nftables.replace(wanted)  # it is away for everybody
        return ""


def chains(targets: Targets, users: Collection[int]) -> str:
    """Only ``users`` may send to ``targets``; what belongs to no user, as the end of a closed connection, may too."""
    allowed = ", ".join(map(str, sorted(users)))
    rules = "".join(
        f"    {'ip6' if ':' in address else 'ip'} daddr {address} tcp dport {port} meta skuid != {{ {allowed} }}"
        " counter reject with tcp reset\n"
        for address, port in sorted(targets)
    )
    return f"  chain bus_access {{\n    type filter hook output priority filter - 1; policy accept;\n{rules}  }}\n"


async def _addresses(urls: Collection[str]) -> Targets:
    """All that the names have now; names that have none are passed over."""
    loop, found = asyncio.get_running_loop(), set()
    for url in urls:
        parts = bus_address(url)
        if not parts.hostname:  # it would stand for loopback, and close ports of jobs there
            continue
        try:
            async with asyncio.timeout(PATIENCE):
                entries = await loop.getaddrinfo(
                    parts.hostname, parts.port or DEFAULT_PORT, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
                )
        except (OSError, ValueError, TimeoutError):
            continue
        found |= {(str(entry[4][0]).partition("%")[0], int(entry[4][1])) for entry in entries}
    return frozenset(found)
