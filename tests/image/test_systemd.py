"""Tests the systemd units in an unprivileged container with systemd as PID 1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from agent_shim.core.paths import Paths
from tests.image.site import SETTINGS, ContainerSite
from tests.support import jobs, pods
from tests.support.pods import Container, Podman
from tests.support.source import ROOT

pytestmark = [pytest.mark.image, pytest.mark.early]  # Building an image takes minutes.

IMAGE = f"{pods.IMAGE}-systemd"
UNIT = "agent-shim.service"

CONTAINERFILE = """
ARG IMAGE
FROM ${IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends systemd dbus && rm -rf /var/lib/apt/lists/*
"""
QUICK = "[Service]\nWatchdogSec=2\n"
CGROUPS: Final = Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def with_systemd(podman: Podman, image: str) -> str:
    arguments = ["--quiet", f"--build-arg=IMAGE={image}", "--tag", IMAGE, "--file", "-", str(ROOT / "systemd")]
    podman("build", *arguments, stdin=CONTAINERFILE.encode())
    return IMAGE


@pytest.fixture
async def container(site: ContainerSite, with_systemd: str) -> AsyncIterator[Container]:
    """Run systemd in a container. The watchdog timeout in the agent's unit is set to two seconds."""
    options = (f"--network={site.network.name}", *systemd_options(), f"--volume={site.blobs}:/blobs:ro")
    site.blobs.mkdir()
    drop_in = {f"/etc/systemd/system/{UNIT}.d/quick.conf": QUICK}
    command = "/lib/systemd/systemd"
    async with pods.running(site.podman, with_systemd, command, options=options, files=drop_in) as made:
        yield made


def systemd_options() -> tuple[str, ...]:
    """Return the podman options for systemd as PID 1.

    systemd 258 and newer require cgroup v2, but podman mounts cgroup v1 on a machine whose controllers are in v1.
    Such a machine usually has a v2 hierarchy without controllers as well, which is enough for the units.
    """
    if not pods.IS_NEXT or (CGROUPS / "cgroup.controllers").exists():
        return ("--systemd=always",)
    if not (CGROUPS / "unified/cgroup.procs").exists():
        pytest.skip(
            "this systemd requires cgroup v2, which is not mounted here: boot with systemd.unified_cgroup_hierarchy=1, "
            "then run ./dev test-next -k test_systemd"
        )
    mounts = (f"--volume={CGROUPS}/unified:{CGROUPS}", "--tmpfs=/run", "--tmpfs=/run/lock")
    return ("--systemd=false", "--env=container=podman", "--cgroupns=host", *mounts)


async def shown(container: Container, member: str) -> str:
    return (await container.exec("systemctl", "show", "--value", "--property", member, UNIT)).strip()


async def test_restarting_the_agent_unit_does_not_restart_jobs(site: ContainerSite, container: Container) -> None:
    await container.until(0, "systemctl", "is-active", "--quiet", "bosh-agent")
    await container.put(SETTINGS, site.settings())
    await site.deploy()
    job = await container.exec("cat", "/var/vcap/sys/run/sleeper/sleeper.pid")
    before = await shown(container, "MainPID")
    await container.exec("systemctl", "restart", UNIT)
    await site.until_state("running")

    assert await shown(container, "MainPID") != before
    assert await container.exec("cat", "/var/vcap/sys/run/sleeper/sleeper.pid") == job
    assert await container.exec("systemd-analyze", "verify", "--man=no", f"/etc/systemd/system/{UNIT}") == ""


async def test_sshd_unit_finds_host_keys(container: Container) -> None:
    """The image contains no host keys, so they must be generated before sshd starts. Without them, Debian's sshd unit
    fails.
    """
    await container.until(0, "systemctl", "is-active", "--quiet", "ssh")

    assert await container.status_of("test", "-s", "/etc/ssh/ssh_host_ed25519_key") == 0


async def test_systemd_watchdog_restarts_a_hanging_agent(container: Container) -> None:
    await container.until(0, "systemctl", "is-active", "--quiet", UNIT)
    first = await shown(container, "MainPID")
    await container.until(0, "sh", "-c", f"test $(ps -o etimes= -p {first}) -ge 5")
    assert await shown(container, "NRestarts") == "0"
    await container.exec("kill", "-STOP", first)
    await container.until(0, "sh", "-c", f"systemctl show --value --property NRestarts {UNIT} | grep -qx 1")

    assert await shown(container, "MainPID") != first


DRAIN = """#!/bin/sh
kill -0 "$(cat /var/vcap/sys/run/sleeper/sleeper.pid)" && echo "the process ran" >/var/vcap/data/drained
echo 0
"""


async def test_poweroff_drains_jobs_and_the_next_start_runs_them(site: ContainerSite, container: Container) -> None:
    await container.until(0, "systemctl", "is-active", "--quiet", "agent-shim-drain")
    await container.put(SETTINGS, site.settings())
    await site.deploy({"sleeper": {**jobs.sleeper(Paths(), "sleeper"), "bin/drain": DRAIN}})
    await container.status_of("systemctl", "poweroff")
    await container.ended()
    await container.start()
    await site.until_state("running")

    assert await container.exec("cat", "/var/vcap/data/drained") == "the process ran\n"
