"""Tests the CPI's VMs under conditions that cluster operators create: evictions, a namespace that forbids root, network
policies, and an admission policy for the CPI's account.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import pytest
import yaml

from agent_shim.core.paths import Paths
from tests.support import jobs, pods
from tests.support.kubernetes import cpi_site
from tests.support.kubernetes.calls import CpiCallError
from tests.support.kubernetes.cpi_site import ACCOUNT, WAYS, Site, Way
from tests.support.kubernetes.deployments import DeployedInstance
from tests.support.kubernetes.node import ADDRESS, FirstNode
from tests.support.kubernetes.objects import LIMIT, Document
from tests.support.source import ROOT

pytestmark = pytest.mark.kubernetes

BY_RECREATION = next(way for way in WAYS if way.attach == "recreate")
USERNS = Way("userns", "live", "userns", "privileged")
RESTRICTED = Way("restricted", "never", "restricted", "restricted", reserved=True)
UNDER_POLICY = Way("under a policy", "recreate", "base", "privileged")
"""The namespace has the Pod Security level `privileged`, which admits everything, so rejections come from the admission
policy.
"""
POLICY = ROOT / "deploy/cpi/admission/policy.yaml"


async def try_kubectl(site: Site, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run kubectl in the site's namespace. Return the result even if the command failed."""
    return await asyncio.to_thread(
        site.namespace.node.kubectl, f"--namespace={site.namespace.name}", *arguments, stdin=stdin
    )


# --- evictions --------------------------------------------------------------------------------------------------------


async def evict(site: Site, instance: DeployedInstance) -> subprocess.CompletedProcess[str]:
    """Evict a VM's pod, as ``kubectl drain`` does with every pod on a node."""
    where = f"/api/v1/namespaces/{site.namespace.name}/pods/{instance.vm}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": instance.vm}}
    return await try_kubectl(site, "create", "--raw", where, "--filename=-", stdin=json.dumps(body))


async def until_allowed(site: Site, wanted: int) -> None:
    """Wait until the disruption controller has counted the pods and allows ``wanted`` evictions."""
    async with asyncio.timeout(LIMIT):
        while await site.namespace.kubectl("get", "pdb", "-o", "jsonpath={.items[*].status.disruptionsAllowed}") != str(
            wanted
        ):
            await asyncio.sleep(0.2)


async def test_node_drain_evicts_one_vm_per_group_at_a_time(node: FirstNode, tmp_path: Path) -> None:
    if node.minor < 22:
        pytest.skip("no policy/v1 in this Kubernetes")
    async with cpi_site.site(node, BY_RECREATION, tmp_path) as site:
        one, two, three = [await site.deployments.first_deploy(with_disk=False) for _ in range(3)]
        await until_allowed(site, 1)

        assert (await evict(site, one)).returncode == 0
        await until_allowed(site, 0)
        refused = await evict(site, two)
        assert refused.returncode != 0
        assert "disruption budget" in refused.stderr
        await site.deployments.resurrect(one)
        await until_allowed(site, 1)
        assert (await evict(site, two)).returncode == 0

        await site.deployments.resurrect(two)
        await site.check(one, two, three)


# --- names and network access -----------------------------------------------------------------------------------------

FRONT: Document = {
    "name": "front",
    "ports": [{"port": 80, "target_port": 8080}],
    "ingress": {"hosts": ["front.example.org"]},
}
ONLY_FROM_INSIDE: Document = {"ingress": [{"from": [{"podSelector": {}}]}]}


async def addresses_behind(site: Site, service: str) -> list[str]:
    """Return the sorted addresses to which a Service forwards connections."""
    said = await site.namespace.kubectl("get", "endpoints", service, "-o", "jsonpath={.subsets[*].addresses[*].ip}")
    return sorted(said.split())


async def until_forwarded_to(site: Site, service: str, *instances: DeployedInstance) -> None:
    """Wait until a Service forwards connections to the VMs of ``instances`` and to no others."""
    pods = [await site.namespace.pod(one.vm).look() for one in instances]
    wanted = sorted(pod["status"]["podIP"] for pod in pods)
    async with asyncio.timeout(LIMIT):
        while await addresses_behind(site, service) != wanted:
            await asyncio.sleep(0.2)


