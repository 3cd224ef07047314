"""Neighbours are forgotten, in a network of our own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.root

SCRIPT = """
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


def test_those_that_are_named_are_forgotten_and_no_others() -> None:
    shell = ["unshare", "--net", "sh", "-c", SCRIPT, "sh", sys.executable]
    left = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout

    assert [line.split()[0] for line in left.splitlines()] == ["10.0.0.6"]
