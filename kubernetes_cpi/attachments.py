"""Manage attachments, which are helper pods that bind a disk into a running VM.

Attaching a disk this way leaves the VM's address, processes and data unchanged. An attachment mounts the claim and
binds it below a directory on the node that is also mounted into the VM. It exits only after the disk is unmounted, so
deleting the attachment cannot remove a disk that is in use.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kubernetes_cpi import log, manifests, names, pods
from kubernetes_cpi.client import PODS, Object
from kubernetes_cpi.errors import ApiError, CpiError, NotSupportedError, VMCreationFailedError
from kubernetes_cpi.session import Session

PROGRAM: Final = Path(__file__).with_name("attachment_program.py")
CONTAINER: Final = "attachment"
DISK: Final = "/disk"
TARGET: Final = "/target"
TARGET_MOUNT: Final = {"name": "target", "mountPath": TARGET, "mountPropagation": "Bidirectional"}
WAIT_UNTIL_DONE: Final = {"exec": {"command": ["/bin/sh", "-c", "until [ -e /tmp/done ]; do sleep 0.02; done"]}}
"""A postStart hook that returns once the helper has created /tmp/done. The kubelet then reports the pod as ready. This
is about a second faster than waiting for the kubelet to report that the pod has exited.
"""
GRACE_S: Final = 365 * 24 * 3600
"""Grace period of an attachment. It is long because an attachment must not be killed while it waits for the VM to stop
using the disk.
"""
KINDS: Final = (names.KIND_ATTACHMENT, names.KIND_DETACHMENT, names.KIND_REBOOT, names.KIND_BOUND)
TRIES: Final = 3
"""Number of times that ``create`` waits until a previous attachment of the disk to the same VM is gone."""
CPU: Final = "50m"
"""CPU request of a helper pod. On a busy node, an unmount takes 0.8 s with this request, 4 s with 10m, and 49 s with
1m.
"""
CPU_OF_ATTACHMENT: Final = "10m"
"""CPU request of an attachment. It is low because an attachment only sleeps while the disk is attached. Mounting a disk
takes 3.5 s with this request.
"""
POLICY: Final = "PodSecurity|denied the request"
"""Regular expression for refusals by Pod Security or a webhook. Their status, 403, does not identify them, because
exceeded quotas and missing permissions are reported with 403 as well.
"""


def manifest(session: Session, vm: Object, disk: str) -> Object:
    """Return the manifest of the attachment pod that binds a disk into a VM, on the VM's node."""
    cid = vm["metadata"]["name"]
    pod = _helper(
        session,
        vm,
        cid,
        names.attachment(cid, disk),
        names.KIND_ATTACHMENT,
        ["attach", DISK, f"{TARGET}/{cid}/{disk}", vm["metadata"]["uid"]],
    )
    pod["metadata"]["labels"][names.DISK] = names.value(disk)
    spec = pod["spec"]
    spec["terminationGracePeriodSeconds"] = GRACE_S
    spec["volumes"] += [{"name": "disk", "persistentVolumeClaim": {"claimName": disk}}, _target(session)]
    container = spec["containers"][0]
    container["volumeMounts"] += [{"name": "disk", "mountPath": DISK}, TARGET_MOUNT]
    container["lifecycle"] = {"postStart": WAIT_UNTIL_DONE}
    return pod


def refusal(session: Session, namespace: str, vm: Object) -> str:
    """Return "" if the cluster admits live attachments for a VM, otherwise the reason why not.

    This is checked with a dry run. ``vm`` is the manifest of the VM's pod.
    """
    # The VM does not exist yet, so it has neither a UID nor a node.
    metadata, spec = {**vm["metadata"], "uid": ""}, {**vm["spec"], "nodeName": "any"}
    body = manifest(session, {**vm, "metadata": metadata, "spec": spec}, "disk-of-a-dry-run")
    try:
        session.client.try_create(PODS, namespace, body)
    except ApiError as exc:
        # A webhook without dry-run support answers 400, and an admission policy answers 403 or 422.
        if exc.status in (http.client.BAD_REQUEST, http.client.FORBIDDEN, http.client.UNPROCESSABLE_ENTITY):
            return str(exc)
        raise
    return ""


