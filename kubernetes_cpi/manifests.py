"""Build the documents for pods, Secrets, claims, and the Services, Ingresses and NetworkPolicies of instance groups.
The functions are pure, so equal requests produce equal documents.

All of the fields have been supported since Kubernetes 1.20, except those that only some tiers and properties use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kubernetes_cpi import names, networks, schema
from kubernetes_cpi.client import CLAIMS, INGRESSES, PODS, POLICIES, SERVICES, Object
from kubernetes_cpi.config import AgentOptions, Config
from kubernetes_cpi.networks import NetworkPlan
from kubernetes_cpi.properties import (
    AgentImage,
    DiskProperties,
    Ingress,
    KubernetesService,
    NetworkPolicy,
    Size,
    VmProperties,
)

CONTAINER: Final = "bosh"
AGENT_PORT: Final = 9190
LIVE_DISKS: Final = "/var/vcap/disks"
"""Directory in a VM for disks that are attached while the VM runs. Mounts propagate to it from the node.

All users must be able to enter the directory, because `/var/vcap/store` is a link into it if the VM is not allowed to
mount. That is why it is not below `/var/vcap/bosh`, which jobs cannot enter.
"""
DISKS_AT_CREATION: Final = "/var/vcap/disks-at-creation"
_FORMER_DISKS_AT_CREATION: Final = "/var/vcap/bosh/disks-at-creation"
"""Directory that older CPI versions used for disks mounted at VM creation. It applies to VMs without the annotation
`names.DISKS_AT`, because their agents have stored paths in this directory.
"""
_LIVE_VOLUME: Final = "live-disks"
AGENT_VOLUME: Final = "agent"
_UNITS: Final = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
PROGRAM: Final = "/opt/agent_shim"
"""Installation directory of the agent. It is part of the image, or a volume if the stemcell is unmodified."""
SETTINGS_DIRECTORY: Final = "/var/vcap/bosh/settings-source-file"
SETTINGS: Final = "config.json"
POD: Final = "pod.json"
"""Key in a VM's Secret. Its value is the pod without disks, from which a recreation creates the new pod. The VM cannot
read it, because the settings volume does not include this key.
"""
DATA: Final = "/var/vcap/data"
MARGIN_S: Final = 10
"""Seconds by which the pod's grace period exceeds the jobs' grace period. The kubelet starts counting before it runs
the preStop hook, which stops the jobs.
"""

BASE_CAPABILITIES: Final = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL", "NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE"),
)
_USER: Final = 1000
"""vcap's UID and GID in the tier without root."""


class Vm(msgspec.Struct, frozen=True):
    """Everything that determines a VM's pod."""

    cid: str
    namespace: str
    director: str
    image: str
    architecture: str
    """Architecture of the nodes that can run the image, or "" if the stemcell names none."""
    properties: VmProperties
    networks: NetworkPlan
    groups: Sequence[str]
    """`env.bosh.groups`: the names of the director, deployment and instance group, and combinations of these names."""
    attach: str
    """How a disk is attached to the running VM: `live`, `recreate`, `never`, or `auto`, which excludes ways that would
    change the VM's address.
    """
    pull_policy: str
    host_path: str
    storage_class: str
    """The configured StorageClass, for claims that do not name one."""

    @property
    def has_data_claim(self) -> bool:
        """Return True if `/var/vcap/data` is a claim, which outlives the pod, rather than an emptyDir."""
        chosen = self.properties.ephemeral_disk.type or ("empty_dir" if self.attach == "never" else "claim")
        return chosen == "claim"

    @property
    def group(self) -> str:
        """Return the value of the label that the VMs in one instance group share, or "" for a VM without a group."""
        return names.digest(*self.groups[:3]) if len(self.groups) >= 3 else ""


def settings(vm: Vm, agent_id: str, env: Mapping[str, Any], agent: AgentOptions) -> Object:
    """Return the agent's settings document (settings/settings.go).

    It does not list disks, because the agent learns about them from the Director over the bus.
    """
    return {
        "agent_id": agent_id,
        "vm": {"name": vm.cid, "id": vm.cid},
        "networks": vm.networks.settings,
        "disks": {"system": "", "persistent": {}},
        "mbus": agent.mbus,
        "ntp": agent.ntp,
        "blobstore": agent.blobstore or {"provider": "dummy", "options": {}},
        "env": env,
    }


