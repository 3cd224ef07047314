"""Wait for pods to become ready or fail, and delete pods, making sure that their containers have stopped."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kubernetes_cpi import log, manifests
from kubernetes_cpi.client import EVENTS, NODES, PODS, WATCH_S, Object
from kubernetes_cpi.errors import ApiError, CpiError, VMCreationFailedError
from kubernetes_cpi.session import Session

HOPELESS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable", "CreateContainerConfigError"}
)
"""Reasons in a waiting container's status that mean that it will not start until somebody intervenes."""
PASSING: Final = r"time-?out|timed out|connection (refused|reset)|eof|too ?many ?requests|429|50[0234]"
"""Matches image pull errors that may be temporary."""
NEW_CLAIM: Final = r'persistentvolumeclaim "[^"]*" not found|unbound immediate PersistentVolumeClaims'
"""Matches the scheduler's message about a claim that the scheduler has not seen yet or whose volume is still being
created.
"""
HOPELESS_CLAIM: Final = r'storageclass\S* "[^"]*" not found|no storage class is set'
"""Matches an event message about a claim that will never get a volume."""
ROOM: Final = "Insufficient|Too many pods|free ports|max volume count|anti-affinity"
"""Matches the scheduler's message that all suitable nodes are full. This may change when other pods terminate."""
NEVER_ADMITTED: Final = frozenset({"SysctlForbidden", "AppArmor", "PodOSNotSupported", "UnexpectedAdmissionError"})
"""Reasons for which the kubelet rejects the pod permanently."""
NEW_CLAIM_TIMEOUT_S: Final = 60
"""Seconds that the scheduler gets to notice a new claim. With 32 new pods it needed more than ten seconds."""
WRONG_CONFIGURATION: Final = 78
"""Exit code of an agent that cannot start until its configuration is changed."""
EXPLAIN_AFTER_S: Final = 3
"""Seconds without progress after which the CPI looks for the reason in the events and in the agent's log."""
LOG_LINES: Final = 50
FORCED_END_S: Final = 30
CLOCK_MARGIN_S: Final = 0.5
"""Seconds by which a time limit may be reached early. ``follow`` may yield a state slightly before the limit, and the
next one only seconds later.
"""
EVENTS_SHOWN: Final = 3
QUIET: Final = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started", "WaitForFirstConsumer"})
"""Reasons given in events that occur at every start and therefore do not explain a delay."""


def is_ready(pod: Object) -> bool:
    """Return True if the kubelet reports the pod as ready and the pod is not being deleted."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and not is_ending(pod)


def is_ending(pod: Object) -> bool:
    """Return True for a pod whose deletion was requested, even if its containers have already terminated."""
    return "deletionTimestamp" in pod["metadata"]


def has_ended(pod: Object) -> bool:
    """Return True for a pod that will never run again, for example after an eviction."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def has_stopped(pod: Object) -> bool:
    """Return True for a deleted pod whose containers have terminated. Its object may remain for a while."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return is_ending(pod) and bool(statuses) and all("terminated" in one.get("state", {}) for one in statuses)


def has_started(pod: Object) -> bool:
    """Return True if a container of the pod is running, even if it is not ready yet."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return not is_ending(pod) and any("running" in one.get("state", {}) for one in statuses)


def until_ready(
    session: Session,
    namespace: str,
    pod: Object,
    *,
    timeout_s: float,
    begun: float | None = None,
    is_enough: Callable[[Object], bool] = is_ready,
) -> Object:
    """Wait until ``is_enough`` returns True for a new pod, by default until the pod is ready. Return the pod.

    The time limit ``timeout_s`` is counted from ``begun`` (monotonic), which defaults to now. Raises
    ``VMCreationFailedError`` with the reason as soon as it is clear that the pod cannot start.
    """
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    timeouts = session.config.timeouts
    judge = _Judge(session, namespace, name)
    # Check the pod often enough to notice an expired time limit soon.
    tick_s = min(WATCH_S, EXPLAIN_AFTER_S, timeouts.unschedulable, timeouts.crashing)
    state: Object | None = pod
    until = (time.monotonic() if begun is None else begun) + timeout_s
    for state in session.client.follow(PODS, namespace, name, until, pod, tick_s=tick_s):
        if state is None or state["metadata"]["uid"] != uid or is_ending(state):
            raise VMCreationFailedError(f"the pod {name} was deleted while it started", ok_to_retry=True)
        if is_enough(state):
            return state
        judge.look(state)
    raise VMCreationFailedError(f"the pod {name} is not ready after {timeout_s:g} s: {judge.reason(state or pod)}")


