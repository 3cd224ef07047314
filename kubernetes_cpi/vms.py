"""Creates, deletes and changes VMs. A VM consists of a pod, an immutable Secret with the agent's settings, and
optionally a data claim. If the pod fails, the cluster does not replace it.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kubernetes_cpi import (
    attachments,
    budgets,
    claims,
    log,
    manifests,
    names,
    networks,
    pods,
    recreation,
    schema,
    services,
    stemcells,
)
from kubernetes_cpi.client import CLAIMS, PODS, SECRETS, Object, Resource
from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import (
    ApiError,
    CpiError,
    InputError,
    NotImplementedByCpiError,
    NotSupportedError,
    UnreachableError,
    VMCreationFailedError,
    VMNotFoundError,
)
from kubernetes_cpi.manifests import Vm
from kubernetes_cpi.names import Cid
from kubernetes_cpi.properties import VmProperties
from kubernetes_cpi.session import Session

GRACE_OF_FAILED_S: Final = 1
"""Grace period in seconds for the pod of a VM that has never run a job."""


BUS: Final = "to the bus|bus credentials"
"""Regular expression for lines in the agent's log about its connection to the bus."""
REACHED: Final = "connected to the bus|does not know us|refuses our certificate|bus credentials"
"""Regular expression for log lines that show that the agent has reached a bus server."""
BUS_PAUSE_S: Final = 0.2
BOOT_S: Final = 2.0
"""Seconds that the agent may take to reach the bus after its container has started. Most agents need less than a
second.
"""


class MbusEnv(msgspec.Struct, frozen=True):
    urls: list[str] = []


class BoshEnv(msgspec.Struct, frozen=True):
    mbus: MbusEnv = MbusEnv()


class VmEnv(msgspec.Struct, frozen=True):
    """The part of `env` that contains the bus addresses."""

    bosh: BoshEnv = BoshEnv()


def create(
    session: Session,
    agent_id: str,
    stemcell: str,
    cloud_properties: Object | None,
    wanted_networks: Object,
    disks: list[Cid] | None = None,
    env: Object | None = None,
) -> list[Any]:
    """Create a VM and wait until its agent is up. Return the VM's cid and networks.

    If the creation fails, all objects that were created are deleted again.
    """
    disks, env = disks or [], env or {}
    vm = _parse(session, agent_id, stemcell, cloud_properties or {}, wanted_networks, env)
    schemes = bus_schemes(session.config.agent.mbus, env)
    for disk in disks:
        claims.check_same_namespace(session, vm.cid, disk)
    held = []
    try:
        if vm.attach == "auto":
            vm = msgspec.structs.replace(vm, attach=_attach_way(session, vm))
        base = manifests.pod(vm)
        _make_secret(session, vm, manifests.settings(vm, agent_id, env, session.config.agent), base)
        held = _hold_disks(session, vm, disks)
        pod = _create_pod(session, vm, base, held, is_reserving=not disks)
        services.make(session, vm)
        if vm.group and vm.properties.disruption_budget:
            budgets.keep(session, vm.namespace, vm.group)
        up = _wait_until_up(session, vm, pod, schemes)
        _check_address(up, vm.networks.address)
        _check_bus(session, vm, schemes)
        attachments.bound(session, up)
    except CpiError as exc:
        _clean_up(session, vm.cid, held, exc)
        # The Director retries create_vm only after this error.
        if isinstance(exc, ApiError | UnreachableError):
            raise VMCreationFailedError(f"cannot create the VM: {exc}", ok_to_retry=exc.ok_to_retry) from exc
        raise
    return [vm.cid, wanted_networks]