async def network_objects(site: Site) -> list[str]:
    """Return the names of all Services, Ingresses and NetworkPolicies that the CPI created."""
    kinds, ours = "services,ingresses,networkpolicies", "app.kubernetes.io/managed-by=kubernetes-cpi"
    return sorted((await site.namespace.kubectl("get", kinds, "-l", ours, "-o", "name")).split())


async def test_services_and_ingresses_follow_the_vms_until_the_last_is_deleted(node: FirstNode, tmp_path: Path) -> None:
    async with cpi_site.site(node, BY_RECREATION, tmp_path) as site:
        director = site.deployments
        with site.vm_type(services=[FRONT], network_policy=ONLY_FROM_INSIDE):
            one = await director.first_deploy("web", with_disk=False)
            two = DeployedInstance("web", 1)
            await director.new_vm(two)

            made = await network_objects(site)
            assert [way for way in made if not way.startswith("networkpolicy")] == [
                "ingress.networking.k8s.io/front",
                "service/dep-web-0",
                "service/dep-web-1",
                "service/front",
            ]
            policy = await site.namespace.kubectl("get", made[1], "-o", "jsonpath={.spec.podSelector.matchLabels}")
            protected = ",".join(f"{key}={value}" for key, value in json.loads(policy).items())
            pods = await site.namespace.kubectl("get", "pods", "-l", protected, "-o", "name")
            assert sorted(pods.split()) == sorted(f"pod/{vm.vm}" for vm in (one, two))
            await until_forwarded_to(site, "front", one, two)

            former = await addresses_behind(site, "dep-web-1")
            await director.recreate(two)
            await until_forwarded_to(site, "dep-web-1", two)
            assert await addresses_behind(site, "dep-web-1") != former
            await until_forwarded_to(site, "front", one, two)

            await director.delete(one)
            assert [way for way in await network_objects(site) if "dep-web-0" in way] == []
            await until_forwarded_to(site, "front", two)
            await director.delete(two)
        assert await network_objects(site) == []
        await site.check()


async def until_resolves_to(site: Site, name: str, asking: DeployedInstance, wanted: DeployedInstance) -> None:
    """Wait until a DNS query from the ``asking`` VM resolves ``name`` to the ``wanted`` VM's address."""
    pod = await site.namespace.pod(wanted.vm).look()
    async with asyncio.timeout(LIMIT):
        while pod["status"]["podIP"] not in (
            await site.exec(asking, "sh", "-c", f"getent ahostsv4 {name}.{site.namespace.name}.svc || true")
        ):
            await asyncio.sleep(0.2)


async def test_instance_name_resolves_to_the_new_address_after_a_recreate(node: FirstNode, tmp_path: Path) -> None:
    if not node.has("coredns"):
        pytest.skip("no CoreDNS among the programs")
    async with cpi_site.site(node, BY_RECREATION, tmp_path) as site:
        one, two = [await site.deployments.first_deploy(group, with_disk=False) for group in ("db", "web")]
        await until_resolves_to(site, "dep-web-0", one, two)
        former = two.networks["default"]["ip"]

        await site.deployments.recreate(two)

        assert two.networks["default"]["ip"] != former
        await until_resolves_to(site, "dep-web-0", one, two)
        await site.check(one, two)


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


async def reaches(site: Site, one: DeployedInstance, address: str, port: int) -> bool:
    """Return True if the VM ``one`` can connect to ``port`` at ``address``."""
    command = ("exec", one.vm, "--", "/opt/agent_shim/bin/python3", "-c", CONNECT, address, str(port))
    return (await try_kubectl(site, *command)).returncode == 0


async def connects(site: Site, one: DeployedInstance, other: DeployedInstance) -> bool:
    """Return True if the first VM can connect to the agent's port on the other VM."""
    return await reaches(site, one, other.networks["default"]["ip"], 9190)


