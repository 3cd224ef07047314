"""Cloud properties of VMs (vm_types, vm_extensions, AZs), disks and networks."""

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
"""A size. An integer means MiB, a string is a Kubernetes quantity."""
Cpus = Annotated[float, Meta(ge=0)] | Quantity
PortNumber = Annotated[int, Meta(ge=1, le=65535)]


class Port(Strict, frozen=True):
    """A port of a Service or of the pod."""

    port: Annotated[PortNumber, doc("Port.")]
    name: Annotated[str, doc("Name. Empty: protocol and port, such as `tcp-80`.")] = ""
    target_port: Annotated[int | str, doc("Port of the pod. 0: the same as `port`.")] = 0
    protocol: Annotated[Protocol, doc("Protocol.")] = "TCP"
    node_port: Annotated[int, doc("Port on each node, for a NodePort or LoadBalancer. 0: any.")] = 0
    host_port: Annotated[int, doc("Port of the node that leads to the pod; not in Services. 0: none.")] = 0


class Ingress(Strict, frozen=True):
    """An Ingress in front of a Service."""

    hosts: Annotated[list[str], doc("Host names. Empty: all.")] = []
    path: Annotated[str, doc("Path prefix.")] = "/"
    port: Annotated[int, doc("Port of the Service. 0: its first one.")] = 0
    class_name: Annotated[str, doc("IngressClass. Empty: the cluster's default.")] = ""
    tls_secret: Annotated[str, doc("Secret with the certificate for `hosts`. Empty: no TLS.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations.")] = {}


class KubernetesService(Strict, frozen=True):
    """A Service in front of all VMs of an instance group."""

    name: Annotated[str, doc("Name of the Service; VMs with the same name share it.")]
    ports: Annotated[list[Port], doc("Ports, each with the same keys as in the VM property `ports`.")]
    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], doc("Type of the Service.")] = "ClusterIP"
    cluster_ip: Annotated[str, doc("Address of the Service. Empty: any; `None`: a headless Service.")] = ""
    load_balancer_ip: Annotated[str, doc("Address to request from the load balancer.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations.")] = {}
    keep: Annotated[bool, doc("Keep the Service and its address when the group's last VM is deleted.")] = False
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
    sub_path: Annotated[str, doc("Path within the volume. Empty: all of it.")] = ""
    propagation: Annotated[Literal["", "None", "HostToContainer", "Bidirectional"], doc("Mount propagation.")] = ""


class EphemeralDisk(Strict, frozen=True):
    """The ephemeral disk, mounted on `/var/vcap/data`."""

    size: Annotated[Size, doc("MiB, or a quantity. With `empty_dir`, requested from the node's ephemeral storage.")] = (
        10240
    )
    type: Annotated[
        Literal["", "claim", "empty_dir"],
        doc(
            "A `claim` outlives the pod, an `empty_dir` does not. Attaching disks by recreation needs a `claim`, and "
            "so does create-swap-delete of a VM that was created with a disk. Empty: `claim`, or `empty_dir` if "
            "`attach` is `never`."
        ),
    ] = ""
    storage_class: Annotated[str, doc("StorageClass of the claim. Empty: `disks.storage_class`.")] = ""


class ReservedDisk(Strict, frozen=True):
    """A persistent disk that is created together with the VM. The VM's first create_disk returns it."""

    size: Annotated[Size, doc("MiB, or a quantity; the same as `persistent_disk` of the instance group.")]
    storage_class: Annotated[str, doc("StorageClass. Empty: `disks.storage_class`.")] = ""


class AgentImage(Strict, frozen=True):
    """The agent to be added to an unmodified stemcell image."""

    image: Annotated[
        str,
        doc(
            "Image with `/opt/agent_shim`, built on the same distribution as the stemcell. The Dockerfile's target "
            "`volume` is enough, but `copy` needs a complete image."
        ),
    ]
    copy: Annotated[
        bool,
        doc("Copy the program with an init container, for clusters without image volumes (before Kubernetes 1.35)."),
    ] = False


