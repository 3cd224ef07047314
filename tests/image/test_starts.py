"""The image runs jobs when it is started the way each known CPI starts it.

The start commands are copied from the CPIs. Most of them are chains with ``&&``, so the container exits if one command
fails.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from tests.image.site import AGENT_JSON, FULL, SETTINGS, ContainerSite, project
from tests.support.environment import AGENT
from tests.support.pods import Container

pytestmark = pytest.mark.image

UMOUNT = ("umount /etc/resolv.conf", "umount /etc/hosts", "umount /etc/hostname")
SYS = ("rm -rf /var/vcap/data/sys", "mkdir -p /var/vcap/data/sys", "mkdir -p /var/vcap/store")
NO_CHRONY = "sed -i 's/chronyc/# chronyc/g' /var/vcap/bosh/bin/sync-time"
DISK = "disk-1"
RUNSVDIR = "exec env -i /usr/sbin/runsvdir-start"

OLD_UNITS = (
    r"find /etc/systemd/system /lib/systemd/system -path '*.wants/*' -not -name '*journald*' -not -name '*logrotate*'"
    r" -not -name '*systemd-tmpfiles*' -not -name '*systemd-user-sessions*' -not -name '*runit*'"
    r" -not -name '*bosh-agent*' -exec rm \{} \;"
)


def chain(*commands: str) -> tuple[str, ...]:
    return ("bash", "-c", " && ".join(commands))


@dataclass(frozen=True)
class CpiStart:
    """How a CPI starts a container, and how it passes settings and disks to the container.

    The settings are copied to ``path`` in the running container or, with ``volume``, mounted there. With ``directory``,
    the mounted volume is a directory with links, as the kubelet creates it for a Secret. With ``whole_tree``, another
    volume hides the image's /var/vcap. Disks appear in the ``disks`` directory, and ``options`` are passed to
    ``podman run``.
    """

    command: tuple[str, ...]
    path: str = SETTINGS
    volume: bool = False
    directory: bool = False
    whole_tree: bool = False
    disks: str = "/warden-cpi-dev"
    options: tuple[str, ...] = ()


CPIS = {
    # Source: bosh-docker-cpi-release vm/factory.go
    "docker, runit": CpiStart(
        chain(*UMOUNT, *SYS, NO_CHRONY, "printf '%b' 'nameserver 192.0.2.53\\n' > /etc/resolv.conf", RUNSVDIR),
    ),
    "docker, systemd": CpiStart(
        chain(
            *UMOUNT,
            *SYS,
            NO_CHRONY,
            "ln -sf /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf",
            "rm -rf /etc/sv/{ssh,cron}",
            "rm -rf /etc/service/{ssh,cron}",
            "exec /sbin/init",
        ),
    ),
    "docker, systemd, until 2025": CpiStart(
        chain(
            *UMOUNT,
            *SYS,
            NO_CHRONY,
            "rm -rf /etc/sv/{ssh,cron}",
            "rm -rf /etc/service/{ssh,cron}",
            OLD_UNITS,
            "exec /sbin/init",
        ),
    ),
    # Source: bosh-kubernetes-cpi-release vm/vm_start.go
    "kubernetes (cppforlife)": CpiStart(
        chain(*UMOUNT, *SYS, "echo '#!/bin/bash' > /var/vcap/bosh/bin/ntpdate", RUNSVDIR),
        volume=True,
        disks="/mnt",
    ),
    # Source: sykesm/kubernetes-cpi actions/create_vm.go
    "kubernetes (sykesm)": CpiStart(
        ("/usr/sbin/runsvdir-start",), "/var/vcap/bosh/instance_settings.json", volume=True, disks="/mnt"
    ),
    # evoila/kubernetes-cpi, a fork of sykesm/kubernetes-cpi, mounts an initially empty volume at /var/vcap.
    "kubernetes (evoila)": CpiStart(
        ("/usr/sbin/runsvdir-start",), "/var/vcap/bosh/instance_settings.json", volume=True, whole_tree=True
    ),
    # Source: SAP/bosh-kubernetes-cpi-release CPI/Kubernetes/Resource/Pod.hs
    "kubernetes (SAP)": CpiStart(
        chain(
            "cp /etc/resolv.conf /etc/resolv.conf.dup",
            "cp /etc/hosts /etc/hosts.dup",
            "cp /etc/hostname /etc/hostname.dup",
            *UMOUNT,
            "mv /etc/resolv.conf.dup /etc/resolv.conf",
            "mv /etc/hosts.dup /etc/hosts",
            "mv /etc/hostname.dup /etc/hostname",
            RUNSVDIR,
        ),
        "/var/vcap/bosh/settings-source-file/config.json",
        volume=True,
        directory=True,
        disks="/var/vcap/bosh/disks",
        options=("--tty", "--interactive"),
    ),
    # Source: bosh-runc-cpi service/create_vm.go
    "runc": CpiStart(
        ("bash", "-c", f"umount /var/vcap/data/root_log; {RUNSVDIR}"),
        volume=True,
        options=("--ulimit=nofile=1024", "--ulimit=nproc=1024"),
    ),
    # Older versions of bosh-lxd-cpi-release, which created containers instead of VMs, ran the image's own init.
    "lxd": CpiStart(("/sbin/init",)),
    # bosh-libvirt-cpi-release driver/domains/lxc.go runs the agent as PID 1.
    "libvirt": CpiStart(("/var/vcap/bosh/bin/bosh-agent", "-C", AGENT_JSON, "-P", "ubuntu"), volume=True),
}


@asynccontextmanager
async def started(
    site: ContainerSite, cpi: CpiStart, *options: str, settings: str | None = None
) -> AsyncIterator[Container]:
    """Run a container with the CPI's command, options and settings."""
    document = settings or site.settings()
    if cpi.whole_tree:
        tree = site.scratch / "tree"
        tree.mkdir(exist_ok=True)
        options = (f"--volume={tree}:/var/vcap", *options)
    if cpi.volume:
        options = (f"--volume={_volume(site.scratch, cpi, document)}:ro", *options)
    async with site.container(*cpi.command, options=(*FULL, *cpi.options, *options)) as container:
        if not cpi.volume:
            await container.put(cpi.path, document)
        yield container


