"""Find the API server's address and credentials in properties, a kubeconfig (including exec plugins), or a service
account.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kubernetes_cpi import log
from kubernetes_cpi.config import Cluster
from kubernetes_cpi.errors import InputError

HEADER_VALUE: Final = r"[\x21-\x7e]*"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_TIMEOUT_S: Final = 60
DEFAULT_NAMESPACE: Final = "default"


class Credential(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` of an ExecCredential."""

    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None


class ExecCredential(msgspec.Struct, frozen=True):
    """The output of a credential plugin."""

    status: Credential


class Access(msgspec.Struct):
    """Address and credentials for an API server. ``renew`` rereads the token file and reruns the exec plugin."""

    server: str
    ca: str = ""
    """The API server's CA certificate, in PEM format."""
    is_verified: bool = True
    """Whether the API server's certificate is checked."""
    tls_server_name: str = ""
    """Name to expect in the certificate instead of the server's host name, or ""."""
    proxy: str = ""
    """URL of the proxy through which to connect, or ""."""
    namespace: str = DEFAULT_NAMESPACE
    token: str = ""
    token_file: Path | None = None
    certificate: str = ""
    key: str = ""
    plugin: Mapping[str, Any] | None = None
    """The `exec` section of a kubeconfig user."""
    origin: str = "the configuration"
    """Where the credentials come from, for error messages."""

    def renew(self) -> None:
        """Read the credentials again, in case they have changed, and redact them in the log."""
        if self.token_file:
            self.token = _text(self.token_file, "token")
        if self.plugin:
            self._run_plugin(self.plugin)
        log.hide([self.token, self.key])
        # Strip the token, because files and shell variables often end with a newline.
        self.token = self.token.strip()
        if not re.fullmatch(HEADER_VALUE, self.token):
            raise InputError(
                f"cannot use the token of {self.origin}: it contains blanks, line breaks or non-ASCII characters"
            )

    def _run_plugin(self, plugin: Mapping[str, Any]) -> None:
        """Run a client-go credential plugin (client.authentication.k8s.io), and store the credentials it prints."""
        import subprocess

        version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        env = {**os.environ, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}
        own = {one["name"]: one["value"] for one in plugin.get("env") or []}
        log.hide(own)
        env |= own
        command = [str(plugin.get("command", "")), *map(str, plugin.get("args") or [])]
        try:
            done = subprocess.run(
                command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXEC_TIMEOUT_S, check=True
            )
            status = msgspec.json.decode(done.stdout, type=ExecCredential).status
        except OSError as exc:
            raise InputError(f"cannot get credentials from {command[0]}: {exc.strerror}") from exc
        except subprocess.SubprocessError as exc:
            # Leave out the exception's message, because it quotes the command's arguments.
            output = (getattr(exc, "stderr", None) or b"").decode(errors="replace").strip()
            raise InputError(f"cannot get credentials from {command[0]}: {output or type(exc).__name__}") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InputError(f"cannot get credentials from {command[0]}: it printed no ExecCredential") from None
        self.token = status.token or ""
        self.certificate = status.client_certificate_data or self.certificate
        self.key = status.client_key_data or self.key


def access(cluster: Cluster) -> Access:
    """Return the API server's address and credentials according to the configuration."""
    has_kubeconfig = bool(cluster.kubeconfig or cluster.kubeconfig_file)
    found = _from_kubeconfig(cluster) if has_kubeconfig else _from_properties(cluster)
    found.renew()
    return found


def _from_properties(cluster: Cluster) -> Access:
    """Return the access that the properties describe. Without credentials in them, use the pod's service account."""
    has_credentials = bool(cluster.token or cluster.token_file or cluster.client_certificate)
    mounted = SERVICE_ACCOUNT / "token"
    if not has_credentials and not mounted.exists():
        raise InputError(
            "cannot reach a cluster: `cluster` of the configuration names no credentials, and this is not a pod with a "
            f"service account ({mounted} is missing)"
        )
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    in_cluster = f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else "https://kubernetes.default.svc"
    ca, namespace = SERVICE_ACCOUNT / "ca.crt", SERVICE_ACCOUNT / "namespace"
    return Access(
        server=cluster.server or in_cluster,
        ca=cluster.ca or (_text(ca, "CA") if ca.exists() else ""),
        namespace=_text(namespace, "namespace").strip() if namespace.exists() else DEFAULT_NAMESPACE,
        token=cluster.token,
        token_file=Path(cluster.token_file) if cluster.token_file else None if has_credentials else mounted,
        certificate=cluster.client_certificate,
        key=cluster.client_key,
    )


