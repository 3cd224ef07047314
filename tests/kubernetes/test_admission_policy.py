"""The admission policy in deploy/cpi restricts somebody who has stolen the CPI's token, but not the CPI itself.

The policy runs in a real API server. The CPI's account has all RBAC permissions, so every rejection comes from the
policy.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cpi.calls import CpiCalls
from tests.cpi.fake_api import FakeApiServer, FakeCluster
from tests.support.kubernetes.api_server import TIMEOUT_S, ApiServer, programs
from tests.support.source import ROOT

pytestmark = pytest.mark.kubernetes

Document = dict[str, Any]

NAMESPACE = "bosh"
REFUSED = (403, 422)
"""HTTP statuses of a rejected request. The API server uses 422 unless the policy specifies a reason other than
``Invalid``.
"""
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:bosh-cpi"
PROGRAM = (ROOT / "kubernetes_cpi/attachment_program.py").read_text()
PARAMETERS = {"program": PROGRAM, "images": "registry.example/ other.example/agents/", "privileged_vms": "false"}
IMAGE = "registry.example/agent-shim:1"
VM = "vm-bosh-0123456789abcdef"
DISK = "disk-bosh-0123456789abcdef"
ROOM = "/var/lib/kubelet/bosh"
SOURCE = {"kind": "PersistentVolumeClaim", "name": "database"}
LABELS = {"app.kubernetes.io/managed-by": "kubernetes-cpi"}
PATHS = {
    "Pod": "/api/v1/namespaces/bosh/pods",
    "Secret": "/api/v1/namespaces/bosh/secrets",
    "PersistentVolumeClaim": "/api/v1/namespaces/bosh/persistentvolumeclaims",
    "Service": "/api/v1/namespaces/bosh/services",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/bosh/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/bosh/networkpolicies",
    "Ingress": "/apis/networking.k8s.io/v1/namespaces/bosh/ingresses",
    "VolumeSnapshot": "/apis/snapshot.storage.k8s.io/v1/namespaces/bosh/volumesnapshots",
}
VERSIONS = {
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Ingress": "networking.k8s.io/v1",
    "VolumeSnapshot": "snapshot.storage.k8s.io/v1",
}


def document(kind: str, name: str, label: str, **more: Any) -> Document:
    """Return an object with the CPI's labels. ``label`` is the value of the label ``cpi.bosh.io/kind``.

    If ``label`` is "", the object has no labels.
    """
    labels = LABELS | {"cpi.bosh.io/kind": label, "cpi.bosh.io/vm": VM} if label else {}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": VERSIONS.get(kind, "v1"), "kind": kind, "metadata": metadata, **more}


def vm(**spec: Any) -> Document:
    container = {"name": "agent", "image": IMAGE}
    return document("Pod", VM, "vm", spec={"containers": [container], "automountServiceAccountToken": False, **spec})


def vm_with(**container: Any) -> Document:
    return vm(containers=[{"name": "agent", "image": IMAGE, **container}])


def secured(**context: Any) -> Document:
    return vm_with(securityContext=context)


def mounting(source: Document, **mount: Any) -> Document:
    """Return a VM's pod that mounts a volume from ``source``."""
    mounts = [{"name": "v", "mountPath": "/mnt", **mount}]
    return vm(containers=[{"name": "agent", "image": IMAGE, "volumeMounts": mounts}], volumes=[{"name": "v", **source}])


def helper(kind: str = "attachment", change: Callable[[Document], object] = lambda _: None) -> Document:
    """Return a helper pod as the CPI creates it, after ``change`` has modified its spec."""
    target = {"name": "target", "hostPath": {"path": ROOM, "type": "DirectoryOrCreate"}}
    arguments = {
        "attachment": ["attach", "/disk", f"/target/{VM}/{DISK}", "uid"],
        "detachment": ["detach", f"/target/{VM}/{DISK}", "uid", "uid", "20"],
        "reboot": ["reboot", "uid", "50"],
        "bound": ["bound", f"/target/{VM}"],
    }[kind]
    mounts = [{"name": "target", "mountPath": "/target", "mountPropagation": "Bidirectional"}]
    volumes = [target]
    if kind == "attachment":
        mounts.append({"name": "disk", "mountPath": "/disk"})
        volumes.append({"name": "disk", "persistentVolumeClaim": {"claimName": DISK}})
    container = {
        "name": "attachment",
        "image": IMAGE,
        "command": ["/opt/agent_shim/bin/python3", "-I", "-S", "-c", PROGRAM, *arguments],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": mounts,
    }
    spec = {"hostPID": True, "automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    made = document("Pod", f"{kind}-1", kind, spec=spec)
    change(made["spec"])
    return made


def in_container(**members: Any) -> Callable[[Document], object]:
    return lambda spec: spec["containers"][0].update(members)


def with_argument(place: int, value: str) -> Callable[[Document], object]:
    return lambda spec: spec["containers"][0]["command"].__setitem__(place, value)


def with_volume(name: str, source: Document, path: str) -> Callable[[Document], object]:
    def change(spec: Document) -> None:
        spec["volumes"].append({"name": name, **source})
        spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path})

    return change


