"""Manage the disks' PersistentVolumeClaims, and record which VM holds each disk.

An annotation on the claim names the VM that holds the disk. Each change to this annotation is conditional on the
claim's `resourceVersion`, so if two calls for the same disk run concurrently, one of them fails with a conflict. The
annotation does not show whether a VM still uses a disk; that is determined from the pods.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kubernetes_cpi import manifests, names, pods
from kubernetes_cpi.client import CLAIMS, PODS, SECRETS, STORAGE_CLASSES, Object
from kubernetes_cpi.errors import ApiError, CpiError, DiskNotFoundError, InputError
from kubernetes_cpi.session import Session

ATTEMPTS: Final = 10
"""Maximum number of attempts to change an object that other calls keep changing."""


class InUseError(CpiError):
    """The disk is mounted or held by another pod or VM."""


class Held(msgspec.Struct, frozen=True):
    """A disk that a VM now holds. The VMs in ``lingering`` have detached the disk but still have it mounted."""

    lingering: list[str]
    detached_from: str
    """The VM that last detached the disk, or ""."""


def annotation(claim: Object, key: str) -> str:
    """Return an annotation, or "" if it is missing."""
    return (claim["metadata"].get("annotations") or {}).get(key) or ""


def find(session: Session, disk: str) -> Object | None:
    """Return a disk's claim, or None if it does not exist, is being deleted or has lost its volume."""
    claim = session.find(CLAIMS, disk, names.KIND_DISK)
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return None
    return None if claim.get("status", {}).get("phase") == "Lost" else claim


def get(session: Session, disk: str) -> Object:
    """Return a disk's claim. Raises ``DiskNotFoundError`` if it does not exist, is being deleted or has lost its
    volume.
    """
    claim = find(session, disk)
    if claim is None:
        raise DiskNotFoundError(
            f"cannot find the disk {disk}: the namespace {session.namespace_of(disk)} has no such claim, or it is "
            "being deleted or has lost its volume"
        )
    return claim


def check_same_namespace(session: Session, vm: str, disk: str) -> None:
    """Refuse to attach a disk from another namespace, because a pod cannot mount it."""
    if session.namespace_of(vm) != session.namespace_of(disk):
        raise CpiError(
            f"cannot attach the disk {disk} to {vm}: it is in the namespace {session.namespace_of(disk)}, the VM in "
            f"{session.namespace_of(vm)}, and a pod can only mount claims of its own namespace"
        )


def hold(session: Session, disk: str, vm: str) -> Held:
    """Make ``vm`` the holder of a disk.

    Raises ``InUseError`` if another VM holds the disk, or if a pod mounts it. Pods of ``vm`` itself and of VMs that
    have already detached the disk do not count.
    """
    namespace = session.namespace_of(disk)
    for _ in range(ATTEMPTS):
        claim = get(session, disk)
        lingering = check_free(claim, [pod for pod in users(session, namespace, disk) if owner_of(pod) != vm])
        holder, former = annotation(claim, names.HOLDER), annotation(claim, names.DETACHED_FROM)
        if holder not in ("", vm) and _exists(session, holder):
            # No pod mounts the disk yet, but the pod of the VM that holds the disk may be about to mount it.
            raise InUseError(f"the disk {disk} is in use by {holder}")
        # None removes an annotation.
        change = {names.HOLDER: vm} | ({names.DETACHED_FROM: None} if former == vm else {})
        if holder == vm or annotate(session, claim, change):
            return Held(lingering, "" if former == vm else former)
    raise CpiError(f"cannot attach the disk {disk}: other calls keep changing its claim", ok_to_retry=True)


