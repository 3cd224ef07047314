"""Tests reading addresses, routes and listening sockets from the kernel's tables."""

from __future__ import annotations

import socket

import pytest

from agent_shim.host import files, network

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
SUBNET = "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
DEFAULT = "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
CHEAPER = "eth1\t00000000\tFE01A8C0\t0003\t0\t0\t20\t00000000\t0\t0\t0\n"


@pytest.mark.parametrize(
    ("text", "route"),
    [
        (HEAD + SUBNET + DEFAULT, ("eth0", "10.0.0.1")),
        (HEAD + DEFAULT + CHEAPER + SUBNET, ("eth1", "192.168.1.254")),
        (HEAD + SUBNET, None),
        (HEAD, None),
        ("", None),
        (HEAD + "eth0\t00000000\n", None),
    ],
)
def test_default_route_with_the_lowest_metric_is_used(text: str, route: tuple[str, str] | None) -> None:
    assert network.parse_route(text) == route


TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.mark.parametrize(
    ("line", "ports"),
    [
        ("   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n", {22: {0}}),
        (
            "   0: 0500000A:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n",
            {2024: {0}},
        ),
        ("   0: 00000000:0016 0500000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n", {}),
        ("   0: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n", {}),
        (f"   0: {'0' * 32}:0016 {'0' * 32}:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1\n", {22: {0}}),
        (f"   0: {'0' * 24}01000000:0016 {'0' * 32}:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1\n", {}),
        ("", {}),
        (
            "   0: 00000000:0016 0:0 0A 0:0 00:0 0 1000 0 1 1\n   1: 0500000A:0016 0:0 0A 0:0 00:0 0 0 0 1 1\n",
            {22: {0, 1000}},
        ),
    ],
)
def test_listening_sockets_are_parsed(line: str, ports: dict[int, set[int]]) -> None:
    """Connections are left out, and so are sockets that only this machine can reach."""
    assert network.parse_listeners((TCP + line).splitlines()) == ports


def test_socket_table_is_read_up_to_the_last_listener() -> None:
    """The kernel lists listeners first, so a job's million connections need not be read."""
    connection = "   0: 00000000:0016 0500000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    lines = iter([TCP, *[connection] * 3])

    assert network.parse_listeners(lines) == {}
    assert len(list(lines)) == 2


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_listening_socket_is_found_until_it_is_closed(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        before = bool(network.listeners(port))
        listener.listen()
        meanwhile = bool(network.listeners(port))

    assert (before, meanwhile, bool(network.listeners(port))) == (False, True, False)


@pytest.mark.parametrize("text", ["10.0.0.1", "::1", "fe80::1%eth0", "fe80::1%br-a.1", "::ffff:10.0.0.1"])
def test_ip_addresses_with_and_without_scope_are_valid(text: str) -> None:
    assert network.is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "name",
            "10.0.0.1%eth0",
            "fe80::1%",
            "fe80::1%a b",
            "fe80::1%a\nsearch other",
            "01.2.3.4",
            "1.2.3",
            "::1/64",
        ),
        *("10.0.0.1\0", "10.0.0.1 ", "%eth0", "\udc80"),
    ],
)
def test_invalid_ip_addresses_are_rejected(text: str) -> None:
    assert not network.is_address(text)
    assert network.family_of(text) is None


@pytest.mark.parametrize(
    ("prefix", "mask"), [("00", "::"), ("40", "ffff:ffff:ffff:ffff::"), ("80", ":".join(["ffff"] * 8))]
)
def test_default_ipv6_address_is_found(monkeypatch: pytest.MonkeyPatch, prefix: str, mask: str) -> None:
    route = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003 eth0\n"
    address = f"20010db8{'0' * 23}5 02 {prefix} 00 80 eth0\n"
    texts = {"ipv6_route": route, "if_inet6": address}
    monkeypatch.setattr(files, "text", lambda path: texts[path.name])

    assert network.default_address(ipv6=True) == network.Address("2001:db8::5", mask, "fe80::1")
