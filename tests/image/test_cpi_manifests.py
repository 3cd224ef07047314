"""The Kubernetes objects that the CPI creates are valid according to the Kubernetes schemas."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls
from tests.cpi.fake_api import FakeApiServer, FakeCluster
from tests.image.test_manifests import NEWEST, tool

pytestmark = pytest.mark.image

VIP = {"type": "vip", "ip": "10.0.0.9", "cloud_properties": {"ports": [{"port": 80}], "service_type": "LoadBalancer"}}
NETWORKS = {"default": {**DYNAMIC["default"], "dns": ["10.0.0.2"]}, "public": VIP}
EVERYTHING: dict[str, Any] = {
    "cpu": 0.5,
    "cpu_limit": 2,
    "memory": 512,
    "zone": "z1",
    "node_selector": {"pool": "bosh"},
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "anti_affinity": "required",
    "tolerations": [{"key": "bosh", "operator": "Exists"}],
    "priority_class": "high",
    "runtime_class": "runc",
    "image_pull_secrets": ["registry"],
    "labels": {"team": "a"},
    "annotations": {"a/b": "c"},
    "sysctls": {"net.core.somaxconn": "1024"},
    "volumes": [{"name": "dev", "mount_path": "/dev/x", "source": {"hostPath": {"path": "/dev"}}, "read_only": True}],
    "ports": [{"port": 53, "protocol": "UDP", "name": "dns", "host_port": 53}],
    "services": [{"name": "zk", "ports": [{"port": 2181, "node_port": 30000}], "type": "NodePort"}],
    "host_aliases": {"10.0.0.1": ["a", "b"]},
    "service_account": "director",
    "service_account_token": True,
    "persistent_disk": {"size": 64},
}


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    server = FakeApiServer(FakeCluster())
    yield server
    server.close()


def created_objects(server: FakeApiServer) -> list[Any]:
    """Return the bodies of the CPI's POST requests, which are the objects that it wanted to create."""
    posted = zip(server.requests, server.bodies, strict=True)
    return [json.loads(body) for request, body in posted if request.startswith("POST")]


def check(documents: list[Any], version: str, directory: Path) -> None:
    file = directory / "objects.yaml"
    file.write_text("\n---\n".join(json.dumps(document) for document in documents))
    command = [tool("kubernetes-validate"), "--strict", "--kubernetes-version", version, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.25", NEWEST])
@pytest.mark.parametrize("tier", ["privileged", "base", "restricted", "userns"])
def test_objects_created_by_the_cpi_for_a_vm_are_valid(
    server: FakeApiServer, tmp_path: Path, tier: str, version: str
) -> None:
    if tier == "userns" and version == "1.25":
        version = "1.30"
    cpi = CpiCalls(server, tmp_path)
    cpi("create_vm", "agent-1", STEMCELL, {"tier": tier}, DYNAMIC, [], ENV)
    cpi("create_vm", "agent-2", STEMCELL, {"tier": tier, **EVERYTHING}, NETWORKS, [], ENV)

    documents = created_objects(server)
    kinds = {"Secret", "PersistentVolumeClaim", "Pod", "Service", "PodDisruptionBudget"}
    assert {one["kind"] for one in documents} == kinds
    if version == "1.25":  # Kubernetes 1.25 does not have this field and ignores it.
        del documents[-1]["spec"]["unhealthyPodEvictionPolicy"]
    check(documents, version, tmp_path)


@pytest.mark.parametrize("version", ["1.25", NEWEST])
def test_objects_created_by_the_cpi_for_a_live_disk_are_valid(
    server: FakeApiServer, tmp_path: Path, version: str
) -> None:
    server.cluster.create(("storageclasses", "", "fast"), {"metadata": {"name": "fast"}})
    cpi = CpiCalls(server, tmp_path)
    vm = cpi.create_vm(attach="live", tier="privileged")
    cpi("attach_disk", vm, cpi("create_disk", 64, {"storage_class": "fast", "labels": {"a": "b"}}, vm))

    check(created_objects(server), version, tmp_path)


def test_cpi_object_check_detects_an_unknown_field(server: FakeApiServer, tmp_path: Path) -> None:
    cpi = CpiCalls(server, tmp_path)
    cpi("create_vm", "agent-1", STEMCELL, {}, DYNAMIC, [], ENV)
    documents = created_objects(server)
    documents[-1]["spec"]["terminationGrace"] = 1

    with pytest.raises(AssertionError):
        check(documents, NEWEST, tmp_path)
