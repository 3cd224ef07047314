"""No CPI method touches another Director's objects or objects that the CPI did not create, whatever their names
are.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeCluster, Object

OURS = {"app.kubernetes.io/managed-by": "kubernetes-cpi"}
POD = {"containers": [{"name": "web"}], "volumes": []}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


class OtherDirector(CpiCalls):
    """A second Director in the same namespace."""

    def request(self, method: str, arguments: Any, *, request_id: str = "") -> bytes:
        made = json.loads(super().request(method, arguments, request_id=request_id))
        made["context"]["director_uuid"] = "another"
        return json.dumps(made).encode()


def make(cluster: FakeCluster, plural: str, name: str, spec: Object | None = None, **labels: str) -> None:
    cluster.create((plural, "bosh", name), {"metadata": {"name": name, "labels": labels}, "spec": spec or {}})
    cluster.settle()


VM_CALLS: list[tuple[str, list[Any]]] = [
    ("delete_vm", []),
    ("reboot_vm", []),
    ("set_vm_metadata", [{"deployment": "dep"}]),
    ("get_disks", []),
    ("attach_disk", ["disk-bosh-" + "0" * 16]),
]
DISK_CALLS: list[tuple[str, list[Any]]] = [
    ("delete_disk", []),
    ("set_disk_metadata", [{"deployment": "dep"}]),
    ("resize_disk", [2048]),
    ("update_disk", [2048]),
    ("snapshot_disk", [{}]),
]


@pytest.mark.parametrize(
    ("plural", "kind", "calls"),
    [
        ("pods", "VM", VM_CALLS),
        ("secrets", "VM", VM_CALLS),
        ("persistentvolumeclaims", "Disk", DISK_CALLS),
    ],
)
def test_object_not_created_by_the_cpi_is_reported_as_a_missing_vm_or_disk(
    cpi: CpiCalls, cluster: FakeCluster, plural: str, kind: str, calls: list[tuple[str, list[Any]]]
) -> None:
    specs: dict[str, Object] = {"pods": POD, "persistentvolumeclaims": CLAIM}
    make(cluster, plural, "others", specs.get(plural))
    make(cluster, "persistentvolumeclaims", "data-others", CLAIM)
    before = cluster.snapshot()

    for method, more in calls:
        cpi.refused(f"{kind}NotFound", method, "others", *more)
    assert cluster.snapshot() == before
    assert cpi(f"has_{kind.lower()}", "others") is False


def test_claim_named_like_a_data_claim_but_not_created_by_the_cpi_is_kept(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """A StatefulSet may have a claim named `data-postgres-0`, which resembles the names of the CPI's data claims."""
    make(cluster, "persistentvolumeclaims", "data-postgres-0", CLAIM)
    before = cluster.snapshot()

    cpi("delete_vm", "postgres-0")

    assert cluster.snapshot() == before


def test_recreation_annotation_on_a_claim_not_created_by_the_cpi_is_ignored(
    cpi: CpiCalls, cluster: FakeCluster
) -> None:
    """If the CPI trusted the annotation, it would create a pod that mounts the disks named in it."""
    disk = cpi("create_disk", 64, {}, None)
    noted = {"name": "data-others", "annotations": {"cpi.bosh.io/disks": json.dumps({"disks": [disk]})}}
    cluster.create(("persistentvolumeclaims", "bosh", "data-others"), {"metadata": noted, "spec": CLAIM})
    make(cluster, "secrets", "others")
    before = cluster.snapshot()

    cpi.refused("VMNotFound", "attach_disk", "others", disk, match="has no such pod")

    assert cluster.snapshot() == before


def test_manually_labelled_claim_can_be_used_as_a_disk(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """An operator can label a claim for restored storage and then use it with `bosh attach-disk`."""
    make(cluster, "persistentvolumeclaims", "restored", CLAIM, **OURS, **{"cpi.bosh.io/kind": "disk"})
    vm = cpi.create_vm()

    assert cpi("has_disk", "restored") is True
    cpi("attach_disk", vm, "restored")
    assert cpi("get_disks", vm) == ["restored"]


def test_director_does_not_see_another_directors_objects(cpi: CpiCalls, cluster: FakeCluster, tmp_path: Any) -> None:
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, vm)
    snapshot = cpi("snapshot_disk", disk, {})
    before = cluster.snapshot()
    other = OtherDirector(cpi.server, tmp_path)

    for cid, calls in ((vm, VM_CALLS), (disk, DISK_CALLS), (snapshot, [("delete_snapshot", [])])):
        for method, more in calls:
            with pytest.raises(CpiFailedError, match="cannot (find|use|attach)") as failed:
                other(method, cid, *more)
            assert failed.value.type in ("VMNotFound", "DiskNotFound"), method

    assert cluster.snapshot() == before
    assert [other("has_vm", vm), other("has_disk", disk)] == [False, False]


def test_another_directors_live_attachment_is_kept(cpi: CpiCalls, cluster: FakeCluster, tmp_path: Any) -> None:
    vm = cpi.create_vm(attach="live", tier="privileged")
    disk = cpi.attached_disk(vm)
    before = cluster.snapshot()

    with pytest.raises(CpiFailedError, match="cannot detach"):
        OtherDirector(cpi.server, tmp_path)("detach_disk", vm, disk)

    assert cluster.snapshot() == before


@pytest.mark.parametrize(
    ("plural", "labels"),
    [("services", {}), ("services", {**OURS, "cpi.bosh.io/kind": "service", "cpi.bosh.io/director": "another"})],
)
def test_create_vm_does_not_adopt_a_service_without_the_cpis_labels(
    cpi: CpiCalls, cluster: FakeCluster, plural: str, labels: dict[str, str]
) -> None:
    make(cluster, plural, "zk", {"ports": [{"port": 1}]}, **labels)
    before = cluster.snapshot()

    with pytest.raises(CpiFailedError, match="cannot use the .*zk: it lacks the labels") as failed:
        cpi.create_vm(services=[{"name": "zk", "ports": [{"port": 2181}]}])

    assert failed.value.type == "VMCreationFailed"
    assert cluster.snapshot() == before


@pytest.mark.parametrize("plural", ["pods", "secrets", "persistentvolumeclaims"])
def test_create_vm_does_not_adopt_an_object_without_the_cpis_labels(
    cpi: CpiCalls, cluster: FakeCluster, plural: str
) -> None:
    vm = cpi.create_vm()
    cpi("delete_vm", vm)
    make(cluster, plural, f"data-{vm}" if plural == "persistentvolumeclaims" else vm, POD | CLAIM)
    (foreign,) = cluster.snapshot().items()

    with pytest.raises(CpiFailedError):
        cpi("create_vm", "agent-1", STEMCELL, {}, DYNAMIC, [], ENV)

    assert foreign in cluster.snapshot().items()