async def test_group_network_policy_blocks_other_groups(node: FirstNode, tmp_path: Path) -> None:
    if not node.has("kube-router"):
        pytest.skip("nothing among the programs enforces NetworkPolicies")
    async with cpi_site.site(node, BY_RECREATION, tmp_path) as site:
        # Remove the egress policy, because kube-router 1.2 does not support its IPv6 rule. With that rule, kube-router
        # would deliver every packet that the egress policy lets out, regardless of the ingress policy.
        await site.namespace.kubectl("delete", "networkpolicy", "bosh-vms-out")
        director = site.deployments
        outside = await director.first_deploy("outside", with_disk=False)
        inside = [{"podSelector": {"matchLabels": {"bosh.io/instance_group": "web"}}}]
        with site.vm_type(network_policy={"ingress": [{"from": inside}]}):
            one = await director.first_deploy("web", with_disk=False)
            two = DeployedInstance("web", 1)
            await director.new_vm(two)

            async with asyncio.timeout(LIMIT):
                while await connects(site, outside, two):
                    await asyncio.sleep(0.5)
            assert await connects(site, one, two)
            assert await connects(site, two, outside)
            await director.delete(one)
            await director.delete(two)
        await site.check(outside)


METADATA: Final = "169.254.169.254"
ELSEWHERE: Final = "198.18.0.1"


@contextmanager
def listener() -> Iterator[int]:
    """Run a server on the node that listens at three addresses: the node's own, a cloud metadata service's, and one
    without a special role.

    Yields the server's port.
    """
    ip = ("ip", "address")
    with socket.create_server(("", 0), backlog=4096) as server:
        for address in (METADATA, ELSEWHERE):
            subprocess.run([*ip, "add", f"{address}/32", "dev", "lo"], check=True)
        try:
            yield server.getsockname()[1]
        finally:
            for address in (METADATA, ELSEWHERE):
                subprocess.run([*ip, "delete", f"{address}/32", "dev", "lo"], check=True)


async def test_vm_reaches_only_addresses_allowed_by_its_egress_policy(node: FirstNode, tmp_path: Path) -> None:
    if not node.has("kube-router"):
        pytest.skip("nothing among the programs enforces NetworkPolicies")
    async with cpi_site.site(node, BY_RECREATION, tmp_path) as site:
        # Remove the IPv6 rule, which kube-router 1.2 does not support.
        only_4 = json.dumps([{"op": "remove", "path": "/spec/egress/0/to/1"}])
        await site.namespace.kubectl("patch", "networkpolicy", "bosh-vms-out", "--type=json", f"--patch={only_4}")
        blocks = [{"ipBlock": {"cidr": f"{address}/32"}} for address in (ADDRESS, METADATA)]
        with listener() as port:
            common = await site.deployments.first_deploy("common", with_disk=False)
            with site.vm_type(network_policy={"egress": [{"to": blocks}]}):
                own = await site.deployments.first_deploy("own", with_disk=False)

            async with asyncio.timeout(LIMIT):
                while await reaches(site, common, METADATA, port) or await reaches(site, own, ELSEWHERE, port):
                    await asyncio.sleep(0.5)
            assert await reaches(site, common, ADDRESS, port)
            assert await reaches(site, common, ELSEWHERE, port)
            assert await reaches(site, own, ADDRESS, port)
            assert await reaches(site, own, METADATA, port)
        await site.deployments.delete(own)
        await site.check(common)


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [BY_RECREATION, RESTRICTED], ids=str)
async def test_cpi_doctor_reports_which_tiers_the_cluster_permits(node: FirstNode, tmp_path: Path, way: Way) -> None:
    async with cpi_site.site(node, way, tmp_path, vms={"tier": way.tier}) as site:
        command = [sys.executable, "-m", "kubernetes_cpi", "doctor", "--config", str(tmp_path / "cpi.json")]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT)

        assert done.returncode == 0, done.stdout + done.stderr
        assert f"ok       tier {way.tier}" in done.stdout
        if node.minor >= 25:
            assert "limited  tier privileged" in done.stdout
            assert "violates PodSecurity" in done.stdout
        assert await site.objects() == []


# --- trial ------------------------------------------------------------------------------------------------------------


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=9) as answer:
        status: int = answer.status
    return status


