"""Tests how the CPI gets access to a cluster: kubeconfigs, exec plugins, service accounts, and TLS verification."""

from __future__ import annotations

import json
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_shim.demo import pki
from kubernetes_cpi import credentials
from kubernetes_cpi.config import Cluster
from kubernetes_cpi.errors import InputError
from tests.cpi.calls import CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster


def kubeconfig(user: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    return {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "bosh"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_kubeconfig_file_gives_access(tmp_path: Path, write: Any) -> None:
    (tmp_path / "ca.pem").write_text("CA")
    (tmp_path / "token").write_text("secret-token\n")
    file = tmp_path / "config"
    file.write_text(write(kubeconfig({"tokenFile": "token"}, **{"certificate-authority": "ca.pem"})))

    access = credentials.access(Cluster(kubeconfig_file=str(file)))

    assert (access.server, access.ca, access.token) == ("https://192.0.2.1:6443", "CA", "secret-token")
    assert access.namespace == "bosh"
    given = kubeconfig({"token": "secret-token"})
    del given["contexts"][0]["context"]["namespace"]
    assert credentials.access(Cluster(kubeconfig=given)).namespace == "default"


@pytest.mark.parametrize("form", [dict, json.dumps, yaml.safe_dump])
def test_kubeconfig_in_the_configuration_gives_access(form: Any) -> None:
    assert credentials.access(Cluster(kubeconfig=form(kubeconfig({"token": "secret-token"})))).token == "secret-token"


def plugin(tmp_path: Path, text: str) -> dict[str, Any]:
    program = tmp_path / "plugin"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(program),
        "args": ["a"],
        "env": [{"name": "OF_PLUGIN", "value": "x"}],
    }


def test_exec_plugin_provides_the_token(tmp_path: Path) -> None:
    echo = 'test "$1$OF_PLUGIN" = ax || exit 9; case $KUBERNETES_EXEC_INFO in *ExecCredential*) ;; *) exit 8 ;; esac\n'
    given = plugin(tmp_path, echo + """echo '{"status": {"token": "of-the-plugin"}}'""")

    assert credentials.access(Cluster(kubeconfig=kubeconfig({"exec": given}))).token == "of-the-plugin"


def test_exec_plugin_certificate_overrides_the_kubeconfig_certificate(tmp_path: Path) -> None:
    given = plugin(tmp_path, """echo '{"status": {"clientCertificateData": "CERT", "clientKeyData": "KEY"}}'""")
    of_file = {"client-certificate-data": "b2xk", "client-key-data": "b2xk"}

    access = credentials.access(Cluster(kubeconfig=kubeconfig({"exec": given, **of_file})))

    assert (access.certificate, access.key) == ("CERT", "KEY")


@pytest.mark.parametrize(
    ("text", "words"), [("echo 'not logged in' >&2; exit 1", "not logged in"), ("echo x", "printed no ExecCredential")]
)
def test_failed_exec_plugin_is_reported(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        credentials.access(Cluster(kubeconfig=kubeconfig({"exec": plugin(tmp_path, text)})))


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            Cluster(kubeconfig={**kubeconfig({}), "current-context": "two"}),
            r"no context is named 'two' \(there are: one\)",
        ),
        (
            Cluster(kubeconfig=kubeconfig({"auth-provider": {"name": "gcp"}})),
            "`auth-provider` of users is not supported",
        ),
        (Cluster(kubeconfig=kubeconfig({"client-key-data": "%"})), "is not a PEM text in base64"),
        (Cluster(kubeconfig="a: ["), "cannot read"),
        (Cluster(kubeconfig="text"), "it is not a hash"),
        (Cluster(kubeconfig_file="/missing"), "No such file"),
        (Cluster(server="https://192.0.2.1"), "names no credentials"),
    ],
)
def test_invalid_cluster_access_configuration_is_rejected(cluster: Cluster, words: str) -> None:
    with pytest.raises(InputError, match=words):
        credentials.access(cluster)


