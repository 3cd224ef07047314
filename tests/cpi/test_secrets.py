"""Secrets of a request and of the configuration are in the VM's Secret and nowhere else."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.cpi.calls import DYNAMIC, STEMCELL, Cpi
from tests.cpi.fake_api import Cluster, Server, waiting

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
    """Canaries in a text, in base64 too."""
    found = [text[at : at + 24] for at in range(len(text)) if text.startswith("CANARY", at)]
    coded = [base64.b64encode(b"xx"[:skip] + b"CANARY").decode()[skip and 4 : 8] for skip in range(3)]
    return found + [one for one in coded if one and one in text]


def documents(cluster: Cluster) -> str:
    """Everything in the cluster but the data of Secrets."""
    kept = {str(key): {**body, "data": None} for key, body in cluster.objects.items()}
    return json.dumps(kept)


@pytest.fixture
def secretive(server: Server, cpi: Cpi) -> Cpi:
    config = json.loads(cpi.file.read_text())
    config["agent"] = {"mbus": "nats://user:CANARYmbus@10.0.0.6:4222", "blobstore": {"password": "CANARYstore"}}
    server.token = config["cluster"]["token"] = "CANARYtoken"
    cpi.write(config)
    return cpi


@pytest.mark.parametrize("way", ["recreate", "live"])
def test_life_of_a_vm(secretive: Cpi, cluster: Cluster, capfd: pytest.CaptureFixture[str], way: str) -> None:
    responses = []

    def call(method: str, *arguments: Any) -> Any:
        response = secretive.answer(secretive.request(method, arguments))
        responses.append(response)
        return response["result"]

    vm = call("create_vm", "agent-1", STEMCELL, {"attach": way}, DYNAMIC, [], ENV)[0]
    assert "CANARYpassword" in base64.b64decode(cluster.of("secrets")[vm]["data"]["config.json"]).decode()
    assert leaks(documents(cluster)) == []
    disk = call("create_disk", 64, {}, vm)
    call("attach_disk", vm, disk)
    assert leaks(documents(cluster)) == []
    call("detach_disk", vm, disk)
    call("delete_vm", vm)

    out = capfd.readouterr()
    assert leaks(json.dumps(responses) + out.out + out.err + documents(cluster)) == []
    assert all(response["error"] is None for response in responses)


@pytest.mark.parametrize("words", ["CANARYpassword", "CANARYkeyxxyyzz", "CANARYtoken", "CANARYmbus", "CANARYcustom"])
def test_cluster_that_repeats_a_secret(
    secretive: Cpi, cluster: Cluster, server: Server, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    """Admission webhooks and kubelets say what they like: nothing of it is passed on."""
    coded = base64.b64encode(words.encode()).decode()
    server.fail("POST secrets", times=9, status=422, message=f'Invalid value: "{words}", in base64 {coded}')

    response = secretive.answer(secretive.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV_WITH_ALL]))

    out = capfd.readouterr()
    assert "Invalid value" in response["error"]["message"]
    assert leaks(json.dumps(response) + out.out + out.err) == []


ENV_WITH_ALL = {**ENV, "bosh": {**ENV["bosh"], "password": "CANARYpassword"}}


def test_bug_that_repeats_a_secret(
    secretive: Cpi, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"with {ENV}")

    monkeypatch.setattr("kubernetes_cpi.vms._described", broken)
    response = secretive.answer(secretive.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV]))

    out = capfd.readouterr()
    assert "ZeroDivisionError" in out.err
    assert leaks(json.dumps(response) + out.out + out.err) == []


@pytest.mark.parametrize(
    "arguments", [["agent-1", 7, {}, DYNAMIC, [], ENV], ["agent-1", STEMCELL, {"a": 1}, 3, [], ENV]]
)
def test_request_that_does_not_fit(secretive: Cpi, capfd: pytest.CaptureFixture[str], arguments: list[Any]) -> None:
    response = secretive.answer(secretive.request("create_vm", arguments))

    out = capfd.readouterr()
    assert response["error"] is not None
    assert leaks(json.dumps(response) + out.out + out.err) == []


def test_process_that_fails(secretive: Cpi, cluster: Cluster) -> None:
    cluster.pod_status = lambda _: waiting("CreateContainerConfigError", "secret CANARYcustom not found")
    response, said = secretive.run(secretive.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV]))

    assert "CreateContainerConfigError" in response["error"]["message"]
    assert leaks(json.dumps(response) + said) == []
