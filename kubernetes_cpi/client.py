"""A client for the API server. It retries requests after temporary errors, and its watches survive lost connections.

Every request is logged as one line. `timeouts.retry` limits the total duration of all attempts.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import msgspec

from kubernetes_cpi import log
from kubernetes_cpi.config import Timeouts
from kubernetes_cpi.credentials import HEADER_VALUE, Access
from kubernetes_cpi.errors import ApiError, InputError, UnreachableError

Object = dict[str, Any]
"""An API object, decoded from JSON."""

RETRIED: Final = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed when it is retried."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
WATCH_S: Final = 5
"""Seconds after which a watch is restarted, because its connection may have been lost unnoticed."""
DRY_RUN: Final = "dryRun=All"
LIST_CHUNK: Final = 250
ALREADY_EXISTS: Final = "AlreadyExists"
MERGE_PATCH: Final = "application/merge-patch+json"


class Resource(msgspec.Struct, frozen=True):
    """A kind of object: its API group and version as they appear in paths (``prefix``), its plural name in paths, and
    its `kind` in documents.
    """

    prefix: str
    plural: str
    kind: str = ""

    def document(
        self, name: str, labels: Mapping[str, str], spec: Object, annotations: Mapping[str, str] | None = None
    ) -> Object:
        """Build an object of this kind from its metadata and spec."""
        return {
            "apiVersion": self.prefix.partition("/")[2],  # The prefix also contains "api" or "apis".
            "kind": self.kind,
            "metadata": {"name": name, "labels": {**labels}, "annotations": {**(annotations or {})}},
            "spec": spec,
        }

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """Return the path of an object, of one of its subresources, or of all objects in a namespace ("" for
        cluster-wide kinds).
        """
        steps = [*(("namespaces", namespace) if namespace else ()), self.plural, name, part]
        return f"/{self.prefix}/" + "/".join(urllib.parse.quote(step, safe="") for step in steps if step)


PODS: Final = Resource("api/v1", "pods", "Pod")
SECRETS: Final = Resource("api/v1", "secrets")
CLAIMS: Final = Resource("api/v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SERVICES: Final = Resource("api/v1", "services", "Service")
EVENTS: Final = Resource("api/v1", "events")
NODES: Final = Resource("api/v1", "nodes")
STORAGE_CLASSES: Final = Resource("apis/storage.k8s.io/v1", "storageclasses")
ACCESS_REVIEWS: Final = Resource("apis/authorization.k8s.io/v1", "selfsubjectaccessreviews")
BUDGETS: Final = Resource("apis/policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
INGRESSES: Final = Resource("apis/networking.k8s.io/v1", "ingresses", "Ingress")
POLICIES: Final = Resource("apis/networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
SNAPSHOTS: Final = Resource("apis/snapshot.storage.k8s.io/v1", "volumesnapshots", "VolumeSnapshot")


class Client:
    """Client for one API server. It sends its requests sequentially over one connection, but each watch has its own."""

    def __init__(self, access: Access, timeouts: Timeouts) -> None:
        self.access = access
        self._timeouts = timeouts
        self._server = _url(access.server, "the API server")
        if access.proxy:
            _url(access.proxy, "the proxy of the API server")
        if self._server.scheme == "http" and not _is_loopback(self._server.hostname or ""):
            raise InputError(
                f"cannot use the API server {access.server}: the credentials would be sent unencrypted; plain http is "
                "allowed only on loopback, for example for `kubectl proxy`"
            )
        self._connection: http.client.HTTPConnection | None = None
        self._tls: ssl.SSLContext | None = None

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object. Raises ``ApiError`` 404 if it does not exist."""
        return self._object("GET", resource.path(namespace, name))

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.get(resource, namespace, name)
        except ApiError as exc:
            if exc.status == http.client.NOT_FOUND:
                return None
            raise

    def list(self, resource: Resource, namespace: str, *, labels: str = "", fields: str = "") -> Iterator[Object]:
        """Return all objects that match the selectors, reading them in chunks."""
        token = ""
        while True:
            given = {"limit": LIST_CHUNK, "continue": token, "labelSelector": labels, "fieldSelector": fields}
            query = urllib.parse.urlencode({key: value for key, value in given.items() if value})
            page = self._object("GET", f"{resource.path(namespace)}?{query}")
            yield from page.get("items") or []
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return

    def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Create an object.

        Raises ``ApiError`` 409 if an object with this name exists. An earlier attempt may have created it if its
        response was lost.
        """
        return self._object("POST", resource.path(namespace), body, name=body["metadata"]["name"])

    def try_create(self, resource: Resource, namespace: str, body: Object) -> None:
        """Check with a dry run whether the cluster would admit an object.

        Raises ``ApiError`` with the reason if it would not.
        """
        self._object("POST", f"{resource.path(namespace)}?{DRY_RUN}", body, name=body["metadata"]["name"])

    def ensure(self, resource: Resource, namespace: str, body: Object) -> tuple[Object, bool]:
        """Create an object unless one with this name exists. Return the object and whether it is new."""
        try:
            return self.create(resource, namespace, body), True
        except ApiError as exc:
            if exc.reason != ALREADY_EXISTS:
                raise
        name = body["metadata"]["name"]
        found = self.find(resource, namespace, name)
        if found is None:  # The object was deleted in the meantime.
            return self.create(resource, namespace, body), True
        return found, False

    def patch(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """Merge ``body`` into an object, and return the result.

        Raises ``ApiError`` 409 if ``body`` contains an outdated `resourceVersion`.
        """
        return self._object("PATCH", resource.path(namespace, name), body)

    def delete(
        self, resource: Resource, namespace: str, name: str, *, grace_s: int | None = None, version: str = ""
    ) -> Object | None:
        """Request the deletion of an object, and return the object.

        Return None if it does not exist, or if ``version`` is given but is not its current resource version.
        """
        options: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if version:
            options["preconditions"] = {"resourceVersion": version}
        try:
            return self._object("DELETE", resource.path(namespace, name), options)
        except ApiError as exc:
            if exc.status == http.client.NOT_FOUND or (version and exc.status == http.client.CONFLICT):
                return None
            raise

    def log_of(self, namespace: str, pod: str, lines: int) -> str:
        """Return the last lines of a pod's log."""
        _, body = self._send("GET", f"{PODS.path(namespace, pod, 'log')}?tailLines={lines}")
        return body.decode(errors="replace")

    def follow(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        deadline: float,
        start: Object | None = None,
        *,
        tick_s: float = WATCH_S,
    ) -> Iterator[Object | None]:
        """Yield each state of an object until ``deadline`` (monotonic). Yield None and stop when the object is gone.

        The first state is ``start`` or, without it, the current state. At least every ``tick_s`` seconds, the current
        state is yielded even if it is unchanged, so that the caller can check the time.
        """
        state, version = start, (start or {}).get("metadata", {}).get("resourceVersion", "")
        # The caller has just read or created ``start``, so the server still has the history since its version.
        if start is None:
            state, version = self._look(resource, namespace, name)
        yield state
        pause = FIRST_PAUSE_S
        while state is not None and (left := deadline - time.monotonic()) > 0:
            try:
                for state in self._watch(resource, namespace, name, version, min(left, tick_s)):
                    yield state
                    if state is None:
                        return
            except (OSError, http.client.HTTPException, _WatchEndedError) as exc:
                log.say(f"WATCH {resource.plural}/{name}: {_reason(exc)}; retrying")
                time.sleep(_jittered(pause))  # noqa: TID251 no event loop
                pause = min(pause * 2, LONGEST_PAUSE_S)
            else:
                pause = FIRST_PAUSE_S
            state, version = self._look(resource, namespace, name)
            yield state

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _look(self, resource: Resource, namespace: str, name: str) -> tuple[Object | None, str]:
        """Return an object and the resource version from which to watch it.

        The object's own resource version cannot be used, because the server may have discarded the history since then.
        """
        query = urllib.parse.urlencode({"fieldSelector": f"metadata.name={name}"})
        page = self._object("GET", f"{resource.path(namespace)}?{query}", name=name)
        items = page.get("items") or []
        return (items[0] if items else None), page["metadata"]["resourceVersion"]

    # --- transport ----------------------------------------------------------------------------------------------------

    def _object(self, method: str, path: str, body: Object | None = None, name: str = "") -> Object:
        """Send a request and decode the response, which must be a JSON object. ``name`` is used only in messages."""
        status, data = self._send(method, path, body, name)
        try:
            return msgspec.json.decode(data, type=Object)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ApiError(
                f"cannot {method} {_short(path, name)}: the server's response is not a JSON object: {exc}",
                status=status,
            ) from None

    def _send(self, method: str, path: str, body: Object | None = None, name: str = "") -> tuple[int, bytes]:
        """Send a request, retrying after temporary errors. Return the status and the body of the response.

        Raises ``ApiError`` if the request was rejected. ``name`` is used only in messages.
        """
        until = time.monotonic() + self._timeouts.retry
        what, is_renewed, attempt = f"{method} {_short(path, name)}", False, 0
        while True:
            began, pause = time.monotonic(), _jittered(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
            attempt += 1
            refusal: ApiError | UnreachableError
            try:
                status, headers, data = self._exchange(method, path, body)
            except ssl.SSLCertVerificationError as exc:
                raise InputError(f"cannot trust the API server {self.access.server}: {exc.verify_message}") from exc
            except ValueError:
                # Leave out http.client's message, because it quotes the headers, which contain the credentials.
                raise InputError(f"cannot {what}: HTTP does not allow its path or headers") from None
            except (OSError, http.client.HTTPException) as exc:
                self.close()
                log.call(what, _reason(exc), time.monotonic() - began)
                refusal = UnreachableError(f"cannot {what}: the API server {self.access.server} does not answer: {exc}")
            else:
                log.call(what, str(status), time.monotonic() - began)
                if status < http.client.MULTIPLE_CHOICES:
                    return status, data
                refusal = _refusal(what, status, data)
                if status == http.client.UNAUTHORIZED and not is_renewed:
                    is_renewed = True
                    self.access.renew()
                    self.close()
                    self._tls = None
                    continue
                # The API server also answers 409 if another request changes a quota at the same time.
                is_overtaken = status == http.client.CONFLICT and method == "POST" and refusal.reason != ALREADY_EXISTS
                if status not in RETRIED and not is_overtaken:
                    raise refusal
                pause = max(pause, _retry_after(headers))
            if time.monotonic() + pause >= until:
                raise refusal
            time.sleep(pause)  # noqa: TID251 no event loop

    def _exchange(self, method: str, path: str, body: Object | None) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request over the connection, which is opened if necessary. Return the status, headers and body."""
        if self._connection is None:
            self._connection = self._connect(self._timeouts.request)
        self._ask(self._connection, method, path, body)
        with self._connection.getresponse() as response:
            data = response.read()
        if response.will_close:
            self.close()
        return response.status, dict(response.headers.items()), data

    def _watch(
        self, resource: Resource, namespace: str, name: str, version: str, seconds: float
    ) -> Iterator[Object | None]:
        """Watch an object, and yield each of its states since the resource version ``version``.

        The server closes the watch after about ``seconds`` seconds.
        """
        whole = max(1, round(seconds))
        query = urllib.parse.urlencode(
            {
                "watch": 1,
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": version,
                "timeoutSeconds": whole,
            }
        )
        began, events = time.monotonic(), 0
        # The server closes the watch after ``whole`` seconds. If it stays silent for longer, the connection is lost.
        with closing(self._connect(whole + self._timeouts.request)) as connection:
            self._ask(connection, "GET", f"{resource.path(namespace)}?{query}", None)
            with closing(connection.getresponse()) as response:
                if response.status != http.client.OK:
                    raise _WatchEndedError(str(response.status))
                try:
                    while line := response.readline():
                        event = msgspec.json.decode(line, type=Object)
                        events += 1
                        if event["type"] == "ERROR":
                            raise _WatchEndedError(str(event.get("object", {}).get("code")))
                        yield None if event["type"] == "DELETED" else event["object"]
                except msgspec.DecodeError as exc:
                    raise _WatchEndedError("cut off") from exc
                finally:
                    log.call(f"WATCH {resource.plural}/{name}", f"{events} events", time.monotonic() - began)

    def _ask(self, connection: http.client.HTTPConnection, method: str, path: str, body: Object | None) -> None:
        """Send a request. The caller reads the response from the connection."""
        headers = {"Accept": "application/json", "User-Agent": "kubernetes-cpi"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if method == "PATCH" else "application/json"
        if self.access.token:
            headers["Authorization"] = f"Bearer {self.access.token}"
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, self._server.path.rstrip("/") + path, data, headers)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        """Return a new connection to the API server, through the proxy if there is one."""
        host, port = self._server.hostname or "", self._server.port
        proxy = urllib.parse.urlsplit(self.access.proxy)
        peer, peer_port = (proxy.hostname, proxy.port) if proxy.hostname else (host, port)
        connection: http.client.HTTPConnection
        if self._server.scheme == "https":
            connection = http.client.HTTPSConnection(peer, peer_port, timeout=timeout, context=self._context())
        else:
            connection = http.client.HTTPConnection(peer, peer_port, timeout=timeout)
        if proxy.hostname:
            connection.set_tunnel(host, port or http.client.HTTPS_PORT)
        return connection

    def _context(self) -> ssl.SSLContext:
        """Return the TLS context. Create it if there is none yet, or if the credentials have been renewed."""
        if self._tls is None:
            try:
                self._tls = _tls(self.access)
            except (ssl.SSLError, ValueError) as exc:
                raise InputError(f"cannot use the CA or client certificate of the cluster: {exc}") from exc
        return self._tls


def _url(text: str, what: str) -> urllib.parse.SplitResult:
    """Parse a URL. Error messages do not quote it, because it may contain a password."""
    try:
        found = urllib.parse.urlsplit(text)
        is_good = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
        (found.hostname or "").encode("idna")  # Raises UnicodeError, a ValueError, for an invalid host name.
    except ValueError:
        is_good = False
    if not is_good or "@" in found.netloc or not re.fullmatch(HEADER_VALUE, text):
        raise InputError(f"cannot reach {what}: its address is not a URL of the form https://HOST:PORT without a user")
    return found


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


class _WatchEndedError(Exception):
    """The server ended a watch with an error such as 410, so the state must be read again."""


class _NamedContext(ssl.SSLContext):
    """An SSL context that checks the server's certificate against ``name`` instead of the host in the URL."""

    name: str = ""

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **{**kwargs, "server_hostname": self.name})


