"""Tests the four ways to attach a persistent disk, and protection against data loss."""

from __future__ import annotations

import base64
import json

import pytest

from kubernetes_cpi import manifests
from tests.cpi.calls import ENV, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster, Object, RefusalError, unscheduled, waiting

AT_CREATION = "/var/vcap/disks-at-creation"
LIVE = "/var/vcap/disks"


def holder(cluster: FakeCluster, disk: str) -> str | None:
    found = cluster.of("persistentvolumeclaims")[disk]["metadata"].get("annotations", {}).get("cpi.bosh.io/holder")
    assert found is None or isinstance(found, str)
    return found


def mounts(cluster: FakeCluster, vm: str) -> list[str]:
    volumes = cluster.of("pods")[vm]["spec"]["volumes"]
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def make_class(cluster: FakeCluster, name: str, **more: object) -> None:
    body: Object = {"metadata": {"name": name}, "provisioner": "x", **more}
    cluster.create(("storageclasses", "", name), body)


def attachments(cluster: FakeCluster) -> list[str]:
    return [name for name in cluster.of("pods") if name.startswith("attach-")]


# --- disks at VM creation ---------------------------------------------------------------------------------------------


def test_attaching_a_disk_mounted_at_vm_creation_changes_nothing(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    first = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, first)
    cpi("delete_vm", first)
    vm = cpi.create_vm("agent-2", [disk])
    server.requests.clear()

    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}
    assert [request.split()[0] for request in server.requests] == ["GET", "GET"]
    assert cpi("get_disks", vm) == [disk]
    cpi("set_disk_metadata", disk, {"deployment": "dep", "instance_id": "0"})
    assert cluster.of("persistentvolumeclaims")[disk]["metadata"]["labels"]["bosh.io/deployment"] == "dep"


def test_create_disk_does_not_wait_for_a_volume(cpi: CpiCalls, cluster: FakeCluster) -> None:
    make_class(cluster, "on-first-use")
    disk = cpi("create_disk", 64, {"storage_class": "on-first-use"}, None)

    claim = cluster.of("persistentvolumeclaims")[disk]
    assert claim["status"]["phase"] == "Pending"
    assert claim["spec"]["storageClassName"] == "on-first-use"
    assert claim["spec"]["resources"]["requests"]["storage"] == "64Mi"
    assert cpi("has_disk", disk) is True


@pytest.mark.parametrize("size", [0, -1])
def test_create_disk_with_a_size_below_one_is_rejected(cpi: CpiCalls, cluster: FakeCluster, size: int) -> None:
    """The CPI must reject the size itself, because the API server would accept a claim of size 0 but never bind it."""
    with pytest.raises(CpiFailedError, match=f"disk of {size} MiB"):
        cpi("create_disk", size, {}, None)

    assert cluster.snapshot() == {}


def test_repeated_request_id_does_not_return_a_disk_in_use(cpi: CpiCalls) -> None:
    """A Director chooses request ids at random, so two different requests may have the same id."""
    vm = cpi.create_vm()
    first = cpi("create_disk", 64, {}, vm, request_id="cpi-111111")
    assert cpi("create_disk", 64, {}, vm, request_id="cpi-111111") == first, "its answer was lost"
    assert cpi("create_disk", 64, {}, vm, request_id="cpi-222222") != first
    cpi("attach_disk", vm, first)

    assert cpi("create_disk", 64, {}, vm, request_id="cpi-111111") != first


