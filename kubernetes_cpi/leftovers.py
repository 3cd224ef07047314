"""``python -m kubernetes_cpi leftovers``: objects of VMs and disks that the Director does not know.

The names that it knows are those in a text, such as the output of `bosh instances --details --json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubernetes_cpi import names, vms
from kubernetes_cpi.client import CLAIMS, PODS, SERVICES, SNAPSHOTS, Object, Resource
from kubernetes_cpi.errors import ApiError, InputError
from kubernetes_cpi.session import Session

KINDS: Final[tuple[Resource, ...]] = (PODS, CLAIMS, SERVICES, SNAPSHOTS)
"""Kinds that the account may list. A Secret has the name of its VM's pod. Delete_vm removes it."""


def unknown(session: Session, text: str) -> dict[str, list[str]]:
    """Return the objects of this Director by the VM or disk that they belong to, if ``text`` does not name it."""
    known = names.cids_in(text)
    if not known:
        raise InputError("cannot look for leftovers: standard input names no VM or disk of the Director")
    found: dict[str, list[str]] = {}
    for resource in KINDS:
        for one in _of_director(session, resource):
            owner = _owner(one)
            if owner and owner not in known:
                found.setdefault(owner, []).append(f"{resource.plural}/{one['metadata']['name']}")
    return found


def remove(session: Session, owners: dict[str, list[str]]) -> Iterator[str]:
    """Delete the VMs among ``owners`` with their objects, but no disk and no snapshot. Yield a line for each."""
    for owner, objects in owners.items():
        if owner.startswith("vm-"):
            vms.delete(session, owner)
            yield f"{owner}: deleted"
        else:
            yield f"{owner}: kept; `kubectl delete {' '.join(objects)}` deletes its data"


def _of_director(session: Session, resource: Resource) -> Iterator[Object]:
    selector = f"{names.MANAGED_BY}={names.OURS},{names.DIRECTOR}={names.value(session.director)}"
    try:
        yield from session.client.list(resource, session.namespace, labels=selector)
    except ApiError as exc:
        if resource is not SNAPSHOTS:
            raise InputError(f"cannot list {resource.plural}: {exc}") from exc


def _owner(one: Object) -> str:
    """Return the VM, disk or snapshot of an object, or "" if several VMs share it."""
    labels, name = one["metadata"]["labels"], one["metadata"]["name"]
    if labels.get(names.KIND) in (names.KIND_DISK, names.KIND_SNAPSHOT):
        return str(name)
    return str(labels.get(names.VM, ""))
