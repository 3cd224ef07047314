"""Create, attach, change and delete persistent disks. There are four ways to attach a disk to a VM.

A disk that is named in the create_vm request is mounted when the VM is created, so attach_disk has nothing left to do.
A reserved disk is created and mounted together with the VM, and a later create_disk returns its cid. Any other disk is
attached either live, by an attachment pod that binds it into the running pod, or by recreation, which replaces the pod
with one that mounts the disk.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from kubernetes_cpi import attachments, claims, log, manifests, names, pods, recreation, schema, vms
from kubernetes_cpi.client import CLAIMS, PODS, STORAGE_CLASSES, Object
from kubernetes_cpi.errors import (
    ApiError,
    CpiError,
    DiskNotAttachedError,
    DiskNotFoundError,
    InputError,
    NotSupportedError,
    VMNotFoundError,
)
from kubernetes_cpi.names import Cid
from kubernetes_cpi.properties import DiskProperties
from kubernetes_cpi.session import Session

MIB: Final = 1024**2


def create(session: Session, size_mib: int, cloud_properties: Object | None = None, vm: Cid | None = None) -> str:
    """Create a disk's claim, or use the claim that was reserved for the VM.

    Return the disk's cid without waiting until a volume is bound to the claim. ``vm`` is the VM that will use the disk,
    or None if the Director does not know it yet.
    """
    if size_mib <= 0:
        raise InputError(f"cannot create a disk of {size_mib} MiB")
    cloud_properties = cloud_properties or {}
    properties = _properties(cloud_properties)
    request = names.digest(
        session.director, session.request_id, vm or "", str(size_mib), str(sorted(cloud_properties.items()))
    )
    if vm and (reserved := _reserved_disk(session, vm, size_mib, request)):
        return reserved
    namespace = session.namespace_of(vm) if vm else session.namespace
    # The claim's name is derived from the Director's request id, so a retried request finds the claim of the first
    # attempt. Requests from the CLI have no id.
    key = (request,) if session.request_id else (os.urandom(8).hex(),)
    body = manifests.disk_claim(
        names.cid("disk", namespace, *key), session.director, size_mib, properties, session.config
    )
    claims.check_class(session, body)
    made, is_new = session.client.ensure(CLAIMS, namespace, body)
    if not is_new and not _is_unused(made):
        # The Director's request ids are random six-digit numbers, and an earlier request happened to have the same one.
        # Create a claim with a random name instead.
        body["metadata"]["name"] = names.cid("disk", namespace, os.urandom(8).hex())
        body["metadata"]["labels"][names.DISK] = body["metadata"]["name"]
        session.client.ensure(CLAIMS, namespace, body)
    cid: str = body["metadata"]["name"]
    return cid


def delete(session: Session, disk: Cid) -> None:
    """Delete a disk's claim, even if it has lost its volume. If the disk is detached but a pod still mounts it, the
    cluster keeps the claim until that pod has terminated.
    """
    namespace = session.namespace_of(disk)
    claim = session.client.find(CLAIMS, namespace, disk)
    session.check_ours(claim, names.KIND_DISK, DiskNotFoundError)
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return
    try:
        claims.check_free(claim, claims.users(session, namespace, disk))
    except claims.InUseError as exc:
        raise CpiError(f"cannot delete the disk {disk}: {exc}; detach it first") from exc
    session.client.delete(CLAIMS, namespace, disk)


def has(session: Session, disk: Cid) -> bool:
    """Return True if the claim exists, is not being deleted and has not lost its volume."""
    return claims.find(session, disk) is not None


def attach(session: Session, vm: Cid, disk: Cid) -> dict[str, str]:
    """Attach a disk to a VM. Return the disk's path in the VM as a hint for the agent."""
    claims.check_same_namespace(session, vm, disk)
    pod = _pod(session, vm)
    if disk in manifests.disks_of(pod):
        # The pod already mounts the disk. The disk may have been detached since, so make the VM its holder again.
        claim = claims.get(session, disk)
        if claims.annotation(claim, names.HOLDER) != vm:
            claims.hold(session, disk, vm)
        recreation.finish(session, pod)
        if not pods.is_ready(pod):
            pods.until_ready(session, session.namespace_of(vm), pod, timeout_s=session.config.timeouts.create_vm)
        return {"path": manifests.place_at_creation(pod, disk)}
    if manifests.live_disks(pod):
        return _attach_live(session, pod, disk)
    return _attach_by_recreation(session, pod, disk)