async def test_vms_with_the_cloud_properties_from_try_kubernetes_start(node: FirstNode, tmp_path: Path) -> None:
    """The VMs have the same cloud properties as the Director and the instances that ``./dev try-kubernetes``
    creates.
    """
    director, minimal = (
        yaml.safe_load((ROOT / f"tools/trial/bosh/{name}.yml").read_text())[0]["value"]
        for name in ("director", "cloud")
    )
    director["ports"].append({"port": 9190, "host_port": 9190})
    way = next(way for way in WAYS if way.attach == "auto")
    async with cpi_site.site(node, way, tmp_path) as site:
        for properties in (director, minimal):
            with site.vm_type(**properties):
                vm = await site.deployments.first_deploy("trial", with_disk=False)
            if properties is director:
                assert await asyncio.to_thread(status_of, f"http://{ADDRESS}:9190/healthz") == 200
            await site.deployments.delete(vm)
        await site.check()


# --- without root -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def writable_volumes() -> AsyncIterator[None]:
    """During the block, make each volume from the cluster's provisioner writable for every user as soon as it appears.

    These volumes are host directories, to which the kubelet does not apply `fsGroup`.
    """

    async def opened() -> None:
        while True:
            for path in Path("/tmp/hostpath_pv").glob("*"):
                with contextlib.suppress(FileNotFoundError):
                    path.chmod(0o777)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(opened())
    try:
        yield
    finally:
        task.cancel()


async def test_job_in_a_vm_without_root_can_write_to_its_disk(node: FirstNode, tmp_path: Path) -> None:
    """Without root, the agent cannot write to directories that the container runtime creates, so the CPI must provide
    them as volumes.
    """
    async with cpi_site.site(node, RESTRICTED, tmp_path) as site, writable_volumes():
        db = await site.deployments.first_deploy()
        await site.write(db)

        assert (await site.exec(db, "id", "-u")).strip() == "1000"
        await site.check(db)
        await site.deployments.recreate(db)
        await site.check(db)


# --- agent added to an unmodified stemcell ----------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True], ids=["image volume", "copy"])
async def test_vm_from_an_unmodified_stemcell_supports_live_disks_and_reboots(
    node: FirstNode, tmp_path: Path, copy: bool
) -> None:
    """The unmodified stemcell contains neither Python nor the agent, so the helper pods for attachments and reboots
    must get both from the agent's image.
    """
    if node.minor < 35 and not copy:
        pytest.skip("no image volumes in this Kubernetes")
    way = Way("over a stemcell", "live", "base", "privileged")
    async with cpi_site.site(node, way, tmp_path, stemcells={"allow_mutable_images": True}) as site:
        site.deployments.stemcell = f"{pods.IMAGE}-system:latest"
        # An image volume needs only the agent's files. Copying them requires a complete image that contains `cp`.
        agent = {"image": f"{pods.IMAGE}:latest" if copy else f"{pods.IMAGE}-volume:latest", "copy": copy}
        with site.vm_type(agent=agent):
            db = await site.deployments.first_deploy()
            await site.write(db)

            await site.cpi.call("reboot_vm", db.vm)
            await site.deployments.until_ready(db)
            await site.check(db)
            await site.deployments.recreate(db)
            await site.check(db)


SLEEPER = "processes: [{name: jailed, executable: /bin/sleep, args: ['1000'], persistent_disk: true}]"


async def test_bpm_sandbox_does_not_keep_a_detached_disk_busy(node: FirstNode, tmp_path: Path) -> None:
    """All disks on this node are on one device, so the device alone does not show which mounts belong to a disk."""
    way = next(way for way in WAYS if way.tier == "privileged")
    async with cpi_site.site(node, way, tmp_path, timeouts={"unmount": 20}) as site:
        director = site.deployments
        director.job = lambda name: jobs.of_bpm(Paths(), name, SLEEPER)  # type: ignore[method-assign]
        db = await director.first_deploy("jailed")
        await site.write(db)
        disk = await director.create_disk(db)
        hint = await site.cpi.call("attach_disk", db.vm, disk)
        await director.ask(db, "add_dynamic_disk", disk, hint)
        # Restart the job so that its bpm sandbox is created while the other disk is attached.
        await director.ask(db, "stop")
        await director.ask(db, "start")
        await director.until_running(db)
        assert "sleep 1000" in await site.exec(db, "ps", "-e", "-o", "args")

        await director.ask(db, "remove_dynamic_disk", disk)
        await site.cpi.call("detach_disk", db.vm, disk)

        await director.delete_disk(disk)
        await site.check(db)