def copying(**members: Any) -> Callable[[Document], object]:
    """Return a change that adds the init container which copies the agent, as in a VM from an unmodified stemcell.

    ``members`` override the container's fields.
    """
    copier = {
        "name": "agent",
        "image": "other.example/agents/agent:1",
        "command": ["cp", "-a", "/opt/agent_shim/.", "/agent"],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "agent", "mountPath": "/agent"}],
    }

    def change(spec: Document) -> None:
        with_volume("agent", {"emptyDir": {}}, "/opt/agent_shim")(spec)
        spec["initContainers"] = [{**copier, **members}]

    return change


def claim(name: str = DISK, label: str = "disk", **spec: Any) -> Document:
    size = {"requests": {"storage": "1Gi"}}
    return document(
        "PersistentVolumeClaim", name, label, spec={"accessModes": ["ReadWriteOnce"], "resources": size, **spec}
    )


def service(label: str = "service", **spec: Any) -> Document:
    selector = {"cpi.bosh.io/group": "0123456789abcdef"}
    return document("Service", "s", label, spec={"selector": selector, "ports": [{"port": 80}], **spec})


CREATED: dict[str, tuple[Document, str]] = {
    "a pod without the label": (document("Pod", "p", "", spec=vm()["spec"]), "handles only objects with the label"),
    "a pod of another kind": (document("Pod", "p", "data", spec=vm()["spec"]), "does not use for this type"),
    "a VM of another name": (document("Pod", "p", "vm", spec=vm()["spec"]), "must be the name of its VM"),
    "another image": (vm_with(image="evil.example/x"), "does not begin with any of the prefixes"),
    "an image whose prefix is a part": (
        vm_with(image="registry.example.evil/x"),
        "does not begin with any of the prefixes",
    ),
    "an init container's image": (
        vm(initContainers=[{"name": "i", "image": "evil.example/x"}]),
        "does not begin with any of the prefixes",
    ),
    "an image volume": (
        mounting({"image": {"reference": "evil.example/x"}}),
        "does not begin with any of the prefixes",
    ),
    "a foreign Secret": (mounting({"secret": {"secretName": "bosh-cpi-token"}}), "volumes of these kinds"),
    "a projected Secret": (
        mounting({"projected": {"sources": [{"secret": {"name": "bosh-cpi-token"}}]}}),
        "volumes of these kinds",
    ),
    "a ConfigMap": (mounting({"configMap": {"name": "bosh-cpi-policy"}}), "volumes of these kinds"),
    "a CSI volume with a Secret": (
        mounting({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "bosh-cpi-token"}}}),
        "volumes of these kinds",
    ),
    "a CSI volume": (mounting({"csi": {"driver": "d"}}), "volumes of these kinds"),
    "an NFS volume": (mounting({"nfs": {"server": "s", "path": "/"}}), "volumes of these kinds"),
    "a foreign claim": (mounting({"persistentVolumeClaim": {"claimName": "database"}}), "volumes of these kinds"),
    "another VM's data": (
        mounting({"persistentVolumeClaim": {"claimName": "data-vm-bosh-1"}}),
        "volumes of these kinds",
    ),
    "a generic ephemeral volume": (
        mounting({"ephemeral": {"volumeClaimTemplate": {"spec": {**claim()["spec"], "dataSource": SOURCE}}}}),
        "volumes of these kinds",
    ),
    "the node's root": (mounting({"hostPath": {"path": "/"}}, readOnly=True), "the VM's own live disks"),
    "all VMs' live disks": (mounting({"hostPath": {"path": ROOM}}, readOnly=True), "the VM's own live disks"),
    "another VM's live disks": (
        mounting({"hostPath": {"path": f"{ROOM}/vm-bosh-1"}}, readOnly=True),
        "the VM's own live disks",
    ),
    "a way out of its live disks": (
        mounting({"hostPath": {"path": f"{ROOM}/{VM}/../vm-bosh-1"}}, readOnly=True),
        "must not contain '..'|the VM's own live disks",
    ),
    "its live disks, writable": (mounting({"hostPath": {"path": f"{ROOM}/{VM}"}}), "the VM's own live disks"),
    "an environment with a Secret": (
        vm_with(env=[{"name": "T", "valueFrom": {"secretKeyRef": {"name": "bosh-cpi-token", "key": "token"}}}]),
        "cannot have environment variables",
    ),
    "a whole Secret as environment": (
        vm_with(envFrom=[{"secretRef": {"name": "bosh-cpi-token"}}]),
        "cannot have environment variables",
    ),
    "the node's network": (vm(hostNetwork=True), "cannot use the node's network or IPC"),
    "the node's IPC": (vm(hostIPC=True), "cannot use the node's network or IPC"),
    "the node's processes": (vm(hostPID=True), "tier privileged requires"),
    "a chosen node": (vm(nodeName="node"), "cannot choose their node"),
    "a probe of another host": (
        vm_with(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        "cannot send requests to another host",
    ),
    "a hook to another host": (
        vm_with(lifecycle={"postStart": {"httpGet": {"host": "169.254.169.254", "port": 80}}}),
        "cannot send requests to another host",
    ),
    "another account": (vm(serviceAccountName="admin"), "service account default or bosh-cpi"),
    "a priority of the cluster": (vm(priorityClassName="system-node-critical"), "reserved for the cluster"),
    "a port of the node": (vm_with(ports=[{"containerPort": 80, "hostPort": 80}]), "requires host_ports"),
    "a privileged VM": (secured(privileged=True), "tier privileged requires"),
    "a privileged init container": (
        vm(initContainers=[{"name": "i", "image": IMAGE, "securityContext": {"privileged": True}}]),
        "tier privileged requires",
    ),
    **{
        f"the capability {name}": (
            vm_with(securityContext={"capabilities": {"add": [name]}}),
            "a capability that affects the node",
        )
        for name in ("SYS_ADMIN", "sys_admin", "CAP_SYS_ADMIN", "all", "ALL", "Sys_Module", "SYS_TIME")
    },
    "no seccomp profile": (
        secured(seccompProfile={"type": "Unconfined"}),
        "profiles of a container",
    ),
    "no seccomp profile of the pod": (
        vm(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        "profiles of a pod",
    ),
    "an SELinux type": (secured(seLinuxOptions={"type": "spc_t"}), "profiles of a container"),
    # These cases create helper pods.
    "a helper with another program": (helper(change=with_argument(4, "evil")), "a helper can only run `program`"),
    "a helper with another interpreter": (
        helper(change=with_argument(0, "/disk/evil")),
        "a helper can only run `program`",
    ),
    "a helper without isolation": (helper(change=with_argument(1, "-s")), "a helper can only run `program`"),
    "a helper with arguments of its own": (helper(change=in_container(args=["x"])), "anything except its program"),
    "a helper with another kind's arguments": (helper(change=with_argument(5, "reboot")), "the arguments of a helper"),
    "a helper for another VM": (helper(change=with_argument(7, f"/target/vm-1/{DISK}")), "the arguments of a helper"),
    "a helper beyond its VM": (
        helper("detachment", with_argument(6, f"/target/{VM}/../vm-1")),
        "the arguments of a helper",
    ),
    "a helper that binds all": (helper("bound", with_argument(6, "/target")), "the arguments of a helper"),
    "a helper with an environment": (
        helper(change=in_container(env=[{"name": "LD_PRELOAD", "value": "/disk/x.so"}])),
        "cannot have environment variables",
    ),
    "a helper with a directory": (helper(change=in_container(workingDir="/disk")), "anything except its program"),
    "a helper with a probe": (
        helper(change=in_container(livenessProbe={"exec": {"command": ["evil"]}})),
        "anything except its program",
    ),
    "a helper with a hook": (
        helper(change=in_container(lifecycle={"postStart": {"exec": {"command": ["evil"]}}})),
        "anything except its program",
    ),
    "a helper with a last hook": (
        helper(change=in_container(lifecycle={"preStop": {"exec": {"command": ["evil"]}}})),
        "anything except its program",
    ),
    "a helper with two containers": (
        helper(change=lambda spec: spec["containers"].append({"name": "c", "image": IMAGE})),
        "a helper can only run `program`",
    ),
    "a helper with an init container": (
        helper(change=lambda spec: spec.update(initContainers=[{"name": "agent", "image": IMAGE}])),
        "an init container of a helper",
    ),
    "a copier with another command": (helper(change=copying(command=["evil"])), "an init container of a helper"),
    "a copier that is privileged": (
        helper(change=copying(securityContext={"privileged": True})),
        "an init container of a helper",
    ),
    "a copier that sees the node": (
        helper(change=copying(volumeMounts=[{"name": "target", "mountPath": "/agent"}])),
        "an init container of a helper",
    ),
    "a copier that stays": (helper(change=copying(restartPolicy="Always")), "an init container of a helper"),
    "a claim as the agent": (
        helper(change=with_volume("agent", {"persistentVolumeClaim": {"claimName": "disk-x"}}, "/opt/agent_shim")),
        "the arguments of a helper|volumes disk, target and agent",
    ),
    "an image as the agent": (
        helper(change=with_volume("agent", {"image": {"reference": "evil.example/x"}}, "/opt/agent_shim")),
        "does not begin with any of the prefixes",
    ),
    "an image over the interpreter": (
        helper(change=with_volume("agent", {"image": {"reference": IMAGE}}, "/usr")),
        "a helper must mount its volumes at",
    ),
    "a helper with the node's root": (
        helper("bound", lambda spec: spec["volumes"][0]["hostPath"].update(path="/")),
        "volumes disk, target and agent",
    ),
    "a helper with a part of a disk": (
        helper(change=lambda spec: spec["containers"][0]["volumeMounts"][1].update(subPath="x")),
        "a helper must mount its volumes at",
    ),
    "a helper with a token": (
        helper(change=lambda spec: spec.pop("automountServiceAccountToken")),
        "volumes of these kinds|a helper cannot have a token",
    ),
    "a helper with a Secret": (
        helper("reboot", with_volume("agent", {"secret": {"secretName": "reboot-1"}}, "/opt/agent_shim")),
        "volumes of these kinds",
    ),
    # These cases create other objects, such as Secrets, claims and Services.
    "a token of another account": (
        document("Secret", "t", "vm", type="kubernetes.io/service-account-token")
        | {
            "metadata": {
                "name": "t",
                "labels": LABELS | {"cpi.bosh.io/kind": "vm"},
                "annotations": {"kubernetes.io/service-account.name": "admin"},
            }
        },
        "must have the type Opaque",
    ),
    "a Secret without the label": (document("Secret", "t", ""), "handles only objects with the label"),
    "a copy of a claim": (
        claim(dataSource=SOURCE),
        "a claim of the CPI must be empty",
    ),
    "a copy by reference": (
        claim(dataSourceRef=SOURCE),
        "a claim of the CPI must be empty",
    ),
    "a chosen volume": (claim(volumeName="pv-of-others"), "a claim of the CPI must be empty"),
    "a volume by labels": (claim(selector={"matchLabels": {"a": "b"}}), "a claim of the CPI must be empty"),
    "a claim of another name": (claim("database"), "must start with disk- or data-"),
    "a foreign snapshot": (
        document("VolumeSnapshot", "n", "snapshot", spec={"source": {"persistentVolumeClaimName": "database"}}),
        "must be that of a disk",
    ),
    "a snapshot of other content": (
        document("VolumeSnapshot", "n", "snapshot", spec={"source": {"volumeSnapshotContentName": "c"}}),
        "must be that of a disk",
    ),
    "a Service in front of others": (service(selector={"app": "database"}), "must select VMs"),
    "a Service without pods": (service(selector=None), "must select VMs"),
    "a Service with an address of others": (service(externalIPs=["192.0.2.7"]), "cannot have external addresses"),
    "a name for another server": (service(type="ExternalName", externalName="evil.example"), "must select VMs"),
    "a policy for others": (
        document("NetworkPolicy", "n", "network-policy", spec={"podSelector": {}, "ingress": [{}]}),
        "NetworkPolicy of the CPI must select VMs",
    ),
    "a finalizer": (
        {**vm(), "metadata": vm()["metadata"] | {"finalizers": ["evil.example/x"]}},
        "cannot have finalizers",
    ),
}

ADMITTED: dict[str, Document] = {
    "a VM": vm(),
    "a VM over an official image": mounting({"image": {"reference": "other.example/agents/agent:1"}}, readOnly=True),
    "a VM with bosh-dns": secured(capabilities={"add": ["NET_ADMIN", "SETFCAP"]}),
    "a VM of a user namespace": vm(
        hostUsers=False,
        containers=[
            {
                "name": "agent",
                "image": IMAGE,
                "securityContext": {
                    "capabilities": {"add": ["SYS_ADMIN"]},
                    "procMount": "Unmasked",
                    "appArmorProfile": {"type": "Unconfined"},
                },
            }
        ],
    ),
    "a VM with its live disks": mounting({"hostPath": {"path": f"{ROOM}/{VM}"}}, readOnly=True),
    "a VM with disks": mounting({"persistentVolumeClaim": {"claimName": DISK}}),
    "a VM with its data": mounting({"persistentVolumeClaim": {"claimName": f"data-{VM}"}}),
    "a VM with its settings": mounting({"secret": {"secretName": VM}}),
    **{f"a helper of the kind {kind}": helper(kind) for kind in ("attachment", "detachment", "reboot", "bound")},
    "a helper over an official image": helper(
        "reboot", with_volume("agent", {"image": {"reference": "other.example/agents/agent:1"}}, "/opt/agent_shim")
    ),
    "a helper with a copied agent": helper("reboot", copying()),
    "a claim": claim(),
    "a Service": service(),
}

OWN = {
    "pod": vm(),
    "helper": helper(),
    "claim": claim(),
    "Service": service(),
    "Secret": document("Secret", VM, "vm", stringData={"config.json": "{}"}),
}
FOREIGN = {
    "pod": document("Pod", "web", "", spec={"containers": [{"name": "web", "image": "x"}]}),
    "claim": {**claim("database"), "metadata": {"name": "database"}},
    "Service": {**service(), "metadata": {"name": "web"}, "spec": {"selector": {"a": "b"}, "ports": [{"port": 80}]}},
    "Secret": document("Secret", "password", "", stringData={"a": "b"}),
    "NetworkPolicy": document("NetworkPolicy", "bosh-vms", "", spec={"podSelector": {}}),
}
TAKEN = {"metadata": {"labels": LABELS | {"cpi.bosh.io/kind": "vm"}}}
CHANGED: dict[str, tuple[str, Document, str]] = {
    "the image of a VM": (
        "pod",
        {"spec": {"containers": [{"name": "agent", "image": IMAGE + "x"}]}},
        "cannot be changed",
    ),
    "the image of a helper": ("helper", {"spec": {"activeDeadlineSeconds": 9}}, "the spec of a pod"),
    "the kind of a pod": ("pod", {"metadata": {"labels": {"cpi.bosh.io/kind": "bound"}}}, "cannot be changed"),
    "the Director of a pod": ("pod", {"metadata": {"labels": {"cpi.bosh.io/director": "x"}}}, "cannot be changed"),
    "the owner's label of a pod": (
        "pod",
        {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}},
        "handles only objects",
    ),
    "a selector's label of a pod": ("pod", {"metadata": {"labels": {"app": "database"}}}, "that begin with bosh.io/"),
    "an annotation of a pod": ("pod", {"metadata": {"annotations": {"x.example/y": "z"}}}, "that begin with bosh.io/"),
    "finalizers of a pod": ("pod", {"metadata": {"finalizers": ["evil.example/x"]}}, "cannot have finalizers"),
    "the volume of a claim": ("claim", {"spec": {"volumeName": "pv-of-others"}}, "annotations of a claim"),
    "the node of a claim": (
        "claim",
        {"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "n"}}},
        "annotations of a claim",
    ),
    "the pods of a Service": (
        "Service",
        {"spec": {"selector": {"cpi.bosh.io/group": None, "a": "b"}}},
        "must select VMs",
    ),
    "the addresses of a Service": (
        "Service",
        {"spec": {"externalIPs": ["192.0.2.7"]}},
        "cannot have external addresses",
    ),
    "a Secret": ("Secret", {"metadata": {"labels": {"bosh.io/a": "b"}}}, "Secrets and snapshots cannot be changed"),
}


def path_of(one: Document) -> str:
    return f"{PATHS[one['kind']]}/{one['metadata']['name']}"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Provide an API server with the policy, and a namespace with objects that the CPI and other owners created."""
    made = ApiServer(programs(), tmp_path_factory.mktemp("api"))
    try:
        made.start()
        if made.minor < 30:
            pytest.skip("no ValidatingAdmissionPolicy in this Kubernetes")
        _fill(made)
        yield made
    finally:
        made.stop()


def _fill(api: ApiServer) -> None:
    rules = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    crd = {
        "group": "snapshot.storage.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "volumesnapshots", "singular": "volumesnapshot", "kind": "VolumeSnapshot"},
        "versions": [version],
    }
    policy = yaml.safe_load_all((ROOT / "deploy/cpi/admission/policy.yaml").read_text())
    admission = "/apis/admissionregistration.k8s.io/v1"
    made = [
        ("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        *(
            (f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"kind": "ServiceAccount", "metadata": {"name": name}})
            for name in ("default", "admin", "bosh-cpi")
        ),
        (
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {
                "metadata": {
                    "name": "volumesnapshots.snapshot.storage.k8s.io",
                    # The API server requires this annotation for API groups whose name ends in k8s.io.
                    "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
                },
                "spec": crd,
            },
        ),
        (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
            {"metadata": {"name": "all"}, "rules": [rules]},
        ),
        (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
            {
                "metadata": {"name": "all"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "all"},
                "subjects": [{"kind": "ServiceAccount", "name": "bosh-cpi", "namespace": NAMESPACE}],
            },
        ),
        *((PATHS[one["kind"]], one) for one in (*OWN.values(), *FOREIGN.values())),
        (f"/api/v1/namespaces/{NAMESPACE}/configmaps", {"metadata": {"name": "bosh-cpi-policy"}, "data": PARAMETERS}),
        *zip(
            (f"{admission}/validatingadmissionpolicies", f"{admission}/validatingadmissionpolicybindings"),
            policy,
            strict=True,
        ),
    ]
    deadline = time.monotonic() + TIMEOUT_S / 5
    for path, body in made:
        # The API for a new kind takes a moment to become available, so retry.
        while (answer := api.request("POST", path, body))[0] == 404 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert answer[0] == 201, f"{path}: {answer[1]}"
    theft, _ = CREATED["another image"]
    snapshot = document("VolumeSnapshot", "n", "", spec={})
    # Wait until the new policy and the API for the new kind are in effect.
    while wrong := [
        reply
        for one in (theft, snapshot)
        if "ValidatingAdmissionPolicy" not in (reply := _try(api, "POST", PATHS[one["kind"]], one))[1]
    ]:
        assert time.monotonic() < deadline, f"the policy does not apply: {wrong}"
        time.sleep(0.2)


def _try(api: ApiServer, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, str]:
    """Send a dry-run request from the CPI's account. Return the status and message in the response."""
    status, answer = api.request(method, f"{path}?dryRun=All", body, user=ACCOUNT, kind=kind)
    return status, str(answer.get("message", ""))


def _merged(below: Document, above: Document) -> Document:
    """Return a copy of a document with a merge patch applied."""
    both = copy.deepcopy(below)
    for key, value in above.items():
        if value is None:
            both.pop(key, None)
        else:
            both[key] = _merged(both.get(key) or {}, value) if isinstance(value, dict) else value
    return both


@pytest.mark.parametrize("name", CREATED)
def test_admission_policy_denies_creation_with_a_stolen_token(api: ApiServer, name: str) -> None:
    one, words = CREATED[name]

    status, message = _try(api, "POST", PATHS[one["kind"]], one)

    assert status in REFUSED, message
    assert any(word in message for word in words.split("|")), message


@pytest.mark.parametrize("name", ADMITTED)
def test_admission_policy_admits_objects_created_by_the_cpi(api: ApiServer, name: str) -> None:
    one = copy.deepcopy(ADMITTED[name])
    one["metadata"]["name"] += "0" if one["metadata"]["name"] != VM else ""
    if one["metadata"]["name"] == VM:
        # Rename the VM, because a VM with the original name already exists.
        one = json.loads(json.dumps(one).replace(VM, f"{VM}0"))

    assert _try(api, "POST", PATHS[one["kind"]], one)[0] == 201, _try(api, "POST", PATHS[one["kind"]], one)


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize("name", CHANGED)
def test_admission_policy_denies_changes_with_a_stolen_token(api: ApiServer, name: str, method: str) -> None:
    which, change, words = CHANGED[name]
    path = path_of(OWN[which])
    whole = _merged(api.request("GET", path)[1], change)
    if "spec" in change and "containers" in change["spec"]:
        before = api.request("GET", path)[1]["spec"]["containers"][0]
        whole["spec"]["containers"] = [before | change["spec"]["containers"][0]]

    if method == "PUT":
        status, message = _try(api, "PUT", path, whole)
    else:
        spec = {"spec": {"containers": whole["spec"]["containers"]}} if "containers" in change.get("spec", {}) else {}
        status, message = _try(api, "PATCH", path, change | spec, "application/merge-patch+json")

    assert (status in REFUSED, words in message) == (True, True), message


@pytest.mark.parametrize("which", FOREIGN)
def test_admission_policy_protects_other_owners_objects_from_a_stolen_token(api: ApiServer, which: str) -> None:
    path = path_of(FOREIGN[which])
    whole = _merged(api.request("GET", path)[1], TAKEN)

    for status, message in (
        _try(api, "PATCH", path, TAKEN, "application/merge-patch+json"),
        _try(api, "PUT", path, whole),
        _try(api, "DELETE", path),
    ):
        assert status in REFUSED, message
        assert "handles only objects with the label" in message


@pytest.mark.parametrize("which", OWN)
def test_admission_policy_lets_the_cpi_delete_its_objects(api: ApiServer, which: str) -> None:
    status, message = _try(api, "DELETE", path_of(OWN[which]))

    assert status in (200, 202), message


def test_admission_policy_admits_every_cpi_request(api: ApiServer, tmp_path: Path) -> None:
    """The fake API server records the requests made during a VM's lifecycle. The test then sends them to the real
    server from the CPI's account.
    """
    server = FakeApiServer(FakeCluster())
    try:
        cpi = CpiCalls(server, tmp_path, disks={"attach": "live"})
        _create_every_kind(cpi)
    finally:
        server.close()
    kinds = {path.rsplit("/", 1)[1]: path for path in PATHS.values()}
    made = set()
    for what, body in zip(server.requests, server.bodies, strict=True):
        method, _, rest = what.partition(" ")
        plural, _, name = rest.partition("/")
        if method not in ("POST", "PATCH", "DELETE") or plural not in kinds:
            continue
        document = json.loads(body) if body else {}
        document.get("metadata", {}).pop("resourceVersion", None)
        document.pop("preconditions", None)
        path, kind = (kinds[plural], "application/json") if method == "POST" else (f"{kinds[plural]}/{name}", "")
        kind = kind or ("application/merge-patch+json" if method == "PATCH" else "application/json")
        status, answer = api.request(method, path, document or None, user=ACCOUNT, kind=kind)
        assert status in (200, 201, 202, 404, 409), (what, answer)
        made.add(f"{method} {plural}")
    assert made >= {
        f"{method} {plural}"
        for method, plurals in {
            "POST": ("pods", "secrets", "persistentvolumeclaims", "services", "ingresses", "networkpolicies"),
            "PATCH": ("pods", "persistentvolumeclaims"),
            "DELETE": ("pods", "secrets", "persistentvolumeclaims", "volumesnapshots"),
        }.items()
        for plural in plurals
    }


def _create_every_kind(cpi: CpiCalls) -> None:
    """Create, use and delete VMs so that the CPI creates every kind of object and pod that it supports."""
    front = {"name": "front", "ports": [{"port": 80}], "ingress": {"hosts": ["web.example"]}}
    metadata = {"deployment": "dep", "job": "db", "index": "0", "id": "i", "director": "d"}
    vms = [
        cpi.create_vm("agent-1", services=[front], network_policy={"ingress": []}, memory=64),
        cpi.create_vm("agent-2", tier="userns", agent={"image": "other.example/agents/agent:1"}),
        cpi.create_vm("agent-3", agent={"image": "other.example/agents/agent:1", "copy": True}),
    ]
    for vm in vms:
        cpi("set_vm_metadata", vm, metadata)
        disk = cpi("create_disk", 64, {}, vm)
        cpi("attach_disk", vm, disk)
        cpi("set_disk_metadata", disk, metadata)
        cpi("delete_snapshot", cpi("snapshot_disk", disk, metadata))
        cpi("reboot_vm", vm)
        cpi("detach_disk", vm, disk)
        cpi("delete_vm", vm)
        cpi("delete_disk", disk)