def create(session: Session, vm: Object, disk: str) -> None:
    """Create a disk's attachment and wait until it has mounted the disk."""
    cid, namespace = vm["metadata"]["name"], vm["metadata"]["namespace"]
    if not manifests.live_disks(vm):
        raise NotSupportedError(
            f"cannot attach the disk {disk} to {cid} while it runs: the VM was created without "
            "`disks.attach: live`; recreate the VM"
        )
    if not vm["spec"].get("nodeName"):
        raise CpiError(f"cannot attach the disk {disk} to {cid}: no node runs the VM", ok_to_retry=True)
    body = manifest(session, vm, disk)
    # A previous attachment of the disk may still be unmounting it, so wait until that one is gone.
    for _ in range(TRIES):
        made = _create_or_find(session, namespace, body)
        if pods.is_ready(made):  # An earlier attach_disk call created the attachment.
            return
        if not pods.is_ending(made):
            break
        if not pods.until_gone(session, namespace, body["metadata"]["name"], session.config.timeouts.unmount):
            raise CpiError(_unmount_timeout(session, namespace, cid, disk))
    try:
        pods.until_ready(session, namespace, made, timeout_s=session.config.timeouts.create_vm)
    except VMCreationFailedError as exc:
        # ``pods.end`` would wait for the attachment's grace period, which is a year, if the node does not respond.
        session.client.delete(PODS, namespace, body["metadata"]["name"])
        pods.until_gone(session, namespace, body["metadata"]["name"], session.config.timeouts.unmount)
        raise CpiError(f"cannot attach the disk {disk} to {cid}: {exc}") from exc


def unmount(session: Session, vm: Object, attachment: Object, disk: str) -> None:
    """Use a helper pod to unmount one of a running VM's disks.

    Raises ``CpiError`` if the VM still uses the disk after `timeouts.unmount`; the attachment then stays unchanged.

    Deleting the attachment would also unmount the disk, but a deletion that finds the disk in use cannot be cancelled.
    """
    cid, namespace = vm["metadata"]["name"], vm["metadata"]["namespace"]
    if not attachment["spec"].get("nodeName"):
        return  # The attachment has never run, so nothing is mounted.
    name = names.detachment(cid, disk)
    patience = str(session.config.timeouts.unmount)
    uids = [vm["metadata"]["uid"], attachment["metadata"]["uid"]]
    arguments = ["detach", f"{TARGET}/{cid}/{disk}", *uids, patience]
    body = _helper(session, attachment, cid, name, names.KIND_DETACHMENT, arguments)
    body["metadata"]["labels"][names.DISK] = names.value(disk)
    try:
        _run(session, namespace, body, work_s=session.config.timeouts.unmount)
    except CpiError as exc:
        raise CpiError(
            f"cannot detach the disk {disk} from {cid}: {exc}. It stays attached; `bosh recreate` ends the VM first",
            ok_to_retry=exc.ok_to_retry,
        ) from exc


def bound(session: Session, vm: Object) -> None:
    """Prevent root in a VM's user namespace from filling the node's disk through the directory in which live disks are
    mounted.

    This must happen before the VM runs its first job.
    """
    if not manifests.live_disks(vm) or vm["spec"].get("hostUsers", True):
        return
    cid, namespace = vm["metadata"]["name"], vm["metadata"]["namespace"]
    name = f"bound-{names.tail(cid)}"
    body = _helper(session, vm, cid, name, names.KIND_BOUND, ["bound", f"{TARGET}/{cid}"])
    try:
        _run(session, namespace, body, work_s=0)
    except CpiError as exc:
        raise CpiError(f"cannot keep {cid} from filling its node's disk: {exc}", ok_to_retry=exc.ok_to_retry) from exc


def end(session: Session, vm: str, disk: str) -> None:
    """Delete a disk's attachment and wait for its container to exit. Call ``unmount`` first, unless the VM is gone."""
    namespace, name = session.namespace_of(vm), names.attachment(vm, disk)
    if session.client.delete(PODS, namespace, name) is None:
        return
    try:
        has_ended = pods.until_stopped(session, namespace, name, session.config.timeouts.unmount)
    except CpiError as exc:
        raise CpiError(f"cannot detach the disk {disk} from {vm}: {exc}") from exc
    if not has_ended:
        raise CpiError(_unmount_timeout(session, namespace, vm, disk))


