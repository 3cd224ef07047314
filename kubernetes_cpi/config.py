"""Read the configuration from the job's file. Properties in the cpi-config entry, which the Director sends in each
request's context, override those in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from kubernetes_cpi import schema
from kubernetes_cpi.errors import InputError
from kubernetes_cpi.schema import Strict, doc

CONTEXT_OF_DIRECTOR: Final = frozenset({"director_uuid", "request_id", "vm"})
"""Keys that the Director itself sets in a request's context (clouds/external_cpi.rb). All other keys are properties."""

MAX_NAMESPACE_CHARS: Final = 40
"""Maximum length of a namespace. A cid contains the namespace, and must fit into a label value of 63 characters."""

AttachWay = Literal["auto", "live", "recreate", "never"]


class Cluster(Strict, frozen=True):
    """Address and credentials for the API server. By default, the service account of the pod in which the CPI runs is
    used.
    """

    server: Annotated[str, doc("The API server's URL. The default is `https://kubernetes.default.svc`.")] = ""
    ca: Annotated[
        str, doc("The API server's CA certificate in PEM format. The default is the one that is mounted into the pod.")
    ] = ""
    token: Annotated[str, doc("A service account's bearer token.")] = ""
    token_file: Annotated[
        str,
        doc(
            "The file with the token, which every CPI call reads again. The default is the one that is mounted "
            "into the pod."
        ),
    ] = ""
    client_certificate: Annotated[str, doc("A client certificate in PEM format, to be used instead of a token.")] = ""
    client_key: Annotated[str, doc("The client certificate's private key in PEM format.")] = ""
    kubeconfig: Annotated[
        str | dict[str, Any],
        doc(
            "A kubeconfig, as text or as a hash, to be used instead of the properties above. Its exec plugins are run."
        ),
    ] = ""
    kubeconfig_file: Annotated[str, doc("The path of a kubeconfig file.")] = ""
    context: Annotated[str, doc("The kubeconfig context to use. The default is the kubeconfig's current context.")] = ""


class AgentOptions(Strict, frozen=True):
    """Agent settings that the Director does not send in its requests."""

    mbus: Annotated[
        str, doc("The message bus address: `nats://IP:4222`, or the `https://` address for `bosh create-env`.")
    ] = ""
    ntp: Annotated[list[str], doc("The time servers that are passed to the agent.")] = []
    blobstore: Annotated[
        dict[str, Any], doc("The blobstore that the agent uses if `env.bosh.blobstores` is not set.")
    ] = {}


class DiskOptions(Strict, frozen=True):
    """Settings for persistent disks."""

    attach: Annotated[
        AttachWay,
        doc(
            "How a disk is attached to a running VM: `live` binds it into the running pod, `recreate` replaces "
            "the pod, and `never` rejects the request. `auto` means `live` if the namespace admits it, "
            "otherwise `recreate` on a `manual` network and `never` on other networks."
        ),
    ] = "auto"
    storage_class: Annotated[str, doc("The StorageClass for claims. The default is the cluster's default class.")] = ""
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"], doc("The access mode for persistent disks.")
    ] = "ReadWriteOnce"
    host_path: Annotated[
        str,
        doc(
            "The directory on each node through which disks are attached to running VMs. It must be on a shared mount."
        ),
    ] = "/var/lib/kubelet/bosh"
    helper_image: Annotated[str, doc("The image for helper pods. The default is the VM's image.")] = ""
    helper_python: Annotated[str, doc("The path to Python (3.9 or newer) in that image.")] = (
        "/opt/agent_shim/bin/python3"
    )


class Networks(Strict, frozen=True):
    """Defaults for the `cloud_properties` of networks."""

    cni: Annotated[
        Literal["none", "calico", "kube-ovn", "antrea", "template"],
        doc(
            "How a pod gets its address on a `manual` network: through the annotation that this CNI reads or, "
            "for `template`, through `annotations`."
        ),
    ] = "none"
    annotations: Annotated[
        dict[str, str],
        doc(
            "Annotations for pods on a `manual` network. The CPI fills in `((ip))`, `((prefix))`, `((gateway))` "
            "and `((delegated_prefix))`."
        ),
    ] = {}
    instance_names: Annotated[
        bool, doc("Create a headless Service named `DEPLOYMENT-GROUP-INDEX` for each instance.")
    ] = True


