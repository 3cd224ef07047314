"""Define the names, labels and annotations of Kubernetes objects.

The cid of a VM, disk or snapshot is the name of its pod, claim or VolumeSnapshot. It contains the namespace, so that
later calls find the object. Names are derived from the request, so that a retry of an interrupted call finds the
objects that the first attempt created. The names of disks and snapshots are random if the request has no id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

Cid = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""A cid that this CPI creates. It is also the name of the Kubernetes object."""

ARCHITECTURE: Final = "kubernetes.io/arch"
"""Node label with the node's architecture."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = "kubernetes-cpi"

KIND: Final = "cpi.bosh.io/kind"
DIRECTOR: Final = "cpi.bosh.io/director"
VM: Final = "cpi.bosh.io/vm"
DISK: Final = "cpi.bosh.io/disk"
GROUP: Final = "cpi.bosh.io/group"
"""Label with a digest of the deployment and instance group, used for anti-affinity and as a selector of Services. The
names themselves could be too long for a label.
"""
METADATA: Final = "bosh.io/"
"""Prefix of the labels and annotations that set_vm_metadata and set_disk_metadata store."""

HOLDER: Final = "cpi.bosh.io/holder"
"""Annotation on a claim: the VM to which it is attached or is being attached."""
DETACHED_FROM: Final = "cpi.bosh.io/detached-from"
"""Annotation on a claim: the VM that last detached the disk and whose pod may still mount it."""
RESERVED_FOR: Final = "cpi.bosh.io/reserved-for"
"""Annotation on a reserved claim: the VM with which it was created. create_disk removes the annotation when it returns
the disk.
"""
REQUEST: Final = "cpi.bosh.io/request"
"""Annotation: digest of the request that created or adopted the object."""
DISKS: Final = "cpi.bosh.io/disks"
"""Annotation on a data claim during a recreation: a description of the new pod, with its disks, as JSON
(``recreation.Intent``).
"""
ATTACH: Final = "cpi.bosh.io/attach"
"""Annotation on a VM's pod: how disks are attached to it while it runs."""
DISKS_AT: Final = "cpi.bosh.io/disks-at"
"""Annotation on a VM's pod: the directory for disks that have been mounted since the pod was created."""
RECREATED: Final = "cpi.bosh.io/recreated"
"""Annotation on a pod that was created by a recreation."""
POLICY: Final = "cpi.bosh.io/network-policy"
"""Annotation on a VM's Secret: its group's NetworkPolicy."""
INGRESS: Final = "cpi.bosh.io/ingress"
"""Annotation on a Service that has an Ingress with the same name."""

OWN_RULES: Final = {"ingress": "cpi.bosh.io/own-ingress", "egress": "cpi.bosh.io/own-egress"}
"""Labels on pods whose group has its own network rules, by direction of traffic.

Policies are additive, so the namespace's policy must exclude these pods.
"""
KEEP: Final = "cpi.bosh.io/keep"
"""Label on a Service that is not deleted with the last VM behind it."""

KIND_VM: Final = "vm"
KIND_DISK: Final = "disk"
KIND_DATA: Final = "data"
KIND_ATTACHMENT: Final = "attachment"
KIND_VIP: Final = "vip"
KIND_SERVICE: Final = "service"
KIND_SNAPSHOT: Final = "snapshot"
KIND_BUDGET: Final = "budget"
KIND_INGRESS: Final = "ingress"
KIND_POLICY: Final = "network-policy"
KIND_INSTANCE: Final = "instance"
KIND_REBOOT: Final = "reboot"
KIND_DETACHMENT: Final = "detachment"
KIND_BOUND: Final = "bound"

_CID: Final = re.compile(r"(?:vm|disk|snapshot)-(?P<namespace>.+)-[0-9a-f]{16}")


def digest(*parts: str) -> str:
    """Return a digest of ``parts`` with 16 hexadecimal digits."""
    import hashlib

    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cid(prefix: str, namespace: str, *parts: str) -> str:
    """Return the cid of the object that ``parts`` identify."""
    return f"{prefix}-{namespace}-{digest(*parts)}"


def namespace_of(name: str, default: str) -> str:
    """Return the namespace in a cid, or ``default`` for an object that the CPI did not create."""
    found = _CID.fullmatch(name)
    return found["namespace"] if found else default


def tail(name: str) -> str:
    """Return the digest in a cid, or a digest of a name that is not a cid. Names that would be too long with the whole
    cid contain this digest instead.
    """
    return name[-16:] if _CID.fullmatch(name) else digest(name)


def data_claim(vm: str) -> str:
    """Return the name of the claim for `/var/vcap/data`."""
    return f"data-{vm}"


def attachment(vm: str, disk: str) -> str:
    """Return the name of the pod that binds a disk into a running VM."""
    return f"attach-{tail(vm)}-{tail(disk)}"


def detachment(vm: str, disk: str) -> str:
    """Return the name of the pod that unmounts one of a running VM's disks."""
    return f"detach-{tail(vm)}-{tail(disk)}"


def labels(kind: str, director: str, **more: str) -> dict[str, str]:
    """Return the labels that all of the CPI's objects have."""
    return {MANAGED_BY: OURS, KIND: kind, **({DIRECTOR: value(director)} if director else {}), **more}


def is_ours(document: Mapping[str, Any], kind: str, director: str) -> bool:
    """Return True for an object of this kind that has the CPI's labels, unless its labels name another Director."""
    found = document["metadata"].get("labels") or {}
    return all(found.get(key) == wanted for key, wanted in labels(kind, "").items()) and (
        found.get(DIRECTOR) in (None, value(director))
    )


def value(text: str) -> str:
    """Return ``text`` as a label value: unchanged if it is valid, otherwise as a digest."""
    return text if is_value(text) else digest(text)


def is_value(text: str) -> bool:
    """Return True if ``text`` is valid as the value of a label."""
    return re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", text) is not None


def metadata(document: Mapping[str, object]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations in which a Director's metadata is stored.

    Invalid characters in a key are replaced; an entry whose key has no valid characters is left out. An entry is stored
    as a label if its value is valid there, otherwise as an annotation.
    """
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for key, given in document.items():
        # In label and annotation keys, the part after the prefix may have at most 63 characters.
        name = re.sub(r"[^-A-Za-z0-9_.]+", "_", str(key)).strip("-_.")[:63].rstrip("-_.")
        if not name:
            continue
        text = given if isinstance(given, str) else str(given)
        (labels if is_value(text) else annotations)[METADATA + name] = text
    return labels, annotations
