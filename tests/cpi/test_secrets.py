"""Secrets from requests and from the configuration appear only in the VM's Secret."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpi.calls import DYNAMIC, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster, waiting

PEM = "-----BEGIN RSA PRIVATE KEY-----\nCANARYkeyMIIEpAIBAAKCAQEA\nCANARYkeyxxyyzz\n-----END RSA PRIVATE KEY-----\n"
ENV: dict[str, Any] = {
    "bosh": {
        "mbus": {"cert": {"ca": "CANARYca", "certificate": "CANARYcertificate", "private_key": PEM}},
        "password": "$6$CANARYpassword",
        "blobstores": [{"provider": "dav", "options": {"endpoint": "https://b", "password": "CANARYblob"}}],
        "groups": ["director", "dep", "zookeeper"],
        "tags": {"team": "a"},
    },
    "custom": {"token": "CANARYcustom"},
}


def leaks(text: str) -> list[str]:
    """Return the canary values that a string contains, in plain text or in base64."""
    found = [text[at : at + 24] for at in range(len(text)) if text.startswith("CANARY", at)]
    coded = [base64.b64encode(b"xx"[:skip] + b"CANARY").decode()[skip and 4 : 8] for skip in range(3)]
    return found + [one for one in coded if one and one in text]


def objects_as_text(cluster: FakeCluster) -> str:
    """Return all objects in the cluster as text, without the Secrets' data."""
    kept = {str(key): {**body, "data": None} for key, body in cluster.objects.items()}
    return json.dumps(kept)


@pytest.fixture
def cpi_with_secrets(server: FakeApiServer, cpi: CpiCalls) -> CpiCalls:
    config = json.loads(cpi.file.read_text())
    config["agent"] = {"mbus": "nats://user:CANARYmbus@10.0.0.6:4222", "blobstore": {"password": "CANARYstore"}}
    server.token = config["cluster"]["token"] = "CANARYtoken"
    cpi.write(config)
    return cpi


@pytest.mark.parametrize("way", ["recreate", "live"])
def test_credentials_are_not_leaked_during_a_vm_lifecycle(
    cpi_with_secrets: CpiCalls, cluster: FakeCluster, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    responses = []

    def call(method: str, *arguments: Any) -> Any:
        response = cpi_with_secrets.answer(cpi_with_secrets.request(method, arguments))
        responses.append(response)
        return response["result"]

    vm = call("create_vm", "agent-1", STEMCELL, {"attach": way}, DYNAMIC, [], ENV)[0]
    assert "CANARYpassword" in base64.b64decode(cluster.of("secrets")[vm]["data"]["config.json"]).decode()
    assert leaks(objects_as_text(cluster)) == []
    disk = call("create_disk", 64, {}, vm)
    call("attach_disk", vm, disk)
    assert leaks(objects_as_text(cluster)) == []
    call("detach_disk", vm, disk)
    call("delete_vm", vm)

    out = capfd.readouterr()
    assert leaks(json.dumps(responses) + out.out + out.err + objects_as_text(cluster)) == []
    assert all(response["error"] is None for response in responses)


@pytest.mark.parametrize("words", ["CANARYpassword", "CANARYkeyxxyyzz", "CANARYtoken", "CANARYmbus", "CANARYcustom"])
def test_secrets_in_cluster_messages_are_not_passed_on(
    cpi_with_secrets: CpiCalls,
    cluster: FakeCluster,
    server: FakeApiServer,
    capfd: pytest.CaptureFixture[str],
    words: str,
) -> None:
    """Messages from admission webhooks and kubelets may contain any text, including the VM's secrets."""
    coded = base64.b64encode(words.encode()).decode()
    server.fail("POST secrets", times=9, status=422, message=f'Invalid value: "{words}", in base64 {coded}')

    response = cpi_with_secrets.answer(
        cpi_with_secrets.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV_WITH_ALL])
    )

    out = capfd.readouterr()
    assert "Invalid value" in response["error"]["message"]
    assert leaks(json.dumps(response) + out.out + out.err) == []


ENV_WITH_ALL = {**ENV, "bosh": {**ENV["bosh"], "password": "CANARYpassword"}}


def test_internal_cpi_error_does_not_leak_secrets(
    cpi_with_secrets: CpiCalls, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"with {ENV}")

    monkeypatch.setattr("kubernetes_cpi.networks.plan", broken)
    response = cpi_with_secrets.answer(
        cpi_with_secrets.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV])
    )

    out = capfd.readouterr()
    assert "ZeroDivisionError" in out.err
    assert leaks(json.dumps(response) + out.out + out.err) == []