def _tls(access: Access) -> ssl.SSLContext:
    """Return a TLS context with the CA and the client certificate."""
    if access.tls_server_name:
        context: ssl.SSLContext = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.name = access.tls_server_name  # type: ignore[attr-defined]
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not access.is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif access.ca:
        context.load_verify_locations(cadata=access.ca)
    else:
        context.load_default_certs()
    if access.certificate:
        with _private_file(f"{access.certificate}\n{access.key}\n") as path:
            context.load_cert_chain(path)
    return context


class _private_file:  # noqa: N801 - used as a function
    """Makes a text available as a file that only this process can read, because `ssl` loads keys only from files."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> str:
        self._fd = os.memfd_create("key", os.MFD_CLOEXEC)
        os.write(self._fd, self._text.encode())
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _refusal(what: str, status: int, data: bytes) -> ApiError:
    """Convert the Status object that the server sends for a rejected request to an ``ApiError``.

    If a proxy sent an error page instead of a Status object, the error quotes the page's first 200 bytes.
    """
    try:
        document = msgspec.json.decode(data, type=Object)
    except (msgspec.DecodeError, UnicodeDecodeError):
        document = {"message": data[:200].decode(errors="replace").strip()}
    message = document.get("message") or http.client.responses.get(status, "")
    reason = document.get("reason") or ""
    return ApiError(f"cannot {what}: {status}: {message}", status=status, reason=reason, ok_to_retry=status in RETRIED)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return how many seconds the server wants the client to wait (`Retry-After`). Dates are not supported."""
    try:
        return max(0.0, float(headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _jittered(seconds: float) -> float:
    """Shorten a pause by a random amount of up to half. Otherwise, clients whose requests failed together would also
    retry together.
    """
    return seconds * (0.5 + os.urandom(1)[0] / 512)


def _short(path: str, name: str = "") -> str:
    """Shorten an API path to `PLURAL/NAME` for the log. ``name`` is the object's name if it is not in the path."""
    plain, _, query = path.partition("?")
    steps = urllib.parse.unquote(plain).split("/")
    # A path has the form PREFIX/namespaces/NAMESPACE/PLURAL/NAME or, for a cluster-wide object, PREFIX/PLURAL/NAME.
    start = steps.index("namespaces") + 2 if "namespaces" in steps else len(steps) - 2
    return "/".join([*steps[start:], *([name] if name else [])]) + (" (dry run)" if query == DRY_RUN else "")


def _reason(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