def check_free(claim: Object, users: Sequence[Object]) -> list[str]:
    """Check that no VM and no other pod uses the disk. ``users`` are the pods that mount it.

    A VM that has detached the disk does not count, even if its pod still mounts the disk. Return these VMs. Raises
    ``InUseError`` if any other pod mounts the disk, even a helper pod.
    """
    disk, holder = claim["metadata"]["name"], annotation(claim, names.HOLDER)
    for pod in users:
        owner = owner_of(pod)
        if (pod["metadata"].get("labels") or {}).get(names.VM) is None:
            raise InUseError(f"the disk {disk} is in use by the pod {owner}, which is not a VM of this CPI")
        # A pod whose name differs from its VM's is a helper pod.
        if pod["metadata"]["name"] != owner or holder == owner:
            raise InUseError(f"the disk {disk} is in use by {owner}")
    return [owner_of(pod) for pod in users]


def record_detach(session: Session, disk: str, vm: str) -> None:
    """Record that ``vm`` no longer holds a disk but may still mount it. Does nothing if another VM holds the disk."""
    for _ in range(ATTEMPTS):
        claim = find(session, disk)
        if claim is None or annotation(claim, names.HOLDER) not in ("", vm):
            return
        if annotation(claim, names.HOLDER) == "" and annotation(claim, names.DETACHED_FROM) == vm:
            return
        if annotate(session, claim, {names.HOLDER: None, names.DETACHED_FROM: vm}):
            return
    raise CpiError(f"cannot detach the disk {disk}: other calls keep changing its claim", ok_to_retry=True)


def users(session: Session, namespace: str, disk: str) -> list[Object]:
    """Return all pods that mount a disk or are about to, including pods that are not VMs.

    Pods whose containers have terminated are left out.
    """
    return [
        pod
        for pod in session.client.list(PODS, namespace)
        if disk in manifests.claims_of(pod) and not pods.has_ended(pod) and not pods.has_stopped(pod)
    ]


def _exists(session: Session, vm: str) -> bool:
    """Return True if the VM's Secret exists. create_vm creates it before anything else, and delete_vm deletes it after
    the pod has terminated.
    """
    return session.client.find(SECRETS, session.namespace_of(vm), vm) is not None


def owner_of(pod: Object) -> str:
    """Return the VM to which a pod or helper pod belongs. If the pod was not created by this CPI, return the pod's own
    name.
    """
    labels = pod["metadata"].get("labels") or {}
    owner: str = labels.get(names.VM) or pod["metadata"]["name"]
    return owner


def is_held(session: Session, disk: str, vm: str) -> bool:
    """Return True if the disk exists and ``vm`` holds it."""
    claim = find(session, disk)
    return claim is not None and annotation(claim, names.HOLDER) == vm


def make(session: Session, namespace: str, body: Object) -> Object:
    """Create a claim, or return the claim that an earlier attempt created. Raises ``CpiError`` if an existing claim is
    being deleted or belongs to another owner.
    """
    name = body["metadata"]["name"]
    check_class(session, body)
    found, is_new = session.client.ensure(CLAIMS, namespace, body)
    if is_new:
        return found
    is_ours = names.is_ours(found, body["metadata"]["labels"][names.KIND], session.director)
    if "deletionTimestamp" in found["metadata"] or not is_ours:
        raise CpiError(f"cannot create the claim {name}: the existing one is being deleted or belongs to another owner")
    return found


def check_class(session: Session, body: Object) -> None:
    """Reject a claim whose StorageClass does not exist. The check is skipped if the account is not allowed to read
    StorageClasses.
    """
    name = body["spec"].get("storageClassName")
    try:
        if name and session.client.find(STORAGE_CLASSES, "", name) is None:
            raise InputError(f"cannot create the claim {body['metadata']['name']}: no StorageClass is named {name!r}")
    except ApiError as exc:
        if exc.status != http.client.FORBIDDEN:
            raise


def annotate(session: Session, claim: Object, annotations: Mapping[str, str | None]) -> bool:
    """Change a claim's annotations. Return False, and change nothing, if the claim has changed since it was read."""
    metadata = {"annotations": annotations, "resourceVersion": claim["metadata"]["resourceVersion"]}
    name = claim["metadata"]["name"]
    try:
        session.client.patch(CLAIMS, claim["metadata"]["namespace"], name, {"metadata": metadata})
    except ApiError as exc:
        if exc.status == http.client.CONFLICT:
            return False
        raise
    return True
