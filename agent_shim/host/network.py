"""Reads network addresses and listeners, and removes entries from the neighbour table. This module does not change the
network configuration.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import HostError
from agent_shim.host import command, files

_SIOCGIFADDR: Final = 0x8915
_SIOCGIFNETMASK: Final = 0x891B
_GLOBAL_SCOPE: Final = 0x00
FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial pid namespace (include/linux/proc_ns.h)."""
_LISTEN: Final = "0A"
NEIGHBOUR_TIMEOUT_S: Final = 30.0
_LOOPBACK: Final = frozenset({f"{socket.htonl(0x7F000001):08X}", f"{'0' * 24}{socket.htonl(1):08X}"})
"""Loopback addresses in the format of ``/proc/net/tcp``, in which 32-bit words have the machine's byte order."""


class Address(msgspec.Struct, frozen=True):
    """The address of a dynamic network, with the members that the Director expects."""

    ip: str
    netmask: str
    gateway: str


def default_address(*, ipv6: bool = False) -> Address | None:
    """Return the IPv4 or IPv6 address of the interface with the default route, or None if there is no such route or
    address. The Go agent does this in platform/net/default_network_resolver.go.
    """
    return _default_ipv6() if ipv6 else _default_ipv4()


def _default_ipv4() -> Address | None:
    route = parse_route(files.text(Path("/proc/net/route")))
    if route is None:
        return None
    interface, gateway = route
    try:
        ip, netmask = _interface_address(interface, _SIOCGIFADDR), _interface_address(interface, _SIOCGIFNETMASK)
    except OSError:  # the interface has disappeared or has no IPv4 address
        return None
    return Address(ip, netmask, gateway)


def parse_route(text: str) -> tuple[str, str] | None:
    """Return the interface and gateway of the default route with the lowest metric, from the text of
    ``/proc/net/route``.
    """
    routes = []
    for line in text.splitlines()[1:]:
        columns = line.split()
        if len(columns) < 8:
            continue
        interface, destination, gateway, _, _, _, metric, mask = columns[:8]
        if destination == mask == "00000000":
            routes.append((int(metric), interface, socket.inet_ntoa(struct.pack("<L", int(gateway, 16)))))
    return min(routes)[1:] if routes else None


def _interface_address(interface: str, request: int) -> str:
    """Return the IPv4 address or netmask of an interface, depending on the ioctl ``request`` (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # struct ifreq: 16 bytes for the name, then a sockaddr_in, in which the address follows the family and the port.
        ifreq = fcntl.ioctl(any_socket, request, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(ifreq[20:24])


def _default_ipv6() -> Address | None:
    """Return the first global address of an interface with a default route. Unlike for IPv4, metrics are ignored."""
    for line in files.text(Path("/proc/net/ipv6_route")).splitlines():
        columns = line.split()
        if len(columns) != 10:
            continue
        destination, destination_prefix, next_hop, interface = columns[0], columns[1], columns[4], columns[9]
        if destination == "0" * 32 and destination_prefix == "00" and interface != "lo":
            gateway = _ipv6(next_hop)
            for entry in files.text(Path("/proc/net/if_inet6")).splitlines():
                address, _, prefix, scope, _, address_interface = entry.split()
                if address_interface == interface and int(scope, 16) == _GLOBAL_SCOPE:
                    host_bits = 128 - int(prefix, 16)
                    return Address(_ipv6(address), _ipv6(f"{(1 << 128) - (1 << host_bits):032x}"), gateway)
    return None


def _ipv6(digits: str) -> str:
    """Format an IPv6 address that is given as 32 hexadecimal digits."""
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def listeners(port: int) -> set[int]:
    """Return the users (uids) whose servers accept TCP connections from other machines on ``port``. This function
    blocks.

    The kernel lists listening sockets first. The connections after them are not read, because jobs may have a million
    of them.
    """
    users: set[int] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError), Path("/proc/net", name).open(encoding="ascii") as lines:
            users |= parse_listeners(lines).get(port, set())
    return users


def parse_listeners(lines: Iterable[str]) -> dict[int, set[int]]:
    """Parse ``/proc/net/tcp`` or ``tcp6``. Return the uids of the users that listen on each port, except on loopback
    addresses.
    """
    users: dict[int, set[int]] = {}
    for line in itertools.islice(lines, 1, None):  # skip the heading
        _, local, _, state, _, _, _, uid, *_ = line.split()
        if state != _LISTEN:
            break
        address, _, port = local.partition(":")
        if address not in _LOOPBACK:
            users.setdefault(int(port, 16), set()).add(int(uid))
    return users


def family_of(text: str) -> socket.AddressFamily | None:
    """Return the family of an IP address without a scope, or None for any other text."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):  # ValueError: the text contains a NUL
            socket.inet_pton(family, text)
            return family
    return None


def is_address(text: str) -> bool:
    """Return True for an address, including an IPv6 address with a scope (``fe80::1%eth0``), and False for other
    text.
    """
    address, percent, scope = text.partition("%")
    if percent and not (scope.isprintable() and scope.split() == [scope]):  # the scope is not a single word
        return False
    family = family_of(address)
    return family == socket.AF_INET6 if percent else family is not None


def has_address(text: str) -> bool:
    """Return True if an interface has the address. Also return True for text that is not an address, because callers
    report an address as missing if the result is False.

    This is tested by binding to the address, which the kernel allows only for this machine's addresses (unless
    ip_nonlocal_bind is set).
    """
    if not is_address(text):  # do not let bind resolve a name
        return True
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((text, 0))
    except OSError as exc:
        return exc.errno != errno.EADDRNOTAVAIL
    return True


def is_of_machine() -> bool:
    """Return True if this is a container that uses the machine's network, so that its packet filter rules would affect
    other programs. Such a container has its own pid namespace but sees the machine's network devices.
    """
    is_contained = Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE
    return is_contained and any(Path("/sys/class/net", name, "device").exists() for _, name in socket.if_nameindex())


async def forget_neighbours(addresses: list[str]) -> None:
    """Remove addresses from the neighbour table with ``ip neigh flush``. If the program or the privilege is missing,
    this has no effect.

    Only one process is started, because a request may contain tens of thousands of addresses. Its timeout is
    ``NEIGHBOUR_TIMEOUT_S``.
    """
    lines = "".join(f"neigh flush to {address}\n" for address in dict.fromkeys(addresses))
    with suppress(HostError):
        await command.run("ip", "-force", "-batch", "-", given=lines, timeout=NEIGHBOUR_TIMEOUT_S)