def detach(session: Session, vm: Cid, disk: Cid) -> None:
    """Detach a disk from a VM. A disk that was attached live is unmounted immediately. A disk that has been mounted
    since the pod was created stays mounted until the pod terminates.
    """
    pod = session.find(PODS, vm, names.KIND_VM)
    claim = claims.find(session, disk)
    is_mounted = pod is not None and disk in manifests.disks_of(pod)
    attachment = attachments.find(session, vm, disk)
    is_live = attachment is not None
    if claim is None and not is_live:
        raise DiskNotFoundError(f"cannot detach the disk {disk}: there is no such claim")
    holder = claims.annotation(claim, names.HOLDER) if claim else vm
    # If an earlier call has already detached the disk, this call succeeds too.
    was_detached = claim is not None and claims.annotation(claim, names.DETACHED_FROM) == vm
    if not is_live and holder != vm and not was_detached:
        raise DiskNotAttachedError(f"cannot detach the disk {disk}: it is not attached to {vm}")
    if attachment is not None and pod is not None:
        # Unmount before anything else is changed, so that a failed detach leaves the attachment as it was.
        attachments.unmount(session, pod, attachment, disk)
    claims.record_detach(session, disk, vm)
    if is_live:
        attachments.end(session, vm, disk)
    elif is_mounted:
        log.say(f"the disk {disk} stays mounted in the pod {vm} until that ends or another VM wants it")


def of_vm(session: Session, vm: Cid) -> list[str]:
    """Return the disks that are attached to a VM."""
    pod = vms.get(session, vm)
    kept = [disk for disk in manifests.disks_of(pod) if claims.is_held(session, disk, vm)]
    return [*kept, *attachments.disks_of(attachments.of(session, vm))]


def set_metadata(session: Session, disk: Cid, metadata: Object) -> None:
    """Store the Director's metadata as labels and annotations on the claim."""
    claims.get(session, disk)  # This raises an error if the claim was not created by this CPI for this Director.
    vms.patch_metadata(session, CLAIMS, disk, metadata, DiskNotFoundError)


def resize(session: Session, disk: Cid, size_mib: int) -> None:
    """Grow the disk's claim. Its file system grows at the next mount.

    Raises ``NotSupportedError`` if the volume cannot grow; the Director then copies the data to a new disk.
    """
    claim = claims.get(session, disk)
    _grow(session, claim, size_mib)


def update(session: Session, disk: Cid, size_mib: int, cloud_properties: Object | None = None) -> None:
    """Change a disk's size and VolumeAttributesClass.

    Raises ``NotSupportedError`` for other changes; the Director then copies the data to a new disk.
    """
    claim, properties = claims.get(session, disk), _properties(cloud_properties or {})
    spec = claim["spec"]
    wanted = properties.storage_class or session.config.disks.storage_class
    if wanted and wanted != spec.get("storageClassName"):
        raise NotSupportedError(
            f"cannot change the disk {disk}: its StorageClass is {spec.get('storageClassName')!r} and cannot change"
        )
    if properties.access_mode and properties.access_mode not in spec["accessModes"]:
        raise NotSupportedError(
            f"cannot change the disk {disk}: its access mode is {spec['accessModes'][0]} and cannot change"
        )
    if properties.volume_attributes_class not in ("", spec.get("volumeAttributesClassName")):
        _patch(session, claim, {"volumeAttributesClassName": properties.volume_attributes_class})
    _grow(session, claim, size_mib)


# --- attach -----------------------------------------------------------------------------------------------------------


