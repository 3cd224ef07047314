"""Detects addresses that the Director expects but that no interface has. This happens when a recreated pod gets a
different address.

A missing address is reported in an alert, a metric and ``status``. ``get_state`` does not mention it, but returns the
``networks`` that the last ``apply`` stored, because any difference would make the Director recreate the instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from agent_shim.core.settings import Effective
from agent_shim.host import clock, network

logger = logging.getLogger(__name__)

POLL_S: Final = 30.0
"""Poll interval. A poll takes a few microseconds for each address."""

MAX_TOLD: Final = 10
"""Maximum number of newly missing addresses reported per check. It is limited because thousands of alerts would block
the event loop. ``missing`` still contains every missing address.
"""


def expected(settings: Effective, applied: Mapping[str, Any]) -> dict[str, str]:
    """Return the expected addresses, each with a description of its network. ``applied`` is the ``networks`` section of
    the last applied spec.

    Floating addresses (vip) are not included, because no interface has them. A dynamic address is included once a spec
    that contains it has been applied.
    """
    found = {
        known.ip: f"network {name} of the settings"
        for name, known in settings.source.networks.items()
        if known.ip and known.type != "vip" and not known.is_dynamic
    }
    for name, members in applied.items():
        known = settings.source.networks.get(name)
        is_floating = isinstance(members, dict) and "vip" in (members.get("type"), known.type if known else "")
        ip = members.get("ip") if isinstance(members, dict) else None
        if isinstance(ip, str) and ip and not is_floating:
            found[ip] = f"network {name} of the applied spec"
    return found


class AddressWatch:
    """Watches the expected addresses. ``missing`` maps the addresses that no interface had at the last check to
    descriptions of their networks.

    ``report`` is called with the network and a message for each address that is newly missing.
    """

    def __init__(self, expected: Callable[[], Mapping[str, str]], report: Callable[[str, str], None]) -> None:
        self.missing: dict[str, str] = {}
        self._expected = expected
        self._report = report

    async def watch(self) -> NoReturn:
        """Check the addresses periodically, forever."""
        while True:
            self.look()
            await asyncio.sleep(clock.until_beat(POLL_S))

    def look(self) -> None:
        """Check once which expected addresses no interface has, and report those that were not missing before."""
        before = self.missing
        self.missing = {ip: where for ip, where in self._expected().items() if not network.has_address(ip)}
        newly_missing = [ip for ip in self.missing if ip not in before]
        if len(newly_missing) > MAX_TOLD:
            logger.warning("%d addresses are on no interface; the first %d follow", len(newly_missing), MAX_TOLD)
        for ip in newly_missing[:MAX_TOLD]:
            text = f"no interface has the address {ip} ({self.missing[ip]})"
            logger.warning("%s", text)
            self._report(self.missing[ip].split(" of ")[0], text)  # "network NAME of …" is reported as "network NAME"
        for ip in before.keys() - self.missing.keys():
            logger.info("the address %s is back", ip)
