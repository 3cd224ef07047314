"""Claims of persistent disks: which VM holds one, and that no two do.

The VM that holds a disk stands in an annotation of its claim, which is changed only against its `resourceVersion`: of
two calls that want one disk, one sees the other. Whether a VM has let go is asked of the pods themselves.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kubernetes_cpi import manifests, names, pods
from kubernetes_cpi.client import CLAIMS, PODS, SECRETS, Object
from kubernetes_cpi.errors import ApiError, CpiError, DiskNotFoundError
from kubernetes_cpi.session import Session

ATTEMPTS: Final = 10
"""Of a change that others' changes overtake."""


class InUseError(CpiError):
    """Another pod has the disk mounted."""


class Held(msgspec.Struct, frozen=True):
    """A disk that a VM may mount once the VMs of ``lingering``, which were told to let go, no longer do."""

    lingering: list[str]
    detached_from: str
    """The VM that was told last."""


def annotation(claim: Object, key: str) -> str:
    """An annotation; "" when there is none."""
    return (claim["metadata"].get("annotations") or {}).get(key) or ""


def find(session: Session, disk: str) -> Object | None:
    """The claim of a disk; None when there is none, or one that is being deleted or has lost its volume."""
    claim = session.client.find(CLAIMS, session.namespace_of(disk), disk)
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return None
    return None if claim.get("status", {}).get("phase") == "Lost" else claim


def get(session: Session, disk: str) -> Object:
    """The claim of a disk; ``DiskNotFoundError`` as ``find`` says None."""
    claim = find(session, disk)
    if claim is None:
        raise DiskNotFoundError(
            f"cannot find the disk {disk}: the namespace {session.namespace_of(disk)} has no such claim, or it is "
            "being deleted or has lost its volume"
        )
    return claim


def check_same_namespace(session: Session, vm: str, disk: str) -> None:
    """Refuse a disk of another namespace, which no pod can mount."""
    if session.namespace_of(vm) != session.namespace_of(disk):
        raise CpiError(
            f"cannot attach the disk {disk} to {vm}: it lies in the namespace {session.namespace_of(disk)}, the VM in "
            f"{session.namespace_of(vm)}, and a claim cannot be mounted from elsewhere"
        )


def hold(session: Session, disk: str, vm: str) -> Held:
    """Make ``vm`` the holder of a disk; ``InUseError`` when another pod has it mounted."""
    namespace = session.namespace_of(disk)
    for _ in range(ATTEMPTS):
        claim = get(session, disk)
        lingering = check_free(claim, [pod for pod in users(session, namespace, disk) if owner_of(pod) != vm])
        holder, former = annotation(claim, names.HOLDER), annotation(claim, names.DETACHED_FROM)
        if holder not in ("", vm) and _exists(session, holder):
            # It may be about to mount the disk.
            raise InUseError(f"the disk {disk} is in use by {holder}")
        change = {names.HOLDER: vm} | ({names.DETACHED_FROM: None} if former == vm else {})
        if holder == vm or annotate(session, claim, change):
            return Held(lingering, "" if former == vm else former)
    raise CpiError(f"cannot attach the disk {disk}: others change its claim all the time", ok_to_retry=True)


def check_free(claim: Object, users: Sequence[Object]) -> list[str]:
    """The VMs among ``users`` of a claim that have been told to let go of it; ``InUseError`` when others use it."""
    disk, holder = claim["metadata"]["name"], annotation(claim, names.HOLDER)
    for pod in users:
        owner = owner_of(pod)
        if (pod["metadata"].get("labels") or {}).get(names.VM) is None:
            raise InUseError(f"the disk {disk} is in use by the pod {owner}, which is no VM of this CPI")
        if pod["metadata"]["name"] != owner or holder == owner:
            raise InUseError(f"the disk {disk} is in use by {owner}")
    return [owner_of(pod) for pod in users]


def let_go(session: Session, disk: str, vm: str) -> None:
    """Note that ``vm`` has been told to let go of a disk; nothing when another VM holds it."""
    for _ in range(ATTEMPTS):
        claim = find(session, disk)
        if claim is None or annotation(claim, names.HOLDER) not in ("", vm):
            return
        if annotation(claim, names.HOLDER) == "" and annotation(claim, names.DETACHED_FROM) == vm:
            return
        if annotate(session, claim, {names.HOLDER: None, names.DETACHED_FROM: vm}):
            return
    raise CpiError(f"cannot detach the disk {disk}: others change its claim all the time", ok_to_retry=True)


def users(session: Session, namespace: str, disk: str) -> list[Object]:
    """Pods that mount a disk or will, those of others too; a pod whose containers have ended uses nothing."""
    return [
        pod
        for pod in session.client.list(PODS, namespace)
        if disk in manifests.claims_of(pod) and not pods.has_ended(pod) and not pods.has_stopped(pod)
    ]


def _exists(session: Session, vm: str) -> bool:
    """True from the first step of create_vm to the last of delete_vm: its Secret is there, with or without a pod."""
    return session.client.find(SECRETS, session.namespace_of(vm), vm) is not None


def owner_of(pod: Object) -> str:
    """The VM that a pod is, or that it serves; the pod's name when it is not ours."""
    labels = pod["metadata"].get("labels") or {}
    owner: str = labels.get(names.VM) or pod["metadata"]["name"]
    return owner


def is_held(session: Session, disk: str, vm: str) -> bool:
    """True when a disk is there and attached to ``vm``."""
    claim = find(session, disk)
    return claim is not None and annotation(claim, names.HOLDER) == vm


def make(session: Session, namespace: str, body: Object) -> Object:
    """Make a claim, or find the one that an earlier attempt made; ``CpiError`` when it is somebody else's."""
    name = body["metadata"]["name"]
    found, is_new = session.client.ensure(CLAIMS, namespace, body)
    if is_new:
        return found
    labels = found["metadata"].get("labels") or {}
    if "deletionTimestamp" in found["metadata"] or labels.get(names.KIND) != body["metadata"]["labels"][names.KIND]:
        raise CpiError(f"cannot make the claim {name}: one of that name is there and is deleted or not ours")
    return found


def annotate(session: Session, claim: Object, annotations: Mapping[str, str | None]) -> bool:
    """Change a claim as it was read; False when it has changed since."""
    metadata = {"annotations": annotations, "resourceVersion": claim["metadata"]["resourceVersion"]}
    name = claim["metadata"]["name"]
    try:
        session.client.patch(CLAIMS, claim["metadata"]["namespace"], name, {"metadata": metadata})
    except ApiError as exc:
        if exc.status == http.client.CONFLICT:
            return False
        raise
    return True