def disks_of(directory: str) -> dict[str, Any]:
    """Return the value of ``disks`` in the settings for a disk in ``directory``."""
    return {"system": "", "persistent": {DISK: f"{directory}/{DISK}"}}


@dataclass(frozen=True)
class DiskDirectory:
    """A host directory that is visible in a container. Disks can be mounted in it while the container runs."""

    place: Path
    kept: Path

    async def attach(self, cid: str) -> None:
        """Bind-mount a disk below the directory, where the warden CPI would mount an image file."""
        for directory in (self.place / cid, self.kept / cid):
            directory.mkdir()
        await self._run("mount", "--bind", str(self.kept / cid), str(self.place / cid))

    async def _run(self, *command: str) -> None:
        await asyncio.to_thread(subprocess.run, command, check=True)

    async def __aenter__(self) -> Self:
        self.place.mkdir()
        self.kept.mkdir()
        await self._run("mount", "--bind", str(self.place), str(self.place))
        await self._run("mount", "--make-shared", str(self.place))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run("umount", "--recursive", str(self.place))


@asynccontextmanager
async def data_volume(site: ContainerSite) -> AsyncIterator[str]:
    """Yield the podman option that mounts a new volume at /var/vcap/data. The volume is deleted after the block."""
    name = (await asyncio.to_thread(site.podman, "volume", "create")).strip()
    try:
        yield f"--volume={name}:/var/vcap/data"
    finally:
        await asyncio.to_thread(site.podman, "volume", "rm", "--force", name)


def _volume(scratch: Path, cpi: CpiStart, document: str) -> str:
    if not cpi.directory:
        file = scratch / "settings.json"
        file.write_text(document)
        return f"{file}:{cpi.path}"
    path = Path(cpi.path)
    source = Path(tempfile.mkdtemp(dir=scratch))
    project(source, path.name, document)
    return f"{source}:{path.parent}"