# --- root in a user namespace -----------------------------------------------------------------------------------------


async def test_vm_in_a_user_namespace_gets_a_live_disk(node: FirstNode, tmp_path: Path) -> None:
    if node.minor < 30:
        pytest.skip("no pods with user namespaces in this Kubernetes")
    async with cpi_site.site(node, USERNS, tmp_path) as site:
        db = await site.deployments.first_deploy()
        await site.write(db)

        assert (await site.exec(db, "cat", "/proc/self/uid_map")).split()[1] != "0"
        await site.check(db)
        await site.deployments.recreate(db)
        await site.check(db)


# A script that moves a live disk's mount and renames its directory. Where the kernel forbids the move, the script binds
# the disk to another path instead.
HIDE = """
mkdir /hidden
mount --move "$1" /hidden || mount --bind "$1" /hidden
mount -o remount,bind,rw "${1%/*}" && mv "$1" "${1%/*}/renamed"
echo before >/hidden/file
"""


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
@pytest.mark.parametrize("tier", ["userns", "privileged"])
async def test_disk_hidden_by_the_vms_root_user_is_not_reported_as_detached(
    node: FirstNode, tmp_path: Path, tier: str
) -> None:
    if node.minor < 30:
        pytest.skip("no pods with user namespaces in this Kubernetes")
    way = Way(tier, "live", tier, "privileged")
    async with cpi_site.site(node, way, tmp_path, timeouts={"unmount": 3}) as site:
        db = await site.deployments.first_deploy(with_disk=False)
        disk = await site.deployments.create_disk(db)
        hint = await site.cpi.call("attach_disk", db.vm, disk)
        await site.exec(db, "sh", "-c", HIDE, "sh", hint["path"])

        with pytest.raises(CpiCallError, match="the VM uses it"):
            await site.cpi.call("detach_disk", db.vm, disk)

        assert await site.cpi.call("get_disks", db.vm) == [disk]
        await site.exec(db, "sh", "-ec", "echo after >/hidden/file; umount /hidden")
        await site.cpi.call("detach_disk", db.vm, disk)
        assert await site.cpi.call("get_disks", db.vm) == []
        await site.deployments.delete(db)
        await site.deployments.delete_disk(disk)
        await site.check()


CLONE = """
import ctypes, pathlib, sys, time
if ctypes.CDLL(None).syscall(428, -100, sys.argv[1].encode(), 1) >= 0:
    pathlib.Path("/tmp/cloned").touch()
time.sleep(999)
"""
KEEP = """
/opt/agent_shim/bin/python3 -c "$@" >/dev/null 2>&1 &
until [ -e /tmp/cloned ]; do sleep 0.1; done
echo $!
"""


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
async def test_disk_mount_cloned_with_open_tree_is_not_reported_as_detached(node: FirstNode, tmp_path: Path) -> None:
    """A mount that was cloned with open_tree(2) is in no mount table. The CPI must detect it through the descriptor
    that keeps it open.
    """
    if node.minor < 30:
        pytest.skip("no pods with user namespaces in this Kubernetes")
    async with cpi_site.site(node, USERNS, tmp_path, timeouts={"unmount": 3}) as site:
        db = await site.deployments.first_deploy(with_disk=False)
        disk = await site.deployments.create_disk(db)
        hint = await site.cpi.call("attach_disk", db.vm, disk)
        keeper = await site.exec(db, "sh", "-c", KEEP, "sh", CLONE, hint["path"])

        with pytest.raises(CpiCallError, match="the VM uses it"):
            await site.cpi.call("detach_disk", db.vm, disk)

        await site.exec(db, "kill", keeper.strip())
        await site.cpi.call("detach_disk", db.vm, disk)
        await site.deployments.delete(db)
        await site.deployments.delete_disk(disk)
        await site.check()