@pytest.mark.parametrize(
    "arguments", [["agent-1", 7, {}, DYNAMIC, [], ENV], ["agent-1", STEMCELL, {"a": 1}, 3, [], ENV]]
)
def test_rejected_cpi_request_does_not_leak_its_secrets(
    cpi_with_secrets: CpiCalls, capfd: pytest.CaptureFixture[str], arguments: list[Any]
) -> None:
    response = cpi_with_secrets.answer(cpi_with_secrets.request("create_vm", arguments))

    out = capfd.readouterr()
    assert response["error"] is not None
    assert leaks(json.dumps(response) + out.out + out.err) == []


SHAPES = [
    "{}\n",
    " {}\r\n",
    "a\n{}",
    "{} b",
    "{}\0",
    "{}\u20ac",
    "'{}\"\\",
    "{}:x",
    "{}@",
    "*{}",
    "!{} x",
    '"{}\\q"',
    "{" * 9 + "{}",
]
"""Common errors in credentials that come from files, shell variables, URLs or YAML."""
PLACES: list[tuple[str, str]] = [
    ("cluster.token", "{}"),
    ("cluster.client_key", "{}"),
    ("cluster.client_certificate", "{}"),
    ("cluster.server", "https://user:{}@192.0.2.1:6443"),
    ("cluster.server", "https://user:{}"),
    ("cluster.kubeconfig", "users: [{{name: u, user: {{token: {}}}}}]"),
    ("cluster.kubeconfig.users", "{}"),
    ("agent.mbus", "nats://user:{}@10.0.0.6:4222"),
    ("agent.mbus", "{}"),
    ("agent.blobstore.options.password", "{}"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "place", [*PLACES, ("token_file", "{}"), ("user.token", "{}"), ("exec", "{}"), ("stderr", "{}")]
)
def test_malformed_credentials_are_not_logged(
    cpi_with_secrets: CpiCalls, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: tuple[str, str], shape: str
) -> None:
    """Tokens from `kubectl create token` or `--var-file` often end in a newline. http.client rejects a header with a
    newline, and its error quotes the header.
    """
    path, form = place
    given = form.format(shape.replace("{}", "CANARYwrong", 1))
    config = json.loads(cpi_with_secrets.file.read_text())
    if path == "token_file":
        (tmp_path / "token").write_text(given)
        config["cluster"] = {"server": cpi_with_secrets.server.url, "token_file": str(tmp_path / "token")}
    elif path in ("user.token", "exec", "stderr"):
        (tmp_path / "plugin").write_text('#!/bin/sh\nprintf %s "$SAID"\n')
        (tmp_path / "plugin").chmod(0o755)
        said = json.dumps({"status": {"token": given}} if path == "exec" else [given])
        plugin = {"command": str(tmp_path / "plugin"), "env": [{"name": "SAID", "value": said.replace("\\u0000", "")}]}
        user = {"token": given} if path == "user.token" else {"exec": plugin}
        config["cluster"] = {"kubeconfig": kubeconfig(cpi_with_secrets.server.url, user)}
    else:
        *steps, last = path.split(".")
        here = config
        for step in steps:
            here = here.setdefault(step, {})
        here[last] = given
    cpi_with_secrets.write(config)

    responses = [
        cpi_with_secrets.answer(cpi_with_secrets.request(method, arguments))
        for method, arguments in (("has_vm", ["vm-bosh-0"]), ("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV]))
    ]

    out = capfd.readouterr()
    assert leaks(json.dumps(responses) + out.out + out.err) == []


def kubeconfig(server: str, user: dict[str, Any]) -> dict[str, Any]:
    return {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "bosh"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
    }


def test_token_with_a_trailing_line_break_is_accepted(cpi_with_secrets: CpiCalls) -> None:
    config = json.loads(cpi_with_secrets.file.read_text())
    config["cluster"]["token"] += "\n"
    cpi_with_secrets.write(config)

    assert cpi_with_secrets("has_vm", "vm-bosh-0") is False


def test_credentials_are_not_sent_over_plain_http(cpi_with_secrets: CpiCalls, server: FakeApiServer) -> None:
    config = json.loads(cpi_with_secrets.file.read_text())
    config["cluster"]["server"] = server.url.replace("127.0.0.1", "192.0.2.1")
    cpi_with_secrets.write(config)

    with pytest.raises(CpiFailedError, match="the credentials would be sent unencrypted"):
        cpi_with_secrets("has_vm", "vm-bosh-0")


def test_failed_create_vm_does_not_leak_secrets(cpi_with_secrets: CpiCalls, cluster: FakeCluster) -> None:
    cluster.pod_status = lambda _: waiting("CreateContainerConfigError", "secret CANARYcustom not found")
    response, said = cpi_with_secrets.run(
        cpi_with_secrets.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV])
    )

    assert "CreateContainerConfigError" in response["error"]["message"]
    assert leaks(json.dumps(response) + said) == []