def until_done(session: Session, namespace: str, pod: Object, *, timeout_s: float) -> Object:
    """Wait until a one-shot pod is ready or has terminated, and return its last state. Such a pod becomes ready when
    its work is done (``attachments.WAIT_UNTIL_DONE``).

    Raises ``CpiError`` if it cannot start or if neither happens in time.
    """
    name = pod["metadata"]["name"]
    judge, state = _Judge(session, namespace, name), pod
    for found in session.client.follow(PODS, namespace, name, time.monotonic() + timeout_s, pod):
        if found is None or is_ending(found):
            raise CpiError(f"the pod {name} was deleted meanwhile", ok_to_retry=True)
        if has_ended(found) or is_ready(found):
            return found
        judge.look(found)
        state = found
    raise CpiError(f"the pod {name} is not done after {timeout_s:g} s: {_waiting_for(state) or 'no reason is known'}")


def end(
    session: Session, namespace: str, name: str, *, grace_s: int | None = None, is_name_needed: bool = False
) -> None:
    """Delete a pod, if there is one, and wait until its containers have terminated.

    The default for ``grace_s`` is the pod's own grace period. If ``is_name_needed`` is set, also wait until the object
    is gone, so that a pod with the same name can be created.

    The node must confirm within the grace period plus `timeouts.delete_vm` that the containers have terminated.
    Otherwise, if the node is Ready, ``CpiError`` is raised. A node that is not Ready may be dead, so its pod is
    force-deleted instead.
    """
    asked = session.client.delete(PODS, namespace, name, grace_s=grace_s)
    if asked is None:
        return
    metadata = asked.get("metadata", {})
    grace = metadata.get("deletionGracePeriodSeconds") or 0
    patience = grace + session.config.timeouts.delete_vm
    if _wait_until_gone(session, namespace, name, metadata.get("uid", ""), patience, is_name_needed=is_name_needed):
        return
    node = asked.get("spec", {}).get("nodeName", "")
    if node and _is_node_ready(session, node):
        raise CpiError(
            f"cannot end the pod {name}: its node {node} is ready, but has not confirmed the end within "
            f"{patience:g} s; see `kubectl describe pod {name}`"
        )
    log.say(
        f"pod {name}: its node {node or '(none)'} has not confirmed the end within {patience:g} s; deleted by force. "
        "Its processes may run on until the node is back or fenced"
    )
    session.client.delete(PODS, namespace, name, grace_s=0)
    if not _wait_until_gone(session, namespace, name, metadata.get("uid", ""), FORCED_END_S, is_name_needed=True):
        raise CpiError(f"cannot end the pod {name}: it still exists after a forced deletion; does it have finalizers?")


def until_gone(session: Session, namespace: str, name: str, timeout_s: float) -> bool:
    """Wait until a deleted pod no longer exists. Return False if it still exists after ``timeout_s`` seconds."""
    return _wait_until_gone(session, namespace, name, "", timeout_s, is_name_needed=True)


def until_stopped(session: Session, namespace: str, name: str, timeout_s: float) -> bool:
    """Wait until a deleted pod's container has exited with status 0 or the pod is gone. Return False if neither happens
    in time.

    Raises ``CpiError`` with the message in the container's termination log if it exits with another status.
    """
    for state in session.client.follow(PODS, namespace, name, time.monotonic() + timeout_s):
        if state is None:
            return True
        if has_stopped(state):
            ended = state["status"]["containerStatuses"][0]["state"]["terminated"]
            if ended.get("exitCode") != 0:
                raise CpiError(f"the pod {name} has failed: {ended.get('message') or ended.get('reason')}")
            return True
    return False


def _wait_until_gone(
    session: Session, namespace: str, name: str, uid: str, timeout_s: float, *, is_name_needed: bool
) -> bool:
    """Wait until a deleted pod's containers have terminated. If ``is_name_needed`` is set, wait until the object is
    gone.

    Return False if that does not happen in time. If ``uid`` is given, a pod with a different UID means that the deleted
    pod is gone.
    """
    for state in session.client.follow(PODS, namespace, name, time.monotonic() + timeout_s):
        if state is None or (uid and state["metadata"]["uid"] != uid):
            return True
        if has_stopped(state) and not is_name_needed:
            return True
    return False