def secret(vm: Vm, settings: Object, pod: Object) -> Object:
    """Return a VM's Secret. It can be immutable, because the agent gets later settings over the bus."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": vm.cid,
            "labels": names.labels(names.KIND_VM, vm.director, **{names.VM: vm.cid}),
            "annotations": {names.POLICY: _policy_name(vm)} if vm.properties.network_policy else {},
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {
            SETTINGS: text(settings),
            POD: text(pod),
        },
    }


def claim(
    name: str,
    kind: str,
    director: str,
    size: Size,
    *,
    storage_class: str,
    access_mode: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    attributes_class: str = "",
) -> Object:
    """Return a PersistentVolumeClaim."""
    spec: Object = {"accessModes": [access_mode], "resources": {"requests": {"storage": quantity(size)}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    if attributes_class:
        spec["volumeAttributesClassName"] = attributes_class
    return CLAIMS.document(name, {**(labels or {}), **names.labels(kind, director)}, spec, annotations)


def disk_claim(name: str, director: str, size: Size, properties: DiskProperties, config: Config) -> Object:
    """Return a persistent disk's claim."""
    return claim(
        name,
        names.KIND_DISK,
        director,
        size,
        storage_class=properties.storage_class or config.disks.storage_class,
        access_mode=properties.access_mode or config.disks.access_mode,
        labels={**properties.labels, names.DISK: names.value(name)},
        annotations={
            **properties.annotations,
            **({SNAPSHOT_CLASS: properties.snapshot_class} if properties.snapshot_class else {}),
        },
        attributes_class=properties.volume_attributes_class,
    )


SNAPSHOT_CLASS: Final = "cpi.bosh.io/snapshot-class"
"""Annotation on a disk's claim: the VolumeSnapshotClass for its snapshots."""


def data_claim(vm: Vm) -> Object:
    """Return the claim for `/var/vcap/data`."""
    disk = vm.properties.ephemeral_disk
    return claim(
        names.data_claim(vm.cid),
        names.KIND_DATA,
        vm.director,
        disk.size,
        storage_class=disk.storage_class or vm.storage_class,
        access_mode="ReadWriteOnce",
        labels={names.VM: vm.cid},
    )


def reserved_name(vm: str, namespace: str) -> str:
    """Return the name of a VM's reserved disk."""
    return names.cid("disk", namespace, "reserved", vm)


def reserved_claim(vm: Vm, config: Config) -> Object:
    """Return a reserved disk's claim. An annotation marks it as reserved until create_disk returns it."""
    disk = vm.properties.persistent_disk
    assert disk is not None
    properties = DiskProperties(storage_class=disk.storage_class)
    body = disk_claim(reserved_name(vm.cid, vm.namespace), vm.director, disk.size, properties, config)
    body["metadata"]["annotations"] |= {names.RESERVED_FOR: vm.cid, names.HOLDER: vm.cid}
    return body


def text(document: Object) -> str:
    """Encode a document as JSON."""
    return msgspec.json.encode(document).decode()


def group_service(service: KubernetesService, vm: Vm) -> Object:
    """Return a Service for the VM's instance group.

    An annotation names the VM, so every new VM in the group changes the Service's `resourceVersion`. A concurrent
    delete_vm that has just found the group empty requires the old `resourceVersion`, so it does not delete the Service.
    """
    spec: Object = {
        "type": service.type,
        "selector": _members(vm),
        "ports": networks.ports(service.ports),
        "publishNotReadyAddresses": False,
    }
    if service.cluster_ip:
        spec["clusterIP"] = service.cluster_ip
    if service.load_balancer_ip:
        spec["loadBalancerIP"] = service.load_balancer_ip
    labels = _labels_of_group(names.KIND_SERVICE, vm) | ({names.KEEP: "true"} if service.keep else {})
    annotations = service.annotations | {names.VM: vm.cid} | ({names.INGRESS: "true"} if service.ingress else {})
    return SERVICES.document(service.name, labels, spec, annotations)