@pytest.mark.parametrize("cpi", CPIS.values(), ids=CPIS.keys())
async def test_image_runs_jobs_under_every_cpi(site: ContainerSite, cpi: CpiStart) -> None:
    async with started(site, cpi) as container:
        await site.deploy()
        heartbeat = await site.monitor.wait_for("heartbeat", AGENT)

        assert (await container.exec("cat", "/proc/1/comm")).strip() == "s6-svscan"
        assert heartbeat.body["job_state"] in ("running", "starting")
        assert "boot step own names: " in container.logs()
        assert servers(await container.exec("cat", "/etc/resolv.conf")) == ["192.0.2.53"]
        assert await container.stop() == 0


@pytest.mark.parametrize("cpi", CPIS.values(), ids=CPIS.keys())
async def test_container_resolves_its_own_host_name_after_boot(site: ContainerSite, cpi: CpiStart) -> None:
    """If a CPI unmounts /etc/hosts, the image's own empty file becomes visible. The agent must fill it at boot, because
    the Director never sends DNS records to a compilation VM.
    """
    async with started(site, cpi) as container:
        given = (await container.exec("hostname")).strip()
        await site.until_pong()
        name = (await container.exec("hostname")).strip()
        resolved = await container.exec("getent", "-s", "hosts:files", "hosts", "localhost", name)
        full = (await container.exec("hostname", "-f")).strip()

    assert name == (AGENT if UMOUNT[2] in cpi.command[-1] else given)
    assert full == name
    localhost, own = (line.split()[1:] for line in resolved.splitlines())
    assert localhost[0] == (AGENT if UMOUNT[1] in cpi.command[-1] else "localhost")
    assert "localhost" in localhost
    assert name in own


def servers(resolv_conf: str) -> list[str]:
    return [line.split()[1] for line in resolv_conf.splitlines() if line.startswith("nameserver")]


async def test_agent_runs_alongside_another_pid_1(site: ContainerSite) -> None:
    """Garden runs its own PID 1 and executes the start command as a separate process. The agent must start even if an
    unmount in that command fails.
    """
    script = "\n".join([*UMOUNT, "umount /etc/nothing", *SYS, NO_CHRONY, RUNSVDIR])
    disks = DiskDirectory(site.scratch / "disks", site.scratch / "kept")
    options = (*FULL, f"--volume={disks.place}:/warden-cpi-dev:rslave")
    async with disks, site.container("sleep", "infinity", options=options) as container:
        await container.put(SETTINGS, site.settings())
        running = asyncio.create_task(container.exec("/bin/bash", "-c", script))
        await site.deploy()
        await disks.attach(DISK)
        await container.put(SETTINGS, site.settings(disks=disks_of("/warden-cpi-dev")))
        await site.director.run(AGENT, "add_persistent_disk", DISK, f"/warden-cpi-dev/{DISK}")
        await site.director.run(AGENT, "mount_disk", DISK)
        await container.exec("touch", "/var/vcap/store/kept")

        assert (disks.kept / DISK / "kept").exists()
        assert (await container.exec("cat", "/proc/1/comm")).strip() == "sleep"
        await container.exec("pkill", "-TERM", "-x", "s6-svscan")
        await running


async def test_agent_reconnects_and_mounts_a_disk_after_a_recreation_by_the_docker_cpi(site: ContainerSite) -> None:
    """To attach a disk, the Docker CPI kills the container, deletes its data and starts a new container. Until the CPI
    has copied the saved files, the agent has an incomplete settings file and credentials that the bus no longer
    accepts.
    """
    cpi = CPIS["docker, runit"]
    disk = site.scratch / "disk"
    disk.mkdir()
    async with data_volume(site) as data, started(site, cpi, data) as container:
        await site.deploy()
        await site.replace_credentials()
        saved = await container.exec("cat", "/var/vcap/bosh/update_settings.json")
        await container.kill()
    settings = site.settings(disks=disks_of(cpi.disks))
    attached = f"--volume={disk}:{cpi.disks}/{DISK}"
    async with data_volume(site) as data, started(site, cpi, data, attached, settings=settings[:99]) as container:
        await container.put(SETTINGS, settings)
        await container.until(0, "sh", "-c", "agent-shim status --json | grep -q uthori")
        await container.put("/var/vcap/bosh/update_settings.json", saved)
        await container.put("/var/vcap/instance/dns/records.json", '{"version": 3, "records": []}', 0o644)
        await container.exec("chgrp", "vcap", "/var/vcap/instance/dns/records.json")
        await site.until_pong()
        await site.director.run(AGENT, "add_persistent_disk", DISK, f"{cpi.disks}/{DISK}")
        await site.director.run(AGENT, "mount_disk", DISK)
        await site.deploy()
        await container.exec("touch", "/var/vcap/store/kept")

        assert await site.director.run(AGENT, "list_disk") == [DISK]
        assert (disk / "kept").exists()