def find(session: Session, vm: str, disk: str) -> Object | None:
    """Return the attachment that binds a disk into a VM, or None if there is none or it has unmounted the disk."""
    pod = session.client.find(PODS, session.namespace_of(vm), names.attachment(vm, disk))
    is_ours = pod is not None and names.is_ours(pod, names.KIND_ATTACHMENT, session.director)
    return pod if pod is not None and is_ours and not pods.has_stopped(pod) else None


def of(session: Session, vm: str) -> list[Object]:
    """Return all of a VM's helper pods, including its attachments."""
    selector = f"{names.VM}={vm},{names.KIND} in ({','.join(KINDS)})"
    return list(session.client.list(PODS, session.namespace_of(vm), labels=selector))


def disks_of(attachments: Sequence[Object]) -> list[str]:
    """Return the disks of ``attachments``. An attachment that is being deleted counts until its container has
    stopped.
    """
    kept = [pod for pod in attachments if not pods.has_stopped(pod)]
    return [claim for pod in kept for claim in manifests.claims_of(pod)]


def end_all(session: Session, vm: str) -> None:
    """Delete the helper pods for a VM whose pod is gone. If a disk cannot be unmounted, only log why."""
    namespace, found = session.namespace_of(vm), of(session, vm)
    for pod in found:
        session.client.delete(PODS, namespace, pod["metadata"]["name"])
    for pod in found:
        name = pod["metadata"]["name"]
        try:
            is_unmounted = pods.until_stopped(session, namespace, name, session.config.timeouts.delete_vm)
        except CpiError as exc:
            log.say(f"{exc}")
            continue
        if not is_unmounted:
            log.say(f"pod {name}: its node has not unmounted the disk; deleted by force")
            session.client.delete(PODS, namespace, name, grace_s=0)


def reboot(session: Session, vm: Object) -> None:
    """Restart the VM. A helper pod terminates PID 1 of the VM's container, and the kubelet restarts the container with
    the same data.
    """
    cid, namespace, uid = vm["metadata"]["name"], vm["metadata"]["namespace"], vm["metadata"]["uid"]
    grace = vm["spec"].get("terminationGracePeriodSeconds", 0)
    name = f"reboot-{names.tail(cid)}"
    before = _restart_count(vm)
    # An interrupted call may have left its helper behind.
    pods.end(session, namespace, name, grace_s=0, is_name_needed=True)
    body = _helper(session, vm, cid, name, names.KIND_REBOOT, ["reboot", uid, str(grace)])
    _create_or_find(session, namespace, body)
    deadline = time.monotonic() + grace + session.config.timeouts.create_vm
    try:
        for state in session.client.follow(PODS, namespace, cid, deadline):
            if state is None or state["metadata"]["uid"] != uid:
                raise CpiError(f"cannot reboot {cid}: its pod was deleted meanwhile")
            if _restart_count(state) > before and pods.is_ready(state):
                return
            helper = session.client.find(PODS, namespace, name)
            if helper and helper.get("status", {}).get("phase") == "Failed":
                raise CpiError(f"cannot reboot {cid}: {_failure_reason(helper)}")
        raise CpiError(f"cannot reboot {cid}: its agent no longer answers; see `kubectl describe pod {cid}`")
    finally:
        pods.end(session, namespace, name, grace_s=0)


def _run(session: Session, namespace: str, body: Object, *, work_s: float) -> None:
    """Run a helper pod that mounts the `disks.host_path` directory, and delete the pod when it is done.

    The pod may take `timeouts.helper` to start and ``work_s`` seconds for its work. Raises ``CpiError`` with the
    helper's last line of output if it fails.
    """
    name = body["metadata"]["name"]
    container = body["spec"]["containers"][0]
    body["spec"]["volumes"].append(_target(session))
    container["volumeMounts"].append(TARGET_MOUNT)
    container["lifecycle"] = {"postStart": WAIT_UNTIL_DONE}
    # An interrupted call may have left its helper behind.
    pods.end(session, namespace, name, grace_s=0, is_name_needed=True)
    made = _create_or_find(session, namespace, body)
    try:
        ended = pods.until_done(session, namespace, made, timeout_s=work_s + session.config.timeouts.helper)
        if ended["status"].get("phase") == "Failed":
            raise CpiError(_failure_reason(ended))
    finally:
        pods.end(session, namespace, name, grace_s=0)