def delete(session: Session, vm: Cid) -> None:
    """Delete a VM and all its objects except persistent disks.

    The VM's pod is deleted first. Only then can the attachments exit, because they wait until the VM no longer uses
    their disks.
    """
    namespace = session.namespace_of(vm)
    pod, secret = _find_objects(session, vm)
    pods.end(session, namespace, vm)
    _remove_other_objects(session, vm, secret)
    # Update the disruption budget only if the pod was still running. If the pod was evicted, the Health Monitor will
    # recreate the VM, so the budget must not change.
    if pod is not None and not pods.is_ending(pod) and not pods.has_ended(pod):
        _update_budget(session, pod)
    # A recreation that read the Secret before it was deleted may have created another pod.
    pods.end(session, namespace, vm)


def has(session: Session, vm: Cid) -> bool:
    """Return True if the VM has a pod that is running or may still be running."""
    pod = session.find(PODS, vm, names.KIND_VM)
    return pod is not None and not pods.has_ended(pod) and not pods.has_stopped(pod)


def reboot(session: Session, vm: Cid) -> None:
    """Restart the VM. If its disks are attached live, only its container is restarted; otherwise, it gets a new pod
    with the same data.
    """
    pod = session.find(PODS, vm, names.KIND_VM)
    if pod is None and (intent := recreation.unfinished(session, vm)):
        # A recreation was interrupted before it created the new pod. Completing it also restarts the VM.
        recreation.carry_on(session, vm, intent)
        return
    pod = pod or get(session, vm)
    if manifests.live_disks(pod):
        attachments.reboot(session, pod)
    elif recreation.can_recreate(pod) and not recreation.must_keep_address(session, pod):
        recreation.recreate(session, pod, manifests.disks_of(pod))
    else:
        raise NotSupportedError(
            f"cannot reboot {vm}: disks are not attached live, and a new pod would lose "
            f"{'its address' if recreation.can_recreate(pod) else manifests.DATA}; recreate the VM instead"
        )


def current(session: Session) -> str:
    """Return the cid of the VM in which the CPI runs. The cid is the VM's host name."""
    name = os.uname().nodename
    if session.find(PODS, name, names.KIND_VM) is None:
        raise NotImplementedByCpiError(f"cannot name the current VM: {name} is not a VM of this CPI")
    return name


def set_metadata(session: Session, vm: Cid, metadata: Object) -> None:
    """Store the Director's metadata as labels and annotations on the pod."""
    get(session, vm)  # This raises an error if the pod was not created by this CPI for this Director.
    patch_metadata(session, PODS, vm, metadata, VMNotFoundError)
    services.name_instance(session, vm, metadata)


def get(session: Session, vm: str) -> Object:
    """Return a VM's pod. Raises ``VMNotFoundError`` if there is none."""
    pod = session.find(PODS, vm, names.KIND_VM)
    if pod is None:
        raise VMNotFoundError(f"cannot find the VM {vm}: the namespace {session.namespace_of(vm)} has no such pod")
    return pod


def patch_metadata(
    session: Session, resource: Resource, cid: str, metadata: Mapping[str, Any], missing: Callable[[str], CpiError]
) -> None:
    """Store the Director's metadata on an object, each entry as a label or as an annotation.

    Raises the error that ``missing`` creates if the object does not exist.
    """
    labels, annotations = names.metadata(metadata)
    # An entry that was a label may now be an annotation, or the other way round, so remove the old one.
    gone: dict[str, str | None] = dict.fromkeys([*labels, *annotations])
    body: Object = {"metadata": {"labels": {**gone, **labels}, "annotations": {**gone, **annotations}}}
    try:
        session.client.patch(resource, session.namespace_of(cid), cid, body)
    except ApiError as exc:
        if exc.status == http.client.NOT_FOUND:
            raise missing(str(exc)) from exc
        raise


def calculate_properties(_config: Config, requirements: Object) -> dict[str, Any]:
    """Convert the `vm_resources` in a manifest to cloud properties. `ram` and `ephemeral_disk_size` are in MiB."""
    try:
        return {
            "cpu": requirements["cpu"],
            "memory": int(requirements["ram"]),
            "ephemeral_disk": {"size": int(requirements["ephemeral_disk_size"])},
        }
    except KeyError as exc:
        raise InputError(f"cannot calculate cloud properties: `vm_resources` lacks {exc}") from None
    except (TypeError, ValueError) as exc:
        raise InputError(f"cannot calculate cloud properties: `vm_resources` is invalid: {exc}") from None


