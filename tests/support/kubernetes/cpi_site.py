"""A namespace created from deploy/cpi, a CPI that uses the namespace's service account, and the Director's records."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.kubernetes import calls, deployments
from tests.support.kubernetes import node as nodes
from tests.support.kubernetes.deployments import DeployedInstance, Deployments
from tests.support.kubernetes.node import FirstNode
from tests.support.kubernetes.objects import LIMIT, Document, Namespace
from tests.support.source import ROOT

ACCOUNT: Final = "bosh-cpi"
LABEL: Final = "cpi.bosh.io"
CLASS: Final = "on-the-node"
"""A StorageClass whose volumes are bound when a pod first uses them, as in most clouds."""
KINDS: Final = "pods,secrets,persistentvolumeclaims,services,configmaps"
GRACE_S: Final = 10

STORAGE: Final = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS},
    "provisioner": "kubernetes.io/host-path",
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
}


@dataclass(frozen=True)
class Way:
    """One of the CPI's ways to attach disks. ``level`` is the Pod Security level of the namespace in which it is
    tested.
    """

    name: str
    attach: str
    tier: str
    level: str
    reserved: bool = False

    def __str__(self) -> str:
        return self.name


WAYS: Final = (
    Way("at creation", "never", "base", "baseline"),
    Way("reserved", "never", "base", "baseline", reserved=True),
    Way("by default", "auto", "base", "privileged"),
    Way("live, mounted", "live", "privileged", "privileged"),
    Way("by recreation", "recreate", "base", "baseline"),
)


@dataclass
class Site:
    """A namespace and the Director that deploys to it."""

    namespace: Namespace
    deployments: Deployments
    way: Way
    hosted: Path
    """Directory on the node below which live disks are mounted."""
    spare: DeployedInstance | None = None
    """An instance that a successful flow leaves for the next flow."""

    @property
    def cpi(self) -> calls.Cpi:
        return self.deployments.cpi

    async def objects(self) -> list[Document]:
        """Return all objects in the namespace, except those that the cluster itself creates in every namespace."""
        found = json.loads(await self.namespace.kubectl("get", KINDS, "-o", "json"))["items"]
        return [one for one in found if not _is_of_cluster(one)]

    @contextmanager
    def vm_type(self, **properties: Any) -> Iterator[None]:
        """Change the VMs' cloud properties during the block. A property that is None is removed."""
        before = self.deployments.vm_type
        self.deployments.vm_type = {key: one for key, one in (before | properties).items() if one is not None}
        try:
            yield
        finally:
            self.deployments.vm_type = before

    async def empty(self) -> None:
        """As the administrator, delete all objects that a failed flow has left behind."""
        for kind in ("pods", "persistentvolumeclaims", "services"):
            await self.namespace.kubectl("delete", kind, "--all", "--force", "--grace-period=0")
        for one in await self.objects():
            await self.namespace.kubectl("delete", one["kind"], one["metadata"]["name"])
        self.deployments.vms.clear()
        self.deployments.disks.clear()

    async def exec(self, instance: DeployedInstance, *command: str) -> str:
        """Return the output of a command in a VM."""
        return await self.namespace.pod(instance.vm).exec(*command)

    async def write(self, instance: DeployedInstance) -> None:
        """Write the file that must survive every flow, as a job running as root would. Also check that vcap can write
        to its own directory on the same disk.
        """
        instance.kept = uuid.uuid4().hex
        await self.exec(instance, "sh", "-c", f"echo {instance.kept} >/var/vcap/store/{deployments.KEPT}; sync")
        await self.exec(instance, "sh", "-ec", _AS_VCAP)

    async def check(self, *instances: DeployedInstance) -> None:
        """Check the invariants after a flow: the jobs are running, the file from ``write`` still exists, and the
        Director has a record of every object.
        """
        for instance in instances:
            if instance.vm:
                await self.deployments.until_running(instance)
            if instance.vm and instance.disk:
                found = await self.exec(instance, "cat", f"/var/vcap/store/{deployments.KEPT}")
                assert found.strip() == instance.kept
                assert await self.deployments.ask(instance, "list_disk") == [instance.disk]
        await self._until_ended()
        unknown = [f"{one['kind']} {one['metadata']['name']}" for one in await self.unheld() if not self._knows(one)]
        assert not unknown, f"left behind, and unknown to the Director: {unknown}"
        assert not list(self.stray_mounts()), "disks are mounted on the node for VMs that are gone"
        assert not list(self.stray_files()), "written to the node's file system instead of a disk"
        await self.check_levels()
        await self.check_secrets()
        self.spare = next((one for one in instances if one.vm and one.disk), None)

    async def _until_ended(self) -> None:
        """Wait until the cluster has removed every object that is being deleted."""
        async with asyncio.timeout(LIMIT):
            while any(_is_ending(one) for one in await self.unheld()):
                await asyncio.sleep(0.5)

    async def unheld(self) -> list[Document]:
        """Return all objects, except deleted claims that a pod still has mounted.

        The cluster removes those claims and their files as soon as the pod has terminated.
        """
        found = await self.objects()
        pods = [one for one in found if one["kind"] == "Pod" and not _is_ending(one)]
        held = {
            volume["persistentVolumeClaim"]["claimName"]
            for pod in pods
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        return [one for one in found if not (_is_ending(one) and one["metadata"]["name"] in held)]

    def _knows(self, one: Document) -> bool:
        """Return True if the Director has a record of every VM and disk to which an object belongs.

        The VM and the disk are read from the object's labels. An object without these labels must have the cid of a VM
        or disk as its name.
        """
        vms, disks = self.deployments.vms, self.deployments.disks
        labels = one["metadata"].get("labels", {})
        vm, disk = labels.get(f"{LABEL}/vm", ""), labels.get(f"{LABEL}/disk", "")
        is_known = (vm in vms or not vm) and (disk in disks or not disk)
        return is_known and (bool(vm or disk) or one["metadata"]["name"] in vms | disks)

    def stray_mounts(self) -> Iterator[str]:
        """Yield the mount points that deleted VMs have left behind on nodes."""
        lines = [line for one in self.namespace.node.workers for line in one.mounts.read_text().splitlines()]
        for point in (Path(line.split()[4]) for line in lines):
            if self.hosted in point.parents and not any(vm in str(point) for vm in self.deployments.vms):
                yield str(point)

    def stray_files(self) -> Iterator[str]:
        """Yield files that ended up on a node's own disk because no disk was mounted in their directory."""
        for worker in self.namespace.node.workers:
            for point in (worker.root / self.hosted.relative_to("/")).glob("*/*"):
                if point.is_dir() and not point.is_mount():
                    yield from map(str, point.iterdir())

    async def check_levels(self) -> None:
        """Check that every pod is permitted by the namespace's Pod Security level."""
        if self.way.level == "privileged":
            return
        for one in await self.objects():
            if one["kind"] == "Pod":
                assert list(beyond_baseline(one["spec"])) == [], one["metadata"]["name"]

    async def check_secrets(self) -> None:
        """Check that secrets from requests are stored only in Secrets, and not in other objects, events or logs."""
        places = [json.dumps(one) for one in await self.objects() if one["kind"] != "Secret"]
        places.append(await self.namespace.kubectl("get", "events", "-o", "json"))
        places += [call.said for call in self.cpi.calls]
        for canary in self.deployments.secrets:
            assert not any(canary in place for place in places)


_AS_VCAP: Final = """
mkdir -p /var/vcap/store/of-vcap
test "$(id -u)" = 0 || exit 0
chown vcap:vcap /var/vcap/store/of-vcap
exec setpriv --reuid=vcap --regid=vcap --clear-groups sh -c "echo kept >/var/vcap/store/of-vcap/file"
"""


def _is_ending(one: Document) -> bool:
    return "deletionTimestamp" in one["metadata"]


def _is_of_cluster(one: Document) -> bool:
    name = one["metadata"]["name"]
    kind = one["kind"]
    authorities = ("kube-root-ca.crt", "openshift-service-ca.crt", "bosh-cpi-policy")
    return (kind == "Secret" and one["type"] == "kubernetes.io/service-account-token") or (
        kind == "ConfigMap" and name in authorities
    )


BASELINE_CAPABILITIES: Final = frozenset(
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID "
    "SYS_CHROOT".split()
)


def beyond_baseline(spec: Document) -> Iterator[str]:
    """Yield the fields of a pod that the ``baseline`` Pod Security level rejects.

    Source: the Pod Security Standards in the Kubernetes documentation.
    """
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    yield from (f"volume {one['name']} is a hostPath" for one in spec.get("volumes", []) if "hostPath" in one)
    safe = {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"}
    pod = spec.get("securityContext") or {}
    yield from (one["name"] for one in pod.get("sysctls", []) if one["name"] not in safe)
    for one in [*spec["containers"], *spec.get("initContainers", [])]:
        context = one.get("securityContext") or {}
        if context.get("privileged"):
            yield "privileged"
        yield from set((context.get("capabilities") or {}).get("add") or ()) - BASELINE_CAPABILITIES
        if context.get("procMount", "Default") != "Default":
            yield "procMount"
        for profile in ("seccompProfile", "appArmorProfile"):
            if (context.get(profile) or pod.get(profile) or {}).get("type") == "Unconfined":
                yield profile
        yield from (f"host port {port}" for port in one.get("ports", []) if port.get("hostPort"))


def manifests(level: str, namespace: str) -> list[Document]:
    """Return the manifests in deploy/cpi for a Pod Security level, with the namespace replaced."""
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    where = ROOT / "deploy/cpi" / level
    said = subprocess.run([kubectl, "kustomize", where], capture_output=True, text=True, check=True).stdout
    documents: list[Document] = list(yaml.safe_load_all(said))
    for one in documents:
        if one["kind"] == "Namespace":
            one["metadata"]["name"] = namespace
        else:
            one["metadata"]["namespace"] = namespace
        for subject in one.get("subjects", []):
            subject["namespace"] = namespace
    return documents


@asynccontextmanager
async def site(node: FirstNode, way: Way, scratch: Path, **config: Any) -> AsyncIterator[Site]:
    """Run a Director that uses this CPI in a new namespace."""
    namespace = Namespace(node, f"test-{secrets.token_hex(4)}", scratch)
    await namespace.create()
    documents = manifests(way.level, namespace.name)
    await namespace.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all([STORAGE, *documents]))
    hosted = Path("/run/bosh-disks") / namespace.name
    home = scratch / "director"
    home.mkdir()
    async with deployments.world(nodes.ADDRESS, scratch) as world:
        document = await _config(namespace, way, world.mbus, hosted)
        path = scratch / "cpi.json"
        path.write_text(json.dumps(_merged(document, config)))
        cpi = calls.of_this_tree(path, home, director=str(uuid.uuid4()))
        vm_type: dict[str, Any] = {"tier": way.tier, "memory": 256, "grace": GRACE_S, "ephemeral_disk": {"size": 256}}
        if way.reserved:
            vm_type["persistent_disk"] = {"size": 64}
        image = home / "image"
        image.touch()
        pointers = {"image_reference": "localhost/agent-shim", "digest": namespace.node.digest()}
        stemcell = await cpi.call("create_stemcell", str(image), pointers, {"tags": {}})
        try:
            yield Site(namespace, Deployments(cpi, world, stemcell, vm_type), way, hosted)
        finally:
            await namespace.clear()


async def _config(namespace: Namespace, way: Way, mbus: str, hosted: Path) -> Document:
    token = await namespace.kubectl(
        "get", "secret", f"{ACCOUNT}-token", "-o", "go-template={{.data.token|base64decode}}"
    )
    return {
        "cluster": {"server": nodes.API, "ca": namespace.node.authority.read_text(), "token": token},
        "namespace": namespace.name,
        "agent": {"mbus": mbus},
        "disks": {"attach": way.attach, "storage_class": CLASS, "host_path": str(hosted)},
        # Kubernetes 1.20's kubelet may report a container's exit half a minute late.
        "timeouts": {"unmount": 60},
    }


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Document:
    """Merge two nested mappings. Values from ``above`` win, except that two mappings under the same key are merged."""
    both = dict(below)
    for key, value in above.items():
        before = both.get(key)
        both[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return both
