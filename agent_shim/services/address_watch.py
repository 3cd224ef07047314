"""Addresses that the Director counts on and no interface has: a pod that was made anew may have got another one.

The Director learns nothing of it from ``get_state``: ``networks`` stay as the last ``apply`` stored them, since any
difference makes it recreate the instance. So people are told, by an alert, a metric and ``status``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from agent_shim.core.settings import Effective
from agent_shim.host import network

logger = logging.getLogger(__name__)

PERIOD: Final = 30.0
"""Seconds between looks; a look takes some microseconds for each address."""


def expected(settings: Effective, applied: Mapping[str, Any]) -> dict[str, str]:
    """The addresses that this instance should have, and who says so; ``applied`` are the networks of the spec.

    A floating address (vip) is on no interface, one that the machine chooses counts when a spec was applied with it.
    """
    found = {
        known.ip: f"network {name} of the settings"
        for name, known in settings.networks.items()
        if known.ip and known.type != "vip" and not known.is_dynamic
    }
    for name, members in applied.items():
        known = settings.networks.get(name)
        is_floating = isinstance(members, dict) and "vip" in (members.get("type"), known.type if known else "")
        ip = members.get("ip") if isinstance(members, dict) else None
        if isinstance(ip, str) and ip and not is_floating:
            found[ip] = f"network {name} of the applied spec"
    return found


class AddressWatch:
    """``missing`` are the addresses that no interface has, as of the last look, and who says that one should.

    ``tell`` is called with a network and a text when another one is missing.
    """

    def __init__(self, expected: Callable[[], Mapping[str, str]], tell: Callable[[str, str], None]) -> None:
        self.missing: dict[str, str] = {}
        self._expected = expected
        self._tell = tell

    async def watch(self) -> NoReturn:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD)

    def look(self) -> None:
        """Compare once."""
        before = self.missing
        self.missing = {ip: where for ip, where in self._expected().items() if not network.has_address(ip)}
        for ip in self.missing.keys() - before.keys():
            text = f"no interface has the address {ip} ({self.missing[ip]})"
            logger.warning("%s", text)
            self._tell(self.missing[ip].split(" of ")[0], text)
        for ip in before.keys() - self.missing.keys():
            logger.info("the address %s is no longer missed", ip)
