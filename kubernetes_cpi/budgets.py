"""Maintain PodDisruptionBudgets for instance groups, so that a node drain evicts only one VM in a group at a time.

Kubernetes supports relative budgets, such as `maxUnavailable`, only for pods that a controller manages. VMs are bare
pods, so each budget instead states how many pods must stay available: all of the group's pods but one.
"""

from __future__ import annotations

import http.client

from kubernetes_cpi import claims, log, names, pods
from kubernetes_cpi.client import BUDGETS, PODS, Object
from kubernetes_cpi.errors import ApiError, CpiError
from kubernetes_cpi.session import Session


def keep(session: Session, namespace: str, group: str) -> None:
    """Set an instance group's PodDisruptionBudget so that only one VM at a time can be evicted.

    If the cluster does not support budgets, or if the account is not allowed to use them, this is only logged.
    """
    try:
        for _ in range(claims.ATTEMPTS):
            if _try_update(session, namespace, group):
                return
        log.say(f"cannot update the PodDisruptionBudget of the group {group}: other calls keep changing it")
    except ApiError as exc:
        if exc.status not in (http.client.FORBIDDEN, http.client.NOT_FOUND):
            raise
        log.say(f"no PodDisruptionBudget: {exc}")


def _try_update(session: Session, namespace: str, group: str) -> bool:
    """Count the group's VMs and create, update or delete its budget accordingly. Return False if another call changed
    the budget at the same time.
    """
    name = f"group-{group}"
    # Read the budget before counting the VMs, so that a concurrent change to the budget is detected as a conflict.
    found = session.client.find(BUDGETS, namespace, name)
    session.check_ours(found, names.KIND_BUDGET, CpiError)
    selector = {names.GROUP: group, names.KIND: names.KIND_VM}
    labels = ",".join(f"{key}={value}" for key, value in selector.items())
    size = sum(
        not pods.is_ending(one) and not pods.has_ended(one)
        for one in session.client.list(PODS, namespace, labels=labels)
    )
    version = found["metadata"]["resourceVersion"] if found else ""
    if size < 2:
        # ``delete`` returns None if another call has changed the budget.
        return found is None or session.client.delete(BUDGETS, namespace, name, version=version) is not None
    spec: Object = {"minAvailable": size - 1}
    if found is None:
        # A VM that is not ready must not keep its node from being drained.
        spec |= {"selector": {"matchLabels": selector}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
        body = BUDGETS.document(name, names.labels(names.KIND_BUDGET, session.director, **{names.GROUP: group}), spec)
        return session.client.ensure(BUDGETS, namespace, body)[1]
    if found["spec"].get("minAvailable") == size - 1:
        return True
    try:
        session.client.patch(BUDGETS, namespace, name, {"metadata": {"resourceVersion": version}, "spec": spec})
    except ApiError as exc:
        if exc.status == http.client.CONFLICT:
            return False
        raise
    return True
