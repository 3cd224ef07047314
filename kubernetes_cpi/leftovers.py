"""``python -m kubernetes_cpi leftovers``: list the Kubernetes objects of VMs, disks
and snapshots that are unknown to the Director.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kubernetes_cpi import names, records, vms
from kubernetes_cpi.client import CLAIMS, PODS, SERVICES, SNAPSHOTS, Object, Resource
from kubernetes_cpi.errors import ApiError, InputError
from kubernetes_cpi.records import Records
from kubernetes_cpi.session import Session

KINDS: Final[tuple[Resource, ...]] = (PODS, CLAIMS, SERVICES, SNAPSHOTS)
"""Kinds of objects to list. Secrets are left out, because a VM's Secret has the name of its pod, and delete_vm removes
both.
"""


class Leftover(msgspec.Struct):
    """A VM, disk or snapshot that the Director does not know."""

    cid: str
    objects: list[str]
    advice: str
    """How the operator can delete a disk or snapshot, or why it might not be a leftover. "" for a VM, which ``remove``
    deletes.
    """


def unknown(session: Session, *, is_deleting: bool) -> list[Leftover]:
    """Return the VMs, disks and snapshots of this Director that have objects in the cluster but are not in the
    Director's records.

    The cluster is queried before the Director, so objects that a task creates between the two queries are not listed.
    However, objects that a running task created earlier may be listed, because they are not in the Director's records
    yet. If ``is_deleting`` is set, ``InputError`` is therefore raised while a task is running.
    """
    objects = [(resource, one) for resource in KINDS for one in _of_director(session, resource)]
    if is_deleting:
        records.check_idle()
    known = records.read()
    orphaned = {names.value(disk) for disk in known.orphaned_disks}
    found: dict[str, Leftover] = {}
    for resource, one in objects:
        owner = _owner(one)
        if owner and not _is_known(one, owner, known, orphaned):
            leftover = found.setdefault(owner, Leftover(owner, [], _advice(one, owner, known)))
            leftover.objects.append(f"{resource.plural}/{one['metadata']['name']}")
    return list(found.values())


def remove(session: Session, found: list[Leftover]) -> Iterator[str]:
    """Delete the VMs among ``found``, but no disks or snapshots. Yield a line of output for each leftover."""
    for one in found:
        if not one.advice:
            vms.delete(session, one.cid)
            yield f"{one.cid}: deleted"
        else:
            yield f"{one.cid}: kept; {one.advice}"


def _of_director(session: Session, resource: Resource) -> Iterator[Object]:
    """Return this Director's objects of a kind. Snapshots are skipped if they cannot be listed, because a cluster need
    not support them.
    """
    selector = f"{names.MANAGED_BY}={names.OURS},{names.DIRECTOR}={names.value(session.director)}"
    try:
        yield from session.client.list(resource, session.namespace, labels=selector)
    except ApiError as exc:
        if resource is not SNAPSHOTS:
            raise InputError(f"cannot list {resource.plural}: {exc}") from exc


def _owner(one: Object) -> str:
    """Return the cid of the VM, disk or snapshot to which an object belongs, or "" if several VMs share it."""
    labels, name = one["metadata"]["labels"], one["metadata"]["name"]
    if labels.get(names.KIND) in (names.KIND_DISK, names.KIND_SNAPSHOT):
        return str(name)
    return str(labels.get(names.VM, ""))


def _is_known(one: Object, owner: str, known: Records, orphaned: set[str]) -> bool:
    """Return True if the Director knows the owner of an object. ``orphaned`` contains the cids of orphaned disks as
    label values.
    """
    labels, annotations = one["metadata"]["labels"], one["metadata"].get("annotations") or {}
    match labels.get(names.KIND):
        case names.KIND_DISK:
            # After a failed migration, the Director does not list the old disk, although it is still attached to its
            # VM.
            return owner in known.disks or annotations.get(names.HOLDER) in known.vms
        case names.KIND_SNAPSHOT:
            # The Director does not list the snapshots of orphaned disks.
            return owner in known.snapshots or labels.get(names.DISK) in orphaned
        case _:
            return owner in known.vms


def _advice(one: Object, owner: str, known: Records) -> str:
    """Return how to delete a disk or snapshot, or why it might not be a leftover. Return "" for a VM."""
    metadata = one["metadata"]
    described = {**(metadata.get("annotations") or {}), **metadata["labels"]}
    deployment = described.get(f"{names.METADATA}deployment", "DEPLOYMENT")
    match metadata["labels"].get(names.KIND):
        case names.KIND_DISK if not known.lists_dynamic_disks:
            return "it may be a dynamic disk, which this Director does not list (GET /dynamic_disks)"
        case names.KIND_DISK:
            return (
                f"if `bosh -d {deployment} cloud-check --report` does not name it as inactive, "
                f"`kubectl -n {metadata['namespace']} delete persistentvolumeclaim {owner}` deletes its data"
            )
        case names.KIND_SNAPSHOT:
            return f"`kubectl -n {metadata['namespace']} delete volumesnapshot {owner}` deletes its data"
        case _:
            return ""
