"""Tests that programs can resolve the DNS records of other instances, and that bosh-dns can read these records."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.support import jobs
from tests.support.fleet import Fleet
from tests.support.machine import Machine

pytestmark = pytest.mark.root

AGENT = "agent-1"
NETWORKS = {"default": {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0"}}


def records(fleet: Fleet, version: int, *pairs: tuple[str, str]) -> list[Any]:
    """Put DNS records into the blobstore and return the arguments of ``sync_dns`` for them."""
    content = json.dumps({"version": version, "records": pairs}).encode()
    named = jobs.blob(fleet.blobs(AGENT), content)
    return [named["blobstore_id"], f"sha256:{hashlib.sha256(content).hexdigest()}", version]


def resolved(machine: Machine, name: str) -> str:
    """Return the addresses, separated by spaces, that the C library finds for a name in the hosts file."""
    found = machine.run(f"getent -s hosts:files ahosts {name} || true")
    return " ".join(sorted({line.split()[0] for line in found.splitlines()}))


async def test_a26_programs_resolve_dns_records_from_the_director(fleet: Fleet) -> None:
    """If the container runtime has mounted /etc/hosts, the agent must write to that file instead of replacing it. If
    the mount is read-only, the records must still be stored for bosh-dns.
    """

    async def sync(version: int, *pairs: tuple[str, str]) -> None:
        assert await fleet.director.value(AGENT, "sync_dns", *records(fleet, version, *pairs)) == "synced"

    machine = await fleet.add(AGENT, NETWORKS)
    pairs = [("10.0.0.9", "db-0.bosh"), ("10.0.0.10", "web-0.bosh"), ("fd00::9", "six.bosh")]
    await sync(1, *pairs)
    assert [resolved(machine, name) for _, name in pairs] == [address for address, _ in pairs]
    await sync(2, ("10.0.0.11", "db-0.bosh"))
    assert (resolved(machine, "db-0.bosh"), resolved(machine, "web-0.bosh")) == ("10.0.0.11", "")
    assert resolved(machine, AGENT) in ("127.0.0.1", "127.0.0.1 ::1", "::1")
    assert machine.run("stat -c '%a %U %G' /var/vcap/instance/dns/records.json /etc/hosts").splitlines() == [
        "640 root vcap",
        "644 root root",
    ]

    machine.run("cp /etc/hosts /mnt/hosts && mount --bind /mnt/hosts /etc/hosts")
    await sync(3, ("10.0.0.9", "db-0.bosh"))
    assert "10.0.0.9 db-0.bosh" in (machine.root / "mnt/hosts").read_text()
    machine.run("mount -o remount,bind,ro /etc/hosts")
    await sync(4, ("10.0.0.10", "db-0.bosh"))
    assert json.loads((machine.vcap / "instance/dns/records.json").read_bytes())["version"] == 4
    assert "10.0.0.9 db-0.bosh" in (machine.root / "mnt/hosts").read_text()


async def test_cloud_config_name_servers_are_used_from_boot_on(fleet: Fleet) -> None:
    network = NETWORKS["default"] | {"dns": ["192.0.2.53", "192.0.2.54"], "default": ["dns", "gateway"]}
    machine = await fleet.add(AGENT, {"default": network})

    lines = machine.run("cat /etc/resolv.conf").splitlines()

    assert [line for line in lines if line.startswith("nameserver")] == [
        "nameserver 192.0.2.53",
        "nameserver 192.0.2.54",
    ]
