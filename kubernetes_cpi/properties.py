"""Define the cloud properties of VMs (vm_types, vm_extensions, AZs), disks and networks."""

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

    port: Annotated[PortNumber, doc("The port number.")]
    name: Annotated[
        str, doc("The port's name. The default consists of the protocol and the number, such as `tcp-80`.")
    ] = ""
    target_port: Annotated[
        int | str, doc("The pod's port to which a Service sends traffic. 0 means the same as `port`.")
    ] = 0
    protocol: Annotated[Protocol, doc("The port's protocol.")] = "TCP"
    node_port: Annotated[
        int, doc("The port on each node, for a NodePort or LoadBalancer Service. 0 means that Kubernetes chooses one.")
    ] = 0
    host_port: Annotated[
        int, doc("The port on the node that is forwarded to the pod, or 0 for none. It has no effect in a Service.")
    ] = 0


class Ingress(Strict, frozen=True):
    """An Ingress in front of a Service."""

    hosts: Annotated[list[str], doc("The host names that the Ingress serves. An empty list means all names.")] = []
    path: Annotated[str, doc("The path prefix that the Ingress serves.")] = "/"
    port: Annotated[int, doc("The Service's port. 0 means its first port.")] = 0
    class_name: Annotated[str, doc("The IngressClass. The default is the cluster's default class.")] = ""
    tls_secret: Annotated[str, doc("The Secret with the certificate for `hosts`. The default is to use no TLS.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations for the Ingress.")] = {}


class KubernetesService(Strict, frozen=True):
    """A Service in front of all VMs of an instance group."""

    name: Annotated[str, doc("The Service's name. VMs that give the same name share the Service.")]
    ports: Annotated[list[Port], doc("The Service's ports, each with the same keys as in the VM's `ports` property.")]
    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], doc("The Service's type.")] = "ClusterIP"
    cluster_ip: Annotated[
        str, doc("The Service's address. By default, Kubernetes chooses one. `None` makes the Service headless.")
    ] = ""
    load_balancer_ip: Annotated[str, doc("The address to request from the load balancer.")] = ""
    annotations: Annotated[dict[str, str], doc("Annotations for the Service.")] = {}
    keep: Annotated[bool, doc("Keep the Service and its address when the group's last VM is deleted.")] = False
    ingress: Annotated[Ingress | None, doc("An Ingress with the same name as the Service.")] = None

    def __post_init__(self) -> None:
        if not self.ports:
            raise ValueError(f"`ports` of the Service {self.name!r} is empty")


class PodVolume(Strict, frozen=True):
    """An additional volume of the pod."""

    name: Annotated[str, doc("The volume's name, which must be a DNS label.")]
    mount_path: Annotated[str, doc("The directory in the VM on which the volume is mounted.")]
    source: Annotated[dict[str, Any], doc("The volume's source as in a pod, such as `hostPath: {path: /dev}`.")]
    read_only: Annotated[bool, doc("Mount the volume read-only.")] = False
    sub_path: Annotated[str, doc("The path within the volume to mount. The default is the whole volume.")] = ""
    propagation: Annotated[
        Literal["", "None", "HostToContainer", "Bidirectional"],
        doc("The volume's mount propagation, as in a pod spec."),
    ] = ""


class EphemeralDisk(Strict, frozen=True):
    """The ephemeral disk, mounted on `/var/vcap/data`."""

    size: Annotated[
        Size,
        doc("The size in MiB or as a Kubernetes quantity. An `empty_dir` takes it from the node's ephemeral storage."),
    ] = 10240
    type: Annotated[
        Literal["", "claim", "empty_dir"],
        doc(
            "A `claim` outlives the pod, whereas an `empty_dir` does not. Attaching disks by recreation needs a "
            "`claim`, and so does create-swap-delete for a VM that was created with a disk. The default is "
            "`empty_dir` if `attach` is `never`, otherwise `claim`."
        ),
    ] = ""
    storage_class: Annotated[str, doc("The claim's StorageClass. The default is `disks.storage_class`.")] = ""


class ReservedDisk(Strict, frozen=True):
    """A persistent disk that is created together with the VM. The first create_disk call for the VM returns it."""

    size: Annotated[
        Size, doc("The size in MiB or as a Kubernetes quantity. It must equal the instance group's `persistent_disk`.")
    ]
    storage_class: Annotated[str, doc("The claim's StorageClass. The default is `disks.storage_class`.")] = ""


