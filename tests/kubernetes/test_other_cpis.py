"""Tests the agent in pods like those of other Kubernetes CPIs, which attach a disk by replacing the pod.

Sources: actions/create_vm.go and volume_manager.go in sykesm/kubernetes-cpi, of which cfibmers/kubernetes-cpi is a
fork, and CPI/Kubernetes/Action/CreateVm.hs and AttachDisk.hs in SAP/bosh-kubernetes-cpi-release. These CPIs delete a
pod without a grace period and immediately create its replacement, while the kubelet is still stopping the old
container. Directors that use these CPIs send no disk hints.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.support.environment import AGENT, BLOBS, Environment
from tests.support.kubernetes.objects import Document, Namespace
from tests.support.pods import IMAGE

pytestmark = pytest.mark.kubernetes

OLD: Final = "one"
NEW: Final = "two"
CPI_PAUSE_S: Final = 15
"""Seconds for which the CPI sleeps after it has replaced a pod."""
ADDRESS: Final = "bosh.cloudfoundry.org/ip-address"
"""Annotation for a CNI plugin that gives pods fixed addresses. Other plugins ignore it."""
SAP_COMMAND: Final = "; ".join(
    [
        *(
            f"cp /etc/{name} /etc/{name}.dup; umount /etc/{name}; mv /etc/{name}.dup /etc/{name}"
            for name in ("resolv.conf", "hosts", "hostname")
        ),
        "exec env -i /usr/sbin/runsvdir-start",
    ]
)


@dataclass(frozen=True)
class OtherCpi:
    """Another project's CPI. ``disk`` converts a disk's id to its cid, and ``place`` is a pattern for the directory at
    which the pod mounts a disk.
    """

    pod: Callable[[], Document]
    settings: Callable[[str], Document]
    disk: Callable[[str], str]
    place: str
    claim: str
    has_many_disks: bool


def _pod(name: str, container: Document, volumes: list[Document], **spec: Any) -> Document:
    labels = {"bosh.cloudfoundry.org/agent-id": AGENT}
    root = {"securityContext": {"privileged": True, "runAsUser": 0}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": {}},
        "spec": {"containers": [{"image": f"{IMAGE}:latest", **container, **root}], "volumes": volumes, **spec},
    }


def _sykesm_pod() -> Document:
    container = {
        "name": "bosh-job",
        # The CPI sets the policy to Always, which would fail here because the cluster has no registry.
        "imagePullPolicy": "IfNotPresent",
        "command": ["/usr/sbin/runsvdir-start"],
        "args": [],
        "volumeMounts": [
            {
                "name": "bosh-config",
                "mountPath": "/var/vcap/bosh/instance_settings.json",
                "subPath": "instance_settings.json",
            },
            {"name": "bosh-ephemeral", "mountPath": "/var/vcap/data"},
        ],
    }
    item = {"key": "instance_settings", "path": "instance_settings.json"}
    volumes = [
        {"name": "bosh-config", "configMap": {"name": f"agent-{AGENT}", "items": [item]}},
        {"name": "bosh-ephemeral", "emptyDir": {}},
    ]
    return _pod(f"agent-{AGENT}", container, volumes, hostname=AGENT)


def _sykesm_settings(document: str) -> Document:
    metadata = {"name": f"agent-{AGENT}"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"instance_settings": document}}


def _sap_pod() -> Document:
    container = {
        "name": "bosh",
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-c", SAP_COMMAND],
        "tty": True,
        "stdin": True,
        "volumeMounts": [
            {"name": "ephemeral-disk", "mountPath": "/var/vcap/data"},
            {"name": "agent-settings", "mountPath": "/var/vcap/bosh/settings-source-file"},
        ],
    }
    volumes = [
        {"name": "ephemeral-disk", "emptyDir": {}},
        {"name": "agent-settings", "secret": {"secretName": f"agent-settings-{AGENT}"}},
    ]
    return _pod(AGENT, container, volumes)


def _sap_settings(document: str) -> Document:
    metadata = {"name": f"agent-settings-{AGENT}"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"config.json": document}}


CPIS: Final = {
    "sykesm": OtherCpi(_sykesm_pod, _sykesm_settings, "cluster:{}".format, "/mnt/{}", "disk-{}", has_many_disks=True),
    "SAP": OtherCpi(_sap_pod, _sap_settings, str, "/var/vcap/bosh/disks/{}", "{}", has_many_disks=False),
}


@dataclass
class OtherVm:
    """A VM's pod, and the objects in which its CPI stores the VM's settings."""

    cpi: OtherCpi
    namespace: Namespace
    bosh: Environment

    @property
    def name(self) -> str:
        found: str = self.cpi.pod()["metadata"]["name"]
        return found

    async def create(self, *disks: str) -> None:
        """Create the settings and a pod that mounts ``disks``."""
        persistent = {self.cpi.disk(disk): self.cpi.place.format(disk) for disk in disks}
        networks = {"default": {"type": "dynamic", "preconfigured": True, "dns": None}}
        settings = json.loads(self.bosh.settings(disks={"persistent": persistent}, networks=networks))
        settings["vm"] = {"name": AGENT}
        pod = self.cpi.pod()
        self._mount(pod, "blobs", {"hostPath": {"path": str(self.bosh.blobs)}}, BLOBS)
        for disk in disks:
            source = {"persistentVolumeClaim": {"claimName": self.cpi.claim.format(disk)}}
            self._mount(pod, f"disk-{disk}", source, self.cpi.place.format(disk))
        claims = [_claim(self.cpi.claim.format(disk)) for disk in disks]
        await self.namespace.apply([*claims, self.cpi.settings(json.dumps(settings)), pod])

    def _mount(self, pod: Document, name: str, source: Document, path: str) -> None:
        spec = pod["spec"]
        spec["volumes"] = [*copy.copy(spec["volumes"]), {"name": name, **source}]
        mounts = spec["containers"][0]["volumeMounts"]
        spec["containers"][0]["volumeMounts"] = [*copy.copy(mounts), {"name": name, "mountPath": path}]

    async def recreate(self, *disks: str) -> None:
        """Attach or detach disks as the CPI does: delete the pod without a grace period and create another one.

        Until the old container has exited, two agents with the same id are running. The kubelet may also start the new
        container a second time ("Pod sandbox changed").
        """
        pod = self.namespace.pod(self.name)
        former = await pod.container()
        await self.namespace.kubectl("delete", "pod", self.name, "--force", "--grace-period=0")
        await self.create(*disks)
        await pod.until_ended(former)
        await asyncio.sleep(CPI_PAUSE_S)
        await self.bosh.until_pong()
        await pod.until_exec_works()

    async def exec(self, *command: str) -> str:
        return await self.namespace.pod(self.name).exec(*command)


def _claim(name: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "64Mi"}},
        },
    }


@pytest.mark.parametrize("name", CPIS)
async def test_disks_are_attached_and_detached_in_other_cpis_pods(
    namespace: Namespace, bosh: Environment, name: str
) -> None:
    cpi = CPIS[name]
    vm = OtherVm(cpi, namespace, bosh)
    old = cpi.disk(OLD)
    bosh.blobs.mkdir()
    await vm.create()
    await bosh.until_pong()
    await vm.recreate(OLD)
    await bosh.director.run(AGENT, "mount_disk", old)
    await bosh.deploy()
    await vm.exec("touch", "/var/vcap/store/kept")

    await vm.recreate(OLD)

    assert await bosh.director.run(AGENT, "list_disk") == [old]
    await bosh.deploy()
    last = OLD
    if cpi.has_many_disks:
        await bosh.director.run(AGENT, "stop")
        await vm.recreate(OLD, NEW)
        await bosh.director.run(AGENT, "mount_disk", cpi.disk(NEW))
        await bosh.director.run(AGENT, "migrate_disk", old, cpi.disk(NEW))
        await bosh.director.run(AGENT, "unmount_disk", old)
        await vm.recreate(NEW)
        await bosh.deploy()
        last = NEW
    await vm.exec("test", "-e", "/var/vcap/store/kept")
    assert await bosh.director.run(AGENT, "list_disk") == [cpi.disk(last)]
    await bosh.director.run(AGENT, "stop")
    await bosh.director.run(AGENT, "unmount_disk", cpi.disk(last))
    await vm.recreate()
    assert await bosh.director.run(AGENT, "list_disk") == []
    assert (namespace.volume(cpi.claim.format(last)) / "kept").exists()