class Stemcells(Strict, frozen=True):
    """Settings for stemcell images."""

    allow_mutable_images: Annotated[bool, doc("Accept stemcells that refer to an image without a digest.")] = False
    pull_policy: Annotated[Literal["IfNotPresent", "Always", "Never"], doc("When nodes pull the image.")] = (
        "IfNotPresent"
    )


class Timeouts(Strict, frozen=True):
    """Time limits in seconds."""

    request: Annotated[float, doc("Time limit for a single attempt at a request to the API server.")] = 30
    retry: Annotated[
        float,
        doc("Time limit for a request including its retries after throttling, server errors and lost connections."),
    ] = 60
    create_vm: Annotated[
        float, doc("Time limit from the creation of a pod until its agent answers, including image pulls.")
    ] = 600
    unschedulable: Annotated[
        float,
        doc("How long create_vm waits for a node that can take the pod. Set it higher if nodes are added on demand."),
    ] = 10
    room: Annotated[
        float,
        doc(
            "How long create_vm waits for room if every suitable node is full. The Director calls it up to "
            "five times, unless no node is large enough."
        ),
    ] = 30
    volume: Annotated[float, doc("How long create_vm waits for the volumes of new claims.")] = 120
    crashing: Annotated[
        float,
        doc(
            "How long create_vm tolerates a container that keeps exiting. If its agent exits with 78 (wrong "
            "configuration), `timeouts.unschedulable` applies instead if it is shorter."
        ),
    ] = 40
    unready: Annotated[float, doc("How long create_vm waits for the agent in a running container to boot.")] = 120
    bus: Annotated[float, doc("How long create_vm waits for the agent to reach the bus. 0 disables the check.")] = 10
    unmount: Annotated[float, doc("How long detach_disk waits for the VM to unmount the disk.")] = 20
    helper: Annotated[
        float, doc("How long a helper pod may take to start. This is added to the time limit for the pod's work.")
    ] = 60
    delete_vm: Annotated[
        float,
        doc(
            "How long delete_vm waits after the grace period for the node to confirm that the pod has ended. "
            "After that, it deletes the pod by force."
        ),
    ] = 120
    resize: Annotated[
        float, doc("How long resize_disk waits for the storage to grow. The storage continues to grow afterwards.")
    ] = 30


class Config(Strict, frozen=True):
    """The CPI's configuration after the request's properties have overridden the job's file."""

    cluster: Annotated[Cluster, doc("How to reach the API server. The default is the in-cluster service account.")] = (
        Cluster()
    )
    namespace: Annotated[
        str,
        doc(
            "The namespace for VMs and disks, at most 40 characters long. The default is the one in the "
            "kubeconfig or the service account's."
        ),
    ] = ""
    agent: Annotated[AgentOptions, doc("Agent settings that the Director does not send.")] = AgentOptions()
    disks: Annotated[DiskOptions, doc("Settings for persistent disks.")] = DiskOptions()
    networks: Annotated[Networks, doc("Defaults for the networks' cloud properties.")] = Networks()
    stemcells: Annotated[Stemcells, doc("Settings for stemcell images.")] = Stemcells()
    vms: Annotated[dict[str, Any], doc("Defaults for the VMs' cloud properties, which the next list describes.")] = {}
    timeouts: Annotated[Timeouts, doc("Time limits in seconds.")] = Timeouts()

    def __post_init__(self) -> None:
        """Reject an invalid namespace. msgspec converts the ``ValueError`` to a ``ValidationError``."""
        if self.namespace:
            check_namespace(self.namespace)


def check_namespace(name: str) -> None:
    """Raise ``ValueError`` unless ``name`` is a DNS label that is short enough to be part of a cid."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MAX_NAMESPACE_CHARS:
        raise ValueError(f"namespace {name!r} is not a DNS label of at most {MAX_NAMESPACE_CHARS} characters")


def load(file: str | Path, context: Mapping[str, Any]) -> Config:
    """Read the job's file, override it with the properties in ``context``, and validate the result.

    If ``file`` is "", only the properties are used.
    """
    document: dict[str, Any] = {}
    if file:
        try:
            document = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, Any])
        except OSError as exc:
            raise InputError(f"cannot read the configuration: {exc.strerror}: {file}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InputError(f"cannot read the configuration: {file}: {exc}") from exc
        # Validate the file before merging it with the properties, so that error messages can name the file.
        schema.read(document, Config, origin=f"the configuration {file}")
    properties = {key: value for key, value in context.items() if key not in CONTEXT_OF_DIRECTOR}
    return schema.read(schema.merged(document, properties), Config, origin="the properties of the CPI")
