"""Runs the agent's image under podman on a machine that has only cgroup v2, in each tier that docs/kubernetes.md
describes.

As under a kubelet, each container has a memory limit, and ``memory.oom.group`` is 1. The agent can change this setting
only if the container's cgroup is writable.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from agent_shim.core.paths import Paths
from kubernetes_cpi.manifests import BASE_CAPABILITIES, SETTINGS, SETTINGS_DIRECTORY
from tests.image.site import ContainerSite
from tests.support import guest, jobs
from tests.support.environment import AGENT, environment
from tests.support.pods import Container, Podman, network
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.vm

LIMIT: Final = 400 << 20
"""A container's memory limit in bytes."""
OF_KUBELET: Final = (
    *(f"--memory={LIMIT}", f"--memory-swap={LIMIT}", "--cgroup-conf=memory.oom.group=1"),
    "--env=KUBERNETES_SERVICE_HOST=192.0.2.1",  # for ``doctor``, which recognizes a pod by this variable
)
UIDS: Final = 200000
"""The uid that the user namespace's root has on the machine."""
ROOT_IN_POD: Final = ("--cap-drop=all", *(f"--cap-add={name}" for name in BASE_CAPABILITIES))
WRITABLE: Final = "--security-opt=unmask=/sys/fs/cgroup"
"""The podman option that makes the container's cgroup writable, as containerd's ``cgroup_writable`` does."""


@dataclass(frozen=True)
class Tier:
    """A tier in docs/kubernetes.md, and how podman runs its container.

    ``uid`` is the agent's uid outside the container. ``volumes`` are the paths at which volumes are mounted in the
    container. ``called`` is the name by which ``doctor`` refers to the tier.
    """

    called: str
    options: tuple[str, ...]
    uid: int = 0
    volumes: tuple[str, ...] = ("/var/vcap/data",)
    runtime: str = "crun"
    cgroup_manager: str = "cgroupfs"

    def plus(self, *options: str) -> Tier:
        return replace(self, options=(*self.options, *options))


PRIVILEGED: Final = Tier("privileged", ("--privileged",))
USERNS: Final = Tier(
    "unprivileged: root of a user namespace that may mount",
    (
        *(*ROOT_IN_POD, "--cap-add=SYS_ADMIN", "--security-opt=unmask=/proc/*"),
        *(f"--uidmap=0:{UIDS}:65536", f"--gidmap=0:{UIDS}:65536"),
    ),
    uid=UIDS,
)
BASE: Final = Tier("root with few capabilities", ROOT_IN_POD)
RESTRICTED: Final = Tier(
    "restricted: no root",
    (
        *("--user=1000:1000", "--cap-drop=all", "--security-opt=no-new-privileges"),
        *("--read-only", "--read-only-tmpfs=false"),
    ),
    uid=1000,
    volumes=("/var/vcap", "/var/vcap/bosh", "/var/vcap/data", "/tmp", "/run"),
)
CLEARS: Final = {
    "privileged": PRIVILEGED.plus("--cgroupns=private"),
    "privileged-host-namespace": PRIVILEGED.plus("--cgroupns=host"),  # as containerd runs privileged pods
    "userns-writable": USERNS.plus(WRITABLE),
    "base-writable": BASE.plus(WRITABLE),
    "restricted-writable": replace(RESTRICTED.plus(WRITABLE), runtime="runc", cgroup_manager="systemd"),
}
"""Containers in which the agent can clear ``memory.oom.group``."""
CANNOT_CLEAR: Final = {
    "userns": USERNS,
    "base": BASE,
    "restricted": RESTRICTED,
    "restricted-writable-for-root": RESTRICTED.plus(WRITABLE),  # crun does not chown the cgroup to the pod's user
}
DELEGATED: Final = replace(PRIVILEGED.plus("--cgroupns=host"), cgroup_manager="systemd")
"""As under CRI-O with crun: systemd delegates a cgroup, and crun puts the container into a subgroup of it."""

