"""Tests how the agent determines the default route's address and reads the ARP cache, in a new network namespace."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.root

LINKS = """
set -e
for name in here there; do
  ip link add $name type veth peer name ${name}2
  ip link set $name up
  ip link set ${name}2 up
done
ip address add 10.0.0.7/20 dev here
ip address add 10.1.0.7/24 dev there
ip address add fd00::7/72 dev here nodad
ip address add fd01::7/64 dev there nodad
"""
ASK = """
"$1" -c "
import msgspec
from agent_shim.host import network
print(msgspec.json.encode([network.default_address(), network.default_address(ipv6=True)]).decode())
"
"""


def default_addresses(routes: str) -> list[dict[str, str] | None]:
    """Add ``routes`` in a new network namespace, and return the default IPv4 and IPv6 addresses that the agent finds
    there.
    """
    shell = ["unshare", "--net", "sh", "-c", LINKS + routes + ASK, "sh", sys.executable]
    answer: list[dict[str, str] | None] = json.loads(
        subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout
    )
    return answer


def test_default_address_belongs_to_the_default_routes_interface() -> None:
    """Routes such as 0.0.0.0/1 also have destinations that begin with zeros, but they are not default routes."""
    routes = """
ip route add 0.0.0.0/1 via 10.1.0.1
ip route add default via 10.0.0.1
ip -6 route add ::/8 via fd01::1 dev there
ip -6 route add default via fd00::1 dev here
"""
    assert default_addresses(routes) == [
        {"ip": "10.0.0.7", "netmask": "255.255.240.0", "gateway": "10.0.0.1"},
        {"ip": "fd00::7", "netmask": "ffff:ffff:ffff:ffff:ff00::", "gateway": "fd00::1"},
    ]


def test_default_route_over_a_link_local_interface_gives_no_address() -> None:
    """A link-local address cannot be reached from other networks."""
    routes = """
ip address flush dev here
ip link set here down
ip link set here up
ip -6 route add default via fe80::1 dev here
ip route add default dev here
"""
    assert default_addresses(routes) == [None, None]


def test_missing_default_route_gives_no_address() -> None:
    assert default_addresses("ip route add 0.0.0.0/1 via 10.1.0.1; ip -6 route add ::/8 via fd01::1 dev there") == [
        None,
        None,
    ]


NEIGHBOURS = """
set -e
ip link add here type veth peer name there
ip link set here up
ip address add 10.0.0.1/24 dev here
ip address add fd00::1/64 dev here nodad
for address in 10.0.0.5 10.0.0.6 10.0.0.7 fd00::5; do
  ip neigh add $address lladdr 02:00:00:00:00:01 dev here nud stale
done
"$1" -c "
import asyncio
from agent_shim.host import network
asyncio.run(network.forget_neighbours(['10.0.0.5', '10.0.0.99', 'fd00::5', '10.0.0.7']))
"
ip neigh
"""


@pytest.mark.attack("a request puts commands for `ip` into an address")
def test_only_given_neighbours_are_removed_from_the_arp_cache() -> None:
    shell = ["unshare", "--net", "sh", "-c", NEIGHBOURS, "sh", sys.executable]
    left = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout

    assert [line.split()[0] for line in left.splitlines()] == ["10.0.0.6"]