def test_pod_service_account_gives_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"token": "mounted-token", "ca.crt": "CA", "namespace": "bosh\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    access = credentials.access(Cluster())
    assert (access.server, access.token, access.ca) == ("https://kubernetes.default.svc", "mounted-token", "CA")
    assert access.namespace == "bosh"
    (tmp_path / "token").write_text("rotated-token")
    access.renew()
    assert access.token == "rotated-token"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert credentials.access(Cluster()).server == "https://[fd00::1]:443"


# --- TLS --------------------------------------------------------------------------------------------------------------

VM = "vm-bosh-" + "0" * 16


@pytest.fixture(scope="module")
def authority() -> pki.Authority:
    return pki.Authority()


@contextmanager
def serving(
    authority: pki.Authority, directory: Path, *hosts: str, asks_client: bool = False
) -> Iterator[FakeApiServer]:
    """Run a fake API server with TLS for ``hosts``. If ``asks_client`` is set, it requires a client certificate."""
    pair = authority.server(hosts=hosts)
    (directory / "server.pem").write_text(pair.certificate + pair.private_key)
    (directory / "ca.pem").write_text(authority.ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem")
    if asks_client:
        context.load_verify_locations(directory / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    server = FakeApiServer(FakeCluster(), tls=context)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*.key")), "no key is left in a file"


def call(server: FakeApiServer, directory: Path, **cluster: Any) -> Any:
    """Call has_vm with the given `cluster` configuration."""
    cpi = CpiCalls(server, directory)
    cpi.write({"cluster": {"server": server.url, **cluster}, "namespace": "bosh", "timeouts": {"retry": 2}})
    return cpi("has_vm", VM)


def test_api_server_certificate_is_verified(authority: pki.Authority, directory: Path) -> None:
    with serving(authority, directory, "127.0.0.1") as server:
        assert call(server, directory, token=server.token, ca=authority.ca) is False
        with pytest.raises(CpiFailedError, match="cannot trust the API server"):
            call(server, directory, token=server.token, ca=pki.Authority().ca)
        assert len(server.requests) == 1, "the token was sent to an untrusted server"


def test_api_server_certificate_is_verified_against_the_configured_name(
    authority: pki.Authority, directory: Path
) -> None:
    with serving(authority, directory, "api.example") as server:
        with pytest.raises(CpiFailedError, match="cannot trust the API server"):
            call(server, directory, token=server.token, ca=authority.ca)
        given = kubeconfig({"token": server.token}, **{"tls-server-name": "api.example"})
        given["clusters"][0]["cluster"] |= {"server": server.url, "certificate-authority": str(directory / "ca.pem")}
        assert call(server, directory, kubeconfig=given) is False


@pytest.mark.parametrize("address", ["https://", "ftp://127.0.0.1", "https://a:b@127.0.0.1", "https://[127.0.0.1"])
def test_invalid_api_server_address_is_reported(server: FakeApiServer, directory: Path, address: str) -> None:
    with pytest.raises(CpiFailedError, match="cannot reach the API server: its address is not a URL"):
        call(server, directory, kubeconfig=kubeconfig({"token": server.token}, server=address))


def test_api_server_certificate_verification_can_be_disabled(authority: pki.Authority, directory: Path) -> None:
    with serving(authority, directory, "api.example") as server:
        given = kubeconfig({"token": server.token})
        given["clusters"][0]["cluster"] |= {"server": server.url, "insecure-skip-tls-verify": True}
        assert call(server, directory, kubeconfig=given) is False


def test_client_certificate_gives_access(authority: pki.Authority, directory: Path) -> None:
    with serving(authority, directory, "127.0.0.1", asks_client=True) as server:
        server.token = ""
        pair = authority.client("cpi")
        given = {"ca": authority.ca, "client_certificate": pair.certificate, "client_key": pair.private_key}
        assert call(server, directory, **given) is False


@pytest.mark.parametrize("key", ["ca", "client_certificate"])
def test_credential_with_invalid_pem_is_reported(authority: pki.Authority, directory: Path, key: str) -> None:
    refused = pytest.raises(CpiFailedError, match="cannot use the CA or client certificate")
    with serving(authority, directory, "127.0.0.1") as server, refused:
        call(server, directory, **{"token": server.token, "ca": authority.ca, key: "no PEM"})
