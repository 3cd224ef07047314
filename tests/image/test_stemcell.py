"""The stemcell that is built from the image has the expected files, and its image starts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from stemcell_overlay import stemcell
from tests.support import pods
from tests.support.pods import Podman
from tests.support.source import ROOT

pytestmark = [pytest.mark.image, pytest.mark.early]  # Building an image takes minutes.

MOST = 80_000_000
"""Maximum size in bytes of /opt/agent_shim, which contains almost everything that the overlay adds to a base."""


@pytest.fixture(scope="module")
def unpacked(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stemcell and return a directory with its files."""
    where = tmp_path_factory.mktemp("stemcell")
    program = [sys.executable, str(ROOT / "stemcell_overlay/stemcell.py"), "--image", image, "--version", "9"]
    environment = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    done = subprocess.run([*program, "--out", str(where)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    tarball = Path(done.stdout.strip())
    (where / "size").write_text(str(tarball.stat().st_size))
    with tarfile.open(tarball) as packed:
        packed.extractall(where / "members")  # noqa: S202 - we made it ourselves
    tarball.unlink()
    return where / "members"


def test_stemcell_image_has_the_build_time_as_modification_time(unpacked: Path) -> None:
    """The LXD CPI uses this time as the creation date of the LXD image, and LXD rejects the time 0."""
    assert (unpacked / "image").stat().st_mtime == stemcell.build_time() > 0


def test_stemcell_has_the_members_that_director_and_cpis_expect(unpacked: Path) -> None:
    manifest = yaml.safe_load((unpacked / "stemcell.MF").read_text())
    sums = [hashlib.new(name, (unpacked / "image").read_bytes()).hexdigest() for name in ("sha1", "sha256")]
    parts = {path.name for path in unpacked.iterdir()}
    spdx, cyclonedx = (json.loads((unpacked / f"sbom.{kind}.json").read_text()) for kind in ("spdx", "cdx"))

    assert parts == {
        *("stemcell.MF", "packages.txt", "dev_tools_file_list.txt", "image", "sbom.spdx.json", "sbom.cdx.json")
    }
    assert manifest["sha1"] == f"{sums[0]};sha256:{sums[1]}"
    assert manifest["stemcell_formats"] == ["warden-tar", "general-tar"]
    system = manifest["operating_system"]
    assert system in ("debian-bookworm", "debian-trixie", "debian-forky", "ubuntu-noble", "ubuntu-jammy")
    assert manifest["name"] == f"bosh-warden-boshlite-{system}-agent-shim"
    assert manifest["architecture"] == manifest["cloud_properties"]["architecture"] == "x86_64"
    assert " openssh-server " in (unpacked / "packages.txt").read_text()
    assert {"nats-py", "msgspec", "agent-shim"} <= {one["name"] for one in cyclonedx["components"]}
    assert len(spdx["packages"]) == len(cyclonedx["components"]) > 200
    licences = {one["name"]: [each["license"]["name"] for each in one["licenses"]] for one in cyclonedx["components"]}
    assert (licences["nats-py"], licences["agent-shim"]) == (["Apache-2.0"], ["Apache-2.0"])
    assert "BSD-3-clause" in licences["openssh-server"]
    assert sum(bool(found) for found in licences.values()) > 0.9 * len(licences)
    below = {one["ref"]: one["dependsOn"] for one in cyclonedx["dependencies"]}
    refs = {one["name"]: one["bom-ref"] for one in cyclonedx["components"]}
    assert set(below) == {manifest["name"], *refs.values()}
    assert {refs["nats-py"], refs["aiohttp"]} < set(below[refs["agent-shim"]])
    assert refs["libc6"] in below[refs["openssh-server"]]
    known = {"SPDXRef-DOCUMENT", *(one["SPDXID"] for one in spdx["packages"])}
    ends = ("spdxElementId", "relatedSpdxElement")
    assert {one[end] for one in spdx["relationships"] for end in ends} == known


def test_stemcell_tarball_is_not_larger_than_its_content(unpacked: Path) -> None:
    """The tarball must not be compressed, because the files in it already are."""
    packed = sum(path.stat().st_size for path in unpacked.iterdir() if path.is_file())

    assert int((unpacked.parent / "size").read_text()) < packed * 1.001


def test_stemcell_with_the_wrong_operating_system_is_rejected(podman: Podman, image: str, tmp_path: Path) -> None:
    """The Director would give such a stemcell the wrong addons."""
    program = [sys.executable, str(ROOT / "stemcell_overlay/stemcell.py"), "--image", image, "--out", str(tmp_path)]
    environment = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    done = subprocess.run([*program, "--os", "ubuntu-xenial"], capture_output=True, text=True, env=environment)

    assert done.returncode == 1
    assert "cannot make a stemcell for ubuntu-xenial: the image is " in done.stderr
    assert list(tmp_path.iterdir()) == []


async def test_unpacked_stemcell_image_starts(podman: Podman, unpacked: Path) -> None:
    """The warden CPI imports only the image's files, not its metadata, and runs its own start command."""
    root = unpacked / "root"
    root.mkdir()
    unpack = ["tar", "-xzf", str(unpacked / "image"), "-C", str(root)]
    await asyncio.to_thread(subprocess.check_call, unpack)
    chain = ("bash", "-c", "exec env -i /usr/sbin/runsvdir-start")
    async with pods.running(podman, str(root), *chain, options=("--network=none", "--rootfs")) as container:
        await container.until(1, "agent-shim", "probe", "ready")
        assert await container.stop() == 0
    shutil.rmtree(unpacked)


def test_stemcell_overlay_stays_below_its_size_limit(podman: Podman, image: str) -> None:
    said = podman("run", "--rm", "--network=none", image, "du", "-s", "--bytes", "/opt/agent_shim")

    assert int(said.split()[0]) < MOST
