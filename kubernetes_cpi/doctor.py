"""``python -m kubernetes_cpi doctor``: report which permissions, security tiers, StorageClasses and ways to attach
disks this cluster, namespace and account offer.

The command uses access reviews and dry runs, and creates nothing.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Final

import msgspec

from kubernetes_cpi import attachments, manifests, names, networks, schema, vms
from kubernetes_cpi.client import ACCESS_REVIEWS, NODES, PODS, SNAPSHOTS, STORAGE_CLASSES, Object
from kubernetes_cpi.errors import ApiError, CpiError, InputError
from kubernetes_cpi.manifests import Vm
from kubernetes_cpi.properties import VmProperties
from kubernetes_cpi.session import Session

OK: Final = "ok"
LIMITED: Final = "limited"
WRONG: Final = "WRONG"
PERMISSIONS: Final = {
    "pods": "create delete get list patch watch",
    "secrets": "create delete get",
    "persistentvolumeclaims": "create delete get list patch watch",
    "services": "create delete get list patch",
    "poddisruptionbudgets.policy": "create delete get patch",
    "ingresses.networking.k8s.io": "create delete get patch",
    "networkpolicies.networking.k8s.io": "create delete get patch",
    "events": "list",
    "pods/log": "get",
    "volumesnapshots.snapshot.storage.k8s.io": "create delete get list watch",
}
"""Required verbs for each resource, as in deploy/cpi/base/role.yaml. The keys have the form
RESOURCE[/SUBRESOURCE][.GROUP].
"""
IMAGE: Final = "registry.invalid/doctor@sha256:" + "0" * 64
TIERS: Final = ("restricted", "base", "userns", "privileged")
APPLY: Final = "kubectl apply -k deploy/cpi/LEVEL"


class CheckRow(msgspec.Struct, frozen=True):
    """A line of the report: what was checked, the result, and what to change."""

    subject: str
    state: str
    text: str
    change: str = ""


def findings(session: Session) -> Iterator[CheckRow]:
    """Yield the result of every check that is possible without creating a VM. If the cluster is unreachable, yield only
    that result.
    """
    try:
        session.client.find(PODS, session.namespace, "doctor")
    except CpiError as exc:
        # A 403 shows that the cluster is reachable. ``_permissions`` reports what is missing.
        if not (isinstance(exc, ApiError) and exc.status == http.client.FORBIDDEN):
            yield CheckRow("cluster", WRONG, str(exc), "`cluster` of the configuration: address, CA, token")
            return
    yield CheckRow("cluster", OK, f"{session.client.access.server}, namespace {session.namespace}")
    yield from _permissions(session)
    yield _bus(session)
    yield from _tiers(session)
    yield from _classes(session)
    yield from _extras(session)


def _permissions(session: Session) -> Iterator[CheckRow]:
    """Check that the account has all required permissions, and that it cannot list Secrets."""
    missing = []
    for name, verbs in PERMISSIONS.items():
        resource, _, group = name.partition(".")
        plural, _, part = resource.partition("/")
        for verb in verbs.split():
            wanted: Object = {"namespace": session.namespace, "verb": verb, "group": group, "resource": plural}
            if not _is_allowed(session, wanted | ({"subresource": part} if part else {})):
                missing.append(f"{verb} {name}")
    if missing:
        yield CheckRow("account", WRONG, f"may not {', '.join(missing)}", APPLY)
    else:
        yield CheckRow("account", OK, "has all permissions of the Role")
    if _is_allowed(session, {"namespace": session.namespace, "verb": "list", "resource": "secrets"}):
        yield CheckRow("account", LIMITED, "may list Secrets, which the CPI does not need", APPLY)


def _is_allowed(session: Session, attributes: Object) -> bool:
    """Return True if the account is allowed to perform an action. ``attributes`` are the `resourceAttributes` of an
    access review.
    """
    body: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {"name": ""},  # ``Client.create`` needs a name for its messages.
        "spec": {"resourceAttributes": attributes},
    }
    return bool(session.client.create(ACCESS_REVIEWS, "", body).get("status", {}).get("allowed"))


def _bus(session: Session) -> CheckRow:
    """Check the configured bus address. The Director's `agent.env`, which may override it, is not known here."""
    try:
        vms.bus_schemes(session.config.agent.mbus, {})
    except InputError as exc:
        return CheckRow("agent.mbus", WRONG, str(exc), "or `env.bosh.mbus.urls` of the Director's `agent.env`")
    return CheckRow("agent.mbus", OK, "an address; create_vm checks whether the agent reaches it")