class AgentImage(Strict, frozen=True):
    """The agent to be added to an unmodified stemcell image."""

    image: Annotated[
        str,
        doc(
            "An image with `/opt/agent_shim` that was built on the same distribution as the stemcell. The "
            "Dockerfile's `volume` target is enough, unless `copy` is set, which needs a complete image."
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
        doc(
            "NetworkPolicy rules for incoming traffic. An empty list blocks all of it. Without this key, the "
            "namespace's rules apply."
        ),
    ] = None
    egress: Annotated[
        list[dict[str, Any]] | None,
        doc(
            "NetworkPolicy rules for outgoing traffic. An empty list blocks all of it. Without this key, the "
            "namespace's rules apply."
        ),
    ] = None


class VmProperties(Strict, frozen=True):
    """Cloud properties of vm_types, vm_extensions and AZs, merged by the Director."""

    tier: Annotated[
        Tier,
        doc(
            "The pod's permissions: `privileged`, `userns` (root in a user namespace), `base` (root with nine "
            "capabilities) or `restricted` (no root)."
        ),
    ] = "base"
    capabilities: Annotated[
        list[str],
        doc(
            "Linux capabilities in addition to those in the `base` and `userns` tiers. For example, bosh-dns needs "
            "`NET_ADMIN` and `SETFCAP`."
        ),
    ] = []
    cpu: Annotated[Cpus, doc("The container's CPU request. 0 means none.")] = 0
    cpu_limit: Annotated[Cpus, doc("The container's CPU limit. 0 means none.")] = 0
    memory: Annotated[
        Size, doc("The container's memory request and limit, in MiB or as a Kubernetes quantity. 0 means none.")
    ] = 0
    resources: Annotated[
        dict[str, Any],
        doc("The container's resources, as in a pod spec. They replace `cpu`, `cpu_limit` and `memory`."),
    ] = {}
    agent: Annotated[
        AgentImage | None,
        doc("The agent to add to an official stemcell image. This is not available in the `restricted` tier."),
    ] = None
    ephemeral_disk: Annotated[EphemeralDisk, doc("The ephemeral disk, which is mounted on `/var/vcap/data`.")] = (
        EphemeralDisk()
    )
    persistent_disk: Annotated[ReservedDisk | None, doc("A persistent disk to create together with the VM.")] = None
    attach: Annotated[AttachWay | Literal[""], doc("Overrides `disks.attach` for this VM.")] = ""
    zone: Annotated[
        str, doc("The zone of the VM's node (`topology.kubernetes.io/zone`). Set it in an AZ's `cloud_properties`.")
    ] = ""
    node_selector: Annotated[dict[str, str], doc("Labels that the node must have.")] = {}
    affinity: Annotated[
        dict[str, Any], doc("The pod's affinity, as in a pod spec, in addition to `zone` and `anti_affinity`.")
    ] = {}
    anti_affinity: Annotated[
        Literal["preferred", "required", "none"],
        doc("Put an instance group's VMs on different nodes and, without `zone`, preferably in different zones."),
    ] = "preferred"
    tolerations: Annotated[list[dict[str, Any]], doc("The pod's tolerations, as in a pod spec.")] = []
    priority_class: Annotated[str, doc("The pod's PriorityClass.")] = ""
    runtime_class: Annotated[str, doc("The pod's RuntimeClass.")] = ""
    image_pull_secrets: Annotated[list[str], doc("The names of Secrets with registry credentials.")] = []
    labels: Annotated[dict[str, str], doc("Additional labels for the pod.")] = {}
    annotations: Annotated[dict[str, str], doc("Additional annotations for the pod.")] = {}
    sysctls: Annotated[dict[str, str], doc("Sysctls to set in the pod.")] = {}
    volumes: Annotated[list[PodVolume], doc("Volumes to mount in addition to the CPI's own.")] = []
    ports: Annotated[list[Port], doc("The pod's ports. They are needed only for `host_port`.")] = []
    services: Annotated[list[KubernetesService], doc("Services in front of the instance group.")] = []
    network_policy: Annotated[
        NetworkPolicy | None, doc("A NetworkPolicy for the instance group, which is deleted with its last VM.")
    ] = None
    disruption_budget: Annotated[
        bool, doc("Create a PodDisruptionBudget for the instance group, so that a drain evicts one VM at a time.")
    ] = True
    host_aliases: Annotated[dict[str, list[str]], doc("Additional names for `/etc/hosts`, keyed by address.")] = {}
    service_account: Annotated[str, doc("The pod's service account. The default is `default`.")] = ""
    service_account_token: Annotated[
        bool, doc("Mount the account's token, which a Director VM needs. Every user on the VM can read the token.")
    ] = False
    grace: Annotated[Count, doc("How many seconds the jobs have to drain and stop when the pod is deleted.")] = 50

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

    storage_class: Annotated[str, doc("The claim's StorageClass. The default is `disks.storage_class`.")] = ""
    access_mode: Annotated[
        Literal["", "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"],
        doc("The claim's access mode. The default is `disks.access_mode`."),
    ] = ""
    volume_attributes_class: Annotated[
        str, doc("The claim's VolumeAttributesClass (Kubernetes 1.34 or newer), which update_disk can change.")
    ] = ""
    snapshot_class: Annotated[
        str, doc("The VolumeSnapshotClass for snapshots. The default is the cluster's default class.")
    ] = ""
    labels: Annotated[dict[str, str], doc("Additional labels for the claim.")] = {}
    annotations: Annotated[dict[str, str], doc("Additional annotations for the claim.")] = {}
    name: Annotated[str, doc("The name of a dynamic disk, which the Director sets.")] = ""


class NetworkProperties(Strict, frozen=True):
    """Cloud properties of networks."""

    cni: Annotated[
        Literal["", "none", "calico", "kube-ovn", "antrea", "multus", "template"],
        doc("Replaces `networks.cni`. `multus` adds an interface to the pod."),
    ] = ""
    annotations: Annotated[
        dict[str, str], doc("Annotations for the pod, in the same form as `networks.annotations`.")
    ] = {}
    name: Annotated[
        str,
        doc("The NetworkAttachmentDefinition (for multus, as `NAMESPACE/NAME` or `NAME`) or the IPPool (for antrea)."),
    ] = ""
    interface: Annotated[str, doc("The name of the interface that multus adds. By default, multus chooses one.")] = ""
    ports: Annotated[
        list[Port],
        doc("The ports of a `vip` network's Service, each with the same keys as in the VM's `ports` property."),
    ] = []
    service_type: Annotated[Literal["ClusterIP", "LoadBalancer"], doc("The type of a `vip` network's Service.")] = (
        "ClusterIP"
    )