def group_ingress(service: KubernetesService, ingress: Ingress, vm: Vm) -> Object:
    """Return the Ingress in front of a Service."""
    backend = {"service": {"name": service.name, "port": {"number": ingress.port or service.ports[0].port}}}
    rule: Object = {"http": {"paths": [{"path": ingress.path, "pathType": "Prefix", "backend": backend}]}}
    spec: Object = {"rules": [{"host": host, **rule} for host in ingress.hosts] or [rule]}
    if ingress.class_name:
        spec["ingressClassName"] = ingress.class_name
    if ingress.tls_secret:
        spec["tls"] = [{"hosts": ingress.hosts, "secretName": ingress.tls_secret}]
    return INGRESSES.document(service.name, _labels_of_group(names.KIND_INGRESS, vm), spec, ingress.annotations)


GROUP_PREFIX: Final = "group-"


def group_policy(policy: NetworkPolicy, vm: Vm) -> Object:
    """Return the NetworkPolicy for the VM's group."""
    rules = _rules(policy)
    types = [direction.capitalize() for direction in rules]
    spec: Object = {"podSelector": {"matchLabels": _members(vm)}, "policyTypes": types, **rules}
    return POLICIES.document(_policy_name(vm), _labels_of_group(names.KIND_POLICY, vm), spec)


def _rules(policy: NetworkPolicy | None) -> Mapping[str, list[dict[str, Any]]]:
    """Return the group's rules for each direction of traffic that its policy restricts. The namespace's policy applies
    to a direction that is left out.
    """
    given = {"ingress": policy.ingress, "egress": policy.egress} if policy else {}
    return {direction: rules for direction, rules in given.items() if rules is not None}


def _labels_of_group(kind: str, vm: Vm) -> dict[str, str]:
    """Return the labels for an object that all VMs in a group share.

    If the VM has no group, the group's label has a value that no pod has, so that the object belongs only to this VM.
    """
    return names.labels(kind, vm.director, **{names.GROUP: vm.group or names.digest(vm.cid)})


def _policy_name(vm: Vm) -> str:
    """Return the name of the NetworkPolicy for the VM's group, or for the VM alone if it has no group."""
    return GROUP_PREFIX + (vm.group or names.digest(vm.cid))


def _members(vm: Vm) -> dict[str, str]:
    """Return the labels that select the pods of the VM's group or, if the VM has no group, only its own pod."""
    return {names.GROUP: vm.group} if vm.group else {names.VM: vm.cid, names.KIND: names.KIND_VM}


def quantity(size: Size) -> str:
    """Return a size as a Kubernetes quantity. An integer means MiB."""
    return f"{size}Mi" if isinstance(size, int) else size


def amount_of(quantity: str) -> float:
    """Convert a Kubernetes quantity such as `512Mi` or `500m` to a number of bytes or CPUs."""
    number = quantity.rstrip("mkKMGTPEi")
    return float(number) * _UNITS[quantity[len(number) :]]


def requests_of(pod: Object) -> dict[str, str]:
    """Return the resource requests of a VM's container.

    The whole pod has the same requests, because the init container that copies the agent requests nothing.
    """
    requests = pod["spec"]["containers"][0].get("resources", {}).get("requests") or {}
    return {resource: str(quantity) for resource, quantity in requests.items()}


# --- the pod ----------------------------------------------------------------------------------------------------------


