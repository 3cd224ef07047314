"""Which address an instance has, and who listens there, read from the kernel's tables."""

from __future__ import annotations

import socket

import pytest

from agent_shim.host import network

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
def test_default_route(text: str, route: tuple[str, str] | None) -> None:
    """The default route with the lowest metric counts; a machine without one has none."""
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
def test_listeners(line: str, ports: dict[int, set[int]]) -> None:
    """Those that others can reach; a connection is none."""
    assert network.parse_listeners((TCP + line).splitlines()) == ports


def test_connections_are_not_read() -> None:
    """The kernel lists listeners first; a job can have a million connections."""
    connection = "   0: 00000000:0016 0500000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    lines = iter([TCP, *[connection] * 3])

    assert network.parse_listeners(lines) == {}
    assert len(list(lines)) == 2


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_listener_is_seen(family: socket.AddressFamily, address: str) -> None:
    """From the moment it listens to its end."""
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        before = bool(network.listeners(port))
        listener.listen()
        meanwhile = bool(network.listeners(port))

    assert (before, meanwhile, bool(network.listeners(port))) == (False, True, False)
