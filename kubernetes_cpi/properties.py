"""Cloud properties: those of VMs (vm_types, vm_extensions, AZs), of disks, and of networks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from kubernetes_cpi.config import AttachWay
from kubernetes_cpi.schema import Strict, doc

Tier = Literal["privileged", "userns", "base", "restricted"]
Protocol = Literal["TCP", "UDP", "SCTP"]
Count = Annotated[int, Meta(ge=0)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$")]
Size = Count | Quantity
"""A size: an integer is MiB, a string a Kubernetes quantity."""
Cpus = Annotated[float, Meta(ge=0)] | Quantity
PortNumber = Annotated[int, Meta(ge=1, le=65535)]


class Port(Strict, frozen=True):
    """A port of a Service or of the pod."""

    port: Annotated[PortNumber, doc("Port.")]
    name: Annotated[str, doc("Its name. Empty: `tcp-PORT` and the like.")] = ""
    target_port: Annotated[int | str, doc("Port of the pod. 0: the same.")] = 0
    protocol: Annotated[Protocol, doc("Protocol.")] = "TCP"
    node_port: Annotated[int, doc("Port of nodes (NodePort, LoadBalancer). 0: any.")] = 0
    host_port: Annotated[int, doc("Port of the node that leads to the pod; not in Services. 0: none.")] = 0


class Ingress(Strict, frozen=True):
    """An Ingress in front of a Service."""

    hosts: Annotated[list[str], doc("Host names. Empty: all.")] = []
    path: Annotated[str, doc("Prefix of paths.")] = "/"
    port: Annotated[int, doc("Port of the Service. 0: its first one.")] = 0
    class_name: Annotated[str, doc("IngressClass. Empty: the cluster's default.")] = ""
    tls_secret: Annotated[str, doc("Secret with the certificate for `hosts`. Empty: no TLS.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations.")] = {}


class KubernetesService(Strict, frozen=True):
    """A Service in front of all VMs of an instance group."""

    name: Annotated[str, doc("Name of the Service; VMs with the same name share it.")]
    ports: Annotated[list[Port], doc("Its ports, with the keys of `ports` of VMs.")]
    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], doc("Its type.")] = "ClusterIP"
    cluster_ip: Annotated[str, doc("Its address. Empty: any; `None`: a headless Service.")] = ""
    load_balancer_ip: Annotated[str, doc("Address to request from the load balancer.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations.")] = {}
    keep: Annotated[bool, doc("Keep the Service, with its address, after the last VM of the group.")] = False
    ingress: Annotated[Ingress | None, doc("An Ingress of the same name.")] = None

    def __post_init__(self) -> None:
        if not self.ports:
            raise ValueError(f"`ports` of the Service {self.name!r} is empty")


class PodVolume(Strict, frozen=True):
    """An additional volume of the pod."""

    name: Annotated[str, doc("Name, a DNS label.")]
    mount_path: Annotated[str, doc("Directory in the VM.")]
    source: Annotated[dict[str, Any], doc("The volume's source as in a pod, such as `hostPath: {path: /dev}`.")]
    read_only: Annotated[bool, doc("Mount read-only.")] = False
    sub_path: Annotated[str, doc("Part of the volume.")] = ""
    propagation: Annotated[Literal["", "None", "HostToContainer", "Bidirectional"], doc("Mount propagation.")] = ""


class EphemeralDisk(Strict, frozen=True):
    """`/var/vcap/data`."""

    size: Annotated[Size, doc("MiB, or a quantity; `empty_dir` requests as much ephemeral storage of the node.")] = (
        10240
    )
    type: Annotated[
        Literal["", "claim", "empty_dir"],
        doc(
            "`claim` outlives the pod: attachment by recreation and create-swap-delete of a VM made with a disk need "
            "it. `empty_dir` ends with the pod. Empty: `claim`, or `empty_dir` where `attach` is `never`."
        ),
    ] = ""
    storage_class: Annotated[str, doc("StorageClass of the claim. Empty: `disks.storage_class`.")] = ""


class ReservedDisk(Strict, frozen=True):
    """A persistent disk that is created with the VM. create_disk later returns it."""

    size: Annotated[Size, doc("MiB, or a quantity; the same as `persistent_disk` of the instance group.")]
    storage_class: Annotated[str, doc("StorageClass. Empty: `disks.storage_class`.")] = ""


class AgentImage(Strict, frozen=True):
    """The agent to be added to an unmodified stemcell image."""

    image: Annotated[
        str,
        doc(
            "Image with `/opt/agent_shim`, made on the distribution of the stemcell: `--target volume`, or with `copy` "
            "a whole image."
        ),
    ]
    copy: Annotated[
        bool,
        doc("Copy the program with an init container, for clusters without image volumes (before Kubernetes 1.35)."),
    ] = False


class NetworkPolicy(Strict, frozen=True):
    """A NetworkPolicy of an instance group, which replaces the namespace's policy.

    It must let the agent reach the bus.
    """

    ingress: Annotated[
        list[dict[str, Any]] | None,
        doc("Rules of a NetworkPolicy. Absent: the namespace's rules. An empty list blocks all."),
    ] = None
    egress: Annotated[
        list[dict[str, Any]] | None,
        doc("Rules of a NetworkPolicy. Absent: the namespace's rules. An empty list blocks all."),
    ] = None


class VmProperties(Strict, frozen=True):
    """Cloud properties of vm_types, vm_extensions and AZs, merged by the Director."""

    tier: Annotated[
        Tier,
        doc(
            "Permissions of the pod: `privileged`, `userns` (root of a user namespace), `base` (root with nine "
            "capabilities), `restricted` (no root)."
        ),
    ] = "base"
    capabilities: Annotated[
        list[str],
        doc(
            "Linux capabilities in addition to those of the tier, `base` or `userns`: bosh-dns needs `NET_ADMIN` and "
            "`SETFCAP`."
        ),
    ] = []
    cpu: Annotated[Cpus, doc("CPUs requested. 0: none.")] = 0
    cpu_limit: Annotated[Cpus, doc("CPUs at most. 0: no limit.")] = 0
    memory: Annotated[Size, doc("Memory requested, which is its limit too: MiB, or a quantity. 0: none.")] = 0
    resources: Annotated[
        dict[str, Any], doc("Resources of the container as in a pod, instead of the three above.")
    ] = {}
    agent: Annotated[
        AgentImage | None,
        doc("The agent for an official image, which has none; not with the tier `restricted`."),
    ] = None
    ephemeral_disk: Annotated[EphemeralDisk, doc("`/var/vcap/data`.")] = EphemeralDisk()
    persistent_disk: Annotated[ReservedDisk | None, doc("A reserved persistent disk.")] = None
    attach: Annotated[AttachWay | Literal[""], doc("`disks.attach` for this VM.")] = ""
    zone: Annotated[str, doc("Zone of nodes (`topology.kubernetes.io/zone`); in `cloud_properties` of an AZ.")] = ""
    node_selector: Annotated[dict[str, str], doc("Labels of nodes.")] = {}
    affinity: Annotated[dict[str, Any], doc("Affinity as in a pod, in addition to `zone` and `anti_affinity`.")] = {}
    anti_affinity: Annotated[
        Literal["preferred", "required", "none"],
        doc("VMs of one instance group keep to different nodes, and without `zone` prefer different zones."),
    ] = "preferred"
    tolerations: Annotated[list[dict[str, Any]], doc("Tolerations as in a pod.")] = []
    priority_class: Annotated[str, doc("PriorityClass.")] = ""
    runtime_class: Annotated[str, doc("RuntimeClass.")] = ""
    image_pull_secrets: Annotated[list[str], doc("Names of Secrets with credentials of registries.")] = []
    labels: Annotated[dict[str, str], doc("Labels of the pod.")] = {}
    annotations: Annotated[dict[str, str], doc("Annotations of the pod.")] = {}
    sysctls: Annotated[dict[str, str], doc("Sysctls of the pod.")] = {}
    volumes: Annotated[list[PodVolume], doc("Volumes in addition to the CPI's.")] = []
    ports: Annotated[list[Port], doc("Ports of the pod, for `host_port`.")] = []
    services: Annotated[list[KubernetesService], doc("Services in front of the instance group.")] = []
    network_policy: Annotated[
        NetworkPolicy | None, doc("A NetworkPolicy of the instance group, until its last VM is deleted.")
    ] = None
    disruption_budget: Annotated[
        bool, doc("A PodDisruptionBudget of the instance group: a drain evicts one VM at a time.")
    ] = True
    host_aliases: Annotated[dict[str, list[str]], doc("Names by address, in `/etc/hosts`.")] = {}
    service_account: Annotated[str, doc("Service account of the pod. Empty: `default`.")] = ""
    service_account_token: Annotated[
        bool, doc("Mount the account's token, as a Director VM needs it. All users of the VM can read it.")
    ] = False
    grace: Annotated[Count, doc("Seconds for jobs to drain and stop when the pod is deleted.")] = 50

    def __post_init__(self) -> None:
        """Refuse properties that need root if the tier has no root."""
        if self.agent and self.tier == "restricted":
            raise ValueError(
                "`agent` needs root, to apply the overlay, and the tier `restricted` has none; set another tier"
            )
        if self.capabilities and self.tier == "restricted":
            raise ValueError("`capabilities` need root, and the tier `restricted` has none; set another tier")


class DiskProperties(Strict, frozen=True):
    """Cloud properties of disk_types."""

    storage_class: Annotated[str, doc("StorageClass. Empty: `disks.storage_class`.")] = ""
    access_mode: Annotated[
        Literal["", "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"],
        doc("Access mode. Empty: `disks.access_mode`."),
    ] = ""
    volume_attributes_class: Annotated[str, doc("VolumeAttributesClass (Kubernetes 1.34); update_disk changes it.")] = (
        ""
    )
    snapshot_class: Annotated[str, doc("VolumeSnapshotClass of snapshots. Empty: the cluster's default.")] = ""
    labels: Annotated[dict[str, str], doc("Labels of the claim.")] = {}
    annotations: Annotated[dict[str, str], doc("Annotations of the claim.")] = {}
    name: Annotated[str, doc("Name of a dynamic disk, set by the Director.")] = ""


class NetworkProperties(Strict, frozen=True):
    """Cloud properties of networks."""

    cni: Annotated[
        Literal["", "none", "calico", "kube-ovn", "antrea", "multus", "template"],
        doc("Replaces `networks.cni`. `multus` adds an interface to the pod."),
    ] = ""
    annotations: Annotated[dict[str, str], doc("Pod annotations, in the same form as `networks.annotations`.")] = {}
    name: Annotated[
        str, doc("NetworkAttachmentDefinition (multus, `NAMESPACE/NAME` or `NAME`) or IPPool (antrea).")
    ] = ""
    interface: Annotated[str, doc("Name of the multus interface. If empty, multus chooses one.")] = ""
    ports: Annotated[list[Port], doc("Ports of the Service of a `vip` network, with the keys of `ports` of VMs.")] = []
    service_type: Annotated[Literal["ClusterIP", "LoadBalancer"], doc("Type of the Service of a `vip` network.")] = (
        "ClusterIP"
    )