def _target(session: Session) -> Object:
    """Return the volume with the node's `disks.host_path` directory, for ``TARGET_MOUNT``."""
    hosted = {"path": session.config.disks.host_path, "type": "DirectoryOrCreate"}
    return {"name": TARGET_MOUNT["name"], "hostPath": hosted}


def _helper(session: Session, like: Object, cid: str, name: str, kind: str, arguments: Sequence[str]) -> Object:
    """Return a privileged pod on the node of ``like``, which is the VM's pod or one of its attachments.

    The pod runs the attachment program (``PROGRAM``) in the VM's image or, if that is set, in `disks.helper_image`.
    """
    spec = like["spec"]
    disks = session.config.disks
    cpu = CPU_OF_ATTACHMENT if kind == names.KIND_ATTACHMENT else CPU
    pod = PODS.document(
        name,
        names.labels(kind, session.director, **{names.VM: cid}),
        {
            # If an attachment's container is killed, it must be restarted, because it has to unmount the disk later.
            "restartPolicy": "Always" if kind == names.KIND_ATTACHMENT else "Never",
            "hostPID": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": CONTAINER,
                    "image": disks.helper_image or spec["containers"][0]["image"],
                    "imagePullPolicy": session.config.stemcells.pull_policy,
                    "command": [disks.helper_python, "-I", "-S", "-c", PROGRAM.read_text(), *arguments],
                    "securityContext": {"privileged": True, "runAsUser": 0},
                    "resources": {"requests": {"cpu": cpu, "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
                    "volumeMounts": [],
                }
            ],
            "volumes": [],
        },
    )
    if not disks.helper_image:
        _add_program(pod["spec"], spec)
    for key in ("imagePullSecrets", "priorityClassName"):
        if spec.get(key):
            pod["spec"][key] = spec[key]
    return manifests.pinned(pod, spec["nodeName"])


def _add_program(spec: Object, like: Object) -> None:
    """Copy the agent's volume, with its mounts and its init container, from the VM's pod (``like``) to the helper pod.

    Only pods with an unmodified stemcell image have this volume, because such an image does not contain the agent's
    Python.
    """
    name = manifests.AGENT_VOLUME
    spec["volumes"] += [one for one in like.get("volumes") or [] if one["name"] == name]
    mounts = like["containers"][0].get("volumeMounts") or []
    spec["containers"][0]["volumeMounts"] += [one for one in mounts if one["name"] == name]
    if copiers := [one for one in like.get("initContainers") or [] if one["name"] == name]:
        spec["initContainers"] = [{**one, "securityContext": {"runAsUser": 0}} for one in copiers]


def _create_or_find(session: Session, namespace: str, body: Object) -> Object:
    """Create a helper pod, or return the existing pod with that name."""
    try:
        return session.client.ensure(PODS, namespace, body)[0]
    except ApiError as exc:
        is_policy = exc.status == http.client.FORBIDDEN and re.search(POLICY, str(exc))
        hint = "; live disks need a namespace that admits privileged pods" if is_policy else ""
        raise CpiError(f"{exc}{hint}", ok_to_retry=exc.ok_to_retry) from exc


def _unmount_timeout(session: Session, namespace: str, vm: str, disk: str) -> str:
    """Return the error message for a disk that was not unmounted in time. It quotes the last line of the attachment's
    log.
    """
    try:
        reason = session.client.log_of(namespace, names.attachment(vm, disk), 1).strip()
    except CpiError as exc:
        reason = str(exc)
    return (
        f"cannot detach the disk {disk} from {vm} within {session.config.timeouts.unmount:g} s: {reason}. It is "
        "unmounted as soon as the VM no longer uses it; `bosh recreate` ends the VM first"
    )


def _restart_count(vm: Object) -> int:
    return sum(int(one.get("restartCount", 0)) for one in vm.get("status", {}).get("containerStatuses") or [])


def _failure_reason(pod: Object) -> str:
    """Return the error that a failed helper wrote to its termination log, or else the kubelet's reason."""
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    ended = statuses[0].get("state", {}).get("terminated") or {}
    return str(ended.get("message") or ended.get("reason") or "its helper failed")