# --- create -----------------------------------------------------------------------------------------------------------


def _parse(session: Session, agent_id: str, stemcell: str, given: Object, wanted_networks: Object, env: Object) -> Vm:
    """Return the VM that the arguments of create_vm describe, with defaults from the configuration."""
    config = session.config
    document = schema.merged(config.vms, given)
    properties = schema.read(document, VmProperties, origin="the cloud properties of the VM")
    bosh = env.get("bosh")
    groups = bosh.get("groups") if isinstance(bosh, Mapping) else None
    image, architecture = stemcells.parts(stemcell)
    return Vm(
        cid=names.cid("vm", session.namespace, session.director, agent_id),
        namespace=session.namespace,
        director=session.director,
        image=image,
        architecture=architecture,
        properties=properties,
        networks=networks.plan(wanted_networks, config.networks),
        groups=[str(group) for group in groups] if isinstance(groups, list) else [],
        attach=properties.attach or config.disks.attach,
        pull_policy=config.stemcells.pull_policy,
        host_path=config.disks.host_path,
        storage_class=config.disks.storage_class,
    )


def _attach_way(session: Session, vm: Vm) -> str:
    """Return how disks are to be attached to the running VM (``Vm.attach``).

    "recreate" is returned only for a VM with a fixed address. Otherwise, a new pod would get an address that the
    Director does not know.
    """
    reason = "the tier `restricted` admits no live disks"
    if vm.properties.tier != "restricted":
        reason = attachments.refusal(session, vm.namespace, manifests.pod(vm))
        if not reason:
            return "live"
    way = "recreate" if vm.networks.address else "auto"
    log.say(f"disks.attach: {'by recreation' if way == 'recreate' else 'only at creation'}: {reason}")
    return way


def _make_secret(session: Session, vm: Vm, settings: Object, base: Object) -> None:
    """Create a VM's Secret. This must be the VM's first object, because only VMs with a Secret can hold disks."""
    secret = manifests.secret(vm, settings, base)
    _, is_good = _create_or_compare(session, SECRETS, vm.namespace, secret, _has_same_data)
    if not is_good:
        # The existing Secret comes from an earlier attempt with this agent id but different settings. Delete its pod as
        # well, because that pod uses the old settings.
        pods.end(session, vm.namespace, vm.cid, grace_s=GRACE_OF_FAILED_S, is_name_needed=True)
        session.client.delete(SECRETS, vm.namespace, vm.cid)
        session.client.ensure(SECRETS, vm.namespace, secret)


def _hold_disks(session: Session, vm: Vm, disks: Sequence[str]) -> list[str]:
    """Reserve the disks for the VM and return those that its pod can mount from the start.

    Disks that another VM still uses are left to attach_disk.
    """
    held = []
    for disk in disks:
        try:
            found = claims.hold(session, disk, vm.cid)
        except claims.InUseError as exc:
            log.say(f"{exc}; attach_disk will attach it")
            continue
        if found.lingering:
            log.say(f"the disk {disk} is still mounted by {', '.join(found.lingering)}; attach_disk will attach it")
            # The VM's pod will not mount the disk, so the VM must not remain its holder.
            claims.record_detach(session, disk, vm.cid)
            continue
        held.append(disk)
    return held


