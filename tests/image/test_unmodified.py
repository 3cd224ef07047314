"""Tests the agent on an unmodified stemcell image. The agent is in a volume, and applies the overlay whenever the
container starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.image.site import FULL, SETTINGS, ContainerSite
from tests.support import pods
from tests.support.pods import Podman

pytestmark = [pytest.mark.image, pytest.mark.early]  # Building an image takes minutes.

START = ("/usr/bin/env", "-i", "AGENT_SHIM_GRACE=50", "/opt/agent_shim/overlay/start")
APPLY = ("/opt/agent_shim/python/bin/python3", "-IB", "/opt/agent_shim/overlay/apply", "/", "--without-program")


@pytest.fixture(scope="module")
def volume(podman: Podman, base: str, image: str) -> str:
    """Return an image that contains only the files in /opt/agent_shim and can be mounted as an image volume."""
    return pods.build(podman, base, "volume")


@pytest.fixture(scope="module")
def stemcell(podman: Podman, base: str, image: str) -> str:
    """Return a Debian image that has a stemcell's packages but no agent files."""
    return pods.build(podman, base, "system")


@pytest.fixture(scope="module")
def copied(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory into which the agent was copied, as an init container does with an emptyDir."""
    where = tmp_path_factory.mktemp("agent")
    where.chmod(0o777)
    podman(
        "run", "--rm", "--network=none", f"--volume={where}:/agent", image, "cp", "-a", "/opt/agent_shim/.", "/agent"
    )
    return where


@pytest.mark.parametrize("way", ["image volume", "copy"])
async def test_unmodified_stemcell_runs_the_agent_from_a_volume(
    site: ContainerSite, stemcell: str, volume: str, copied: Path, way: str
) -> None:
    image_volume = f"--mount=type=image,source={volume},destination=/opt/agent_shim"
    option = image_volume if way == "image volume" else f"--volume={copied}:/opt/agent_shim:ro"
    unmodified = dataclasses.replace(site, image=stemcell)
    async with unmodified.container(*START, options=(*FULL, option)) as container:
        await container.put(SETTINGS, site.settings())
        await site.deploy()

        assert (await container.exec("cat", "/proc/1/comm")).strip() == "s6-svscan"
        assert await container.exec("readlink", "/sbin/init") == "/opt/agent_shim/launch\n"
        assert "running" in await container.exec("/var/vcap/bosh/bin/monit", "summary")
        assert [path for path in await container.changed() if path.startswith("/opt/")] in ([], ["/opt/agent_shim"])
        assert await container.stop() == 0
        await container.start()
        await site.until_pong()
        assert await container.stop() == 0


def test_applying_the_overlay_again_changes_nothing(podman: Podman, stemcell: str, volume: str) -> None:
    mount = f"--mount=type=image,source={volume},destination=/opt/agent_shim"
    twice = f"{' '.join(APPLY)} >/first; {' '.join(APPLY)} >/second; wc -l </first; wc -l </second"
    first, second = podman("run", "--rm", "--network=none", mount, stemcell, "sh", "-c", twice).split()

    assert int(first) > 50
    assert int(second) == 0


async def test_overlay_reports_missing_interpreter_libraries(podman: Podman, base: str, volume: str) -> None:
    """Plain Debian lacks some of a stemcell's packages."""
    mount = f"--mount=type=image,source={volume},destination=/opt/agent_shim"
    run = await asyncio.to_thread(podman.run, "run", "--rm", "--network=none", mount, base, *START)

    assert run.returncode == 78
    assert b"cannot start agent_shim: this image lacks a library of its interpreter" in run.stderr
    assert b"libexpat1" in run.stderr
