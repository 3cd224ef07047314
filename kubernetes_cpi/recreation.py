"""Recreate VMs: replace a VM's pod with a new pod that has the same name but mounts other disks. The data claim and the
Secret are kept.

The properties of the new pod are recorded in an annotation on the data claim before the old pod is deleted. If the CPI
is interrupted before the new pod exists, the next call completes the recreation.
"""

from __future__ import annotations

import base64
import http.client
import time
from collections.abc import Callable, Sequence

import msgspec

from kubernetes_cpi import attachments, claims, log, manifests, names, pods
from kubernetes_cpi.client import CLAIMS, PODS, SECRETS, Object
from kubernetes_cpi.errors import ApiError, CpiError, NotSupportedError, VMCreationFailedError, VMNotFoundError
from kubernetes_cpi.session import Session


class Intent(msgspec.Struct, frozen=True):
    """The pod that a recreation is about to create: its disks, and the metadata that the old pod had."""

    disks: list[str]
    live: list[str] = []
    """Disks to attach live after the new pod has started."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


def can_recreate(pod: Object) -> bool:
    """Return True if the VM's data directory, which contains credentials, packages and logs, outlives the pod."""
    return names.data_claim(pod["metadata"]["name"]) in manifests.claims_of(pod)


def must_keep_address(session: Session, pod: Object) -> bool:
    """Return True if the pod must not be recreated, because a new pod would have a different address from the one that
    the Director has read.
    """
    # "auto" means that the VM has no fixed address (see ``vms._attach_way``).
    is_undecided = (pod["metadata"].get("annotations") or {}).get(names.ATTACH) == "auto"
    return is_undecided and session.config.disks.attach != "recreate"


def unfinished(session: Session, vm: str) -> Intent | None:
    """Return the unfinished recreation of a VM, or None."""
    claim = session.client.find(CLAIMS, session.namespace_of(vm), names.data_claim(vm))
    is_ours = claim is not None and names.is_ours(claim, names.KIND_DATA, session.director)
    text = claims.annotation(claim, names.DISKS) if claim is not None and is_ours else ""
    return msgspec.json.decode(text, type=Intent) if text else None


def recreate(session: Session, pod: Object, disks: Sequence[str]) -> None:
    """Recreate the pod with ``disks``. If the new pod cannot start, recreate it with the previous disks and raise
    ``CpiError``.
    """
    vm, had = pod["metadata"]["name"], manifests.disks_of(pod)
    intent = _record_intent(session, pod, disks)
    log.say(f"pod {vm}: recreated with the disks {', '.join(disks) or '(none)'}")
    pods.end(session, session.namespace_of(vm), vm, is_name_needed=True)
    try:
        made = carry_on(session, vm, intent)
    except VMCreationFailedError as exc:
        log.say(f"pod {vm}: {exc}; recreated with its previous disks")
        former = msgspec.structs.replace(intent, disks=had)
        _write_intent(session, vm, former)
        # This pod has never become ready, so a short grace period is enough.
        pods.end(session, session.namespace_of(vm), vm, grace_s=1, is_name_needed=True)
        carry_on(session, vm, former)
        raise CpiError(f"cannot recreate the pod of {vm} with the disks {', '.join(disks)}: {exc}") from exc
    before, after = (one.get("status", {}).get("podIP") for one in (pod, made))
    if before != after:
        log.say(f"pod {vm}: its address is {after}; links and DNS of the Director keep {before} until `bosh recreate`")


def release(session: Session, pod: Object, disk: str) -> None:
    """Make a VM's pod release a disk that the VM has detached but the pod still mounts.

    Delete the pod, and create a new one without the disk if the VM is in use. No new pod is created if the Director has
    shut the VM down or is deleting it at the same time.
    """
    vm, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    intent = unfinished(session, vm)
    if intent is None and not _is_in_use(session, pod):
        log.say(f"{vm} is shut down, but its pod still mounts the disk {disk}: ending the pod")
        pods.end(session, namespace, vm)
        return
    log.say(f"{vm} still mounts the disk {disk}, so its pod is recreated without it")
    try:
        if intent is None:
            intent = _record_intent(
                session, pod, [one for one in manifests.disks_of(pod) if claims.is_held(session, one, vm)]
            )
        pods.end(session, namespace, vm, is_name_needed=True)
        # Do not wait until the pod is ready. If the VM was shut down just before, the pod starts but never becomes
        # ready.
        carry_on(session, vm, intent, is_enough=pods.has_started)
    except VMNotFoundError:
        log.say(f"pod {vm}: it is not recreated, because its VM is being deleted")
    except VMCreationFailedError as exc:
        log.say(f"pod {vm}: {exc}; the disk {disk} is free nevertheless")