def _create_pod(session: Session, vm: Vm, base: Object, disks: Sequence[str], *, is_reserving: bool) -> Object:
    """Create a VM's claims and pod, or reuse those of an earlier attempt. Return the pod.

    An existing pod is replaced if it has ended or was created from a different manifest.
    If ``is_reserving`` is set and the VM's properties contain `persistent_disk`, also create the claim of that disk and
    mount it.
    """
    mounted = list(disks)
    if vm.has_data_claim:
        claims.make(session, vm.namespace, manifests.data_claim(vm))
    if vm.properties.persistent_disk and is_reserving:
        body = manifests.reserved_claim(vm, session.config)
        claims.make(session, vm.namespace, body)
        mounted.append(body["metadata"]["name"])
    pod = manifests.with_disks(base, mounted)
    pod["metadata"]["annotations"][names.REQUEST] = names.digest(manifests.text(pod))
    made, is_good = _create_or_compare(session, PODS, vm.namespace, pod, _is_same_pod)
    if not is_good:
        pods.end(session, vm.namespace, vm.cid, grace_s=GRACE_OF_FAILED_S, is_name_needed=True)
        made, _ = session.client.ensure(PODS, vm.namespace, pod)
    return made


def _create_or_compare(
    session: Session, resource: Resource, namespace: str, body: Object, is_same: Callable[[Object, Object], bool]
) -> tuple[Object, bool]:
    """Create an object, or find the existing one with the same name.

    Return the object, and True if it is new or ``is_same`` finds it equal to ``body``.
    """
    made, is_new = session.client.ensure(resource, namespace, body)
    session.check_ours(made, names.KIND_VM, VMCreationFailedError)
    return made, is_new or is_same(made, body)


def _has_same_data(found: Object, wanted: Object) -> bool:
    """Return True if the existing Secret ``found`` contains the strings in ``wanted``."""
    data = {key: base64.b64decode(value).decode() for key, value in (found.get("data") or {}).items()}
    return bool(data == wanted["stringData"])


def _is_same_pod(found: Object, wanted: Object) -> bool:
    """Return True if the pod ``found`` was created from the same manifest as ``wanted`` and can still run."""
    digests = [(one["metadata"].get("annotations") or {}).get(names.REQUEST) for one in (found, wanted)]
    return digests[0] == digests[1] and not pods.is_ending(found) and not pods.has_ended(found)