def _attach_live(session: Session, pod: Object, disk: str) -> dict[str, str]:
    """Attach a disk with an attachment pod, unless that was done already. Return the hint for the agent."""
    vm = pod["metadata"]["name"]
    attachment, claim = attachments.find(session, vm, disk), claims.get(session, disk)
    is_mounted = attachment is not None and pods.is_ready(attachment)
    if not is_mounted or claims.annotation(claim, names.HOLDER) != vm:
        _release(session, disk, claims.hold(session, disk, vm))
        try:
            attachments.create(session, pod, disk)
        except CpiError:
            claims.record_detach(session, disk, vm)
            raise
    return {"path": f"{manifests.live_disks(pod)}/{disk}"}


def _attach_by_recreation(session: Session, pod: Object, disk: str) -> dict[str, str]:
    """Attach a disk by recreating the VM's pod. Return the hint for the agent.

    Raises ``NotSupportedError`` if the pod cannot be recreated or its recreation is not allowed.
    """
    vm = pod["metadata"]["name"]
    if (pod["metadata"].get("annotations") or {}).get(names.ATTACH) == "never":
        raise NotSupportedError(
            f"cannot attach the disk {disk} to {vm}, which runs: the VM was created with `attach: never`; reserve a "
            "disk with the cloud property `persistent_disk`, or choose `recreate` or `live`"
        )
    if recreation.must_keep_address(session, pod):
        raise NotSupportedError(
            f"cannot attach the disk {disk} to {vm}, which runs: the namespace refuses live attachments, and another "
            "pod would get another address on its dynamic network, which links, DNS and `bosh vms` would not learn. "
            "Reserve the disk (cloud property `persistent_disk`), admit privileged pods, use a manual network, or set "
            "`disks.attach: recreate` and run `bosh recreate` after the deploy"
        )
    if not recreation.can_recreate(pod):
        raise NotSupportedError(
            f"cannot attach the disk {disk} to {vm}, which runs: its {manifests.DATA} is not a claim, so its pod "
            "cannot be recreated; recreate the VM with `disks.attach: recreate` or `live`"
        )
    _release(session, disk, claims.hold(session, disk, vm))
    kept = [one for one in manifests.disks_of(pod) if claims.is_held(session, one, vm)]
    try:
        recreation.recreate(session, pod, [*kept, disk])
    except CpiError:
        claims.record_detach(session, disk, vm)
        raise
    return {"path": manifests.place_at_creation(pod, disk)}


def _pod(session: Session, vm: str) -> Object:
    """Return a VM's pod, after completing an interrupted recreation."""
    pod = session.find(PODS, vm, names.KIND_VM)
    if pod is not None:
        return pod
    intent = recreation.unfinished(session, vm)
    if intent is None:
        raise VMNotFoundError(f"cannot attach a disk to {vm}: the namespace {session.namespace_of(vm)} has no such pod")
    return recreation.carry_on(session, vm, intent)


def _release(session: Session, disk: str, held: claims.Held) -> None:
    """Free a disk from the VMs that have detached it, so that a new VM can mount it.

    ``held`` is the result of ``claims.hold`` and names these VMs. If a VM's pod still mounts the disk, the pod is
    deleted, or recreated without the disk.
    """
    for other in dict.fromkeys([*held.lingering, *filter(None, [held.detached_from])]):
        pod = session.find(PODS, other, names.KIND_VM)
        if pod is not None and disk in manifests.disks_of(pod):
            recreation.release(session, pod, disk)
        elif pod is not None:
            recreation.finish(session, pod)
        elif intent := recreation.unfinished(session, other):
            # A recreation of that VM was interrupted before it created the new pod, so complete it.
            recreation.carry_on(session, other, intent, is_enough=pods.has_started)


# --- create and change ------------------------------------------------------------------------------------------------


def _properties(document: Mapping[str, Any]) -> DiskProperties:
    return schema.read(document, DiskProperties, origin="the cloud properties of the disk")


def _is_unused(claim: Object) -> bool:
    """Return True if nothing has used or changed the claim since it was created, and it is not being deleted."""
    annotations = claim["metadata"].get("annotations") or {}
    is_used = any(key in annotations for key in (names.HOLDER, names.DETACHED_FROM))
    has_metadata = any(
        key.startswith(names.METADATA) for key in [*annotations, *(claim["metadata"].get("labels") or {})]
    )
    return not is_used and not has_metadata and "deletionTimestamp" not in claim["metadata"]