def _is_node_ready(session: Session, node: str) -> bool:
    """Return True if the node is Ready. Return False if it is not, or if the account is not allowed to read nodes."""
    try:
        found = session.client.find(NODES, "", node)
    except ApiError as exc:
        if exc.status != http.client.FORBIDDEN:
            raise
        return False
    conditions = (found or {}).get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _oversized_request(session: Session, pod: Object) -> str:
    """Return a message if the pod requests more of a resource than the largest node has.

    Return "" if no request is too large, or if the account is not allowed to list nodes.
    """
    try:
        found = [one.get("status", {}).get("allocatable") or {} for one in session.client.list(NODES, "")]
    except ApiError as exc:
        if exc.status != http.client.FORBIDDEN:
            raise
        return ""
    for resource, wanted in manifests.requests_of(pod).items():
        sizes = sorted((one[resource] for one in found if resource in one), key=manifests.amount_of)
        if sizes and manifests.amount_of(wanted) > manifests.amount_of(sizes[-1]):
            return f"it requests {wanted} {resource}, and the largest node has {sizes[-1]}; choose a smaller VM type"
    return ""


class _Judge:
    """Examines successive states of a pod to detect as early as possible that it cannot start."""

    def __init__(self, session: Session, namespace: str, name: str) -> None:
        self._session, self._namespace, self._name = session, namespace, name
        timeouts = session.config.timeouts
        # Time limit in seconds for each kind of wait (see ``_kind``).
        self._patience = {
            "claim": max(timeouts.unschedulable, NEW_CLAIM_TIMEOUT_S),
            "volume": timeouts.volume,
            "room": timeouts.room,
            "unschedulable": timeouts.unschedulable,
            "wrong": min(timeouts.crashing, timeouts.unschedulable),
            "crashing": timeouts.crashing,
            "start": float("inf"),
            "unready": timeouts.unready,
        }
        # Maps the kind of the current wait to the time (monotonic) at which the wait began. It has only this one item.
        self._since: dict[str, float] = {}
        # The last message in the log, so that ``_log_change`` does not repeat it.
        self._logged = ""

    def look(self, pod: Object) -> None:
        """Check one state. Raises ``VMCreationFailedError`` if the pod cannot start."""
        self._log_change(_waiting_for(pod))
        if has_ended(pod):
            is_temporary = pod["status"].get("reason") not in NEVER_ADMITTED
            raise VMCreationFailedError(
                f"the pod {self._name} has ended: {_waiting_for(pod)}", ok_to_retry=is_temporary
            )
        reason, words = _waiting(pod)
        if reason in HOPELESS:
            raise VMCreationFailedError(
                f"the pod {self._name} cannot start: {_waiting_for(pod)}",
                ok_to_retry=bool(re.search(PASSING, words, re.IGNORECASE)),
            )
        kind = _kind(pod)
        # If the pod is now waiting for something else, a new wait begins.
        self._since = {kind: self._since.get(kind, time.monotonic())}
        # Count slightly more, because the state may arrive just before a limit, and the next one seconds later.
        lasts_s = time.monotonic() - self._since[kind] + CLOCK_MARGIN_S
        if lasts_s < min(EXPLAIN_AFTER_S, self._patience[kind]):
            return
        explanation = self.reason(pod)
        self._log_change(explanation)
        if lasts_s >= self._patience[kind] or (kind in ("claim", "volume") and re.search(HOPELESS_CLAIM, explanation)):
            excess = _oversized_request(self._session, pod) if kind == "room" else ""
            # A retry may succeed because other pods have made room, or because the reason for a crash has disappeared.
            raise VMCreationFailedError(
                f"the pod {self._name} cannot start: {excess or explanation}",
                ok_to_retry=kind in ("room", "crashing") and not excess,
            )

    def reason(self, pod: Object) -> str:
        """Return why the pod is not ready, according to the scheduler, the kubelet, events of the pod and its claims,
        and the agent's last log line.
        """
        kind, found = _kind(pod), [_waiting_for(pod)]
        if kind in ("claim", "volume", "start"):
            for name in [*manifests.claims_of(pod), self._name]:
                found += [f"{name}: {text}" for text in _events(self._session, self._namespace, name)]
        if kind in ("wrong", "crashing", "unready"):
            found.append(last_log_message(self._session, self._namespace, self._name) or "")
        return "; ".join(filter(None, found)) or "no reason is known"

    def _log_change(self, text: str) -> None:
        if text and text != self._logged:
            log.say(f"pod {self._name}: {text}")
            self._logged = text


