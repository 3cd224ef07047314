"""Tests upgrades from earlier releases, and rollbacks, with running jobs and a disk.

Some tests replace the agent while jobs run. The others create a new container with the same volumes, as a kubelet and
the Kubernetes CPIs do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from agent_shim.core.paths import Paths
from tests.image.site import ContainerSite
from tests.image.test_starts import CPIS, DISK, disks_of, started
from tests.support import jobs, pods
from tests.support.environment import AGENT
from tests.support.pods import Container, Podman
from tests.support.source import ROOT

pytestmark = [pytest.mark.image, pytest.mark.early]  # Building an image takes minutes.

FORMER: Final = {"0.2.0": "9b696af0"}
"""Version and commit of the last two releases. So far, there is only one such release."""
CPI: Final = CPIS["kubernetes (sykesm)"]
OVERLAY: Final = ("stemcell_overlay", "systemd")
PID: Final = ("cat", "/var/vcap/sys/run/sleeper/sleeper.pid", "/var/vcap/sys/run/user/user.pid")
PUT_PROGRAM: Final = """
set -e
cp -a /opt/agent_shim /mnt/program
tar -C /mnt -cf - program
rm -r /mnt/program
"""


@dataclasses.dataclass(frozen=True)
class ReleasedImage:
    """A release's image and the source tree from which it was built."""

    image: str
    tree: Path

    async def install(self, podman: Podman, container: Container) -> None:
        """Replace the agent in a running container and restart it, as docs/upgrading.md describes under
        "Upgrading without stopping jobs".
        """
        read = ("run", "--rm", "--network=none", self.image, "sh", "-c", PUT_PROGRAM)
        program = (await asyncio.to_thread(podman.run, *read)).stdout
        sources = ["tar", "-C", str(self.tree), "--exclude=program", "-cf", "-", *OVERLAY]
        overlay = (await asyncio.to_thread(subprocess.run, sources, capture_output=True, check=True)).stdout
        await container.exec("rm", "-rf", "/mnt/new")
        await container.exec("mkdir", "/mnt/new")
        await container.exec("tar", "-C", "/mnt/new", "-xf", "-", stdin=overlay)
        await container.exec("tar", "-C", "/mnt/new/stemcell_overlay", "-xf", "-", stdin=program)
        await container.exec("/mnt/new/stemcell_overlay/apply", "/")
        await container.exec("sv", "restart", "agent")


@pytest.fixture(scope="module", params=FORMER)
def former(
    request: pytest.FixtureRequest, podman: Podman, base: str, tmp_path_factory: pytest.TempPathFactory
) -> ReleasedImage:
    """Build an earlier release's image from that release's source.

    The Dockerfile in 0.2.0 passes a file with locale aliases to localedef. Newer bases, such as Ubuntu 26.04, do not
    have this file, so the option is removed.
    """
    tree = tmp_path_factory.mktemp("former")
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", FORMER[request.param]], capture_output=True)
    if packed.returncode != 0:
        pytest.skip(f"this clone has no {request.param} ({packed.stderr.decode().strip()}): git fetch --unshallow")
    subprocess.run(["tar", "-C", str(tree), "-xf", "-"], input=packed.stdout, check=True)
    dockerfile = tree / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(" -A /usr/share/locale/locale.alias", ""))
    return ReleasedImage(pods.build(podman, base, tree=tree, name=f"{pods.IMAGE}-{request.param}"), tree)


@pytest.fixture
def now(image: str) -> ReleasedImage:
    return ReleasedImage(image, ROOT)


def release(version: str) -> Mapping[str, Mapping[str, str | bytes]]:
    """Return two jobs: ``sleeper`` runs as root, and ``user`` runs as vcap and has to traverse ``/var/vcap/data``.

    One of the ``user`` job's scripts contains ``version``, so a different version changes the job.
    """
    user = jobs.process(Paths(), "user", "echo $$ >$pidfile; exec chpst -u vcap:vcap /var/vcap/jobs/user/bin/run")
    run = f"#!/bin/sh\n# {version}\nexec sleep 1000\n"
    return {"sleeper": jobs.sleeper(Paths(), "sleeper"), "user": user | {"bin/run": run}}


def site_with(site: ContainerSite, one: ReleasedImage) -> ContainerSite:
    return dataclasses.replace(site, image=one.image)


async def check_jobs_and_disk(site: ContainerSite, container: Container) -> None:
    """Check that the jobs are running, and that the disk with the test's file is mounted at the store."""
    await site.until_state("running")
    assert await site.director.run(AGENT, "list_disk") == [DISK]
    await container.exec("test", "-e", "/var/vcap/store/kept")


async def test_upgrade_and_rollback_keep_jobs_on_the_same_volumes(
    site: ContainerSite, former: ReleasedImage, now: ReleasedImage
) -> None:
    """Each release must first run the jobs that another release has deployed, and then deploy changed jobs."""
    data, disk = site.scratch / "data", site.scratch / "disk"
    for path in (data, disk):
        path.mkdir()
    settings = site.settings(disks=disks_of(CPI.disks))
    volumes = (f"--volume={data}:/var/vcap/data", f"--volume={disk}:{CPI.disks}/{DISK}")
    async with started(site_with(site, former), CPI, *volumes, settings=settings) as container:
        await site.until_pong()
        await site.director.run(AGENT, "mount_disk", DISK)
        await site.deploy(release("1"))
        await container.exec("touch", "/var/vcap/store/kept")
        await container.kill()
    for one in (now, former, now):
        async with started(site_with(site, one), CPI, *volumes, settings=settings) as container:
            await check_jobs_and_disk(site, container)
            await site.deploy(release(one.image))
            await container.stop()


async def test_jobs_run_as_vcap_after_a_rollback_on_a_volume_created_with_mode_0750(
    site: ContainerSite, former: ReleasedImage, now: ReleasedImage
) -> None:
    """Under the earlier release, vcap could not enter a volume with this mode. This release changes the mode, so vcap
    can still enter the volume after a rollback.
    """
    data = site.scratch / "data"
    data.mkdir(mode=0o750)
    volume = f"--volume={data}:/var/vcap/data"
    async with started(site_with(site, now), CPI, volume) as container:
        await site.deploy(release("1"))
        await container.stop()
    async with started(site_with(site, former), CPI, volume):
        await site.until_state("running")
        await site.deploy(release("2"))


async def test_agent_program_is_replaced_and_restored_without_restarting_jobs(
    site: ContainerSite, podman: Podman, former: ReleasedImage, now: ReleasedImage
) -> None:
    disk = site.scratch / "disk"
    disk.mkdir()
    settings = site.settings(disks=disks_of(CPI.disks))
    volume = f"--volume={disk}:{CPI.disks}/{DISK}"
    async with started(site_with(site, former), CPI, volume, settings=settings) as container:
        await site.until_pong()
        await site.director.run(AGENT, "mount_disk", DISK)
        await site.deploy(release("1"))
        await container.exec("touch", "/var/vcap/store/kept")
        before = await container.exec(*PID)
        versions = [await version(container)]
        for one in (now, former):
            await one.install(podman, container)
            await site.until_pong()
            versions.append(await version(container))
            await check_jobs_and_disk(site, container)
            assert await container.exec(*PID) == before
        assert versions == [versions[0], versions[1], versions[0]]
        assert versions[0] != versions[1]


async def version(container: Container) -> Any:
    """Wait until the agent answers, and return its version."""
    await container.until(0, "agent-shim", "status")
    return (await container.exec("agent-shim", "status", "--json")).partition('"version"')[2].split('"')[1]
