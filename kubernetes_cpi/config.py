"""The configuration: the job's file, overridden by properties of the cpi-config entry, which the Director sends in each
request's context.
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
"""Limit for the length of a namespace. A cid contains the namespace, and must fit into a label value of 63
characters.
"""

AttachWay = Literal["auto", "live", "recreate", "never"]


class Cluster(Strict, frozen=True):
    """Address and credentials of the API server. By default, the service account of the pod in which the CPI runs is
    used.
    """

    server: Annotated[str, doc("URL of the API server. Empty: `https://kubernetes.default.svc`.")] = ""
    ca: Annotated[str, doc("CA of the API server, PEM. Empty: the one mounted into the pod.")] = ""
    token: Annotated[str, doc("Bearer token of a service account.")] = ""
    token_file: Annotated[
        str,
        doc("File with the token, read at each call. Empty: the one mounted into the pod."),
    ] = ""
    client_certificate: Annotated[str, doc("Client certificate, PEM, instead of a token.")] = ""
    client_key: Annotated[str, doc("Key of the client certificate, PEM.")] = ""
    kubeconfig: Annotated[
        str | dict[str, Any],
        doc("A kubeconfig, as text or as a hash, instead of the properties above. Its exec plugins are run."),
    ] = ""
    kubeconfig_file: Annotated[str, doc("File with a kubeconfig.")] = ""
    context: Annotated[str, doc("Context of the kubeconfig. Empty: its current one.")] = ""


class AgentOptions(Strict, frozen=True):
    """Settings of the agent that the Director does not send in its requests."""

    mbus: Annotated[
        str, doc("Address of the message bus, `nats://IP:4222`; for `bosh create-env` the `https://` one.")
    ] = ""
    ntp: Annotated[list[str], doc("Time servers.")] = []
    blobstore: Annotated[dict[str, Any], doc("Blobstore, used if `env.bosh.blobstores` is not set.")] = {}


class DiskOptions(Strict, frozen=True):
    """Settings for persistent disks."""

    attach: Annotated[
        AttachWay,
        doc(
            "How a disk reaches a running VM: `live` binds it into the running pod, `recreate` replaces the pod, and "
            "`never` refuses. `auto`: `live` where the namespace admits it, else `recreate` on a `manual` network, "
            "else `never`."
        ),
    ] = "auto"
    storage_class: Annotated[str, doc("StorageClass of claims. Empty: the cluster's default.")] = ""
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"], doc("Access mode of persistent disks.")
    ] = "ReadWriteOnce"
    host_path: Annotated[
        str,
        doc("Directory on each node through which disks are attached to running VMs. It must be on a shared mount."),
    ] = "/var/lib/kubelet/bosh"
    helper_image: Annotated[str, doc("Image of attachment pods. Empty: the image of the VM.")] = ""
    helper_python: Annotated[str, doc("Python (3.9 or newer) in that image.")] = "/opt/agent_shim/bin/python3"


class Networks(Strict, frozen=True):
    """Defaults for the `cloud_properties` of networks."""

    cni: Annotated[
        Literal["none", "calico", "kube-ovn", "antrea", "template"],
        doc("How a pod gets the address of a `manual` network: by the annotation of this CNI, or by `annotations`."),
    ] = "none"
    annotations: Annotated[
        dict[str, str],
        doc(
            "Annotations of pods on a `manual` network; `((ip))`, `((prefix))`, `((gateway))` and "
            "`((delegated_prefix))` are filled in."
        ),
    ] = {}
    instance_names: Annotated[bool, doc("A headless Service `DEPLOYMENT-GROUP-INDEX` for each instance.")] = True


class Stemcells(Strict, frozen=True):
    """Settings for stemcell images."""

    allow_mutable_images: Annotated[bool, doc("Accept stemcells that name an image without a digest.")] = False
    pull_policy: Annotated[Literal["IfNotPresent", "Always", "Never"], doc("When nodes pull the image.")] = (
        "IfNotPresent"
    )


class Timeouts(Strict, frozen=True):
    """Time limits in seconds."""

    request: Annotated[float, doc("One request to the API server.")] = 30
    retry: Annotated[float, doc("One request with retries after throttling, server errors, lost connections.")] = 60
    create_vm: Annotated[float, doc("From the pod's creation until its agent answers; image pulls included.")] = 600
    unschedulable: Annotated[
        float,
        doc("How long create_vm waits for a node that can take the pod. Set it higher if nodes are added on demand."),
    ] = 10
    room: Annotated[
        float,
        doc(
            "How long create_vm waits for room if every suitable node is full. The Director tries five times, "
            "unless no node is large enough."
        ),
    ] = 30
    volume: Annotated[float, doc("How long create_vm waits for the volumes of new claims.")] = 120
    crashing: Annotated[
        float,
        doc(
            "How long create_vm tolerates a container that keeps exiting. If its agent exits with 78 (wrong "
            "configuration), `timeouts.unschedulable` applies if that is shorter."
        ),
    ] = 40
    unready: Annotated[float, doc("How long create_vm waits for the agent of a running container to boot.")] = 120
    bus: Annotated[float, doc("How long create_vm waits for the agent to reach the bus. 0 disables the check.")] = 10
    unmount: Annotated[float, doc("How long detach_disk waits for the VM to unmount the disk.")] = 20
    helper: Annotated[
        float, doc("Time allowed for starting a helper pod. It is added to the timeout of the pod's work.")
    ] = 60
    delete_vm: Annotated[
        float,
        doc(
            "How long to wait after the grace period for the node to confirm the end of the pod. "
            "Then the pod is deleted by force."
        ),
    ] = 120
    resize: Annotated[float, doc("How long resize_disk waits for the storage to grow, which continues afterwards.")] = (
        30
    )


class Config(Strict, frozen=True):
    """The CPI's configuration after the request's properties have overridden the job's file."""

    cluster: Annotated[Cluster, doc("The API server. Defaults to the in-cluster service account.")] = Cluster()
    namespace: Annotated[
        str,
        doc("Namespace of VMs and disks, at most 40 characters. Empty: from the kubeconfig or service account."),
    ] = ""
    agent: Annotated[AgentOptions, doc("Settings of the agents.")] = AgentOptions()
    disks: Annotated[DiskOptions, doc("Persistent disks.")] = DiskOptions()
    networks: Annotated[Networks, doc("Defaults of networks.")] = Networks()
    stemcells: Annotated[Stemcells, doc("Images.")] = Stemcells()
    vms: Annotated[dict[str, Any], doc("Defaults for the cloud properties of VMs, described in the next list.")] = {}
    timeouts: Annotated[Timeouts, doc("Time limits in seconds.")] = Timeouts()

    def __post_init__(self) -> None:
        if self.namespace:
            check_namespace(self.namespace)


def check_namespace(name: str) -> None:
    """Raise ``ValueError`` unless ``name`` is a DNS label that is short enough to be part of a cid."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MAX_NAMESPACE_CHARS:
        raise ValueError(f"namespace {name!r} is not a DNS label of at most {MAX_NAMESPACE_CHARS} characters")


def load(file: str | Path, context: Mapping[str, Any]) -> Config:
    """Read the job's file, override it with the properties in ``context``, and validate the result."""
    document: dict[str, Any] = {}
    if file:
        try:
            document = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, Any])
        except OSError as exc:
            raise InputError(f"cannot read the configuration: {exc.strerror}: {file}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InputError(f"cannot read the configuration: {file}: {exc}") from exc
        schema.read(document, Config, origin=f"the configuration {file}")
    properties = {key: value for key, value in context.items() if key not in CONTEXT_OF_DIRECTOR}
    return schema.read(schema.merged(document, properties), Config, origin="the properties of the CPI")
