"""Tests VMs, from create_vm to delete_vm."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
import yaml

from kubernetes_cpi import attachments, manifests, names
from tests.cpi.calls import DIRECTOR, DYNAMIC, ENV, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster, Object, merged, unscheduled, waiting
from tests.support.source import ROOT


def test_vm_is_created_rebooted_and_deleted(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """The pod must become ready without a bus connection, because the Director admits the agent to the bus only after
    create_vm has returned (steps/create_vm_step.rb).
    """
    vm = cpi.create_vm()

    assert re.fullmatch(r"vm-bosh-[0-9a-f]{16}", vm)
    assert cpi("has_vm", vm) is True
    (container,) = cluster.of("pods")[vm]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz?level=boot"
    assert {"livenessProbe", "startupProbe"} & container.keys() == set(), (
        "a slow agent would be restarted with all its jobs"
    )
    cpi("set_vm_metadata", vm, {"deployment": "dep", "name": "zookeeper/1", "index": "0", "job": "zookeeper"})
    metadata = cluster.of("pods")[vm]["metadata"]
    assert metadata["labels"]["bosh.io/deployment"] == "dep"
    assert metadata["annotations"]["bosh.io/name"] == "zookeeper/1"

    data = cluster.of("persistentvolumeclaims")[f"data-{vm}"]["metadata"]["uid"]
    cpi("reboot_vm", vm)
    assert cluster.of("pods")[vm]["metadata"]["uid"] != metadata["uid"]
    assert cluster.of("persistentvolumeclaims")[f"data-{vm}"]["metadata"]["uid"] == data

    cpi("delete_vm", vm)
    assert cpi("has_vm", vm) is False
    assert cluster.snapshot() == {}


def test_vm_settings_are_stored_in_an_immutable_secret(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()

    secret = cluster.of("secrets")[vm]
    settings = json.loads(base64.b64decode(secret["data"]["config.json"]))
    assert secret["immutable"] is True
    assert settings["agent_id"] == "agent-1"
    assert settings["vm"]["name"] == vm
    assert settings["mbus"] == "nats://10.0.0.6:4222"
    assert settings["networks"]["default"]["preconfigured"] is True
    assert settings["disks"]["persistent"] == {}
    assert settings["env"] == ENV
    volume = cluster.of("pods")[vm]["spec"]["volumes"][0]
    assert volume["secret"]["defaultMode"] == 0o400
    assert [item["key"] for item in volume["secret"]["items"]] == ["config.json"]


@pytest.mark.parametrize(
    "message", ['1 persistentvolumeclaim "data-x" not found.', "1 pod has unbound immediate PersistentVolumeClaims."]
)
def test_create_vm_keeps_waiting_if_the_scheduler_has_not_seen_the_claim(
    cpi: CpiCalls, cluster: FakeCluster, message: str
) -> None:
    """create_vm must not give up after `timeouts.unschedulable`, because the scheduler might not have seen the claim
    yet. In this test, the scheduler never sees the claim, so create_vm waits until `timeouts.create_vm` has passed.
    """
    cluster.pod_status = lambda _: unscheduled(f"0/1 nodes are available: {message}")

    with pytest.raises(CpiFailedError, match="is not ready after 3 s: no node takes it"):
        cpi.create_vm()

    assert cluster.snapshot() == {}


@pytest.mark.parametrize(
    ("plural", "message"),
    [
        ("pods", 'pods "x" is forbidden: exceeded quota: memory'),
        ("pods", 'admission webhook "policy.example" denied the request: no'),
        ("secrets", 'secrets "x" is forbidden: exceeded quota: count/secrets'),
        ("persistentvolumeclaims", "exceeded quota: requests.storage"),
    ],
)
def test_create_vm_cleans_up_if_the_cluster_rejects_an_object(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, plural: str, message: str
) -> None:
    server.fail(f"POST {plural}", times=9, status=403, message=message)

    with pytest.raises(CpiFailedError, match=re.escape(message)) as failed:
        cpi.create_vm()

    assert (failed.value.type, failed.value.ok_to_retry) == ("VMCreationFailed", False)
    assert cluster.snapshot() == {}


@pytest.mark.parametrize("is_secret", [False, True])
def test_delete_vm_forces_deletion_on_an_unresponsive_node(
    cpi: CpiCalls, cluster: FakeCluster, capsys: pytest.CaptureFixture[str], is_secret: bool
) -> None:
    vm = cpi.create_vm(grace=0)
    if is_secret:
        cluster.create(("nodes", "", "node-1"), {"metadata": {"name": "node-1"}})
        cluster.objects["nodes", "", "node-1"]["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
        cluster.forbidden.add("nodes")
    cluster.is_node_alive = False
    cluster.of("pods")[vm]["spec"]["terminationGracePeriodSeconds"] = 1

    cpi("delete_vm", vm)

    assert "has not confirmed the end" in capsys.readouterr().err
    assert [name for name in cluster.snapshot() if name != "nodes/node-1"] == []


def test_delete_vm_does_not_force_deletion_if_reading_the_node_fails_temporarily(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    vm = cpi.create_vm(grace=0)
    cluster.is_node_alive = False
    cluster.of("pods")[vm]["spec"]["terminationGracePeriodSeconds"] = 1
    server.fail("GET nodes", times=99, status=500, message="etcd is slow")

    with pytest.raises(CpiFailedError, match="etcd is slow") as failed:
        cpi("delete_vm", vm)

    assert failed.value.ok_to_retry is True
    assert vm in cluster.of("pods"), "no deletion by force"


def replaced(cluster: FakeCluster, name: str) -> None:
    """Replace a pod immediately, without a grace period, with a pod of the same name."""
    pod = cluster.of("pods")[name]
    cluster.delete(("pods", "bosh", name), {"gracePeriodSeconds": 0})
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    short = spec | {"terminationGracePeriodSeconds": 1}
    cluster.create(("pods", "bosh", name), {"metadata": {"name": name, "labels": {}}, "spec": short})


def test_create_vm_fails_if_the_pod_is_replaced_during_its_start(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cluster.start_after_s = 0.3
    vm = names.cid("vm", "bosh", DIRECTOR, "agent-1")
    # The watch misses the deletion of the old pod.
    server.fail("WATCH pods/", status=410, on=lambda: replaced(cluster, vm))

    with pytest.raises(CpiFailedError, match="was deleted while it started") as failed:
        cpi.create_vm()

    assert failed.value.ok_to_retry is True


def test_delete_vm_does_not_wait_for_a_replacement_pod(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    vm = cpi.create_vm()
    cluster.is_node_alive = False
    # The watch misses the deletion of the old pod.
    server.fail("WATCH pods/", status=410, on=lambda: replaced(cluster, vm))

    cpi("delete_vm", vm)

    before = server.requests[: server.requests.index(f"DELETE secrets/{vm}")]
    assert before.count(f"DELETE pods/{vm}") == 1, "it is not deleted by force"
    assert vm not in cluster.of("secrets")


def test_delete_vm_returns_once_the_containers_have_terminated(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    cluster.objects_linger_s = 600.0

    cpi("delete_vm", vm)

    assert vm in cluster.of("pods")
    assert cpi("has_vm", vm) is False
    cluster.hurry()
    assert cluster.snapshot() == {}


def test_delete_vm_fails_if_a_healthy_node_does_not_terminate_the_pod(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    cluster.create(("nodes", "", "node-1"), {"metadata": {"name": "node-1"}})
    cluster.objects["nodes", "", "node-1"]["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.is_node_alive = False
    cluster.of("pods")[vm]["spec"]["terminationGracePeriodSeconds"] = 1

    with pytest.raises(CpiFailedError, match="node-1 is ready, but has not confirmed"):
        cpi("delete_vm", vm)

    assert cpi("has_vm", vm) is True


def test_repeated_create_vm_reuses_the_vm_unless_properties_differ(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(memory=64)
    uid = cluster.of("pods")[vm]["metadata"]["uid"]

    assert cpi.create_vm(memory=64) == vm
    assert cluster.of("pods")[vm]["metadata"]["uid"] == uid
    assert cpi.create_vm(memory=128) == vm
    pod = cluster.of("pods")[vm]
    assert pod["metadata"]["uid"] != uid
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "128Mi"}


def test_cpi_methods_other_than_delete_vm_report_a_missing_vm(cpi: CpiCalls) -> None:
    assert cpi("delete_vm", "vm-bosh-" + "0" * 16) is None
    for method, arguments in (("set_vm_metadata", [{}]), ("reboot_vm", []), ("attach_disk", ["disk-bosh-" + "0" * 16])):
        cpi.refused("VMNotFound", method, "vm-bosh-" + "0" * 16, *arguments)


@pytest.mark.parametrize("cid", ["", "a/log", "../secrets/x", "A", "a" * 254])
def test_invalid_vm_cid_is_rejected(cpi: CpiCalls, server: FakeApiServer, cid: str) -> None:
    """In the URL, an empty name would address the list of all pods, and a name with a slash would address another
    resource.
    """
    for method in ("has_vm", "delete_vm"):
        with pytest.raises(CpiFailedError, match="arguments do not fit"):
            cpi(method, cid)

    assert server.requests == []


def test_evicted_vm_is_reported_as_missing_and_can_be_deleted(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm()
    cluster.patch(("pods", "bosh", vm), {"status": {"phase": "Failed", "reason": "Evicted"}})

    assert cpi("has_vm", vm) is False
    cpi("delete_vm", vm)
    assert cluster.snapshot() == {}


def test_reboot_with_live_disks_restarts_the_container(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(attach="live", tier="privileged")
    before = cluster.of("pods")[vm]

    cpi("reboot_vm", vm)

    pod = cluster.of("pods").pop(vm)
    assert pod["metadata"]["uid"] == before["metadata"]["uid"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1
    assert list(cluster.of("pods")) == [vm], "the helper is gone"


def test_group_service_is_deleted_with_the_last_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    services = [{"name": "zk", "ports": [{"port": 2181}]}]
    one, two = (cpi.create_vm(agent, services=services) for agent in ("agent-1", "agent-2"))

    cpi("delete_vm", one)
    assert "zk" in cluster.of("services")
    cpi("delete_vm", two)
    assert cluster.of("services") == {}


def test_service_of_a_vm_without_a_group_is_deleted_only_with_that_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    properties = {"services": [{"name": "director", "ports": [{"port": 25555}]}]}
    vm, _ = cpi("create_vm", "agent-1", STEMCELL, properties, DYNAMIC, [], {})

    cpi("delete_vm", cpi.create_vm("agent-2"))
    assert list(cluster.of("services")) == ["director"]
    cpi("delete_vm", vm)
    assert cluster.of("services") == {}


def test_service_claimed_by_a_new_vm_during_deletion_is_kept(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    services = [{"name": "zk", "ports": [{"port": 2181}]}]
    vm = cpi.create_vm(services=services)

    def want() -> None:
        cluster.patch(("services", "bosh", "zk"), {"metadata": {"annotations": {"cpi.bosh.io/vm": "vm-bosh-other"}}})

    server.fail("DELETE services/zk", on=want)
    cpi("delete_vm", vm)

    assert "zk" in cluster.of("services")


def test_service_with_the_keep_property_outlives_its_last_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(services=[{"name": "zk", "ports": [{"port": 2181}], "keep": True}])

    cpi("delete_vm", vm)

    assert list(cluster.snapshot()) == ["services/zk"]


def test_vip_address_moves_to_the_newest_vm_that_uses_it(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vip = {"type": "vip", "ip": "10.0.0.9", "cloud_properties": {"ports": [{"port": 80}]}}
    made = [
        cpi("create_vm", agent, STEMCELL, {}, {**DYNAMIC, "public": vip}, [], ENV)[0]
        for agent in ("agent-1", "agent-2")
    ]

    (service,) = cluster.of("services").values()
    assert service["spec"]["selector"]["cpi.bosh.io/vm"] == made[1]
    cpi("delete_vm", made[0])
    assert len(cluster.of("services")) == 1
    cpi("delete_vm", made[1])
    assert cluster.snapshot() == {}


def test_create_vm_fails_if_the_pod_does_not_get_the_requested_address(cpi: CpiCalls, cluster: FakeCluster) -> None:
    manual = {"type": "manual", "ip": "10.244.0.5", "cloud_properties": {"cni": "kube-ovn"}}

    with pytest.raises(CpiFailedError, match=r"instead of 10\.244\.0\.5"):
        cpi("create_vm", "agent-1", STEMCELL, {}, {"default": manual}, [], ENV)

    assert cluster.snapshot() == {}


def test_calculated_vm_cloud_properties_are_accepted(cpi: CpiCalls) -> None:
    found = cpi("calculate_vm_cloud_properties", {"cpu": 2, "ram": 1024, "ephemeral_disk_size": 2048})

    assert found == {"cpu": 2, "memory": 1024, "ephemeral_disk": {"size": 2048}}
    assert cpi.create_vm(**found)


def helpers(cluster: FakeCluster) -> list[str]:
    """Return the commands of all helper pods that have been created, including pods that were deleted again."""
    made = [body for _, event, (plural, *_), body in cluster.events if (event, plural) == ("ADDED", "pods")]
    containers = [pod["spec"]["containers"][0] for pod in made]
    return [" ".join(one["command"][5:]) for one in containers if one["name"] == attachments.CONTAINER]


@pytest.mark.attack("root in a container that the CPI created fills the node's file system")
@pytest.mark.parametrize("tier", ["userns", "privileged", "base"])
def test_disk_directory_size_on_the_node_is_limited_before_jobs_run(
    cpi: CpiCalls, cluster: FakeCluster, tier: str
) -> None:
    """A helper pod prevents the VM from filling the node's file system through its live-disk directory. Only the
    ``userns`` tier needs this, because root in the user namespace could otherwise remount the directory as writable.
    """
    vm = cpi.create_vm(attach="live", tier=tier)

    assert helpers(cluster) == ([f"bound /target/{vm}"] if tier == "userns" else [])
    assert list(cluster.of("pods")) == [vm]


def test_create_vm_cleans_up_if_the_disk_directorys_size_cannot_be_limited(cpi: CpiCalls, cluster: FakeCluster) -> None:
    told = {"exitCode": 1, "message": "Operation not permitted"}
    failed = {"phase": "Failed", "containerStatuses": [{"restartCount": 0, "state": {"terminated": told}}]}
    cluster.pod_status = lambda pod: failed if pod["metadata"]["name"].startswith("bound-") else None

    with pytest.raises(CpiFailedError, match="cannot keep .* from filling its node's disk: Operation not permitted"):
        cpi.create_vm(attach="live", tier="userns")

    assert cluster.snapshot() == {}


def security(spec: Object) -> Object:
    """Return the security settings of a pod and its container, such as users, capabilities and profiles."""
    members = {"pod": spec.get("securityContext"), "hostUsers": spec.get("hostUsers")}
    return members | {"container": spec["containers"][0]["securityContext"]}


@pytest.mark.parametrize("tier", ["base", "privileged", "restricted", "userns"])
def test_cpi_security_tiers_match_the_manifests(cpi: CpiCalls, cluster: FakeCluster, tier: str) -> None:
    where = ROOT / "deploy/kubernetes"
    base, *_ = (one for one in yaml.safe_load_all((where / "base/statefulset.yaml").read_text()) if one)
    spec = base["spec"]["template"]["spec"]
    if tier != "base":
        patch = yaml.safe_load((where / tier / "tier.yaml").read_text())["spec"]["template"]["spec"]
        (container,), (change,) = spec["containers"], patch["containers"]
        spec = merged(spec, {**patch, "containers": [merged(container, change)]})

    vm = cpi.create_vm(tier=tier)

    assert security(cluster.of("pods")[vm]["spec"]) == security(spec)


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
APART = {
    "labelSelector": {"matchLabels": {names.GROUP: names.digest("director", "dep", "zookeeper")}},
    "topologyKey": "kubernetes.io/hostname",
}
SPREAD = {**APART, "maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
IN_ZONE = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z1"]}


@pytest.mark.parametrize(
    ("properties", "path", "wanted"),
    [
        ({}, "automountServiceAccountToken", False),
        ({}, "restartPolicy", "Always"),
        ({}, f"affinity.podAntiAffinity.{PREFERRED}", [{"weight": 100, "podAffinityTerm": APART}]),
        ({"anti_affinity": "required"}, f"affinity.podAntiAffinity.{REQUIRED}", [APART]),
        ({"anti_affinity": "none"}, "affinity", None),
        ({}, "topologySpreadConstraints", [SPREAD]),
        ({"anti_affinity": "none"}, "topologySpreadConstraints", None),
        ({"zone": "z1"}, "topologySpreadConstraints", None),
        ({"attach": "never", "ephemeral_disk": {"size": 64}}, "container.resources.requests.ephemeral-storage", "64Mi"),
        ({"ephemeral_disk": {"size": 64}}, "container.resources", {}),
        (
            {"zone": "z1"},
            f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms",
            [{"matchExpressions": [IN_ZONE]}],
        ),
        ({"service_account": "a", "service_account_token": True}, "automountServiceAccountToken", True),
        # runAsUser must not be set, because the kubelet would let only that user read the token, but a Director runs
        # its CPI as vcap.
        ({"service_account_token": True}, "container.securityContext.runAsUser", None),
        ({"service_account_token": True, "tier": "privileged"}, "container.securityContext", {"privileged": True}),
        ({"tier": "privileged"}, "container.securityContext.runAsUser", 0),
        ({"service_account": "a"}, "serviceAccountName", "a"),
        ({"priority_class": "high"}, "priorityClassName", "high"),
        ({"runtime_class": "kata"}, "runtimeClassName", "kata"),
        ({"image_pull_secrets": ["registry"]}, "imagePullSecrets", [{"name": "registry"}]),
        ({"node_selector": {"pool": "bosh"}}, "nodeSelector", {"pool": "bosh"}),
        ({"tolerations": [{"operator": "Exists"}]}, "tolerations", [{"operator": "Exists"}]),
        ({"sysctls": {"a.b": "1"}}, "securityContext.sysctls", [{"name": "a.b", "value": "1"}]),
        ({"host_aliases": {"10.0.0.1": ["a"]}}, "hostAliases", [{"ip": "10.0.0.1", "hostnames": ["a"]}]),
        (
            {"capabilities": ["NET_ADMIN", "CAP_SETFCAP", "KILL"]},
            "container.securityContext.capabilities",
            {"drop": ["ALL"], "add": [*manifests.BASE_CAPABILITIES, "NET_ADMIN", "SETFCAP"]},
        ),
        (
            {"capabilities": ["NET_ADMIN"], "tier": "userns"},
            "container.securityContext.capabilities",
            {"drop": ["ALL"], "add": [*manifests.BASE_CAPABILITIES, "NET_ADMIN", "SYS_ADMIN"]},
        ),
        ({"capabilities": ["NET_ADMIN"], "tier": "privileged"}, "container.securityContext.capabilities", None),
        ({"grace": 30}, "terminationGracePeriodSeconds", 30 + manifests.MARGIN_S),
        (
            {"cpu": 0.5, "cpu_limit": 2, "memory": 512},
            "container.resources",
            {"requests": {"cpu": "0.5", "memory": "512Mi"}, "limits": {"cpu": "2.0", "memory": "512Mi"}},
        ),
        ({"resources": {"limits": {"a/gpu": 1}}}, "container.resources", {"limits": {"a/gpu": 1}}),
        (
            {"grace": 30},
            "container.lifecycle.preStop.exec.command",
            ["/opt/agent_shim/bin/agent-shim", "drain", "--timeout", "30"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_vm_cloud_properties_are_applied_to_the_pod(
    cpi: CpiCalls, cluster: FakeCluster, properties: Object, path: str, wanted: object
) -> None:
    vm = cpi.create_vm(**properties)

    spec = cluster.of("pods")[vm]["spec"]
    found: Any = {**spec, "container": spec["containers"][0]}
    for step in path.split("."):
        found = (found or {}).get(step)
    assert found == wanted


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"memry": 64}, "unknown key `memry`.*`memory`"),
        ({"tier": "restricted", "capabilities": ["NET_ADMIN"]}, "`capabilities` need root"),
        ({"tier": "restricted", "agent": {"image": "a:1"}}, "`agent` needs root.*set another tier"),
    ],
    ids=["unknown", "capabilities without root", "the agent over an image without root"],
)
def test_invalid_vm_cloud_properties_are_rejected(
    cpi: CpiCalls, cluster: FakeCluster, properties: Object, words: str
) -> None:
    with pytest.raises(CpiFailedError, match=words):
        cpi.create_vm(**properties)

    assert cluster.snapshot() == {}


AGENT = {"image": "registry.example/agent-shim-volume:1"}


def test_agent_can_be_added_to_an_unmodified_stemcell(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(agent=AGENT)

    spec = cluster.of("pods")[vm]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-1] == "/opt/agent_shim/overlay/start"
    assert {"name": "agent", "mountPath": "/opt/agent_shim", "readOnly": True} in container["volumeMounts"]
    source = {"reference": AGENT["image"], "pullPolicy": "IfNotPresent"}
    assert {"name": "agent", "image": source} in spec["volumes"]
    assert "initContainers" not in spec


def test_agent_is_copied_if_the_cluster_has_no_image_volumes(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(agent={**AGENT, "copy": True})

    spec = cluster.of("pods")[vm]["spec"]
    (copier,) = spec["initContainers"]
    assert (copier["image"], copier["command"]) == (AGENT["image"], ["cp", "-a", "/opt/agent_shim/.", "/agent"])
    assert copier["volumeMounts"] == [{"name": "agent", "mountPath": "/agent"}]
    assert {"name": "agent", "emptyDir": {}} in spec["volumes"]
    assert spec["containers"][0]["command"][-1] == "/opt/agent_shim/overlay/start"


def test_missing_agent_image_is_reported(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """The CPI must read the reason from the init container's status, because the VM container is only waiting."""
    status = waiting("PodInitializing", "")
    status["initContainerStatuses"] = waiting("ErrImagePull", "pull: not found")["containerStatuses"]
    cluster.pod_status = lambda _: status

    with pytest.raises(CpiFailedError, match="ErrImagePull: pull: not found"):
        cpi.create_vm(agent={**AGENT, "copy": True})

    assert cluster.snapshot() == {}


