"""Names and labels of objects. The name of an object is its cid; the cid holds the namespace, so that a call finds it.

Names follow from the request, not from chance: a call that was cut off and is made again finds what it made before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

Cid = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""A cid of this CPI: the name of an object."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = "kubernetes-cpi"

KIND: Final = "cpi.bosh.io/kind"
DIRECTOR: Final = "cpi.bosh.io/director"
VM: Final = "cpi.bosh.io/vm"
DISK: Final = "cpi.bosh.io/disk"
GROUP: Final = "cpi.bosh.io/group"
"""Deployment and instance group as a digest, which fits where their names might not: anti-affinity, Services."""
METADATA: Final = "bosh.io/"
"""Prefix of the labels and annotations that set_vm_metadata and set_disk_metadata make."""

HOLDER: Final = "cpi.bosh.io/holder"
"""Annotation of a claim: the VM that it is attached to, or is being attached to."""
DETACHED_FROM: Final = "cpi.bosh.io/detached-from"
"""Annotation of a claim: the VM that let go of it last; its pod may still mount it."""
RESERVED_FOR: Final = "cpi.bosh.io/reserved-for"
"""Annotation of a claim: the VM that it was made with, until create_disk hands it out."""
REQUEST: Final = "cpi.bosh.io/request"
"""Annotation: digest of the request that made or adopted the object."""
DISKS: Final = "cpi.bosh.io/disks"
"""Annotation of a data claim: the disks of the pod that a recreation makes, as JSON."""
ATTACH: Final = "cpi.bosh.io/attach"
"""Annotation of a VM's pod: how disks come to it while it runs."""
RECREATED: Final = "cpi.bosh.io/recreated"
"""Annotation of a pod that a recreation has made."""

KEEP: Final = "cpi.bosh.io/keep"
"""Label of a Service that outlives the VMs behind it."""

KIND_VM: Final = "vm"
KIND_DISK: Final = "disk"
KIND_DATA: Final = "data"
KIND_ATTACHMENT: Final = "attachment"
KIND_VIP: Final = "vip"
KIND_SERVICE: Final = "service"
KIND_SNAPSHOT: Final = "snapshot"
KIND_REBOOT: Final = "reboot"

_CID: Final = re.compile(r"(?:vm|disk|snapshot)-(?P<namespace>.+)-[0-9a-f]{16}")


def digest(*parts: str) -> str:
    """16 hexadecimal digits that stand for ``parts``."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cid(prefix: str, namespace: str, *parts: str) -> str:
    """The cid of an object that ``parts`` identify."""
    return f"{prefix}-{namespace}-{digest(*parts)}"


def namespace_of(name: str, default: str) -> str:
    """The namespace that a cid names; ``default`` for an object that was made by hand."""
    found = _CID.fullmatch(name)
    return found["namespace"] if found else default


def tail(name: str) -> str:
    """The digest of a cid, or one of a name that is none."""
    return name[-16:] if _CID.fullmatch(name) else digest(name)


def data_claim(vm: str) -> str:
    """The claim of `/var/vcap/data`."""
    return f"data-{vm}"


def attachment(vm: str, disk: str) -> str:
    """The pod that binds a disk into a running VM."""
    return f"attach-{tail(vm)}-{tail(disk)}"


def labels(kind: str, director: str, **more: str) -> dict[str, str]:
    """Labels of every object that the CPI makes."""
    return {MANAGED_BY: OURS, KIND: kind, **({DIRECTOR: value(director)} if director else {}), **more}


def value(text: str) -> str:
    """``text`` as the value of a label: as it is where it fits, else a digest."""
    return text if is_value(text) else digest(text)


def is_value(text: str) -> bool:
    """True for what a label takes as its value."""
    return re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", text) is not None


def metadata(document: Mapping[str, object]) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations for the metadata of a Director: labels where both key and value fit."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for key, given in document.items():
        name = re.sub(r"[^-A-Za-z0-9_.]+", "_", str(key)).strip("-_.")[:63].rstrip("-_.")
        if not name:
            continue
        text = given if isinstance(given, str) else str(given)
        (labels if is_value(text) else annotations)[METADATA + name] = text
    return labels, annotations