def pod(vm: Vm) -> Object:
    """Return a VM's pod, without persistent disks."""
    properties = vm.properties
    volumes, mounts = _volumes(vm)
    container: Object = {
        "name": CONTAINER,
        "image": vm.image,
        "imagePullPolicy": vm.pull_policy,
        "command": ["/usr/bin/env", "-i", f"AGENT_SHIM_GRACE={properties.grace}", _start(properties)],
        "securityContext": _container_security(properties),
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}, *_ports(properties)],
        # There is no liveness probe, because it would kill all jobs whenever the agent is slow. PID 1 already restarts
        # an agent that has exited. Readiness does not depend on the bus, for two reasons: the Director admits an agent
        # to the bus only after create_vm has returned, and Services must keep working while the bus is down.
        "readinessProbe": {
            "httpGet": {"path": "/readyz?level=boot", "port": "agent"},
            "periodSeconds": 1,
            "timeoutSeconds": 3,
            "failureThreshold": 3,
        },
        "lifecycle": {
            "preStop": {"exec": {"command": [f"{PROGRAM}/bin/agent-shim", "drain", "--timeout", str(properties.grace)]}}
        },
        "resources": _resources(vm),
        "volumeMounts": mounts,
    }
    spec: Object = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": properties.grace + MARGIN_S,
        "automountServiceAccountToken": properties.service_account_token,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
        **_scheduling(vm),
        **_dns(vm.networks),
    }
    if properties.agent and properties.agent.copy:
        spec["initContainers"] = [_copier(vm, properties.agent)]
    if security := _pod_security(properties):
        spec["securityContext"] = security
    if properties.tier == "userns":
        spec["hostUsers"] = False
    for key, value in {
        "serviceAccountName": properties.service_account,
        "priorityClassName": properties.priority_class,
        "runtimeClassName": properties.runtime_class,
        "imagePullSecrets": [{"name": name} for name in properties.image_pull_secrets],
        "hostAliases": [{"ip": ip, "hostnames": hosts} for ip, hosts in properties.host_aliases.items()],
    }.items():
        if value:
            spec[key] = value
    labels = properties.labels | _group_labels(vm) | names.labels(names.KIND_VM, vm.director, **{names.VM: vm.cid})
    labels |= {names.OWN_RULES[direction]: "true" for direction in _rules(properties.network_policy)}
    annotations = properties.annotations | vm.networks.annotations
    annotations |= {names.ATTACH: vm.attach, names.DISKS_AT: DISKS_AT_CREATION}
    return PODS.document(vm.cid, labels, spec, annotations)


def with_disks(pod: Object, disks: Sequence[str]) -> Object:
    """Return a copy of the pod that also mounts ``disks``."""
    made = _copied(pod)
    for disk in disks:
        name = f"disk-{names.tail(disk)}"
        made["spec"]["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": disk}})
        mounts = made["spec"]["containers"][0]["volumeMounts"]
        mounts.append({"name": name, "mountPath": place_at_creation(pod, disk)})
    return made


def pinned(pod: Object, node: str) -> Object:
    """Return a copy of the pod with a node affinity that makes the scheduler place it on this node.

    Setting `nodeName` would bypass the scheduler, and claims that are bound on first use would then stay unbound.
    """
    made = _copied(pod)
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    _require_node(made["spec"].setdefault("affinity", {}), term)
    return made


def disks_of(pod: Object) -> list[str]:
    """Return the disks that a pod has mounted since its creation."""
    at_creation = place_at_creation(pod, "")
    mounts = pod["spec"]["containers"][0].get("volumeMounts") or []
    return [one["mountPath"].removeprefix(at_creation) for one in mounts if one["mountPath"].startswith(at_creation)]


def place_at_creation(pod: Object, disk: str) -> str:
    """Return the path of a disk that a pod has mounted since its creation."""
    annotations = pod["metadata"].get("annotations") or {}
    return f"{annotations.get(names.DISKS_AT, _FORMER_DISKS_AT_CREATION)}/{disk}"


def claims_of(pod: Object) -> list[str]:
    """Return all claims that a pod mounts, not only the CPI's."""
    volumes = pod["spec"].get("volumes") or []
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def live_disks(pod: Object) -> str:
    """Return the directory in which live disks appear in the VM, or "" if its pod has no such directory."""
    mounts = pod["spec"]["containers"][0].get("volumeMounts") or []
    return next((one["mountPath"] for one in mounts if one["name"] == _LIVE_VOLUME), "")