@pytest.mark.attack("root in a container that the CPI created fills the node's file system")
async def test_root_in_a_user_namespace_cannot_write_to_the_nodes_file_system(node: FirstNode, tmp_path: Path) -> None:
    """The directory for the VM's live disks is on the node's file system, so the VM must see it read-only."""
    if node.minor < 30:
        pytest.skip("no pods with user namespaces in this Kubernetes")
    async with cpi_site.site(node, USERNS, tmp_path) as site:
        vm = await site.deployments.first_deploy(with_disk=False)

        write = "mount -o remount,bind,rw /var/vcap/disks && touch /var/vcap/disks/file"

        assert "Permission denied" in await site.exec(vm, "sh", "-c", f"{write} 2>&1 || true")
        await site.check(vm)


# --- the policy -------------------------------------------------------------------------------------------------------


def pods_for_a_stolen_token(namespace: str) -> Iterator[Document]:
    """Yield pods that somebody with a stolen token might want to create."""
    ours = {"app.kubernetes.io/managed-by": "kubernetes-cpi", "cpi.bosh.io/kind": "vm"}
    container = {"name": "c", "image": "localhost/agent-shim", "command": ["sleep", "9"]}
    secret = {"name": "s", "secret": {"secretName": f"{ACCOUNT}-token"}}
    specs = [
        {"containers": [{**container, "image": "evil.example/x"}]},
        {"containers": [container], "volumes": [secret]},
        {"containers": [container], "hostNetwork": True},
        {"containers": [container], "serviceAccountName": "admin"},
        {"containers": [{**container, "securityContext": {"privileged": True}}]},
    ]
    for number, spec in enumerate(specs):
        metadata = {"name": f"theft-{number}", "namespace": namespace, "labels": ours}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    helper = ours | {"cpi.bosh.io/kind": "attachment"}
    program = {**container, "command": ["/opt/agent_shim/bin/python3", "-I", "-S", "-c", "evil"]}
    metadata = {"name": "theft-helper", "namespace": namespace, "labels": helper}
    yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [program]}}


async def test_admission_policy_restricts_a_stolen_token_but_not_the_cpi(node: FirstNode, tmp_path: Path) -> None:
    if node.minor < 30:
        pytest.skip("no ValidatingAdmissionPolicy in this Kubernetes")
    async with cpi_site.site(node, UNDER_POLICY, tmp_path) as site:
        name = site.namespace.name
        as_cpi = f"--as=system:serviceaccount:{name}:{ACCOUNT}"
        program = f"--from-file=program={ROOT / 'kubernetes_cpi/attachment_program.py'}"
        await site.namespace.kubectl("create", "serviceaccount", "admin")
        values = ["--from-literal=images=localhost/", "--from-literal=privileged_vms=false"]
        await site.namespace.kubectl("create", "configmap", "bosh-cpi-policy", program, *values)
        documents = list(yaml.safe_load_all(POLICY.read_text()))
        await site.namespace.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(documents))
        try:
            for pod in pods_for_a_stolen_token(name):
                text = json.dumps(pod)
                async with asyncio.timeout(LIMIT):
                    # A new policy takes a moment to take effect, so retry.
                    while (
                        "ValidatingAdmissionPolicy"
                        not in (
                            await try_kubectl(site, "create", as_cpi, "--dry-run=server", "--filename=-", stdin=text)
                        ).stderr
                    ):
                        await asyncio.sleep(0.5)
            refused = await try_kubectl(site, "delete", "secret", as_cpi, f"{ACCOUNT}-token")
            assert "ValidatingAdmissionPolicy" in refused.stderr

            db = await site.deployments.first_deploy()
            await site.write(db)
            await site.check(db)
            await site.deployments.delete(db)
            await site.deployments.delete_disk(db.disk)
        finally:
            await site.namespace.kubectl("delete", "--filename=-", stdin=yaml.safe_dump_all(documents))