def _from_kubeconfig(cluster: Cluster) -> Access:
    """Return the access that the kubeconfig describes. Paths in a kubeconfig file are relative to its directory."""
    origin = f"the kubeconfig {cluster.kubeconfig_file}" if not cluster.kubeconfig else "`cluster.kubeconfig`"
    base = Path(cluster.kubeconfig_file).parent if cluster.kubeconfig_file else Path()
    document = cluster.kubeconfig or _text(Path(cluster.kubeconfig_file), "kubeconfig")
    if isinstance(document, str):
        document = _parsed(document, origin)
    context = _named(document, "contexts", "context", cluster.context or document.get("current-context", ""), origin)
    place = _named(document, "clusters", "cluster", context.get("cluster", ""), origin)
    user = _named(document, "users", "user", context.get("user", ""), origin) if context.get("user") else {}
    for unsupported in ("auth-provider", "username"):
        if user.get(unsupported):
            raise InputError(f"cannot use {origin}: `{unsupported}` of users is not supported; use a token or `exec`")
    if not place.get("server"):
        raise InputError(f"cannot use {origin}: its cluster {context.get('cluster')!r} has no server")
    if place.get("insecure-skip-tls-verify"):
        log.say(f"{origin} says insecure-skip-tls-verify: the API server is not verified")
    token_file = user.get("tokenFile")
    return Access(
        server=place["server"],
        ca=_data_or_file(place, "certificate-authority", base),
        is_verified=not place.get("insecure-skip-tls-verify"),
        tls_server_name=place.get("tls-server-name") or "",
        proxy=place.get("proxy-url") or "",
        namespace=context.get("namespace") or DEFAULT_NAMESPACE,
        token=str(user.get("token") or ""),
        token_file=base / token_file if token_file else None,
        certificate=_data_or_file(user, "client-certificate", base),
        key=_data_or_file(user, "client-key", base),
        plugin=user.get("exec"),
        origin=origin,
    )


def _parsed(text: str, origin: str) -> dict[str, Any]:
    """Parse YAML or JSON. JSON is valid YAML too, but the JSON parser is ten times faster."""
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError:
        import yaml

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            # Report only the position, because the exception's message may quote a part of the token.
            place = getattr(exc, "problem_mark", None)
            raise InputError(
                f"cannot read {origin}: not valid YAML{f' in line {place.line + 1}' if place else ''}"
            ) from None
    if not isinstance(document, dict):
        raise InputError(f"cannot read {origin}: it is not a hash")
    return document


def _named(document: Mapping[str, Any], many: str, one: str, name: str, origin: str) -> dict[str, Any]:
    """Return the content of a named kubeconfig entry. ``many`` is the key of the entry list, such as `contexts`, and
    ``one`` the key of an entry's content, such as `context`.
    """
    for entry in document.get(many) or []:
        if entry.get("name") == name:
            found: dict[str, Any] = entry.get(one) or {}
            return found
    known = ", ".join(str(entry.get("name")) for entry in document.get(many) or []) or "none"
    raise InputError(f"cannot use {origin}: no {one} is named {name!r} (there are: {known})")


def _data_or_file(entry: Mapping[str, Any], key: str, base: Path) -> str:
    """Return PEM data from a kubeconfig, or "" if there is none.

    The data is either in the entry ``KEY-data``, encoded in base64, or in the file that the entry ``KEY`` names. The
    file name may be relative to ``base``.
    """
    if data := entry.get(f"{key}-data"):
        try:
            return base64.b64decode("".join(data.split()), validate=True).decode()
        except (AttributeError, binascii.Error, ValueError):
            raise InputError(f"cannot use the kubeconfig: `{key}-data` is not a PEM text in base64") from None
    return _text(base / entry[key], key) if entry.get(key) else ""


def _text(file: Path, what: str) -> str:
    """Return the text of a file. Error messages call it ``what``."""
    try:
        return file.read_text()
    except OSError as exc:
        raise InputError(f"cannot read the {what}: {exc.strerror}: {file}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"cannot read the {what}: {file} is not text") from exc
