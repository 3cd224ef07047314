"""A small but strict fake of a Kubernetes API server with a kubelet.

``FakeCluster`` stores and checks the objects, and simulates the scheduler and the kubelet. ``FakeApiServer`` speaks
HTTP and injects faults into requests that match a pattern such as ``POST pods``.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str]

NODE = "node-1"
TOKEN = "token-of-the-cpi"
STEP_S = 0.005
"""Seconds that the simulated scheduler or kubelet needs for each action."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
GROUPS = {
    "/api/v1/": {"pods", "secrets", "persistentvolumeclaims", "services", "events", "nodes"},
    "/apis/storage.k8s.io/v1/": {"storageclasses"},
    "/apis/policy/v1/": {"poddisruptionbudgets"},
    "/apis/networking.k8s.io/v1/": {"ingresses", "networkpolicies"},
    "/apis/authorization.k8s.io/v1/": {"selfsubjectaccessreviews"},
    "/apis/snapshot.storage.k8s.io/v1/": {"volumesnapshots"},
}


class RefusalError(Exception):
    """Raised if the server rejects a request. The server then responds with a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


@dataclass
class Fault:
    """A fault for the next ``times`` requests whose ``METHOD plural/name`` matches ``pattern``.

    If ``status`` is set, the request is not processed, and this status is returned. If ``cut`` is "before" or "after",
    the connection is closed before or after the request is processed.
    """

    pattern: str
    times: int = 1
    status: int = 0
    message: str = "played"
    raw: str = ""
    """Body of the response, instead of a Status object."""
    retry_after: str = ""
    cut: str = ""
    delay_s: float = 0.0
    on: Callable[[], object] = lambda: None
    seen: int = 0


@dataclass
class FakeCluster:
    """All objects in a cluster, and settings for how its kubelet treats pods."""

    objects: dict[Key, Object] = field(default_factory=dict)
    events: list[tuple[int, str, Key, Object]] = field(default_factory=list)
    """All changes so far: resource version, event type, key, and the object after the change."""
    version: int = 100
    memory: int = 10000
    """Number of past versions that the server remembers. A watch that starts from an older version gets status 410."""
    admission: list[Callable[[str, Object], None]] = field(default_factory=list)
    pod_status: Callable[[Object], Object | None] = lambda _: None
    """Returns the status that the kubelet reports for a pod, or None to report it as running."""
    start_after_s: float = STEP_S
    """Seconds from a pod's creation until its container is running."""
    is_node_alive: bool = True
    objects_linger_s: float = 0.0
    """Seconds from the exit of a pod's containers to the removal of the pod object. Kubernetes 1.20 takes several
    seconds.
    """
    exit_code: int = 0
    busy_disks: set[str] = field(default_factory=set)
    """Disks that cannot be unmounted, because a VM uses them."""
    has_snapshots: bool = True
    snapshot_status: Object = field(
        default_factory=lambda: {"creationTime": "2001-01-01T00:00:02Z", "readyToUse": True}
    )
    denied: set[str] = field(default_factory=lambda: {"list secrets"})
    """Actions that access reviews report as denied, in the form "VERB PLURAL"."""
    forbidden: set[str] = field(default_factory=set)
    """Plurals of the kinds whose objects the account is not allowed to read."""
    logs: Callable[[Object], str] = lambda _: '{"level": "info", "message": "connected to the bus at 10.0.0.6:4222"}'
    """Returns the log of a pod."""
    violations: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    timers: list[threading.Timer] = field(default_factory=list)

    # --- functions for tests ------------------------------------------------------------------------------------------

    def of(self, plural: str) -> dict[str, Object]:
        """Return all objects of the given kind, keyed by name."""
        with self.changed:
            return {name: body for (kind, _, name), body in self.objects.items() if kind == plural}

    def snapshot(self) -> dict[str, Any]:
        """Return all objects without the members that differ from run to run so that two states can be compared."""
        with self.changed:
            return {f"{plural}/{name}": _essence(body) for (plural, _, name), body in sorted(self.objects.items())}

    def settle(self) -> None:
        """Wait until the scheduler and kubelet have completed their pending actions."""
        while pending := [timer for timer in self.timers if timer.is_alive()]:
            for timer in pending:
                timer.join()

    def hurry(self) -> None:
        """Run the pending actions of the scheduler and kubelet now instead of when they are due."""
        for timer in self.timers:
            if timer.is_alive():
                timer.cancel()
                timer.function(*timer.args)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def admitted(self, key: Key, body: Object) -> Object:
        """Return the object as it would be stored. Raise ``RefusalError`` if ``create`` would reject it."""
        _check_metadata(body["metadata"])
        if key[0] == "pods":
            _check_pod(body)
        for admit in self.admission:
            admit(key[0], body)
        return body

    def create(self, key: Key, body: Object) -> Object:
        with self.changed:
            plural, namespace, name = key
            self.admitted(key, body)
            if key in self.objects:
                raise RefusalError(409, "AlreadyExists", f'{plural} "{name}" already exists')
            body["metadata"] |= {
                "namespace": namespace,
                "uid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{key} {self._births(key)}")),
                "creationTimestamp": "2001-01-01T00:00:00Z",
            }
            if plural == "secrets":
                given = body.pop("stringData", {})
                body["data"] = {name: base64.b64encode(text.encode()).decode() for name, text in given.items()}
            if plural == "persistentvolumeclaims":
                # Leave the claim pending. It is bound only when a pod uses it (WaitForFirstConsumer).
                body["status"] = {"phase": "Pending"}
            if plural == "pods":
                body["status"] = {"phase": "Pending"}
            if plural == "services" and body["spec"].get("clusterIP") != "None":
                body["spec"].setdefault("clusterIP", "10.0.0.1")
            self._store(key, body, "ADDED")
            if plural == "pods":
                self._later(self._start, key, body["metadata"]["uid"], after_s=self.start_after_s)
            if plural == "volumesnapshots":
                self._later(self._cut, key)
            return self.objects[key]

    def patch(self, key: Key, change: Object) -> Object:
        with self.changed:
            body = self.existing(key)
            version = change.get("metadata", {}).get("resourceVersion")
            if version and version != body["metadata"]["resourceVersion"]:
                raise RefusalError(409, "Conflict", "the object has been modified")
            if key[0] == "secrets" and set(change) - {"metadata"}:
                raise RefusalError(422, "Invalid", "field is immutable when `immutable` is set")
            merged = _merge(body, change)
            _check_metadata(merged["metadata"])
            self._store(key, merged, "MODIFIED")
            if key[0] == "persistentvolumeclaims":
                self._later(self._expand, key)
            return self.objects[key]

    def delete(self, key: Key, options: Object) -> Object:
        with self.changed:
            body = self.existing(key)
            version = options.get("preconditions", {}).get("resourceVersion")
            if version and version != body["metadata"]["resourceVersion"]:
                raise RefusalError(409, "Conflict", "the object has been modified")
            if key[0] == "pods":
                grace = options.get("gracePeriodSeconds", body["spec"].get("terminationGracePeriodSeconds", 30))
                if grace == 0:
                    return self._remove(key)
                self._mark_deleted(key, grace)
                self._later(self._end, key, body["metadata"]["uid"])
                return self.objects[key]
            if body["metadata"].get("finalizers") or (key[0] == "persistentvolumeclaims" and self._users(key)):
                self._mark_deleted(key, None)
                return self.objects[key]
            return self._remove(key)

    def _births(self, key: Key) -> int:
        return sum(1 for _, kind, born, _ in self.events if kind == "ADDED" and born == key)

    def existing(self, key: Key) -> Object:
        if key not in self.objects:
            raise RefusalError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def _mark_deleted(self, key: Key, grace: int | None) -> None:
        metadata = {"deletionTimestamp": "2001-01-01T00:00:01Z", "deletionGracePeriodSeconds": grace}
        self._store(key, _merge(self.objects[key], {"metadata": metadata}), "MODIFIED")

    def _store(self, key: Key, body: Object, kind: str) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = body
        self.events.append((self.version, kind, key, json.loads(json.dumps(body))))
        self.changed.notify_all()

    def _remove(self, key: Key) -> Object:
        body = self.objects.pop(key)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, "DELETED", key, body))
        self.changed.notify_all()
        for other, claim in list(self.objects.items()):
            is_leaving = other[0] == "persistentvolumeclaims" and "deletionTimestamp" in claim["metadata"]
            if is_leaving and not self._users(other):
                self._remove(other)
        return body

    # --- scheduler, kubelet, volumes ----------------------------------------------------------------------------------

    def _later(self, step: Callable[..., None], *arguments: Any, after_s: float = STEP_S) -> None:
        timer = threading.Timer(after_s, step, arguments)
        timer.daemon = True
        self.timers.append(timer)
        timer.start()

    def _start(self, key: Key, uid: str) -> None:
        with self.changed:
            pod = self.objects.get(key)
            if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
                return
            status = self.pod_status(pod)
            if status is None:
                missing = [
                    name for name in _claims(pod) if ("persistentvolumeclaims", key[1], name) not in self.objects
                ]
                if missing:
                    status = _unscheduled(f'persistentvolumeclaim "{missing[0]}" not found')
                else:
                    self._mount(key, pod)
                    status = _running(pod, len(self.events))
                    if (pod["metadata"].get("labels") or {}).get("cpi.bosh.io/kind") == "detachment":
                        status = self._unmounted(pod)
                    self._reboot(key[1], pod["metadata"].get("labels") or {})
            is_scheduled = "containerStatuses" in status or status["phase"] != "Pending"
            spec = {"nodeName": NODE} if is_scheduled else {}
            self._store(key, _merge(pod, {"spec": spec, "status": status}), "MODIFIED")

    def _unmounted(self, pod: Object) -> Object:
        """Return the status of a helper pod that unmounts a disk. The helper pod fails if a VM uses the disk."""
        is_busy = pod["metadata"]["labels"]["cpi.bosh.io/disk"] in self.busy_disks
        if not is_busy:
            return _running(pod, len(self.events))
        told = {"exitCode": 1, "message": "cannot unmount the disk: the VM uses it"}
        return {"phase": "Failed", "containerStatuses": [{"restartCount": 0, "state": {"terminated": told}}]}

    def _reboot(self, namespace: str, labels: Object) -> None:
        """Restart the container of the VM named in a reboot helper pod's labels. Ignore the labels of other pods."""
        vm = ("pods", namespace, labels.get("cpi.bosh.io/vm", ""))
        if labels.get("cpi.bosh.io/kind") == "reboot" and vm in self.objects:
            container, *_ = self.objects[vm]["status"]["containerStatuses"]
            statuses = [{**container, "restartCount": container["restartCount"] + 1}]
            self._store(vm, _merge(self.objects[vm], {"status": {"containerStatuses": statuses}}), "MODIFIED")

    def _mount(self, key: Key, pod: Object) -> None:
        for name in _claims(pod):
            for other in self._users(("persistentvolumeclaims", key[1], name)):
                if other["metadata"]["name"] != key[2] and not name.startswith("data-"):
                    self.violations.append(f"{name} is mounted by {other['metadata']['name']} and by {key[2]}")
            claim = self.objects["persistentvolumeclaims", key[1], name]
            if claim["status"]["phase"] != "Bound":
                storage = claim["spec"]["resources"]["requests"]
                bound = {"status": {"phase": "Bound", "capacity": storage}}
                self._store(("persistentvolumeclaims", key[1], name), _merge(claim, bound), "MODIFIED")

    def _end(self, key: Key, uid: str) -> None:
        with self.changed:
            pod = self.objects.get(key)
            if pod is None or pod["metadata"]["uid"] != uid:
                return
            is_attachment = pod["metadata"].get("labels", {}).get("cpi.bosh.io/kind") == "attachment"
            is_busy = is_attachment and bool(self.busy_disks & set(_claims(pod)))
            if self.is_node_alive and not is_busy:
                if self.objects_linger_s:
                    ended = [{"restartCount": 0, "state": {"terminated": {"exitCode": self.exit_code}}}]
                    self._store(key, _merge(pod, {"status": {"containerStatuses": ended}}), "MODIFIED")
                    self._later(self._remove_if_there, key, uid, after_s=self.objects_linger_s)
                else:
                    self._remove(key)

    def _remove_if_there(self, key: Key, uid: str) -> None:
        with self.changed:
            if key in self.objects and self.objects[key]["metadata"]["uid"] == uid:
                self._remove(key)

    def _expand(self, key: Key) -> None:
        with self.changed:
            claim = self.objects.get(key)
            if claim and claim["status"].get("phase") == "Bound":
                wanted = claim["spec"]["resources"]["requests"]
                if claim["status"].get("capacity") != wanted:
                    self._store(key, _merge(claim, {"status": {"capacity": wanted}}), "MODIFIED")

    def _cut(self, key: Key) -> None:
        with self.changed:
            if key in self.objects:
                self._store(key, _merge(self.objects[key], {"status": self.snapshot_status}), "MODIFIED")

    def _users(self, claim: Key) -> list[Object]:
        """Return the running pods that mount a claim."""
        return [
            pod
            for (plural, namespace, _), pod in self.objects.items()
            if plural == "pods"
            and namespace == claim[1]
            and claim[2] in _claims(pod)
            and pod["status"].get("phase") == "Running"
            and "terminated" not in pod["status"]["containerStatuses"][0]["state"]
        ]