class NetworkPolicy(Strict, frozen=True):
    """A NetworkPolicy for an instance group. It replaces the namespace's policy for this group.

    It must allow connections from the agent to the bus.
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
    cpu: Annotated[Cpus, doc("CPU request. 0: none.")] = 0
    cpu_limit: Annotated[Cpus, doc("CPU limit. 0: none.")] = 0
    memory: Annotated[Size, doc("Memory request and limit: MiB, or a quantity. 0: none.")] = 0
    resources: Annotated[
        dict[str, Any], doc("Resources of the container as in a pod, instead of `cpu`, `cpu_limit` and `memory`.")
    ] = {}
    agent: Annotated[
        AgentImage | None,
        doc("The agent to add to an official stemcell image. Not available in the tier `restricted`."),
    ] = None
    ephemeral_disk: Annotated[EphemeralDisk, doc("`/var/vcap/data`.")] = EphemeralDisk()
    persistent_disk: Annotated[ReservedDisk | None, doc("A persistent disk to create with the VM.")] = None
    attach: Annotated[AttachWay | Literal[""], doc("`disks.attach` for this VM.")] = ""
    zone: Annotated[str, doc("Zone of nodes (`topology.kubernetes.io/zone`); in `cloud_properties` of an AZ.")] = ""
    node_selector: Annotated[dict[str, str], doc("Labels that the node must have.")] = {}
    affinity: Annotated[dict[str, Any], doc("Affinity as in a pod, in addition to `zone` and `anti_affinity`.")] = {}
    anti_affinity: Annotated[
        Literal["preferred", "required", "none"],
        doc("Put VMs of one instance group on different nodes and, without `zone`, preferably in different zones."),
    ] = "preferred"
    tolerations: Annotated[list[dict[str, Any]], doc("Tolerations as in a pod.")] = []
    priority_class: Annotated[str, doc("PriorityClass.")] = ""
    runtime_class: Annotated[str, doc("RuntimeClass.")] = ""
    image_pull_secrets: Annotated[list[str], doc("Names of Secrets with credentials of registries.")] = []
    labels: Annotated[dict[str, str], doc("Labels of the pod.")] = {}
    annotations: Annotated[dict[str, str], doc("Annotations of the pod.")] = {}
    sysctls: Annotated[dict[str, str], doc("Sysctls of the pod.")] = {}
    volumes: Annotated[list[PodVolume], doc("Volumes in addition to the CPI's.")] = []
    ports: Annotated[list[Port], doc("Ports of the pod, only needed for `host_port`.")] = []
    services: Annotated[list[KubernetesService], doc("Services in front of the instance group.")] = []
    network_policy: Annotated[
        NetworkPolicy | None, doc("A NetworkPolicy of the instance group, until its last VM is deleted.")
    ] = None
    disruption_budget: Annotated[
        bool, doc("A PodDisruptionBudget of the instance group: a drain evicts one VM at a time.")
    ] = True
    host_aliases: Annotated[dict[str, list[str]], doc("Additional names for `/etc/hosts`, by address.")] = {}
    service_account: Annotated[str, doc("Service account of the pod. Empty: `default`.")] = ""
    service_account_token: Annotated[
        bool, doc("Mount the account's token, as a Director VM needs it. All users of the VM can read it.")
    ] = False
    grace: Annotated[Count, doc("Seconds for jobs to drain and stop when the pod is deleted.")] = 50

    def __post_init__(self) -> None:
        """Reject properties that need root if the tier has no root."""
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
    ports: Annotated[
        list[Port], doc("Ports of a `vip` network's Service, each with the same keys as in the VM property `ports`.")
    ] = []
    service_type: Annotated[Literal["ClusterIP", "LoadBalancer"], doc("Type of the Service of a `vip` network.")] = (
        "ClusterIP"
    )
