"""Tests VMs on two nodes, one of which is drained with ``kubectl drain`` as described in docs/cluster-upgrades.md."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.support.kubernetes import cpi_site
from tests.support.kubernetes.calls import CpiCallError
from tests.support.kubernetes.cpi_site import Site, Way
from tests.support.kubernetes.deployments import DeployedInstance
from tests.support.kubernetes.node import API, SECOND, FirstNode, KubeletNode

pytestmark = pytest.mark.kubernetes

LIVE: Final = Way("live", "live", "base", "privileged")
LOCAL: Final = "of-one-node"
"""A StorageClass whose volumes exist only on the cluster's second node."""
DRAIN: Final = (
    "drain",
    SECOND,
    "--ignore-daemonsets",
    "--delete-emptydir-data",
    "--force",
    "--pod-selector=cpi.bosh.io/kind!=attachment",
)
GROUP_SIZE: Final = 3
ASK_API: Final = f"""
import ssl, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen("{API}/readyz", context=context, timeout=9).read().decode())
"""


@pytest.fixture(scope="module")
def second(node: FirstNode) -> Iterator[KubeletNode]:
    if node.minor < 22:
        pytest.skip("no policy/v1 in this Kubernetes")
    with node.second() as made:
        yield made


@contextlib.asynccontextmanager
async def without_scheduling_on(site: Site, other: str) -> AsyncIterator[None]:
    """Keep new VMs off the ``other`` node while the block runs."""
    await site.namespace.kubectl("cordon", other)
    try:
        yield
    finally:
        await site.namespace.kubectl("uncordon", other)


async def node_of(site: Site, instance: DeployedInstance) -> str:
    node: str = (await site.namespace.pod(instance.vm).look())["spec"]["nodeName"]
    return node


async def count_ready(site: Site, group: str) -> int:
    """Return the number of ready VMs in a group."""
    ready = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
    said = await site.namespace.kubectl(
        "get", "pods", "-l", f"bosh.io/instance_group={group}", "-o", f"jsonpath={ready}"
    )
    return said.split().count("True")


async def drain_second_node(site: Site) -> str:
    done = await asyncio.to_thread(site.namespace.node.kubectl, *DRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def resurrect_until(site: Site, instances: list[DeployedInstance], drain: asyncio.Task[str]) -> list[int]:
    """Recreate each missing VM, as the Health Monitor does, until the drain has finished. Return the number of ready
    VMs in the "web" group at the beginning of each round.
    """
    served = []
    while not drain.done():
        served.append(await count_ready(site, "web"))
        for instance in instances:
            if not await site.cpi.call("has_vm", instance.vm):
                await site.deployments.resurrect(instance)
    return served


async def test_node_drain_moves_a_groups_vms_one_by_one_with_their_disks(
    node: FirstNode, second: KubeletNode, tmp_path: Path
) -> None:
    async with cpi_site.site(node, LIVE, tmp_path) as site:
        async with without_scheduling_on(site, node.name):
            db = await site.deployments.first_deploy()
            webs = [await site.deployments.first_deploy("web", with_disk=False) for _ in range(GROUP_SIZE)]
        await site.write(db)
        instances = [db, *webs]
        assert {await node_of(site, one) for one in instances} == {second.name}
        assert await site.exec(db, "/opt/agent_shim/bin/python3", "-c", ASK_API) == "ok\n"

        drain = asyncio.create_task(drain_second_node(site))
        try:
            served = await resurrect_until(site, instances, drain)
            await drain
            for instance in instances:
                if not await site.cpi.call("has_vm", instance.vm):
                    await site.deployments.resurrect(instance)
            assert {await node_of(site, one) for one in instances} == {node.name}
        finally:
            await site.namespace.kubectl("uncordon", second.name)
        assert min(served) >= GROUP_SIZE - 1
        # The file on the disk shows that the drain script ran before the pod was removed. The disk has moved to the
        # other node.
        assert (await site.exec(db, "cat", "/var/vcap/store/drained")).splitlines() == ["drained"]
        await site.check(*instances)


def local_volume(path: Path) -> str:
    """Create a directory for a volume on the second node. Return the manifests for the volume and its StorageClass."""
    path.mkdir()
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [SECOND]}
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": LOCAL},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": LOCAL},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "64Mi"},
            "local": {"path": str(path)},
            "storageClassName": LOCAL,
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}},
        },
    }
    return yaml.safe_dump_all([storage, volume])


async def test_vm_waits_for_the_drained_node_that_has_its_disk(
    node: FirstNode, second: KubeletNode, tmp_path: Path
) -> None:
    volume = local_volume(tmp_path / "volume")
    async with cpi_site.site(node, LIVE, tmp_path) as site, contextlib.AsyncExitStack() as stack:
        await site.namespace.kubectl("apply", "--filename=-", stdin=volume)
        stack.push_async_callback(site.namespace.kubectl, "delete", "--wait=false", "--filename=-", stdin=volume)
        site.deployments.disk_type = {"storage_class": LOCAL}
        async with without_scheduling_on(site, node.name):
            db = await site.deployments.first_deploy()
        await site.write(db)

        await drain_second_node(site)
        try:
            assert await site.cpi.call("has_vm", db.vm) is False
            with pytest.raises(CpiCallError, match="no node takes it.*affinity"):
                await site.deployments.resurrect(db)
            assert await site.cpi.call("has_disk", db.disk)
        finally:
            await site.namespace.kubectl("uncordon", second.name)
        await site.deployments.new_vm(db)

        assert await node_of(site, db) == second.name
        await site.check(db)