HUNGRY: Final = """
processes:
- name: hungry
  executable: /bin/sh
  args:
  - -c
  - |
    while [ ! -e /var/vcap/data/hungry/eat ]; do sleep 0.5; done
    rm /var/vcap/data/hungry/eat
    head -c 100M /dev/zero | tail -c 100M | sleep 1000
  ephemeral_disk: true
  limits: {memory: 64M}
"""
"""A bpm.yml whose process allocates more memory than its limit allows when asked to, and keeps it."""
EAT: Final = "/var/vcap/data/eater/eat"
EATER: Final = f"echo $$ >$pidfile; while [ ! -e {EAT} ]; do sleep 0.5; done; rm {EAT}; exec tail /dev/zero"
"""A start program without a memory limit, which uses up all of the container's memory when asked to."""
RELEASE: Final = {
    "sleeper": jobs.sleeper(Paths(), "sleeper"),
    "hungry": jobs.of_bpm(Paths(), "hungry", HUNGRY),
    "eater": jobs.process(Paths(), "eater", EATER),
}


@dataclass(frozen=True)
class Instance:
    """A container with the three jobs in ``RELEASE``. ``data`` is its ``/var/vcap/data``."""

    site: ContainerSite
    container: Container
    data: Path

    def pid(self, name: str) -> str:
        """Return the pid of a job's process, or "" if it has none."""
        for path in (f"{name}/{name}.pid", f"bpm/{name}/{name}.pid"):
            with suppress(FileNotFoundError):
                return (self.data / "sys/run" / path).read_text().strip()
        return ""

    def eat(self, name: str) -> None:
        """Tell a job to allocate memory."""
        (self.data / name / "eat").touch()

    async def exhaust(self, name: str) -> str:
        """Make a job allocate memory until it is killed and restarted. Return the summary of the alert."""
        before, others = self.pid(name), {other: self.pid(other) for other in RELEASE if other != name}
        self.eat(name)
        alert = await self.site.monitor.wait_for(
            "alert",
            AGENT,
            lambda body: body["title"].startswith(name) and "Does not exist" in body["title"],
            timeout=TIMEOUT_S,
        )
        await until(lambda: self.pid(name) not in ("", before))
        await self.site.until_state("running")
        assert {other: self.pid(other) for other in others} == others
        return str(alert.body["summary"])

    async def kills_together(self) -> bool:
        """Return True if the container's ``memory.oom.group`` is set, as seen from the machine."""
        form = ("inspect", "--format", "{{.State.Pid}}", self.container.name)
        pid = (await asyncio.to_thread(self.site.podman, *form)).strip()
        group = Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")
        return Path("/sys/fs/cgroup", group, "memory.oom.group").read_text() == "1\n"

    async def doctor(self) -> dict[str, Any]:
        """Return the ``agent-shim doctor`` report, in which ``findings`` maps each topic to its finding.

        The command's exit code is ignored, because it is 1 if anything is wrong.
        """
        report = json.loads(await self.container.exec("sh", "-c", "agent-shim doctor --json || true"))
        return {**report, "findings": {one["topic"]: one for one in report["findings"]}}


@contextmanager
def image_for(tier: Tier) -> Iterator[str]:
    """Yield the image as an argument for ``--rootfs``. The files belong to the container's root user."""
    if tier.uid != UIDS:
        yield f"{guest.IMAGE}:O"
        return
    mapped = Path(f"{guest.IMAGE}-mapped")
    mapped.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", "-o", f"X-mount.idmap=b:0:{UIDS}:65536", guest.IMAGE, mapped], check=True)
    try:
        yield f"{mapped}:O"
    finally:
        subprocess.run(["umount", mapped], check=True)


def volumes_for(tier: Tier, scratch: Path) -> dict[str, Path]:
    """Create a pod's volumes, and return their directories, keyed by their paths in the container."""
    made = {path: scratch / Path(path).name for path in (*tier.volumes, SETTINGS_DIRECTORY)}
    for path, directory in made.items():
        directory.mkdir()
        directory.chmod(0o1777 if path == "/tmp" else 0o755)
        os.chown(directory, tier.uid, tier.uid)
    return made


