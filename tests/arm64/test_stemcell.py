"""A stemcell for arm64, built on this machine, runs a job on an emulated arm64 machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.image.site import SETTINGS
from tests.support import arm64_guest, pods
from tests.support.arm64 import enable_emulation
from tests.support.arm64_guest import HOST, Machine
from tests.support.environment import AGENT, BLOBS, Environment, environment
from tests.support.source import ROOT

pytestmark = pytest.mark.arm64


@pytest.fixture(scope="module")
def stemcell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stemcell for arm64 with ``./dev stemcell``, unpack it, and return the directory with its files."""
    where = tmp_path_factory.mktemp("stemcell")
    enable_emulation()
    podman = pods.podman(where)
    base = pods.arm64_base_image(podman, where)
    make = [sys.executable, str(ROOT / "stemcell_overlay/stemcell.py"), "--arch=arm64", f"--base={base}"]
    options = [f"--out={where}", "--", "--build-arg=COMPILERS=", *pods.secrets()]
    env = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    made = subprocess.run([*make, *options], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    members = where / "members"
    with tarfile.open(made) as packed:
        packed.extractall(members)  # noqa: S202 - we made it ourselves
    Path(made).unlink()
    return members


@pytest.fixture(scope="module")
def disk(stemcell: Path) -> Path:
    """Create a disk image with the stemcell's root file system, and return its path."""
    root = stemcell / "root"
    root.mkdir()
    subprocess.run(["tar", "-xzf", stemcell / "image", "-C", root], check=True)
    return arm64_guest.make_disk(root, stemcell / "disk")


@pytest.fixture
async def bosh(tmp_path: Path) -> AsyncIterator[Environment]:
    """Provide a message bus that the machine reaches at the address ``HOST``."""
    async with environment(HOST, tmp_path, listen="127.0.0.1", timeout_s=600) as made:
        made.blobs.mkdir()
        yield made


@pytest.fixture
async def machine(disk: Path, bosh: Environment, tmp_path: Path) -> AsyncIterator[Machine]:
    async with arm64_guest.running(disk, bosh.blobs, tmp_path / "console") as running:
        yield running


def test_stemcell_for_arm64_names_its_architecture(stemcell: Path) -> None:
    """As RFC 0062 proposes, the architecture is part of the name but not of the operating system."""
    manifest = yaml.safe_load((stemcell / "stemcell.MF").read_text())

    assert manifest["name"] == "bosh-warden-boshlite-debian-bookworm-arm64-agent-shim"
    assert manifest["operating_system"] == "debian-bookworm"
    assert manifest["version"].endswith((".arm64", "+arm64"))
    assert manifest["architecture"] == manifest["cloud_properties"]["architecture"] == "arm64"


async def test_stemcell_for_arm64_runs_a_job_under_a_keeper(machine: Machine, bosh: Environment) -> None:
    (bosh.blobs / "settings.json").write_text(bosh.settings())
    await machine.exec("install", "-m", "640", f"{BLOBS}/settings.json", SETTINGS)
    assert await machine.exec("uname", "-m") == "aarch64\n"
    await bosh.deploy()

    pid = (await machine.exec("cat", "/var/vcap/sys/run/sleeper/sleeper.pid")).strip()
    parent = (await machine.exec("ps", "-o", "ppid=", "-p", pid)).strip()
    assert await machine.exec("cat", f"/proc/{pid}/comm") == "sleep\n"
    assert await machine.exec("cat", f"/proc/{parent}/comm") == "keeper\n"

    await bosh.director.run(AGENT, "stop")
    assert (await bosh.director.value(AGENT, "get_state"))["job_state"] == "stopped"
    assert await machine.exec("sh", "-c", f"kill -0 {pid} 2>/dev/null || echo gone") == "gone\n"
    await bosh.director.run(AGENT, "start")
    await bosh.until_state("running")

    assert await machine.stop() == 0
    assert await machine.power_off() == 0