def carry_on(
    session: Session, vm: str, intent: Intent, *, is_enough: Callable[[Object], bool] = pods.is_ready
) -> Object:
    """Continue a recreation after the old pod has been deleted: create the new pod, wait for it, and return it. The new
    pod may run on a different node.
    """
    namespace = session.namespace_of(vm)
    if intent.live:
        # Attachments of the old pod cannot be reused, because they contain its UID.
        attachments.end_all(session, vm)
    secret = session.client.find(SECRETS, namespace, vm)
    if secret is None:
        raise VMNotFoundError(f"cannot recreate the pod of {vm}: its Secret is gone")
    body = msgspec.json.decode(base64.b64decode(secret["data"][manifests.POD]), type=Object)
    # The recreation may have been interrupted long ago, so mount only disks that are still attached to the VM.
    held = [disk for disk in intent.disks if claims.is_held(session, disk, vm)]
    body = manifests.with_disks(body, held)
    metadata = body["metadata"]
    metadata["labels"] = {**metadata["labels"], **intent.labels}
    metadata["annotations"] = {**metadata["annotations"], **intent.annotations, names.RECREATED: "true"}
    made, _ = session.client.ensure(PODS, namespace, body)
    if session.client.find(SECRETS, namespace, vm) is None:
        # The VM was deleted in the meantime, so remove the new pod. If the VM is deleted only after this check,
        # delete_vm removes the pod, because it deletes the pod once more after it has deleted the Secret.
        pods.end(session, namespace, vm, grace_s=1)
        raise VMNotFoundError(f"cannot recreate the pod of {vm}: its VM was deleted meanwhile")
    timeout_s = session.config.timeouts.create_vm
    ready = pods.until_ready(session, namespace, made, timeout_s=timeout_s, is_enough=is_enough)
    attachments.bound(session, ready)
    for disk in intent.live:
        if claims.is_held(session, disk, vm):
            attachments.create(session, ready, disk)
    _write_intent(session, vm, None)
    return ready


def finish(session: Session, pod: Object) -> None:
    """Delete the record of a recreation that was interrupted after it had created ``pod``.

    Do nothing if ``pod`` was not created by a recreation.
    """
    vm = pod["metadata"]["name"]
    if names.RECREATED in (pod["metadata"].get("annotations") or {}) and unfinished(session, vm):
        _write_intent(session, vm, None)


def _record_intent(session: Session, pod: Object, disks: Sequence[str]) -> Intent:
    """Record that ``pod`` is about to be recreated with ``disks``, and return the record."""
    vm = pod["metadata"]["name"]
    if not can_recreate(pod):
        raise NotSupportedError(
            f"cannot recreate the pod of {vm}: {manifests.DATA} is not a claim, so its credentials and packages "
            "would be lost; recreate the VM with `disks.attach: recreate`, or attach disks live"
        )
    live = attachments.disks_of(attachments.of(session, vm)) if manifests.live_disks(pod) else []
    intent = Intent(list(disks), live, _metadata(pod, "labels"), _metadata(pod, "annotations"))
    _write_intent(session, vm, intent)
    return intent


def _is_in_use(session: Session, pod: Object) -> bool:
    """Return True if the VM is in use, that is, if its pod is ready.

    Shortly after a shutdown, a VM's pod may still be reported as ready. This does not matter if the pod can be
    recreated, but otherwise it would make ``release`` fail. A pod that cannot be recreated therefore counts as in use
    only if it stays ready for `timeouts.unmount` seconds.
    """
    if can_recreate(pod) or not pods.is_ready(pod):
        return pods.is_ready(pod)
    metadata = pod["metadata"]
    deadline = time.monotonic() + session.config.timeouts.unmount
    states = session.client.follow(PODS, metadata["namespace"], metadata["name"], deadline, pod)
    return all(state is not None and pods.is_ready(state) for state in states)


def _write_intent(session: Session, vm: str, intent: Intent | None) -> None:
    """Record a recreation in an annotation of the VM's data claim, or delete the record if ``intent`` is None."""
    text = msgspec.json.encode(intent).decode() if intent else None
    body: Object = {"metadata": {"annotations": {names.DISKS: text}}}
    try:
        session.client.patch(CLAIMS, session.namespace_of(vm), names.data_claim(vm), body)
    except ApiError as exc:
        if exc.status != http.client.NOT_FOUND:
            raise
        raise VMNotFoundError(f"cannot recreate the pod of {vm}: its VM was deleted meanwhile") from exc


def _metadata(pod: Object, kind: str) -> dict[str, str]:
    """Return the pod's labels or annotations that were set by set_vm_metadata."""
    found = pod["metadata"].get(kind) or {}
    return {key: value for key, value in found.items() if key.startswith(names.METADATA)}
