"""Create and remove the objects that direct traffic to VMs: Services, Ingresses, group NetworkPolicies, and a DNS name
for each instance.

An object that several VMs share is deleted with the last of them.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from typing import Any, Final

from kubernetes_cpi import log, manifests, names, networks, pods
from kubernetes_cpi.client import INGRESSES, PODS, POLICIES, SERVICES, Object, Resource
from kubernetes_cpi.errors import ApiError, CpiError, VMCreationFailedError
from kubernetes_cpi.manifests import Vm
from kubernetes_cpi.session import Session

MAX_NAME_CHARS: Final = 63
"""Maximum length of a Service name, which must be a DNS label that begins with a letter."""


def make(session: Session, vm: Vm) -> None:
    """Create or update the objects for the VM's group and its `vip` networks. Afterwards, traffic to the `vip`
    addresses reaches this VM, even if it reached another VM before.
    """
    for vip in vm.networks.vips:
        _ensure(session, SERVICES, vm.namespace, networks.service(vip, vm.cid, vm.director))
    for service in vm.properties.services:
        _ensure(session, SERVICES, vm.namespace, manifests.group_service(service, vm))
        if service.ingress:
            _ensure(session, INGRESSES, vm.namespace, manifests.group_ingress(service, service.ingress, vm))
    if vm.properties.network_policy:
        _ensure(session, POLICIES, vm.namespace, manifests.group_policy(vm.properties.network_policy, vm))


def remove(session: Session, vm: str, policy: str) -> None:
    """Delete the Services that lead only to this VM, and those of all groups that have no VMs left.

    ``policy`` is the name of the VM's NetworkPolicy, or "" if there is none. The NetworkPolicy is deleted if the VM's
    group has no VMs left.
    """
    namespace = session.namespace_of(vm)
    for service in session.client.list(SERVICES, namespace, labels=f"{names.MANAGED_BY}={names.OURS}"):
        metadata = service["metadata"]
        labels = metadata["labels"]
        if not names.is_ours(service, labels.get(names.KIND, ""), session.director) or names.KEEP in labels:
            continue
        selector = service["spec"].get("selector", {})
        is_unused = labels.get(names.VM) == vm or selector.get(names.VM) == vm
        # The selector of a Service contains a group only if the Service was created for a VM that has one.
        if labels.get(names.KIND) == names.KIND_SERVICE and names.GROUP in selector:
            is_unused = is_unused or _is_empty(session, namespace, selector[names.GROUP])
        if is_unused:
            if names.INGRESS in (metadata.get("annotations") or {}):
                _delete(session, INGRESSES, namespace, metadata["name"], names.KIND_INGRESS)
            # If a new VM in the group has changed the Service since it was listed, this call deletes nothing.
            session.client.delete(SERVICES, namespace, metadata["name"], version=metadata["resourceVersion"])
    if policy and _is_empty(session, namespace, policy.removeprefix(manifests.GROUP_PREFIX)):
        _delete(session, POLICIES, namespace, policy, names.KIND_POLICY)


def name_instance(session: Session, vm: str, metadata: Mapping[str, Any]) -> None:
    """Point the DNS name `DEPLOYMENT-GROUP-INDEX`, taken from the Director's metadata, to a VM. Compilation VMs get no
    name.

    The name remains valid when the VM's address changes. If the name cannot be created, for example because a
    permission is missing or an unrelated Service has the same name, the reason is only logged.
    """
    parts = [metadata.get(key) for key in ("deployment", "job", "index")]
    if not session.config.networks.instance_names or "compiling" in metadata or None in parts:
        return
    spec: Object = {
        "clusterIP": "None",
        "selector": {names.VM: vm, names.KIND: names.KIND_VM},
        # Publish addresses of pods that are not ready, because the instances of a clustered service must find each
        # other before they become ready.
        "publishNotReadyAddresses": True,
    }
    labels = names.labels(names.KIND_INSTANCE, session.director, **{names.VM: vm})
    body = SERVICES.document(instance_name(*map(str, parts)), labels, spec)
    try:
        _ensure(session, SERVICES, session.namespace_of(vm), body)
    except CpiError as exc:
        log.say(f"the VM has no name in the cluster's DNS: {exc}")


def instance_name(deployment: str, group: str, index: str) -> str:
    """Return the name of an instance as a valid DNS label.

    If the parts do not form a valid label, invalid characters are replaced, a long name is shortened, and a digest
    keeps the name unique.
    """
    text = f"{deployment}-{group}-{index}"
    if len(text) <= MAX_NAME_CHARS and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", text):
        return text
    # "i-", "-" and the digest take 19 characters.
    clean = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[: MAX_NAME_CHARS - 19].rstrip("-")
    return f"i-{clean}-{names.digest(deployment, group, index)}"


def _ensure(session: Session, resource: Resource, namespace: str, body: Object) -> None:
    """Create an object, or update it if it exists.

    Raises ``VMCreationFailedError`` if an existing object was not created by this CPI for this Director.
    """
    made, is_new = session.client.ensure(resource, namespace, body)
    if is_new:
        return
    session.check_ours(made, body["metadata"]["labels"][names.KIND], VMCreationFailedError)
    # The clusterIP of an existing Service cannot be changed.
    spec = {key: value for key, value in body["spec"].items() if key != "clusterIP"}
    metadata = {key: body["metadata"][key] for key in ("labels", "annotations")}
    session.client.patch(resource, namespace, body["metadata"]["name"], {"metadata": metadata, "spec": spec})


def _is_empty(session: Session, namespace: str, group: str) -> bool:
    """Return True if a group has no pods except those that are being deleted."""
    members = session.client.list(PODS, namespace, labels=f"{names.GROUP}={group}")
    return all(pods.is_ending(pod) for pod in members)


def _delete(session: Session, resource: Resource, namespace: str, name: str, kind: str) -> None:
    """Delete an object if this CPI has created it for this Director. If the account is not allowed to read it, only log
    that.
    """
    try:
        found = session.client.find(resource, namespace, name)
    except ApiError as exc:
        if exc.status != http.client.FORBIDDEN:
            raise
        log.say(f"{resource.plural}/{name} remains: {exc}")
        return
    if found is not None and names.is_ours(found, kind, session.director):
        session.client.delete(resource, namespace, name, version=found["metadata"]["resourceVersion"])