def _kind(pod: Object) -> str:
    """Return what the pod is waiting for, as a key of ``_Judge._patience``.

    The scheduler may wait for a ``claim``, for ``room`` on a node, for any suitable node (``unschedulable``), or for a
    ``volume``. Once the pod has a node, its container might not have started yet (``start``), might be ``unready``, or
    might have crashed (``wrong`` if the agent's configuration is the reason, otherwise ``crashing``).
    """
    if (message := _unschedulable(pod)) is not None:
        if re.search(NEW_CLAIM, message):
            return "claim"
        return "room" if re.search(ROOM, message) else "unschedulable"
    if not pod["spec"].get("nodeName"):
        return "volume"
    crash, reason = _crash(pod), _waiting(pod)[0]
    if crash is not None:
        return "wrong" if crash.get("exitCode") == WRONG_CONFIGURATION else "crashing"
    if reason.endswith("Error"):  # such as RunContainerError
        return "crashing"
    return "unready" if has_started(pod) else "start"


def last_log_message(session: Session, namespace: str, name: str, wanted: str = "") -> str | None:
    """Return the last line of the agent's log that matches the regular expression ``wanted``, or "" if none does.

    If ``wanted`` is empty, return the last warning or error, or the last line if there is none. Return None if the log
    cannot be read.
    """
    try:
        lines = session.client.log_of(namespace, name, LOG_LINES).splitlines()
    except CpiError as exc:
        log.say(f"cannot read the log of {name}: {exc}")
        return None
    found = [_Line.of(line) for line in lines if line.strip()]
    matching = [one for one in found if re.search(wanted, one.message)]
    warnings = [one for one in matching if one.level.lower() not in ("info", "debug") and not wanted]
    return (warnings or matching or [_Line("")])[-1].message


class _Line(msgspec.Struct, frozen=True):
    """A line of the agent's log. The agent writes JSON in a pod; other programs may write plain text."""

    message: str
    level: str = "info"

    @classmethod
    def of(cls, line: str) -> _Line:
        """Parse a line. A line that is not in the agent's format becomes the message."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError:
            return cls(line.strip())


def _waiting_for(pod: Object) -> str:
    """Return why a pod is not ready, according to the kubelet or the scheduler, or "" if they give no reason."""
    status = pod.get("status", {})
    if has_ended(pod):
        return ": ".join(filter(None, [status.get("reason"), status.get("message")])) or str(status["phase"])
    if (message := _unschedulable(pod)) is not None:
        return f"no node takes it: {message}"
    reason, message = _waiting(pod)
    crash = _crash(pod)
    if crash is not None:
        code, last = crash.get("exitCode"), str(crash.get("message") or crash.get("reason") or "").strip()
        return f"its container ends with exit code {code}{f': {last}' if last else ''}"
    return ": ".join(filter(None, [reason, message]))


def _container(pod: Object) -> Mapping[str, Any]:
    """Return the status of the container that the pod is waiting for: the init container until it is done, then the
    main container.
    """
    status = pod.get("status", {})
    initial = [one for one in status.get("initContainerStatuses") or [] if not one.get("ready")]
    statuses = initial or status.get("containerStatuses") or [{}]
    found: Mapping[str, Any] = statuses[0]
    return found


def _waiting(pod: Object) -> tuple[str, str]:
    """Return the kubelet's reason and message for not having started the container. Missing texts are ""."""
    waiting = _container(pod).get("state", {}).get("waiting") or {}
    return waiting.get("reason") or "", waiting.get("message") or ""


def _crash(pod: Object) -> Mapping[str, Any] | None:
    """Return how the container last terminated, or None if it has never terminated."""
    container = _container(pod)
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    found: Mapping[str, Any] | None = ended
    return found


def _unschedulable(pod: Object) -> str | None:
    """Return the scheduler's message if it has found no node for the pod, otherwise None."""
    for one in pod.get("status", {}).get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False" and one.get("reason") == "Unschedulable":
            return str(one.get("message", ""))
    return None


def _events(session: Session, namespace: str, name: str) -> list[str]:
    """Return the latest events of an object. They can tell, for example, that a volume cannot be created or mounted."""
    try:
        found = session.client.list(EVENTS, namespace, fields=f"involvedObject.name={name}")
        texts = [f"{one.get('reason')}: {one.get('message')}" for one in found if one.get("reason") not in QUIET]
        return texts[-EVENTS_SHOWN:]
    except CpiError as exc:
        log.say(f"cannot read the events of {name}: {exc}")
        return []