def test_create_vm_does_not_mount_a_disk_that_another_vm_uses(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """In a create-swap-delete update, the Director passes the disk to create_vm while the old VM still uses it."""
    old = cpi.create_vm()
    disk = cpi.attached_disk(old)

    new = cpi.create_vm("agent-2", [disk])
    assert disk not in mounts(cluster, new)
    with pytest.raises(CpiFailedError, match=f"in use by {old}"):
        cpi("attach_disk", new, disk)
    cpi("detach_disk", old, disk)
    cpi("attach_disk", new, disk)

    assert disk in mounts(cluster, new)
    assert disk not in mounts(cluster, old)
    assert holder(cluster, disk) == new


UNREADY = {"conditions": [{"type": "Ready", "status": "False"}]}


def swapped(cpi: CpiCalls, way: str, **properties: object) -> tuple[str, str, str]:
    """Create two VMs as in a create-swap-delete update, and detach the disk from the old VM. Return the old VM, the
    new VM and the disk.
    """
    disk = cpi("create_disk", 64, {}, None)
    old, new = (cpi.create_vm(agent, [disk], attach=way, **properties) for agent in ("agent-1", "agent-2"))
    cpi("detach_disk", old, disk)
    return old, new, disk


def shut_down(cluster: FakeCluster, vm: str) -> None:
    """Simulate a `shutdown` request to a VM. From then on, none of the VM's pods becomes ready."""
    running = cluster.of("pods")[vm]["status"]
    cluster.pod_status = lambda pod: running | UNREADY if pod["metadata"]["name"] == vm else None


@pytest.mark.parametrize("way", ["recreate", "live"])
@pytest.mark.parametrize("disk_type", ["claim", "empty_dir"])
def test_attach_deletes_the_pod_of_a_vm_that_was_shut_down(
    cpi: CpiCalls, cluster: FakeCluster, way: str, disk_type: str
) -> None:
    """The attach must not wait for this pod, because it can never become ready again after a shutdown."""
    old, new, disk = swapped(cpi, way, ephemeral_disk={"type": "claim"})
    if disk_type == "empty_dir":
        (data,) = [one for one in cluster.objects["pods", "bosh", old]["spec"]["volumes"] if one["name"] == "data"]
        data["emptyDir"] = {}
        del data["persistentVolumeClaim"]
    cluster.patch(("pods", "bosh", old), {"status": UNREADY})

    assert cpi("attach_disk", new, disk)

    assert old not in cluster.of("pods")
    assert cpi("get_disks", new) == [disk]
    cpi("delete_vm", old)
    assert holder(cluster, disk) == new


@pytest.mark.parametrize("way", ["recreate", "live"])
def test_attach_takes_the_disk_of_a_vm_that_was_just_shut_down(cpi: CpiCalls, cluster: FakeCluster, way: str) -> None:
    old, new, disk = swapped(cpi, way, ephemeral_disk={"type": "claim"})
    shut_down(cluster, old)

    assert cpi("attach_disk", new, disk)

    assert disk not in mounts(cluster, old)
    assert cpi("get_disks", new) == [disk]


def test_attach_waits_until_a_vm_without_a_data_claim_reports_its_shutdown(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    old, new, disk = swapped(cpi, "live", ephemeral_disk={"type": "empty_dir"})
    server.fail("WATCH pods/", on=lambda: cluster.patch(("pods", "bosh", old), {"status": UNREADY}))

    assert cpi("attach_disk", new, disk)

    assert old not in cluster.of("pods")


@pytest.mark.parametrize("moment", ["PATCH persistentvolumeclaims/data-", "GET secrets/", "POST pods/vm"])
def test_attach_succeeds_while_the_old_vm_is_being_deleted(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, moment: str
) -> None:
    """In a create-swap-delete update, the Director may delete the old VM while the deploy is still running
    (ScheduledOrphanedVMCleanup).
    """
    old, new, disk = swapped(cpi, "live", ephemeral_disk={"type": "claim"})
    server.fail(f"{moment}.*{old[-16:]}", on=lambda: cpi("delete_vm", old))

    assert cpi("attach_disk", new, disk)

    cluster.settle()
    assert old not in cluster.of("pods")
    assert cpi("get_disks", new) == [disk]


def test_attach_succeeds_even_if_the_previous_vm_cannot_start_without_the_disk(
    cpi: CpiCalls, cluster: FakeCluster
) -> None:
    old, new, disk = swapped(cpi, "recreate")
    cluster.pod_status = lambda pod: unscheduled("no room") if pod["metadata"]["name"] == old else None

    assert cpi("attach_disk", new, disk)

    assert cpi("get_disks", new) == [disk]


def test_disk_that_has_lost_its_volume_is_missing_but_can_be_deleted(cpi: CpiCalls, cluster: FakeCluster) -> None:
    disk = cpi("create_disk", 64, {}, None)
    cluster.patch(("persistentvolumeclaims", "bosh", disk), {"status": {"phase": "Lost"}})

    assert cpi("has_disk", disk) is False
    cpi("delete_disk", disk)

    assert cluster.snapshot() == {}


def test_disk_that_is_unknown_or_not_attached_is_reported(cpi: CpiCalls, cluster: FakeCluster) -> None:
    missing, elsewhere = (f"disk-{namespace}-{'0' * 16}" for namespace in ("bosh", "other"))

    with pytest.raises(CpiFailedError) as failed:
        cpi.create_vm(disks=[missing])

    assert failed.value.type == "DiskNotFound"
    assert cluster.snapshot() == {}
    vm, other = cpi.create_vm(), cpi.create_vm("agent-2")
    for method in ("attach_disk", "detach_disk"):
        cpi.refused("DiskNotFound", method, vm, missing)
    assert cpi("has_disk", missing) is False
    assert cpi("delete_disk", missing) is None
    with pytest.raises(CpiFailedError, match="namespace other"):
        cpi("attach_disk", vm, elsewhere)
    with pytest.raises(CpiFailedError, match="namespace other"):
        cpi.create_vm("agent-3", [elsewhere])
    disk = cpi.attached_disk(vm)
    cpi.refused("DiskNotAttached", "detach_disk", other, disk)
    assert cpi("get_disks", vm) == [disk]


@pytest.mark.parametrize("way", ["recreate", "live"])
def test_attach_fails_if_another_vm_takes_the_disk_at_the_same_time(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, way: str
) -> None:
    """The second VM's pod has not mounted the disk yet, so only the claim shows the CPI that there is a conflict."""
    one, two = (cpi.create_vm(agent, attach=way, tier="privileged") for agent in ("agent-1", "agent-2"))
    disk = cpi("create_disk", 64, {}, one)

    def overtake() -> None:
        cluster.patch(
            ("persistentvolumeclaims", "bosh", disk), {"metadata": {"annotations": {"cpi.bosh.io/holder": two}}}
        )

    server.fail(f"PATCH persistentvolumeclaims/{disk}", on=overtake)
    with pytest.raises(CpiFailedError, match=f"in use by {two}"):
        cpi("attach_disk", one, disk)

    assert holder(cluster, disk) == two
    assert disk not in mounts(cluster, one)
    cpi("attach_disk", two, disk)
    assert cpi("get_disks", two) == [disk]


def test_disk_of_a_deleted_vm_can_be_mounted_by_a_new_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    disk = cpi.attached_disk(vm)
    cpi("delete_vm", vm)
    assert holder(cluster, disk) == vm

    assert disk in mounts(cluster, cpi.create_vm("agent-2", [disk]))


# --- reserved ---------------------------------------------------------------------------------------------------------


def test_reserved_disk_is_returned_by_create_disk(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(persistent_disk={"size": "64Mi"})
    uid = cluster.of("pods")[vm]["metadata"]["uid"]
    settings = json.loads(base64.b64decode(cluster.of("secrets")[vm]["data"]["config.json"]))
    assert settings["disks"]["persistent"] == {}, "the agent would mount a disk that the Director does not know about"

    disk = cpi("create_disk", 128, {}, vm)
    assert cluster.of("persistentvolumeclaims")[disk]["spec"]["resources"]["requests"]["storage"] == "128Mi"
    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid
    other = cpi("create_disk", 64, {}, vm)
    assert other != disk
    cpi("delete_vm", vm)
    assert set(cluster.of("persistentvolumeclaims")) == {disk, other}


def test_unused_reserved_disk_is_deleted_with_the_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(persistent_disk={"size": 64})

    cpi("delete_vm", vm)

    assert cluster.snapshot() == {}


def test_create_vm_with_a_disk_does_not_reserve_another(cpi: CpiCalls, cluster: FakeCluster) -> None:
    disk = cpi("create_disk", 64, {}, None)

    vm = cpi.create_vm("agent-1", [disk], persistent_disk={"size": 64})

    assert sorted(mounts(cluster, vm)) == sorted([f"data-{vm}", disk])


# --- attach by recreation ---------------------------------------------------------------------------------------------


def test_attach_by_recreation_replaces_the_pod(
    cpi: CpiCalls, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log must state the pod's new address, because the Director keeps the old one in links and DNS."""
    vm = cpi.create_vm()
    cpi("set_vm_metadata", vm, {"name": "zookeeper/1", "index": "0"})
    before, secret = cluster.of("pods")[vm], cluster.of("secrets")[vm]["metadata"]["uid"]
    disk = cpi("create_disk", 64, {}, vm)

    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}

    pod = cluster.of("pods")[vm]
    assert pod["metadata"]["uid"] != before["metadata"]["uid"]
    assert pod["metadata"]["labels"]["bosh.io/index"] == "0"
    assert pod["metadata"]["annotations"]["bosh.io/name"] == "zookeeper/1"
    assert sorted(mounts(cluster, vm)) == sorted([f"data-{vm}", disk])
    assert cluster.of("secrets")[vm]["metadata"]["uid"] == secret
    assert "cpi.bosh.io/disks" not in cluster.of("persistentvolumeclaims")[f"data-{vm}"]["metadata"]["annotations"]
    now, then = pod["status"]["podIP"], before["status"]["podIP"]
    assert f"its address is {now}; links and DNS of the Director keep {then}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"ephemeral_disk": {"type": "empty_dir"}}, "is not a claim"),
        ({"ephemeral_disk": {"type": "claim"}, "attach": "never"}, "attach: never"),
    ],
    ids=["without a data claim", "never"],
)
def test_attach_by_recreation_is_refused_if_disabled_or_without_a_data_claim(
    cpi: CpiCalls, cluster: FakeCluster, properties: Object, words: str
) -> None:
    """Without a data claim, the agent in the new pod would not have its permanent credentials and could not connect to
    the bus.
    """
    vm = cpi.create_vm(**properties)
    uid = cluster.of("pods")[vm]["metadata"]["uid"]
    disk = cpi("create_disk", 64, {}, vm)

    cpi.refused("NotSupported", "attach_disk", vm, disk, match=words)
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid


def test_pod_that_fails_to_start_with_a_disk_is_restored_without_it(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, vm)
    cluster.pod_status = lambda pod: unscheduled("volume node affinity conflict") if disk in str(pod["spec"]) else None

    with pytest.raises(CpiFailedError, match="volume node affinity conflict"):
        cpi("attach_disk", vm, disk)

    assert mounts(cluster, vm) == [f"data-{vm}"]
    assert cpi("has_vm", vm) is True
    assert holder(cluster, disk) is None


def test_disk_migration_detaches_the_old_disk_without_recreating_the_pod(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    small, large = cpi("create_disk", 64, {}, vm), cpi("create_disk", 128, {}, vm)
    cpi("attach_disk", vm, small)
    cpi("attach_disk", vm, large)
    assert cpi("get_disks", vm) == [small, large]
    uid = cluster.of("pods")[vm]["metadata"]["uid"]

    cpi("detach_disk", vm, small)
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid
    assert cpi("get_disks", vm) == [large]
    cpi("delete_disk", small)
    assert cpi("has_disk", small) is False
    assert "deletionTimestamp" in cluster.of("persistentvolumeclaims")[small]["metadata"], "the pod still mounts it"
    cpi("delete_disk", small)
    cpi("delete_vm", vm)
    assert list(cluster.of("persistentvolumeclaims")) == [large]


def test_disk_that_is_being_deleted_is_not_attached(cpi: CpiCalls, cluster: FakeCluster) -> None:
    one, two = cpi.create_vm("agent-1"), cpi.create_vm("agent-2")
    disk = cpi.attached_disk(one)
    cpi("detach_disk", one, disk)
    cpi("delete_disk", disk)

    cpi.refused("DiskNotFound", "attach_disk", two, disk)


def test_detached_disk_that_is_still_mounted_is_reattached_without_recreating_the_pod(
    cpi: CpiCalls, cluster: FakeCluster
) -> None:
    vm = cpi.create_vm()
    disk = cpi.attached_disk(vm)
    uid = cluster.of("pods")[vm]["metadata"]["uid"]

    cpi("detach_disk", vm, disk)
    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}

    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid
    assert holder(cluster, disk) == vm


def test_attach_refuses_a_disk_still_mounted_by_a_vm_without_a_data_claim(cpi: CpiCalls, cluster: FakeCluster) -> None:
    disk = cpi("create_disk", 64, {}, None)
    old = cpi.create_vm("agent-1", [disk], ephemeral_disk={"type": "empty_dir"})
    cpi("detach_disk", old, disk)
    new = cpi.create_vm("agent-2", [disk])

    with pytest.raises(CpiFailedError, match="is not a claim"):
        cpi("attach_disk", new, disk)

    assert disk in mounts(cluster, old)
    assert disk not in mounts(cluster, new)


def test_disk_in_use_by_a_pod_that_is_not_a_vm_is_not_attached_or_deleted(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, vm)
    volume = {"name": "disk", "persistentVolumeClaim": {"claimName": disk}}
    spec = {"containers": [{"name": "debug"}], "volumes": [volume]}
    cluster.create(("pods", "bosh", "debug"), {"metadata": {"name": "debug"}, "spec": spec})

    with pytest.raises(CpiFailedError, match="debug, which is not a VM"):
        cpi("attach_disk", vm, disk)
    with pytest.raises(CpiFailedError, match="in use by the pod debug"):
        cpi("delete_disk", disk)


# --- the default ------------------------------------------------------------------------------------------------------

POD_SECURITY = 'pods "attach-1" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes, privileged'


def refuse_privileged(plural: str, body: Object) -> None:
    """Reject privileged pods, as a namespace with the `baseline` Pod Security level does."""
    if plural == "pods" and ("hostPath" in str(body["spec"]) or "'privileged': True" in str(body["spec"])):
        raise RefusalError(403, "Forbidden", POD_SECURITY)


def test_default_attach_is_live_if_the_namespace_admits_privileged_pods(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cpi.write(server.config(disks={}))
    vm = cpi.create_vm()
    before = cluster.of("pods")[vm]
    disk = cpi("create_disk", 64, {}, vm)

    assert cpi("attach_disk", vm, disk) == {"path": f"{LIVE}/{disk}"}

    assert cluster.of("pods")[vm]["status"]["podIP"] == before["status"]["podIP"]
    assert cluster.of("pods")[vm]["metadata"]["uid"] == before["metadata"]["uid"]
    assert len(attachments(cluster)) == 1, "the admission dry run leaves no pod"


def test_default_attach_is_refused_if_it_would_change_the_vms_address(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.admission.append(refuse_privileged)
    cpi.write(server.config(disks={}))
    vm = cpi.create_vm()
    before = cluster.of("pods")[vm]
    disk = cpi("create_disk", 64, {}, vm)

    with pytest.raises(CpiFailedError, match="would get another address") as failed:
        cpi("attach_disk", vm, disk)
    with pytest.raises(CpiFailedError, match="a new pod would lose its address; recreate the VM instead"):
        cpi("reboot_vm", vm)

    assert failed.value.type == "NotSupported"
    assert cluster.of("pods")[vm] == before
    assert holder(cluster, disk) is None
    assert f"disks.attach: only at creation: cannot POST pods/attach-{vm[-16:]}" in capsys.readouterr().err
    cpi.write(server.config(disks={"attach": "recreate"}))
    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}, "the operator accepts another address"
    cpi("detach_disk", vm, disk)
    cpi.write(server.config(disks={}))
    cpi("delete_vm", vm)
    again = cpi.create_vm("agent-2", [disk])
    assert cpi("attach_disk", again, disk) == {"path": f"{AT_CREATION}/{disk}"}


def test_default_attach_recreates_the_pod_if_the_address_is_kept(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cluster.admission.append(refuse_privileged)
    cpi.write(server.config(disks={}))
    manual = {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0", "cloud_properties": {"cni": "calico"}}
    vm, _ = cpi("create_vm", "agent-1", STEMCELL, {}, {"first": manual}, [], ENV)
    disk = cpi("create_disk", 64, {}, vm)

    assert cpi("attach_disk", vm, disk) == {"path": f"{AT_CREATION}/{disk}"}

    assert cluster.of("pods")[vm]["status"]["podIP"] == "10.0.0.5"


@pytest.mark.parametrize("status", [400, 422])
def test_failed_admission_dry_run_disables_live_attach(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, status: int
) -> None:
    cpi.write(server.config(disks={}))
    server.fail("POST pods/attach", status=status, message="admission webhook does not support dry run")
    cpi.create_vm("agent-2", tier="restricted")
    assert [one for one in server.requests if "attach-" in one] == []

    vm = cpi.create_vm()

    assert cluster.of("pods")[vm]["metadata"]["annotations"]["cpi.bosh.io/attach"] == "auto"


# --- live disks -------------------------------------------------------------------------------------------------------


def live_vm(cpi: CpiCalls, agent: str = "agent-1", disks: list[str] | None = None, **properties: object) -> str:
    return cpi.create_vm(agent, disks or [], attach="live", tier="privileged", **properties)


def test_live_attach_does_not_change_the_pod(cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer) -> None:
    vm = live_vm(cpi)
    uid = cluster.of("pods")[vm]["metadata"]["uid"]
    disk = cpi("create_disk", 64, {}, vm)

    assert cpi("attach_disk", vm, disk) == {"path": f"{LIVE}/{disk}"}
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid
    assert cpi("get_disks", vm) == [disk]
    (name,) = attachments(cluster)
    (container,) = cluster.of("pods")[name]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "10m", "with 1m, an unmount takes 49 s on a busy node"
    spec = cluster.of("pods")[name]["spec"]
    assert "nodeName" not in server.bodies[server.requests.index(f"POST pods/{name}")]
    assert "node-1" in str(spec["affinity"])
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["terminationGracePeriodSeconds"] > 24 * 3600, "it would be killed before it can unmount"

    server.requests.clear()
    cpi("attach_disk", vm, disk)
    assert [request.split()[0] for request in server.requests] == ["GET", "GET", "GET"]
    cpi("detach_disk", vm, disk)
    assert attachments(cluster) == []
    assert cpi("get_disks", vm) == []
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid


@pytest.mark.parametrize("failure", ["in use", "refused", "no image"])
def test_failed_live_detach_changes_nothing(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, failure: str
) -> None:
    vm, other = live_vm(cpi), live_vm(cpi, "agent-2")
    disk = cpi("create_disk", 64, {}, vm)
    hint = cpi("attach_disk", vm, disk)
    before = cluster.snapshot()
    if failure == "in use":
        cluster.busy_disks.add(disk)
    elif failure == "refused":
        server.fail("POST pods/detach", status=403, message='pods is forbidden: User "x" cannot create resource')
    else:
        cluster.pod_status = lambda pod: waiting("ErrImagePull", "gone") if "detach-" in str(pod["metadata"]) else None

    with pytest.raises(CpiFailedError, match=f"cannot detach the disk {disk} from {vm}") as failed:
        cpi("detach_disk", vm, disk)

    assert "privileged" not in failed.value.message
    assert ("the VM uses it. It stays attached" in failed.value.message) == (failure == "in use")
    with pytest.raises(CpiFailedError, match=f"in use by {vm}"):
        cpi("attach_disk", other, disk)
    cluster.settle()
    assert cluster.snapshot() == before
    assert cpi("get_disks", vm) == [disk]
    assert cpi("attach_disk", vm, disk) == hint
    cpi("reboot_vm", vm)
    assert cpi("get_disks", vm) == [disk]
    cluster.busy_disks.clear()
    cluster.pod_status = lambda _: None
    cpi("detach_disk", vm, disk)
    assert (cpi("get_disks", vm), attachments(cluster)) == ([], [])


def test_manually_deleted_attachment_is_kept_while_its_disk_is_in_use(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = live_vm(cpi)
    disk = cpi.attached_disk(vm)
    cluster.busy_disks.add(disk)
    (name,) = attachments(cluster)
    cluster.delete(("pods", "bosh", name), {})
    cluster.settle()

    assert cpi("get_disks", vm) == [disk]
    assert holder(cluster, disk) == vm


@pytest.mark.parametrize("copy", [True, False])
def test_helper_pods_for_an_unmodified_stemcell_use_the_agent_image(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, copy: bool
) -> None:
    """Helper pods need the agent's Python, which the VM's own image does not contain."""
    vm = cpi.create_vm(attach="live", tier="privileged", agent={"image": "registry.example/agent:1", "copy": copy})
    disk = cpi("create_disk", 64, {}, vm)
    spec = cluster.of("pods")[vm]["spec"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "agent"]
    cpi("attach_disk", vm, disk)
    cpi("reboot_vm", vm)
    cpi("detach_disk", vm, disk)

    made = {r: json.loads(b) for r, b in zip(server.requests, server.bodies, strict=True) if r.startswith("POST pods/")}
    helpers = [body["spec"] for request, body in made.items() if request != f"POST pods/{vm}"]
    assert len(helpers) == 3
    for helper in helpers:
        (container,) = helper["containers"]
        assert volume in helper["volumes"]
        assert {"name": "agent", "mountPath": "/opt/agent_shim", "readOnly": True} in container["volumeMounts"]
        copied = [(one["image"], one["command"], one["securityContext"]) for one in helper.get("initContainers", [])]
        wanted = ("registry.example/agent:1", ["cp", "-a", "/opt/agent_shim/.", "/agent"], {"runAsUser": 0})
        assert copied == ([wanted] if copy else [])


def test_delete_vm_deletes_the_pod_before_its_attachments(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    vm = live_vm(cpi)
    disks = [cpi("create_disk", 64, {}, vm) for _ in range(2)]
    for disk in disks:
        cpi("attach_disk", vm, disk)
    server.requests.clear()

    cpi("delete_vm", vm)

    deleted = [request for request in server.requests if request.startswith("DELETE pods")]
    assert deleted[0] == deleted[-1] == f"DELETE pods/{vm}"
    assert len(deleted) == 4
    gone = [body["metadata"]["name"] for _, kind, key, body in cluster.events if kind == "DELETED" and key[0] == "pods"]
    assert gone[0] == vm
    assert sorted(cluster.of("persistentvolumeclaims")) == sorted(disks)


@pytest.mark.parametrize(
    ("refusal", "has_hint"),
    [
        ("", False),
        ('violates PodSecurity "baseline:latest": privileged', True),
        ('User "bosh-cpi" cannot create resource "pods"', False),
    ],
    ids=["no image", "policy", "no permission"],
)
def test_failed_live_attach_leaves_no_attachment(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, refusal: str, has_hint: bool
) -> None:
    vm = live_vm(cpi)
    disk = cpi("create_disk", 64, {}, vm)
    if refusal:
        server.fail("POST pods/attach", status=403, message=refusal)
    cluster.pod_status = lambda pod: waiting("ErrImagePull", "not found") if "attach-" in str(pod["metadata"]) else None

    with pytest.raises(CpiFailedError, match=refusal or f"cannot attach the disk {disk} to {vm}") as failed:
        cpi("attach_disk", vm, disk)

    assert ("namespace that admits privileged pods" in failed.value.message) == has_hint
    assert attachments(cluster) == []
    assert holder(cluster, disk) is None


def test_failed_live_attach_does_not_wait_for_an_unresponsive_node(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = live_vm(cpi)
    disk = cpi("create_disk", 64, {}, vm)
    cluster.is_node_alive = False
    cluster.pod_status = lambda _: waiting("ContainerCreating", "")

    with pytest.raises(CpiFailedError, match=f"cannot attach the disk {disk} to {vm}: the pod .* is not ready"):
        cpi("attach_disk", vm, disk)

    (name,) = attachments(cluster)
    assert "deletionTimestamp" in cluster.of("pods")[name]["metadata"]


def test_live_disk_of_a_deleted_vm_is_mounted_by_the_replacement_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """In a resurrection, the Director calls delete_vm and then create_vm with the disk, without calling detach_disk in
    between.
    """
    old = live_vm(cpi)
    disk = cpi.attached_disk(old)

    cpi("delete_vm", old)
    new = live_vm(cpi, "agent-2", [disk])

    assert disk in mounts(cluster, new)
    assert holder(cluster, disk) == new


def test_detached_disk_can_be_reused_once_the_helper_container_has_exited(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """After the container has exited, the kubelet may take seconds to remove the helper pod. Another VM must not have
    to wait for that.
    """
    one, two = live_vm(cpi, "agent-1"), live_vm(cpi, "agent-2")
    disk = cpi.attached_disk(one)
    cluster.objects_linger_s = 0.8

    cpi("detach_disk", one, disk)
    assert cpi("get_disks", one) == []
    cpi("attach_disk", two, disk)
    cpi("detach_disk", two, disk)
    cpi("attach_disk", one, disk)

    assert cpi("get_disks", one) == [disk]


def test_unmount_failure_on_the_node_is_reported_by_detach_disk(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = live_vm(cpi)
    disk = cpi.attached_disk(vm)
    cluster.objects_linger_s, cluster.exit_code = 0.5, 1

    with pytest.raises(CpiFailedError, match=f"cannot detach the disk {disk}.*has failed"):
        cpi("detach_disk", vm, disk)


def test_recreated_vm_keeps_its_live_disks(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """The live disks must be attached again, because the new pod may run on a different node."""
    at_creation, live = (cpi("create_disk", 64, {}, None) for _ in range(2))
    old = live_vm(cpi, "agent-1", [at_creation], ephemeral_disk={"type": "claim"})
    cpi("attach_disk", old, live)
    former = cluster.of("pods")[old]["metadata"]["uid"]
    cpi("detach_disk", old, at_creation)
    new = live_vm(cpi, "agent-2")

    cpi("attach_disk", new, at_creation)

    uid = cluster.of("pods")[old]["metadata"]["uid"]
    (attachment,) = [
        pod for name, pod in cluster.of("pods").items() if pod["metadata"]["labels"].get("cpi.bosh.io/disk") == live
    ]
    assert uid != former
    assert uid in attachment["spec"]["containers"][0]["command"]
    assert cpi("get_disks", old) == [live]
    assert cpi("get_disks", new) == [at_creation]


def _made_by_an_older_version(cluster: FakeCluster, vm: str) -> None:
    """Change the VM's objects as if an older CPI version, which mounted disks below `/var/vcap/bosh`, had created
    them.
    """
    pod, secret = cluster.of("pods")[vm], cluster.of("secrets")[vm]
    kept = json.loads(base64.b64decode(secret["data"]["pod.json"]))
    for one in (pod, kept):
        del one["metadata"]["annotations"]["cpi.bosh.io/disks-at"]
        for mount in one["spec"]["containers"][0]["volumeMounts"]:
            for directory in (AT_CREATION, LIVE):
                moved = directory.replace("/vcap/", "/vcap/bosh/")
                mount["mountPath"] = mount["mountPath"].replace(f"{directory}/", f"{moved}/")
                mount["mountPath"] = moved if mount["mountPath"] == directory else mount["mountPath"]
    secret["data"]["pod.json"] = base64.b64encode(json.dumps(kept).encode()).decode()


def places(cluster: FakeCluster, vm: str) -> list[str]:
    return [one["mountPath"] for one in cluster.of("pods")[vm]["spec"]["containers"][0]["volumeMounts"]]


def test_vm_from_an_older_cpi_version_keeps_its_disk_paths(cpi: CpiCalls, cluster: FakeCluster) -> None:
    first, second, third = (cpi("create_disk", 64, {}, None) for _ in range(3))
    vm = cpi.create_vm("agent-1", [first], attach="recreate")
    _made_by_an_older_version(cluster, vm)
    former = "/var/vcap/bosh/disks-at-creation"

    assert cpi("attach_disk", vm, first) == {"path": f"{former}/{first}"}
    assert cpi("attach_disk", vm, second) == {"path": f"{former}/{second}"}

    assert {f"{former}/{first}", f"{former}/{second}"} <= set(places(cluster, vm))
    assert cpi("get_disks", vm) == [first, second]
    live = live_vm(cpi, "agent-2")
    _made_by_an_older_version(cluster, live)
    assert cpi("attach_disk", live, third) == {"path": f"/var/vcap/bosh/disks/{third}"}


@pytest.mark.parametrize("way", ["at creation", "live"])
def test_resumed_recreation_does_not_take_a_disk_from_another_vm(cpi: CpiCalls, cluster: FakeCluster, way: str) -> None:
    vm, other = live_vm(cpi, ephemeral_disk={"type": "claim"}), live_vm(cpi, "agent-2")
    own, taken = (cpi("create_disk", 64, {}, None) for _ in range(2))
    cpi("attach_disk", vm, own)
    cpi("attach_disk", other, taken)
    record = {"disks": [taken] if way == "at creation" else [], "live": [own, taken] if way == "live" else [own]}
    text = json.dumps(record | {"labels": {}, "annotations": {}})
    patch = {"metadata": {"annotations": {"cpi.bosh.io/disks": text}}}
    cluster.patch(("persistentvolumeclaims", "bosh", f"data-{vm}"), patch)
    cluster.delete(("pods", "bosh", vm), {"gracePeriodSeconds": 0})

    cpi("reboot_vm", vm)

    assert cpi("get_disks", vm) == [own]
    assert cpi("get_disks", other) == [taken]
    assert holder(cluster, taken) == other


def test_repeated_conflicts_during_attach_cause_a_retryable_error(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, None)
    server.fail(f"PATCH persistentvolumeclaims/{disk}", times=99, status=409, message="modified")

    with pytest.raises(CpiFailedError, match="other calls keep changing its claim") as failed:
        cpi("attach_disk", vm, disk)

    assert failed.value.ok_to_retry is True


# --- size, type, snapshots --------------------------------------------------------------------------------------------


def test_resize_disk_grows_a_claim_and_refuses_to_shrink_it(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    disk = cpi.attached_disk(vm)

    cpi("resize_disk", disk, 128)
    assert cluster.of("persistentvolumeclaims")[disk]["status"]["capacity"] == {"storage": "128Mi"}
    cpi.refused("NotSupported", "resize_disk", disk, 64, match="it has 128 MiB and cannot shrink")


@pytest.mark.parametrize("can_read", [True, False])
def test_resize_disk_is_refused_if_the_storage_class_forbids_expansion(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, can_read: bool
) -> None:
    make_class(cluster, "fixed")
    disk = cpi("create_disk", 64, {"storage_class": "fixed"}, None)
    if not can_read:
        cluster.forbidden.add("storageclasses")
        server.fail(
            "PATCH persistentvolumeclaims", status=403, message="only dynamically provisioned pvc can be resized"
        )

    cpi.refused("NotSupported", "resize_disk", disk, 128)


def test_update_disk_changes_size_and_attributes_but_not_the_class(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    make_class(cluster, "fast", allowVolumeExpansion=True)
    disk = cpi("create_disk", 64, {"storage_class": "fast"}, None)

    assert cpi("update_disk", disk, 128, {"storage_class": "fast", "volume_attributes_class": "gold"}) is None
    spec = cluster.of("persistentvolumeclaims")[disk]["spec"]
    assert (spec["volumeAttributesClassName"], spec["resources"]["requests"]["storage"]) == ("gold", "128Mi")
    assert cpi("update_disk", disk, 128, {"access_mode": spec["accessModes"][0]}) is None
    cpi.refused("NotSupported", "update_disk", disk, 128, {"storage_class": "slow"})
    cpi.refused("NotSupported", "update_disk", disk, 128, {"access_mode": "ReadWriteMany"})
    cpi.write(server.config(disks={"storage_class": "slow"}))
    cpi.refused("NotSupported", "update_disk", disk, 128, {})


def test_disk_snapshots_are_created_and_deleted(cpi: CpiCalls, cluster: FakeCluster) -> None:
    disk = cpi("create_disk", 64, {}, None)

    snapshot = cpi("snapshot_disk", disk, {"deployment": "dep", "index": 0, "job": "zookeeper"})

    body = cluster.of("volumesnapshots")[snapshot]
    assert body["spec"]["source"] == {"persistentVolumeClaimName": disk}
    assert body["metadata"]["labels"]["bosh.io/index"] == "0"
    cpi("delete_snapshot", snapshot)
    cpi("delete_snapshot", snapshot)
    cluster.snapshot_status = {"error": {"message": "quota"}}
    with pytest.raises(CpiFailedError, match=f"cannot take a snapshot of {disk}: quota"):
        cpi("snapshot_disk", disk, {})
    assert cluster.of("volumesnapshots") == {}
    cluster.has_snapshots = False
    cpi.refused("NotImplemented", "snapshot_disk", disk, {})


@pytest.mark.parametrize(
    ("quantity", "size"), [("64Mi", 64 << 20), ("2048Ki", 2 << 20), ("1.5G", 1_500_000_000), ("1Ei", 1 << 60), ("7", 7)]
)
def test_disk_sizes_in_all_kubernetes_units_are_parsed(quantity: str, size: int) -> None:
    assert manifests.amount_of(quantity) == size