def bus_schemes(mbus: str, env: Mapping[str, Any]) -> list[str]:
    """Return the URL schemes of the bus addresses in ``env`` or, if it has none, of ``mbus``.

    Raises ``InputError`` if an address is invalid. The message does not quote the address, because it may contain a
    password.
    """
    try:
        given = msgspec.convert(env, VmEnv).bosh.mbus.urls or [mbus]
        parts = [urllib.parse.urlsplit(url) for url in given]
        is_good = all(
            one.scheme == "https" or (one.scheme == "nats" and one.hostname and one.port != 0) for one in parts
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise InputError(
            f"cannot create the VM: `agent.mbus` of the CPI {'is not a bus address' if mbus else 'is empty'}: set it "
            "to the Director's, nats://IP:4222, or for `bosh create-env` to the https:// one of the VM"
        )
    return [one.scheme for one in parts]


def _wait_until_up(session: Session, vm: Vm, pod: Object, schemes: Sequence[str]) -> Object:
    """Wait until the agent logs that it has reached the bus, or until the pod is ready. Return the pod's last state.

    The log is read because it is faster: the kubelet probes readiness only once a second.
    """
    begun, timeout_s = time.monotonic(), session.config.timeouts.create_vm
    state = pods.until_ready(session, vm.namespace, pod, timeout_s=timeout_s, is_enough=pods.has_started)
    boots_until = time.monotonic() + BOOT_S
    while not pods.is_ready(state) and "nats" in schemes and time.monotonic() < boots_until:
        message = pods.last_log_message(session, vm.namespace, vm.cid, BUS)
        if message is None:
            break
        if re.search(REACHED, message):
            return state
        time.sleep(BUS_PAUSE_S)  # noqa: TID251 no event loop
    return pods.until_ready(session, vm.namespace, state, timeout_s=timeout_s, begun=begun)


def _check_bus(session: Session, vm: Vm, schemes: Sequence[str]) -> None:
    """Raise ``VMCreationFailedError`` if the agent logs that it cannot reach the bus. Only a NATS bus is checked, and
    only if `timeouts.bus` is not 0.

    It is not an error if the bus rejects the agent's certificate. In that case, the agent has reached the bus, and the
    Director admits the certificate only after create_vm has returned.
    """
    until = time.monotonic() + session.config.timeouts.bus
    while "nats" in schemes and session.config.timeouts.bus:
        message = pods.last_log_message(session, vm.namespace, vm.cid, BUS)
        if message is None or re.search(REACHED, message):  # None means that the log cannot be read
            return
        if time.monotonic() >= until and not message:
            log.say(f"the log of {vm.cid} has no attempt to reach the bus")
            return
        if time.monotonic() >= until:
            raise VMCreationFailedError(
                f"the agent of the VM does not reach the bus: {message}; see `agent.mbus` and the NetworkPolicies",
                ok_to_retry=True,
            )
        time.sleep(BUS_PAUSE_S)  # noqa: TID251 no event loop


def _check_address(pod: Object, wanted: str) -> None:
    """Raise ``VMCreationFailedError`` if the pod does not have the address ``wanted``, unless ``wanted`` is ""."""
    got = [one.get("ip") for one in pod["status"].get("podIPs") or [{"ip": pod["status"].get("podIP")}]]
    if wanted and wanted not in got:
        raise VMCreationFailedError(
            f"the pod got the address {', '.join(map(str, got))} instead of {wanted}: the cluster's network does not "
            "follow the annotations of the manual network"
        )


# --- delete -----------------------------------------------------------------------------------------------------------


def _clean_up(session: Session, vm: str, held: Sequence[str], why: CpiError) -> None:
    """Remove the objects that a failed create_vm has left behind.

    Objects that could not be removed keep their labels, so delete_vm finds them later.
    """
    log.say(f"cannot create the VM: {why}; its objects are removed")
    try:
        pod, secret = _find_objects(session, vm)
        pods.end(session, session.namespace_of(vm), vm, grace_s=GRACE_OF_FAILED_S)
        _remove_other_objects(session, vm, secret)
        if pod is not None:
            _update_budget(session, pod)
        for disk in held:
            claims.record_detach(session, disk, vm)
    except CpiError as exc:
        log.say(f"cannot remove all objects of {vm}: {exc}; run delete_vm {vm} to remove the rest")


def _update_budget(session: Session, pod: Object) -> None:
    if group := pod["metadata"]["labels"].get(names.GROUP):
        budgets.keep(session, pod["metadata"]["namespace"], group)


def _find_objects(session: Session, vm: str) -> tuple[Object | None, Object | None]:
    """Return a VM's pod and Secret, each of them None if it does not exist.

    Raises ``VMNotFoundError`` if one of them was not created by this CPI for this Director.
    """
    secret, pod = (session.client.find(resource, session.namespace_of(vm), vm) for resource in (SECRETS, PODS))
    for found in (secret, pod):
        session.check_ours(found, names.KIND_VM, VMNotFoundError)
    return pod, secret


def _remove_other_objects(session: Session, vm: str, secret: Object | None) -> None:
    """Delete all of a VM's objects except its pod and its persistent disks. The pod must have terminated already.

    A reserved disk that create_disk has not returned yet is also deleted, because the Director does not know about it.
    """
    namespace = session.namespace_of(vm)
    attachments.end_all(session, vm)
    # Delete the group's objects before the Secret, because the Secret names the NetworkPolicy. If this call is
    # interrupted, a retry can then still find them.
    services.remove(session, vm, ((secret or {}).get("metadata", {}).get("annotations") or {}).get(names.POLICY, ""))
    session.client.delete(SECRETS, namespace, vm)
    data = session.client.find(CLAIMS, namespace, names.data_claim(vm))
    if data is not None and names.is_ours(data, names.KIND_DATA, session.director):
        session.client.delete(CLAIMS, namespace, names.data_claim(vm))
    reserved = manifests.reserved_name(vm, namespace)
    claim = session.find(CLAIMS, reserved, names.KIND_DISK)
    if claim and claims.annotation(claim, names.RESERVED_FOR) == vm:
        session.client.delete(CLAIMS, namespace, reserved)