@pytest.mark.parametrize("name", ["kubernetes (cppforlife)", "kubernetes (sykesm)", "kubernetes (SAP)"])
async def test_disk_is_mounted_after_a_recreation_by_the_kubernetes_cpis(site: ContainerSite, name: str) -> None:
    """The Director sends no disk hint, so the agent must find the disk's path in the settings."""
    cpi = CPIS[name]
    disk = site.scratch / "disk"
    disk.mkdir()
    async with started(site, cpi) as container:
        await site.deploy()
        await container.kill()
    settings = site.settings(disks=disks_of(cpi.disks))
    attached = f"--volume={disk}:{cpi.disks}/{DISK}"
    async with started(site, cpi, attached, settings=settings) as container:
        await site.until_pong()
        await site.director.run(AGENT, "mount_disk", DISK)
        await site.deploy()
        await container.exec("touch", "/var/vcap/store/kept")
        await container.kill()
    async with started(site, cpi, attached, settings=settings) as container:
        await site.until_pong()

        assert await site.director.run(AGENT, "list_disk") == [DISK]
        await container.exec("test", "-f", "/var/vcap/store/kept")


async def test_jobs_and_disk_are_restored_after_a_restart_with_the_same_root_file_system(site: ContainerSite) -> None:
    """The LXD CPI restarts the container to reboot the VM or to attach a disk. Its disk hint is a map that contains the
    path, while most CPIs send the path itself.
    """
    cpi = CPIS["lxd"]
    disks = DiskDirectory(site.scratch / "disks", site.scratch / "kept")
    hint = {"path": f"/warden-cpi-dev/{DISK}"}
    settings = site.settings(disks={"ephemeral": {"path": "/var/vcap/data"}, "persistent": {DISK: hint}})
    options = (*FULL, f"--volume={disks.place}:/warden-cpi-dev:rslave")
    async with (
        disks,
        data_volume(site) as data,
        site.container(*cpi.command, options=(*options, data), files={SETTINGS: site.settings()}) as container,
    ):
        await site.deploy()
        await container.kill()
        await disks.attach(DISK)
        await container.copy(SETTINGS, settings)
        await container.start()
        await site.until_state("running")
        await site.director.run(AGENT, "add_persistent_disk", DISK, hint)
        await site.director.run(AGENT, "mount_disk", DISK)
        await container.exec("touch", "/var/vcap/store/kept")
        await container.kill()
        await container.start()
        await site.until_state("running")

        assert await site.director.run(AGENT, "list_disk") == [DISK]
        await container.exec("test", "-f", "/var/vcap/store/kept")


async def test_jobs_run_again_in_a_new_container_with_the_same_volumes(site: ContainerSite) -> None:
    """A kubelet gives a restarted container a new root file system."""
    cpi = CPIS["kubernetes (sykesm)"]
    data = site.scratch / "data"
    data.mkdir()
    async with started(site, cpi, f"--volume={data}:/var/vcap/data") as container:
        await site.deploy()
        await container.kill()
    async with started(site, cpi, f"--volume={data}:/var/vcap/data"):
        await site.until_pong()
        await site.until_state("running")
        state = await site.director.value(AGENT, "get_state")

    assert [job["name"] for job in state["job"]["templates"]] == ["sleeper"]
