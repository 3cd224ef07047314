"""Requests and responses have the form that the Director's CPI specification (integration/cpi_spec.rb) and the bosh CLI
require.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kubernetes_cpi import endpoint, methods
from tests.cpi.calls import DIRECTOR, ENV, STEMCELL, CpiCalls, checked, start
from tests.cpi.fake_api import FakeCluster

KNOWN_TYPES = {
    f"Bosh::Clouds::{name}"
    for name in (
        *("CpiError", "NotSupported", "NotImplemented", "CloudError", "VMNotFound", "NetworkNotFound", "NoDiskSpace"),
        *("DiskNotAttached", "DiskNotFound", "VMCreationFailed"),
    )
}
STEMCELL_PROPERTIES = {
    "name": "bosh-kubernetes-agent-shim",
    "version": "1.2",
    "infrastructure": "warden",
    "hypervisor": "docker",
    "disk": 5120,
    "disk_format": "rootfs",
    "container_format": "bare",
    "os_type": "linux",
    "os_distro": "ubuntu",
    "architecture": "x86_64",
    "root_device_name": "/dev/sda1",
    "image_reference": "registry.example/agent-shim:1.2",
    "digest": "sha256:" + "a" * 64,
    "image": "registry.example/agent-shim:1.2@sha256:" + "a" * 64,
}
MANUAL = {
    "type": "manual",
    "ip": "10.244.0.5",
    "netmask": "255.255.255.0",
    "prefix": "32",
    "cloud_properties": {"cni": "calico"},
    "default": ["dns", "gateway"],
    "dns": ["192.168.1.1", "192.168.1.2"],
    "gateway": "192.168.1.1",
}


def director(method: str, *arguments: Any, vm_api: bool = False, api_version: int | None = 3) -> bytes:
    """Return a request in the Director's format."""
    context: dict[str, Any] = {"director_uuid": DIRECTOR, "request_id": "cpi-123456"}
    if vm_api:
        context["vm"] = {"stemcell": {"api_version": 3}}
    request: dict[str, Any] = {"method": method, "arguments": arguments, "context": context}
    if api_version:
        request["api_version"] = api_version
    return json.dumps(request).encode()


def test_cpi_info_response_satisfies_the_director_and_the_cli() -> None:
    """The CLI requires `stemcell_formats`. The Director sends `info` without an `api_version`, but the CLI sends it
    with version 1.
    """
    for raw in (
        director("info", api_version=None),
        b'{"method":"info","arguments":[],"context":{"director_uuid":"d"},"api_version":1}',
    ):
        response = checked(start(raw).stdout)
        assert response["error"] is None
        assert response["result"]["api_version"] == 3
        assert response["result"]["stemcell_formats"] == ["kubernetes-light", "docker-light", "warden-light"]


def test_cpi_calls_made_for_a_deployment_succeed(cpi: CpiCalls, cluster: FakeCluster) -> None:
    def call(method: str, *arguments: Any, **more: Any) -> Any:
        response = cpi.answer(director(method, *arguments, **more))
        assert response["error"] is None, response
        return response["result"]

    stemcell = call("create_stemcell", "/var/vcap/data/tmp/image", STEMCELL_PROPERTIES, {"tags": {}})
    assert stemcell == f"{STEMCELL}#amd64"
    vm, networks = call("create_vm", "agent-1", stemcell, {}, {"first": MANUAL}, [], ENV, vm_api=True)
    assert networks == {"first": MANUAL}
    metadata = {"director": "d", "deployment": "dep", "id": "1-2", "job": "zk", "instance_group": "zk", "index": "0"}
    assert call("set_vm_metadata", vm, {**metadata, "name": "zk/1-2", "created_at": "2026-01-01T00:00:00Z"}) is None
    disk = call("create_disk", 3000, {}, vm)
    hint = call("attach_disk", vm, disk, vm_api=True)
    assert hint, "an empty hint is an AttachDiskResponseError"
    assert call("set_disk_metadata", disk, {**metadata, "instance_index": "0", "attached_at": "2026-01-01"}) is None
    assert call("has_disk", disk) is True
    assert call("get_disks", vm) == [disk]
    assert call("detach_disk", vm, disk, vm_api=True) is None
    assert call("delete_vm", vm, vm_api=True) is None
    assert call("has_vm", vm) is False
    assert call("delete_disk", disk) is None
    assert call("delete_stemcell", stemcell) is None
    assert cluster.snapshot() == {}


def test_manual_network_sets_the_pods_address_and_dns(cpi: CpiCalls, cluster: FakeCluster) -> None:
    response = cpi.answer(director("create_vm", "agent-1", STEMCELL, {}, {"first": MANUAL}, [], ENV, vm_api=True))

    (pod,) = cluster.of("pods").values()
    assert response["error"] is None
    assert pod["metadata"]["annotations"]["cni.projectcalico.org/ipAddrs"] == '["10.244.0.5"]'
    assert pod["status"]["podIP"] == "10.244.0.5"
    assert pod["spec"]["dnsConfig"] == {"nameservers": ["192.168.1.1", "192.168.1.2"]}
    assert pod["spec"]["dnsPolicy"] == "None"


def test_create_vm_accepts_null_disks_properties_and_env(cpi: CpiCalls) -> None:
    dynamic = {"a": {"type": "dynamic", "prefix": "32", "cloud_properties": {}, "default": ["dns", "gateway"]}}
    response = cpi.answer(director("create_vm", "agent-1", STEMCELL, None, dynamic, None, None, vm_api=True))

    assert response["error"] is None


@pytest.mark.parametrize("method", ["current_vm_id", "create_network", "delete_network", "ping", "configure_networks"])
def test_unsupported_cpi_method_returns_not_implemented(cpi: CpiCalls, method: str) -> None:
    error = cpi.answer(director(method))["error"]

    assert error["type"] == "Bosh::Clouds::NotImplemented"


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_invalid_cpi_arguments_cause_only_errors_known_to_the_director(cpi: CpiCalls, method: str) -> None:
    given: list[list[Any]] = [[], [None], [7], [{}], [[]]]
    for arguments in given:
        error = cpi.answer(director(method, *arguments))["error"]
        assert error is None or error["type"] in KNOWN_TYPES


def test_cpi_config_properties_override_the_configuration(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """If several CPIs are configured, the Director adds the properties from the CPI's entry in the cpi-config to the
    context of each request.
    """
    context = {"director_uuid": DIRECTOR, "request_id": "cpi-1", "namespace": "other", "disks": {"attach": "never"}}
    raw = {"method": "create_disk", "arguments": [64, {}, None], "context": context, "api_version": 3}

    disk = cpi.answer(json.dumps(raw).encode())["result"]

    assert disk.startswith("disk-other-")
    assert ("persistentvolumeclaims", "other", disk) in cluster.objects
    assert cpi("has_disk", disk) is True, "the cid names its namespace"


def test_unknown_key_in_a_cpi_config_is_rejected() -> None:
    raw = b'{"method":"has_vm","arguments":["vm-a-0"],"context":{"director_uuid":"d","namespase":"x"}}'

    assert "nearest known one is `namespace`" in checked(endpoint.answer(raw, []))["error"]["message"]