def _reserved_disk(session: Session, vm: str, size_mib: int, request: str) -> str:
    """Return the cid of the disk that was reserved for a VM, or "" if no disk is available.

    Only one create_disk request gets the disk. A retry of that request gets the same cid again.
    """
    namespace = session.namespace_of(vm)
    name = manifests.reserved_name(vm, namespace)
    for _ in range(claims.ATTEMPTS):
        claim = claims.find(session, name)
        if claim is None:
            return ""
        if claims.annotation(claim, names.RESERVED_FOR) != vm:
            # create_disk has already returned this disk, either to a different request or to an earlier attempt of
            # this request, whose response was lost.
            return name if session.request_id and claims.annotation(claim, names.REQUEST) == request else ""
        if manifests.amount_of(claim["spec"]["resources"]["requests"]["storage"]) < size_mib * MIB:
            _grow(session, claim, size_mib)  # This changes the claim, so the next iteration reads it again.
        elif claims.annotate(session, claim, {names.RESERVED_FOR: None, names.REQUEST: request}):
            return name
    raise CpiError(f"cannot return the reserved disk {name}: other calls keep changing its claim", ok_to_retry=True)


def _grow(session: Session, claim: Object, size_mib: int) -> None:
    """Request a larger volume, and wait for up to `timeouts.resize` until it has grown.

    If that takes longer, only log this, because the cluster continues to grow the volume.

    If no volume is bound to the claim yet, do not wait, because the new volume will have the requested size.
    """
    name, wanted = claim["metadata"]["name"], size_mib * MIB
    has = manifests.amount_of(claim["spec"]["resources"]["requests"]["storage"])
    if wanted < has:
        raise NotSupportedError(
            f"cannot resize the disk {name} to {size_mib} MiB: it has {has // MIB:.0f} MiB and cannot shrink"
        )
    if wanted == has:
        return
    _check_expansion(session, claim)
    changed = _patch(session, claim, {"resources": {"requests": {"storage": manifests.quantity(size_mib)}}})
    if changed.get("status", {}).get("phase") != "Bound":
        return
    deadline = time.monotonic() + session.config.timeouts.resize
    for state in session.client.follow(CLAIMS, claim["metadata"]["namespace"], name, deadline, changed):
        status = (state or {}).get("status", {})
        has_grown = manifests.amount_of(status.get("capacity", {}).get("storage", "0")) >= wanted
        # In this state, the volume has grown, and its file system grows at the next mount.
        is_pending = any(one["type"] == "FileSystemResizePending" for one in status.get("conditions") or [])
        if state is None or has_grown or is_pending:
            return
    log.say(f"the disk {name} has not grown to {size_mib} MiB yet: the cluster is still growing it")


def _check_expansion(session: Session, claim: Object) -> None:
    """Refuse to grow a disk whose StorageClass does not allow it.

    If the account is not allowed to read the class, this check is left to the API server.
    """
    name = claim["spec"].get("storageClassName")
    try:
        found = session.client.find(STORAGE_CLASSES, "", name) if name else None
    except ApiError as exc:
        if exc.status != http.client.FORBIDDEN:
            raise
        return
    if found is not None and not found.get("allowVolumeExpansion"):
        raise NotSupportedError(
            f"cannot resize the disk {claim['metadata']['name']}: its StorageClass {name} has no allowVolumeExpansion"
        )


def _patch(session: Session, claim: Object, spec: Object) -> Object:
    """Merge ``spec`` into a claim's spec, and return the claim. Raises ``NotSupportedError`` if the cluster rejects the
    change.
    """
    metadata = claim["metadata"]
    try:
        return session.client.patch(CLAIMS, metadata["namespace"], metadata["name"], {"spec": spec})
    except ApiError as exc:
        if exc.status in (http.client.FORBIDDEN, http.client.UNPROCESSABLE_ENTITY):
            raise NotSupportedError(f"cannot change the disk {metadata['name']}: {exc}") from exc
        raise