@asynccontextmanager
async def deployed(tier: Tier, scratch: Path) -> AsyncIterator[Instance]:
    """Run a container with a pod's settings and volumes, and deploy the three jobs."""
    if not guest.IMAGE.exists():
        pytest.skip(f"{guest.IMAGE} is missing: run ./dev test-vm, which passes the image to the guest")
    podman = Podman(scratch / "containers.conf")
    engine = {"cgroup_manager": tier.cgroup_manager, "runtime": tier.runtime, "events_logger": "file"}
    podman.config.write_text("\n".join(["[engine]", *(f'{name} = "{value}"' for name, value in engine.items())]))
    with image_for(tier) as image, network(podman, "pods") as pods:
        async with environment(pods.gateway, scratch, timeout_s=TIMEOUT_S) as made:
            site = ContainerSite(**vars(made), podman=podman, image=image, network=pods)
            volumes = volumes_for(tier, scratch)
            settings = volumes[SETTINGS_DIRECTORY] / SETTINGS
            settings.write_text(site.settings())
            os.chown(settings, tier.uid, tier.uid)
            options = [*OF_KUBELET, *(f"--volume={place}:{path}" for path, place in volumes.items()), *tier.options]
            async with site.container("/sbin/init", options=(*options, "--rootfs")) as container:
                await site.deploy(RELEASE)
                yield Instance(site, container, volumes["/var/vcap/data"])


@pytest.mark.parametrize("tier", CLEARS.values(), ids=CLEARS.keys())
async def test_oom_killer_kills_one_process_if_the_agent_can_change_the_cgroup(tier: Tier, tmp_path: Path) -> None:
    """The agent clears memory.oom.group when it boots. The alert names the cause, and the other jobs keep running."""
    async with deployed(tier, tmp_path) as instance:
        report = await instance.doctor()
        assert report["tier"] == tier.called
        assert report["findings"]["limits"]["found"] == f"memory {LIMIT >> 20} MiB"
        assert report["findings"]["cgroups"]["found"] == "version 2, without subgroups"
        assert "out of memory" not in report["findings"]
        assert not await instance.kills_together()

        own_limit = await instance.exhaust("hungry")
        assert own_limit == "process is not running: killed because it exceeded its memory limit"
        containers_limit = await instance.exhaust("eater")
        assert containers_limit == "process is not running: killed by the kernel because memory ran out"
        assert "SIGKILL, out of memory" in await instance.container.exec("agent-shim", "status")


@pytest.mark.parametrize("tier", CANNOT_CLEAR.values(), ids=CANNOT_CLEAR.keys())
async def test_oom_killer_kills_all_processes_if_the_agent_cannot_change_the_cgroup(tier: Tier, tmp_path: Path) -> None:
    """``doctor`` suggests the kubelet's singleProcessOOMKill setting. A process that exceeds only its own limit is
    still killed alone, because the agent kills it. When the container is restarted, the jobs are started again.
    """
    async with deployed(tier, tmp_path) as instance:
        report = await instance.doctor()
        assert report["tier"] == tier.called
        assert report["findings"]["limits"]["found"] == f"memory {LIMIT >> 20} MiB"
        assert report["findings"]["cgroups"]["found"] == "version 2, without subgroups"
        assert report["findings"]["out of memory"]["verdict"] == "limited"
        assert report["findings"]["out of memory"]["change"].startswith("singleProcessOOMKill: true")
        assert await instance.kills_together()

        own_limit = await instance.exhaust("hungry")
        assert own_limit == "process is not running: killed because it exceeded its memory limit"
        instance.eat("eater")
        assert await instance.container.ended() == 128 + signal.SIGKILL
        await instance.container.start()
        await instance.site.until_state("running")


async def test_kernel_enforces_memory_limits_of_jobs_in_a_delegated_cgroup(tmp_path: Path) -> None:
    """The agent creates the jobs' cgroups alongside its own."""
    async with deployed(DELEGATED, tmp_path) as instance:
        report = await instance.doctor()
        assert report["findings"]["cgroups"]["found"] == "version 2, subgroups can be created"
        assert not await instance.kills_together()

        own_limit = await instance.exhaust("hungry")
        assert own_limit == "process is not running: killed because it exceeded its memory limit"
        (alert,) = (one.body for one in instance.site.monitor.of("alert", AGENT) if "it was killed" in str(one.body))
        assert "used 64.0 MiB, its limit is 64.0 MiB" in alert["summary"]
        containers_limit = await instance.exhaust("eater")
        assert containers_limit == "process is not running: killed by the kernel because memory ran out"
