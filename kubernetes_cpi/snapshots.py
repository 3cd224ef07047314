"""Create and delete disk snapshots in clusters that support VolumeSnapshots."""

from __future__ import annotations

import http.client
import time
from typing import Final

from kubernetes_cpi import claims, log, manifests, names
from kubernetes_cpi.client import SNAPSHOTS, Object
from kubernetes_cpi.errors import ApiError, CpiError, DiskNotFoundError, NotImplementedByCpiError
from kubernetes_cpi.names import Cid
from kubernetes_cpi.session import Session

CUT_TIMEOUT_S: Final = 60


def create(session: Session, disk: Cid, metadata: Object) -> str:
    """Take a snapshot of a disk, and return the snapshot's cid.

    Before returning, wait for up to ``CUT_TIMEOUT_S`` until writes to the disk no longer change the snapshot.
    """
    claim = claims.get(session, disk)
    namespace = session.namespace_of(disk)
    labels, annotations = names.metadata(metadata)
    spec: Object = {"source": {"persistentVolumeClaimName": disk}}
    if chosen := claims.annotation(claim, manifests.SNAPSHOT_CLASS):
        spec["volumeSnapshotClassName"] = chosen
    name = names.cid("snapshot", namespace, session.director, session.request_id or str(time.time_ns()), disk)  # noqa: TID251 - only makes the name unique
    labels |= names.labels(names.KIND_SNAPSHOT, session.director, **{names.DISK: names.value(disk)})
    body = SNAPSHOTS.document(name, labels, spec, annotations)
    try:
        made, _ = session.client.ensure(SNAPSHOTS, namespace, body)
    except ApiError as exc:
        if exc.status == http.client.NOT_FOUND:
            raise NotImplementedByCpiError("cannot take a snapshot: the cluster has no VolumeSnapshots") from exc
        raise
    for state in session.client.follow(SNAPSHOTS, namespace, name, time.monotonic() + CUT_TIMEOUT_S, made):
        status = (state or {}).get("status") or {}
        if state is None or (why := (status.get("error") or {}).get("message")):
            session.client.delete(SNAPSHOTS, namespace, name)
            raise CpiError(f"cannot take a snapshot of {disk}: {why if state else 'it was deleted'}")
        if status.get("creationTime") or status.get("readyToUse"):
            return name
    log.say(f"the snapshot {name} is not ready yet: the cluster continues")
    return name


def delete(session: Session, snapshot: Cid) -> None:
    """Delete a snapshot. Do nothing if it is already gone. If it belongs to another Director, raises
    ``DiskNotFoundError``, because the Director has no error class for snapshots.
    """
    namespace = session.namespace_of(snapshot)
    found = session.client.find(SNAPSHOTS, namespace, snapshot)
    session.check_ours(found, names.KIND_SNAPSHOT, DiskNotFoundError)
    session.client.delete(SNAPSHOTS, namespace, snapshot)