def _tiers(session: Session) -> Iterator[CheckRow]:
    """Use dry runs to check which security tiers and which ways of attaching disks the namespace admits.

    A tier that is not admitted is ``WRONG`` only if it is the configured one.
    """
    default = schema.read(session.config.vms, VmProperties, origin="`vms` of the configuration").tier
    for tier in TIERS:
        refusal = _refusal(session, tier)
        state = OK if not refusal else WRONG if tier == default else LIMITED
        change = "" if not refusal else "another `tier`, or a namespace of a higher Pod Security level"
        yield CheckRow(f"tier {tier}", state, refusal or "admitted", change)
    body = manifests.pod(_vm(session, default))
    refusal = attachments.refusal(session, session.namespace, body)
    way = session.config.disks.attach
    if not refusal:
        yield CheckRow("disks.attach", OK, f"{way}: disks reach running VMs live")
        return
    # With `auto`, disks can still be attached to running VMs on manual networks.
    state = WRONG if way == "live" else OK if way in ("recreate", "never") else LIMITED
    change = "a namespace of the level `privileged`, reserved disks, `disks.attach: recreate`, or a manual network"
    yield CheckRow("disks.attach", state, f"{way}; no live disks: {refusal}", change if state != OK else "")


def _refusal(session: Session, tier: str) -> str:
    """Return why the namespace does not admit a VM of this tier, or "" if it does."""
    try:
        session.client.try_create(PODS, session.namespace, manifests.pod(_vm(session, tier)))
    except ApiError as exc:
        return str(exc)
    return ""


def _vm(session: Session, tier: str) -> Vm:
    """Return a VM for a dry run. It has no live disks, because a namespace may admit its tier but not live disks."""
    properties = schema.read(
        schema.merged(session.config.vms, {"tier": tier}), VmProperties, origin="`vms` of the configuration"
    )
    return Vm(
        cid=names.cid("vm", session.namespace, "doctor", tier),
        namespace=session.namespace,
        director=session.director,
        image=IMAGE,
        architecture="",
        properties=properties,
        networks=networks.NetworkPlan(settings={}),
        groups=[],
        attach="never",
        pull_policy=session.config.stemcells.pull_policy,
        host_path=session.config.disks.host_path,
        storage_class=session.config.disks.storage_class,
    )


def _classes(session: Session) -> Iterator[CheckRow]:
    """Check the configured StorageClass."""
    name = session.config.disks.storage_class
    if not name:
        yield CheckRow(
            "disks.storage_class", OK, "empty: the cluster's default, if it has one (kubectl get storageclass)"
        )
        return
    try:
        found = session.client.find(STORAGE_CLASSES, "", name)
    except ApiError as exc:
        yield CheckRow("disks.storage_class", LIMITED, str(exc), "kubectl apply -k deploy/cpi/cluster-reader")
        return
    if found is None:
        yield CheckRow("disks.storage_class", WRONG, f"no StorageClass is named {name!r}", "kubectl get storageclass")
        return
    grows = "can grow" if found.get("allowVolumeExpansion") else "cannot grow: the Director copies to a larger disk"
    yield CheckRow("disks.storage_class", OK, f"{name}: {found.get('provisioner')}, {grows}")


def _extras(session: Session) -> Iterator[CheckRow]:
    """Check optional permissions, and report what is impossible without them."""
    for subject, resource, namespace, lost in (
        ("snapshots", SNAPSHOTS, session.namespace, "snapshot_disk is not implemented"),
        ("nodes", NODES, "", "delete_vm cannot distinguish a healthy node from a dead one"),
    ):
        try:
            # ``find`` would also return None if the cluster had no VolumeSnapshots.
            if resource is SNAPSHOTS:
                list(session.client.list(resource, namespace))
            else:
                session.client.find(resource, namespace, "doctor")
        except ApiError as exc:
            change = "kubectl apply -k deploy/cpi/cluster-reader" if subject == "nodes" else ""
            yield CheckRow(subject, LIMITED, f"{lost}: {exc}", change)
        else:
            yield CheckRow(subject, OK, "readable")