class FakeApiServer:
    """Serves the cluster over HTTP on a free port. ``requests`` records each request as `METHOD plural/name`, in
    order.
    """

    def __init__(self, cluster: FakeCluster, *, tls: ssl.SSLContext | None = None) -> None:
        self.cluster = cluster
        self.requests: list[str] = []
        self.bodies: list[str] = []
        self.faults: list[Fault] = []
        self.token = TOKEN
        self.expired = 0
        """Number of watches that were rejected with status 410."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                server.serve(self)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - http.server prescribes these names

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Ignore connection errors, because a client that is killed may close its connection at any point."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if tls:
            # Perform the TLS handshake in the connection's own thread so that a failed handshake does not delay other
            # clients.
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut down the server and wait for the cluster's pending actions."""
        self._http.shutdown()
        self._http.server_close()
        self.cluster.settle()

    def config(self, **more: Any) -> Object:
        """Return a CPI configuration for this server.

        By default, disks are attached by recreating the pod, because this covers more of the CPI's code than the
        alternatives.
        """
        cluster = {"server": self.url, "token": self.token}
        agent = {"mbus": "nats://10.0.0.6:4222"}
        return {"cluster": cluster, "namespace": "bosh", "agent": agent, "disks": {"attach": "recreate"}, **more}

    def fail(self, pattern: str, **what: Any) -> Fault:
        """Inject a fault into future requests that match ``pattern``."""
        fault = Fault(pattern, **what)
        self.faults.append(fault)
        return fault

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Serve one request."""
        length = int(handler.headers.get("Content-Length") or 0)
        raw = handler.rfile.read(length)
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body: Object = json.loads(raw) if raw else {}
        plural, namespace, name, part = _path(url.path)
        name = name or body.get("metadata", {}).get("name", "")
        what = f"{'WATCH' if 'watch' in query else handler.command} {plural}/{name}"
        self.requests.append(what)
        self.bodies.append(raw.decode())
        fault = next((one for one in self.faults if one.seen < one.times and re.search(one.pattern, what)), None)
        try:
            if fault:
                fault.seen += 1
                time.sleep(fault.delay_s)
                fault.on()
                if fault.cut == "before":
                    handler.close_connection = True
                    return
                if fault.status:
                    body_of_fault = fault.raw or _status(fault.status, "", fault.message)
                    _reply(handler, fault.status, body_of_fault, fault.retry_after)
                    return
            if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
                raise RefusalError(401, "Unauthorized", "Unauthorized")
            if plural in self.cluster.forbidden:
                raise RefusalError(403, "Forbidden", f"{plural} is forbidden")
            if "watch" in query:
                self._watch(handler, plural, namespace, query, fault)
                return
            answer = self._answer(handler.command, (plural, namespace, name), part, body, query)
            if fault and fault.cut == "after":
                handler.close_connection = True
                return
            _reply(handler, 201 if handler.command == "POST" else 200, answer)
        except RefusalError as exc:
            _reply(handler, exc.code, _status(exc.code, exc.reason, exc.message))
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _answer(self, method: str, key: Key, part: str, body: Object, query: dict[str, str]) -> Object | str:
        cluster = self.cluster
        if key[0] == "volumesnapshots" and not cluster.has_snapshots:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        if key[0] == "selfsubjectaccessreviews":
            wanted = body["spec"]["resourceAttributes"]
            asked = f"{wanted['verb']} {wanted['resource']}" + (
                f"/{wanted['subresource']}" if "subresource" in wanted else ""
            )
            return {"status": {"allowed": asked not in cluster.denied}}
        with cluster.changed:
            if method == "POST" and "dryRun" in query:
                answer: Object | str = cluster.admitted(key, body)
            elif method == "POST":
                answer = cluster.create(key, body)
            elif method == "PATCH":
                answer = cluster.patch(key, body)
            elif method == "DELETE":
                answer = cluster.delete(key, body)
            elif part == "log":
                answer = cluster.logs(cluster.existing(key))
            elif key[2]:
                answer = cluster.existing(key)
            else:
                items = [
                    one
                    for (plural, namespace, _), one in cluster.objects.items()
                    if plural == key[0] and namespace == key[1] and _selected(one, query)
                ]
                answer = {"items": items, "metadata": {"resourceVersion": str(cluster.version)}}
            return json.loads(json.dumps(answer)) if isinstance(answer, dict) else answer

    def _watch(
        self, handler: BaseHTTPRequestHandler, plural: str, namespace: str, query: dict[str, str], fault: Fault | None
    ) -> None:
        since, until = (
            int(query.get("resourceVersion") or 0),
            time.monotonic() + float(query.get("timeoutSeconds", "5")),
        )
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        cluster = self.cluster

        def send(event: Object) -> None:
            line = json.dumps(event).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            handler.wfile.flush()

        if since < cluster.version - cluster.memory:
            self.expired += 1
            send({"type": "ERROR", "object": {**_status(410, "Expired", "too old resource version"), "code": 410}})
            until = 0
        while time.monotonic() < until:
            with cluster.changed:
                found = [
                    (kind, body)
                    for version, kind, key, body in cluster.events
                    if version > since and key[:2] == (plural, namespace) and _selected(body, query)
                ]
                since = cluster.version
                if not found:
                    cluster.changed.wait(max(0.0, min(0.05, until - time.monotonic())))
            for kind, body in found:
                send({"type": kind, "object": body})
                if fault and fault.cut == "after":
                    handler.close_connection = True
                    return
        handler.wfile.write(b"0\r\n\r\n")


def _reply(handler: BaseHTTPRequestHandler, status: int, body: Object | str, retry_after: str = "") -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    handler.send_response(status)
    if retry_after:
        handler.send_header("Retry-After", retry_after)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
    handler.wfile.flush()


def _status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def _path(path: str) -> tuple[str, str, str, str]:
    """Split a URL path into plural, namespace, name and subresource."""
    for prefix, plurals in GROUPS.items():
        if path.startswith(prefix):
            steps = path.removeprefix(prefix).split("/")
            namespace = ""
            if steps[0] == "namespaces":
                namespace, steps = steps[1], steps[2:]
            plural, name, part = [*steps, "", ""][:3]
            if plural in plurals:
                return plural, namespace, urllib.parse.unquote(name), part
    raise AssertionError(f"no API has the path {path}")


def _selected(body: Object, query: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels") or {}
    for rule in re.findall(r"[^,(]+(?:\([^)]*\))?", query.get("labelSelector", "")):
        if found := re.fullmatch(r"(\S+) in \(([^)]*)\)", rule):
            if labels.get(found[1]) not in found[2].split(","):
                return False
        elif labels.get(rule.partition("=")[0]) != rule.partition("=")[2]:
            return False
    for rule in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, wanted = rule.partition("=")
        value: Any = body
        for step in path.split("."):
            value = value.get(step, {}) if isinstance(value, dict) else {}
        if value != wanted:
            return False
    return True


def _merge(body: Object, change: Object) -> Object:
    out = dict(body)
    for key, value in change.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = _merge(out[key] if isinstance(out.get(key), dict) else {}, value)
        else:
            out[key] = value
    return out


def _check_metadata(metadata: Object) -> None:
    wrong = [] if NAME.fullmatch(metadata["name"]) and len(metadata["name"]) <= 253 else [metadata["name"]]
    for key, value in (metadata.get("labels") or {}).items():
        wrong += [] if LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value) else [f"label {key}: {value}"]
    for key, value in (metadata.get("annotations") or {}).items():
        wrong += [] if LABEL_KEY.fullmatch(key) and isinstance(value, str) else [f"annotation {key}: {value}"]
    if wrong:
        raise RefusalError(422, "Invalid", f"Invalid value: {wrong[0]}")


def _check_pod(pod: Object) -> None:
    volumes = [one["name"] for one in pod["spec"].get("volumes") or []]
    mounts = [one for container in pod["spec"]["containers"] for one in container.get("volumeMounts") or []]
    paths = [one["mountPath"] for one in mounts]
    if len(set(volumes)) != len(volumes) or len(set(paths)) != len(paths):
        raise RefusalError(422, "Invalid", "Duplicate value of a volume or mount")
    for name in volumes:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            raise RefusalError(422, "Invalid", f"spec.volumes.name: Invalid value: {name}")
    for mount in mounts:
        if mount["name"] not in volumes:
            raise RefusalError(422, "Invalid", f"spec.containers[0].volumeMounts: Not found: {mount['name']}")
        volume = next(one for one in pod["spec"]["volumes"] if one["name"] == mount["name"])
        if mount.get("mountPropagation") and "emptyDir" in volume:
            raise AssertionError("an emptyDir under a propagated mount: the kubelet would empty the disks in it")


def _claims(pod: Object) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]


def _running(pod: Object, number: int) -> Object:
    asked = re.search(r"[0-9.]+", pod["metadata"].get("annotations", {}).get("cni.projectcalico.org/ipAddrs", ""))
    return {
        "phase": "Running",
        "podIP": asked[0] if asked else f"10.1.{number // 250 % 250}.{number % 250}",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"restartCount": 0, "state": {"running": {}}}],
    }


def _unscheduled(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


unscheduled, merged = _unscheduled, _merge


def waiting(reason: str, message: str) -> Object:
    """Return the status of a pod whose container cannot start. ``reason`` and ``message`` say why."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"restartCount": 0, "state": state}]}


def _essence(body: Object) -> Object:
    """Return an object without the members that differ from run to run."""
    metadata = {key: body["metadata"].get(key) for key in ("name", "labels", "annotations", "deletionTimestamp")}
    return {"metadata": metadata, "spec": body.get("spec"), "data": body.get("data")}
