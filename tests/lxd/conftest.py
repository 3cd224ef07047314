"""Fixtures for the LXD tests: a daemon with a bridge, the CPI, an imported stemcell, and a Director on the bridge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lxd.__main__ import STEMCELL
from tests.lxd.cpi import BRIDGE, DAEMON, IS_INCUS, POOL, Lxc, LxdCpi, RealCpi
from tests.support.environment import Environment, environment

GATEWAY = "10.245.0.1"

PRESEED: dict[str, Any] = {
    "networks": [
        {
            "name": BRIDGE,
            "type": "bridge",
            "config": {
                "ipv4.address": f"{GATEWAY}/24",
                "ipv4.nat": "false",
                "ipv4.firewall": "false",
                "ipv6.address": "none",
                "ipv6.firewall": "false",
            },
        }
    ],
    "storage_pools": [{"name": POOL, "driver": "dir"}],
    "profiles": [{"name": "default", "devices": {"root": {"type": "disk", "pool": POOL, "path": "/"}}}],
}


@pytest.fixture(scope="session")
def lxc() -> Iterator[Lxc]:
    """Run an LXD or Incus daemon that stores its containers in directories. The containers are killed with the
    daemon.
    """
    directory = Path(os.environ[STEMCELL]).parent / "lxd"
    directory.mkdir()
    client = Lxc(directory)
    admin = ["incus", "admin"] if IS_INCUS else ["lxd"]
    with (directory.parent / "lxd.log").open("w") as log:
        daemon = subprocess.Popen([DAEMON, "--group=root"], env=client.environment, stdout=log, stderr=log)
        try:
            subprocess.run([*admin, "waitready", "--timeout=120"], env=client.environment, check=True)
            preseed = yaml.safe_dump(PRESEED)
            subprocess.run([*admin, "init", "--preseed"], env=client.environment, input=preseed, text=True, check=True)
            yield client
            for name in client("list", "--format=csv", "--columns=n").split():
                client("delete", "--force", name)
        finally:
            daemon.terminate()
            daemon.wait(60)


@pytest.fixture(scope="session")
def cpi(lxc: Lxc) -> LxdCpi:
    binary = os.environ.get("LXD_CPI")
    return RealCpi(lxc, binary, lxc.directory.parent) if binary else LxdCpi(lxc)


@pytest.fixture(scope="session")
def stemcell(cpi: LxdCpi) -> str:
    """Import the unpacked stemcell that ``./dev stemcell`` has built, as a Director does. Return its cid."""
    directory = Path(os.environ[STEMCELL])
    manifest = yaml.safe_load((directory / "stemcell.MF").read_text())
    return cpi.create_stemcell(directory / "image", manifest["cloud_properties"])


@pytest.fixture
async def bosh(lxc: Lxc, tmp_path: Path) -> AsyncIterator[Environment]:
    async with environment(GATEWAY, tmp_path) as made:
        made.blobs.mkdir()
        for directory in (made.blobs, *tmp_path.parents):
            with contextlib.suppress(OSError):
                directory.chmod(directory.stat().st_mode | 0o055)
        yield made