def _volumes(vm: Vm) -> tuple[list[Object], list[Object]]:
    """Return the pod's volumes except persistent disks, and their mounts in the container."""
    properties = vm.properties
    settings = {"secretName": vm.cid, "defaultMode": 0o400, "items": [{"key": SETTINGS, "path": SETTINGS}]}
    volumes: list[Object] = [{"name": "settings", "secret": settings}]
    mounts: list[Object] = [{"name": "settings", "mountPath": SETTINGS_DIRECTORY, "readOnly": True}]
    if properties.tier == "restricted":
        # The root file system is read-only in this tier.
        for name, path, source in (
            ("vcap", "/var/vcap", {}),
            # The settings are mounted below this directory. Without this volume, the runtime would create the directory
            # as root, and the agent could not write to it.
            ("bosh", "/var/vcap/bosh", {}),
            ("tmp", "/tmp", {}),  # noqa: S108 - inside the pod
            ("run", "/run", {"medium": "Memory", "sizeLimit": "16Mi"}),
        ):
            volumes.append({"name": name, "emptyDir": source})
            mounts.append({"name": name, "mountPath": path})
    mounts.append({"name": "data", "mountPath": DATA})
    if vm.has_data_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": names.data_claim(vm.cid)}})
    else:
        volumes.append({"name": "data", "emptyDir": {"sizeLimit": quantity(properties.ephemeral_disk.size)}})
    if agent := properties.agent:
        image: Object = {"image": {"reference": agent.image, "pullPolicy": vm.pull_policy}}
        volumes.append({"name": AGENT_VOLUME, **({"emptyDir": {}} if agent.copy else image)})
        mounts.append({"name": AGENT_VOLUME, "mountPath": PROGRAM, "readOnly": True})
    if vm.attach == "live":
        # Never use an emptyDir for live disks. When the pod ends, the kubelet deletes the content of an emptyDir,
        # including the content of disks that are mounted in it.
        path = f"{vm.host_path}/{vm.cid}"
        volumes.append({"name": _LIVE_VOLUME, "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
        # Everything in the volume except the disks is read-only. Otherwise, the VM could move the disks and fill the
        # node with files in the volume.
        live: Object = {"name": _LIVE_VOLUME, "mountPath": LIVE_DISKS, "readOnly": True}
        mounts.append({**live, "mountPropagation": "HostToContainer"})
    for volume in properties.volumes:
        volumes.append({"name": volume.name, **volume.source})
        mount: Object = {"name": volume.name, "mountPath": volume.mount_path, "readOnly": volume.read_only}
        mount |= {"subPath": volume.sub_path} if volume.sub_path else {}
        mount |= {"mountPropagation": volume.propagation} if volume.propagation else {}
        mounts.append(mount)
    return volumes, mounts


def _start(properties: VmProperties) -> str:
    """Return the program to run as PID 1.

    On an unmodified stemcell, this program first applies the overlay.
    """
    return f"{PROGRAM}/overlay/start" if properties.agent else "/usr/sbin/runsvdir-start"


def _copier(vm: Vm, agent: AgentImage) -> Object:
    """Return the init container that copies the agent from its image."""
    return {
        "name": AGENT_VOLUME,
        "image": agent.image,
        "imagePullPolicy": vm.pull_policy,
        "command": ["cp", "-a", f"{PROGRAM}/.", "/agent"],
        "securityContext": _container_security(vm.properties),
        "volumeMounts": [{"name": AGENT_VOLUME, "mountPath": "/agent"}],
    }


def _container_security(properties: VmProperties) -> Object:
    """Return the security context of the VM's container, according to its tier. The tier `privileged` has all
    capabilities, so the property `capabilities` has no effect there.
    """
    tier = properties.tier
    # With runAsUser, the kubelet would let only that user read the token, but a Director runs its CPI as vcap. It is
    # safe to leave out runAsUser, because the image runs as root anyway.
    user: Object = {} if properties.service_account_token else {"runAsUser": 0}
    if tier == "privileged":
        return {"privileged": True, **user}
    if tier == "restricted":
        return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    more = [name.upper().removeprefix("CAP_") for name in properties.capabilities]
    security: Object = {
        **user,
        "capabilities": {"drop": ["ALL"], "add": list(dict.fromkeys([*BASE_CAPABILITIES, *more]))},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if tier == "userns":
        # Lift two restrictions that would prevent mounts: container runtimes' default profiles forbid all mounts, and
        # the kernel refuses to mount a new /proc if parts of the existing one are masked.
        security["capabilities"]["add"].append("SYS_ADMIN")
        security |= {"appArmorProfile": {"type": "Unconfined"}, "procMount": "Unmasked"}
    return security


def _pod_security(properties: VmProperties) -> Object:
    """Return the pod's security context, which contains the sysctls and, in the tier without root, the user."""
    security: Object = {}
    if properties.tier == "restricted":
        security = {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    if properties.sysctls:
        security["sysctls"] = [{"name": name, "value": value} for name, value in properties.sysctls.items()]
    return security


def _ports(properties: VmProperties) -> list[Object]:
    return [
        {
            **({"name": port.name} if port.name else {}),
            "containerPort": port.port,
            "protocol": port.protocol,
            **({"hostPort": port.host_port} if port.host_port else {}),
        }
        for port in properties.ports
    ]


def _resources(vm: Vm) -> Object:
    properties = vm.properties
    if properties.resources:
        # The property `resources` replaces `cpu`, `cpu_limit` and `memory`.
        return dict(properties.resources)
    requests, limits = {}, {}
    if properties.cpu:
        requests["cpu"] = str(properties.cpu)
    if properties.cpu_limit:
        limits["cpu"] = str(properties.cpu_limit)
    if not vm.has_data_claim:
        # Do not limit the container's storage, because its logs would count too. The volume has its own limit.
        requests["ephemeral-storage"] = quantity(properties.ephemeral_disk.size)
    if properties.memory:
        requests["memory"] = limits["memory"] = quantity(properties.memory)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _scheduling(vm: Vm) -> Object:
    """Return the members of the pod's spec that determine on which nodes the pod may run."""
    properties = vm.properties
    affinity: Object = _copied(properties.affinity)
    if properties.zone:
        zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [properties.zone]}
        _require_node(affinity, {"matchExpressions": [zone]})
    if vm.group and properties.anti_affinity != "none":
        term = {
            "labelSelector": {"matchLabels": {names.GROUP: vm.group}},
            "topologyKey": "kubernetes.io/hostname",
        }
        apart = affinity.setdefault("podAntiAffinity", {})
        if properties.anti_affinity == "required":
            apart.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(term)
        else:
            weighed = {"weight": 100, "podAffinityTerm": term}
            apart.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(weighed)
    spread = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.GROUP: vm.group}},
    }
    # VMs with the same fixed zone cannot be spread over zones.
    is_spread = vm.group and properties.anti_affinity != "none" and not properties.zone
    found = {
        "affinity": affinity,
        "topologySpreadConstraints": [spread] if is_spread else [],
        "nodeSelector": ({names.ARCHITECTURE: vm.architecture} if vm.architecture else {}) | properties.node_selector,
        "tolerations": properties.tolerations,
    }
    return {key: value for key, value in found.items() if value}