def test_current_vm_id_returns_the_cid_of_the_vm_that_runs_the_cpi(
    cpi: CpiCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = cpi.create_vm()
    cpi.refused("NotImplemented", "current_vm_id", match="is not a VM of this CPI")

    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"nodename": vm}))

    assert cpi("current_vm_id") == vm


@pytest.mark.parametrize(
    ("properties", "path", "kind"),
    [
        ({"tier": "restricted"}, "/var/vcap/bosh", "emptyDir"),
        ({"tier": "privileged", "attach": "live"}, manifests.LIVE_DISKS, "hostPath"),
    ],
    ids=["the directory of the agent", "live disks"],
)
def test_agent_directory_is_an_empty_dir_and_live_disks_are_on_a_host_path(
    cpi: CpiCalls, cluster: FakeCluster, properties: Object, path: str, kind: str
) -> None:
    """The agent's directory must be an emptyDir, because an agent without root cannot write into a directory that the
    container runtime created. Live disks must not be mounted in an emptyDir, because the kubelet would delete their
    content together with the emptyDir.
    """
    vm = cpi.create_vm(**properties)

    mounts = {one["mountPath"]: one["name"] for one in cluster.of("pods")[vm]["spec"]["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in cluster.of("pods")[vm]["spec"]["volumes"]}
    assert kind in volumes[mounts[path]]


def test_labels_annotations_and_volumes_are_added_to_the_pod(cpi: CpiCalls, cluster: FakeCluster) -> None:
    volume = {"name": "dev", "mount_path": "/dev/x", "source": {"hostPath": {"path": "/dev"}}, "read_only": True}

    vm = cpi.create_vm(labels={"team": "a"}, annotations={"a/b": "c"}, volumes=[volume])

    pod = cluster.of("pods")[vm]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["a/b"] == "c"
    assert {"name": "dev", "hostPath": {"path": "/dev"}} in pod["spec"]["volumes"]
    assert {"name": "dev", "mountPath": "/dev/x", "readOnly": True} in pod["spec"]["containers"][0]["volumeMounts"]
