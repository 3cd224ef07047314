"""The ways in which CPIs start a container and hand it its settings, each until a deployed job runs.

The commands are those of the CPIs, word for word; where one fails in a chain of ``&&`` the container is dead at birth.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image.pods import Container
from tests.image.site import AGENT, AGENT_JSON, FULL, SETTINGS, Site

pytestmark = pytest.mark.image

UMOUNT = ("umount /etc/resolv.conf", "umount /etc/hosts", "umount /etc/hostname")
SYS = ("rm -rf /var/vcap/data/sys", "mkdir -p /var/vcap/data/sys", "mkdir -p /var/vcap/store")
NO_CHRONY = "sed -i 's/chronyc/# chronyc/g' /var/vcap/bosh/bin/sync-time"
RUNSVDIR = "exec env -i /usr/sbin/runsvdir-start"

OLD_UNITS = (
    r"find /etc/systemd/system /lib/systemd/system -path '*.wants/*' -not -name '*journald*' -not -name '*logrotate*'"
    r" -not -name '*systemd-tmpfiles*' -not -name '*systemd-user-sessions*' -not -name '*runit*'"
    r" -not -name '*bosh-agent*' -exec rm \{} \;"
)


def chain(*commands: str) -> tuple[str, ...]:
    return ("bash", "-c", " && ".join(commands))


@dataclass(frozen=True)
class Cpi:
    """``command`` and how the settings come: by ``tar`` into the running container, or with ``volume`` at ``path``.

    ``directory``: the volume is one, with the links of the kubelet in it. ``options`` are those of the container.
    """

    command: tuple[str, ...]
    path: str = SETTINGS
    volume: bool = False
    directory: bool = False
    options: tuple[str, ...] = ()


CPIS = {
    # bosh-docker-cpi-release vm/factory.go
    "docker, runit": Cpi(
        chain(*UMOUNT, *SYS, NO_CHRONY, "printf '%b' 'nameserver 192.0.2.53\\n' > /etc/resolv.conf", RUNSVDIR),
    ),
    "docker, systemd": Cpi(
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
    "docker, systemd, until 2025": Cpi(
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
    # bosh-kubernetes-cpi-release vm/vm_start.go
    "kubernetes (cppforlife)": Cpi(
        chain(*UMOUNT, *SYS, "echo '#!/bin/bash' > /var/vcap/bosh/bin/ntpdate", RUNSVDIR), volume=True
    ),
    # sykesm/kubernetes-cpi actions/create_vm.go
    "kubernetes (sykesm)": Cpi(("/usr/sbin/runsvdir-start",), "/var/vcap/bosh/instance_settings.json", volume=True),
    # SAP/bosh-kubernetes-cpi-release CPI/Kubernetes/Resource/Pod.hs
    "kubernetes (SAP)": Cpi(
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
        options=("--tty", "--interactive"),
    ),
    # bosh-runc-cpi service/create_vm.go
    "runc": Cpi(
        ("bash", "-c", f"umount /var/vcap/data/root_log; {RUNSVDIR}"),
        volume=True,
        options=("--ulimit=nofile=1024", "--ulimit=nproc=1024"),
    ),
    # bosh-lxd-cpi-release when it made containers: the init of the image
    "lxd": Cpi(("/sbin/init",)),
    # bosh-libvirt-cpi-release driver/domains/lxc.go: the agent itself is process 1
    "libvirt": Cpi(("/var/vcap/bosh/bin/bosh-agent", "-C", AGENT_JSON, "-P", "ubuntu"), volume=True),
}


@asynccontextmanager
async def started(site: Site, cpi: Cpi, *options: str, settings: str | None = None) -> AsyncIterator[Container]:
    """A container as this CPI makes it, with its settings."""
    document = settings or site.settings()
    if cpi.volume:
        options = (f"--volume={_volume(site.scratch, cpi, document)}:ro", *options)
    async with site.container(*cpi.command, options=(*FULL, *cpi.options, *options)) as container:
        if not cpi.volume:
            await container.put(cpi.path, document)
        yield container


def _volume(scratch: Path, cpi: Cpi, document: str) -> str:
    if not cpi.directory:
        file = scratch / "settings.json"
        file.write_text(document)
        return f"{file}:{cpi.path}"
    path = Path(cpi.path)
    kept = scratch / "source" / "..2026_01_01"
    kept.mkdir(parents=True)
    (kept / path.name).write_text(document)
    (scratch / "source/..data").symlink_to(kept.name)
    (scratch / "source" / path.name).symlink_to(f"..data/{path.name}")
    return f"{scratch / 'source'}:{path.parent}"


@pytest.mark.parametrize("cpi", CPIS.values(), ids=CPIS.keys())
async def test_every_start_leads_to_a_running_job(site: Site, cpi: Cpi) -> None:
    """However it is started the init is process 1, the agent answers, what is deployed runs, and it ends well."""
    async with started(site, cpi) as container:
        await site.deploy()
        heartbeat = await site.monitor.wait_for("heartbeat", AGENT)

        assert (await container.exec("cat", "/proc/1/comm")).strip() == "s6-svscan"
        assert heartbeat.body["job_state"] in ("running", "starting")
        assert (await container.exec("cat", "/etc/resolv.conf")).count("nameserver") > 0
        assert await container.stop() == 0


async def test_a_start_beside_another_init(site: Site) -> None:
    """Garden has a process 1 of its own and runs the commands beside it, one that fails among them."""
    script = "\n".join([*UMOUNT, "umount /etc/nothing", *SYS, NO_CHRONY, RUNSVDIR])
    async with site.container("sleep", "infinity") as container:
        await container.put(SETTINGS, site.settings())
        running = asyncio.create_task(container.exec("/bin/bash", "-c", script))
        await site.deploy()

        assert (await container.exec("cat", "/proc/1/comm")).strip() == "sleep"
        await container.exec("pkill", "-TERM", "-x", "s6-svscan")
        await running


async def test_recreation_with_a_disk(site: Site) -> None:
    """The Docker CPI attaches a disk by killing the container and its data; what it knows it tells the new one late."""
    cpi = CPIS["docker, runit"]
    disk = site.scratch / "disk"
    disk.mkdir()
    async with started(site, cpi) as container:
        await site.deploy()
        await container.signal("KILL")
        await container.ended()
    settings = json.loads(site.settings(disks={"system": "", "persistent": {"disk-1": "/warden-cpi-dev/disk-1"}}))
    async with started(
        site, cpi, f"--volume={disk}:/warden-cpi-dev/disk-1", settings=json.dumps(settings)
    ) as container:
        await container.put("/var/vcap/instance/dns/records.json", '{"version": 3, "records": []}', 0o644)
        with contextlib.suppress(AssertionError):
            await container.exec("chgrp", "vcap", "/var/vcap/instance/dns/records.json")
        await site.until_pong()
        await site.director.run(AGENT, "add_persistent_disk", "disk-1", "/warden-cpi-dev/disk-1")
        await site.director.run(AGENT, "mount_disk", "disk-1")
        await site.deploy()
        await container.exec("touch", "/var/vcap/store/kept")

        assert await site.director.run(AGENT, "list_disk") == ["disk-1"]
        assert (disk / "kept").exists()


async def test_kept_data_brings_the_jobs_back(site: Site) -> None:
    """A kubelet restarts a container on a fresh root file system and the same volumes: nobody has to deploy again."""
    cpi = CPIS["kubernetes (sykesm)"]
    data = site.scratch / "data"
    data.mkdir()
    async with started(site, cpi, f"--volume={data}:/var/vcap/data") as container:
        await site.deploy()
        await container.signal("KILL")
        await container.ended()
    async with started(site, cpi, f"--volume={data}:/var/vcap/data"):
        await site.until_pong()
        await site.until_state("running")
        state = await site.director.value(AGENT, "get_state")

    assert [job["name"] for job in state["job"]["templates"]] == ["sleeper"]