def _require_node(affinity: Object, term: Object) -> None:
    """Change ``affinity`` so that the pod's node must also match ``term``.

    ``term`` is added to each existing alternative, because a node needs to match only one of them.
    """
    rule = affinity.setdefault("nodeAffinity", {}).setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = rule.setdefault("nodeSelectorTerms", []) or [{}]
    rule["nodeSelectorTerms"] = [
        schema.merged(one, {key: [*one.get(key, []), *value] for key, value in term.items()}) for one in terms
    ]


def _dns(networks: NetworkPlan) -> Object:
    if not networks.nameservers:
        return {}
    return {"dnsPolicy": "None", "dnsConfig": {"nameservers": networks.nameservers}}


def _copied(document: Object) -> Object:
    """Return a deep copy, so that the caller can change it without changing the original."""
    import copy

    return copy.deepcopy(document)


def _group_labels(vm: Vm) -> dict[str, str]:
    """Return labels with the names of the director, deployment and instance group, and with the group's digest.

    Names that are not valid as label values are left out. set_vm_metadata sets these labels again later, along with
    others.
    """
    labels, _ = names.metadata(dict(zip(("director", "deployment", "instance_group"), vm.groups, strict=False)))
    return labels | ({names.GROUP: vm.group} if vm.group else {})
