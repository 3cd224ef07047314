"""Tests Services, Ingresses, NetworkPolicies and instance names."""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_cpi import services
from tests.cpi.calls import CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster

METADATA = {"deployment": "dep", "job": "zookeeper", "index": "0", "name": "zookeeper/1-2", "id": "1-2"}
WEB: dict[str, Any] = {
    "services": [{"name": "web", "ports": [{"port": 80}], "ingress": {"hosts": ["web.example.org"], "class_name": "n"}}]
}
POLICY: dict[str, Any] = {"network_policy": {"ingress": [{"ports": [{"port": 2181}]}]}}


def target(cluster: FakeCluster, service: str) -> str:
    """Return the VM to which a Service forwards connections."""
    return str(cluster.of("services")[service]["spec"]["selector"]["cpi.bosh.io/vm"])


def test_instance_name_points_to_the_instances_newest_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    old, new = (cpi.create_vm(agent) for agent in ("agent-1", "agent-2"))
    cpi("set_vm_metadata", old, METADATA)

    spec = cluster.of("services")["dep-zookeeper-0"]["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert target(cluster, "dep-zookeeper-0") == old
    cpi("set_vm_metadata", new, METADATA)
    assert target(cluster, "dep-zookeeper-0") == new
    cpi("delete_vm", old)
    assert target(cluster, "dep-zookeeper-0") == new
    cpi("delete_vm", new)
    assert cluster.snapshot() == {}


@pytest.mark.parametrize(
    ("metadata", "networks"),
    [
        ({**METADATA, "compiling": "ruby"}, {}),
        ({"deployment": "dep", "job": "zookeeper"}, {}),
        ({}, {}),
        (METADATA, {"instance_names": False}),
    ],
    ids=["compilation", "no index", "nothing", "switched off"],
)
def test_instance_name_is_omitted_if_disabled_or_the_vm_has_no_instance(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, metadata: dict[str, str], networks: dict[str, bool]
) -> None:
    cpi.write(server.config(networks=networks))

    cpi("set_vm_metadata", cpi.create_vm(), metadata)

    assert cluster.of("services") == {}


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_set_vm_metadata_succeeds_even_if_the_instance_name_is_unavailable(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, is_forbidden: bool
) -> None:
    if is_forbidden:
        server.fail("POST services", times=9, status=403)
    else:
        cluster.create(("services", "bosh", "dep-zookeeper-0"), {"metadata": {"name": "dep-zookeeper-0"}, "spec": {}})
    vm = cpi.create_vm()

    cpi("set_vm_metadata", vm, METADATA)

    assert "selector" not in cluster.of("services").get("dep-zookeeper-0", {"spec": {}})["spec"]
    assert cluster.of("pods")[vm]["metadata"]["labels"]["bosh.io/index"] == "0"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("dep", "web", "0"), "dep-web-0"),
        (("cf", "doppler_z1", "3"), "i-cf-doppler-z1-3-"),
        (("Prod", "web", "0"), "i-prod-web-0-"),
        (("d" * 40, "g" * 40, "12"), "i-" + "d" * 40 + "-ggg-"),
        (("7", "web", "0"), "i-7-web-0-"),
    ],
)
def test_instance_name_is_a_valid_dns_label(parts: tuple[str, str, str], name: str) -> None:
    found = services.instance_name(*parts)

    assert found.startswith(name)
    assert len(found) <= services.MAX_NAME_CHARS


def test_instances_with_similar_names_get_different_dns_names() -> None:
    assert services.instance_name("a", "b_c", "0") != services.instance_name("a", "b.c", "0")


def test_ingress_is_created_and_deleted_with_its_service(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vms = [cpi.create_vm(agent, **WEB) for agent in ("agent-1", "agent-2")]

    spec = cluster.of("ingresses")["web"]["spec"]
    assert spec["ingressClassName"] == "n"
    (rule,) = spec["rules"]
    assert rule["host"] == "web.example.org"
    assert rule["http"]["paths"][0]["backend"] == {"service": {"name": "web", "port": {"number": 80}}}
    cpi("delete_vm", vms[0])
    assert "web" in cluster.of("ingresses")
    cpi("delete_vm", vms[1])
    assert cluster.snapshot() == {}


def test_ingress_without_hosts_accepts_all_hosts_and_may_use_tls(cpi: CpiCalls, cluster: FakeCluster) -> None:
    ingress = {"tls_secret": "web-tls", "hosts": [], "path": "/api", "port": 8080, "annotations": {"a/b": "c"}}
    cpi.create_vm(services=[{"name": "web", "ports": [{"port": 80}, {"port": 8080}], "ingress": ingress}])

    made = cluster.of("ingresses")["web"]
    assert made["metadata"]["annotations"] == {"a/b": "c"}
    assert made["spec"]["tls"] == [{"hosts": [], "secretName": "web-tls"}]
    assert "host" not in made["spec"]["rules"][0]
    assert made["spec"]["rules"][0]["http"]["paths"][0]["path"] == "/api"
    assert made["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"] == {"number": 8080}


def test_group_network_policy_is_deleted_with_the_last_vm(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vms = [cpi.create_vm(agent, **POLICY) for agent in ("agent-1", "agent-2")]

    (policy,) = cluster.of("networkpolicies").values()
    labels = cluster.of("pods")[vms[1]]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == POLICY["network_policy"]["ingress"]
    # Policies are additive, so labels must exempt these pods from the namespace's policy for the same direction.
    assert {"cpi.bosh.io/own-ingress", "cpi.bosh.io/own-egress"} & labels.keys() == {"cpi.bosh.io/own-ingress"}
    vms.append(cpi.create_vm("agent-3", network_policy={"ingress": [], "egress": []}))
    (changed,) = cluster.of("networkpolicies").values()
    assert changed["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert (changed["spec"]["ingress"], changed["spec"]["egress"]) == ([], [])
    for vm in vms:
        assert len(cluster.of("networkpolicies")) == 1
        cpi("delete_vm", vm)
    assert cluster.snapshot() == {}


def test_delete_vm_deletes_the_network_policy_even_if_the_pod_is_gone(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vm = cpi.create_vm(**POLICY)
    cluster.delete(("pods", "bosh", vm), {"gracePeriodSeconds": 0})

    cpi("delete_vm", vm)

    assert cluster.snapshot() == {}


def test_failed_create_vm_removes_its_services(cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer) -> None:
    server.fail("POST networkpolicies", status=403, message="may not")

    with pytest.raises(CpiFailedError, match="may not"):
        cpi.create_vm(**WEB, **POLICY)

    assert cluster.snapshot() == {}


@pytest.mark.parametrize("plural", ["ingresses", "networkpolicies"])
def test_another_directors_ingress_or_network_policy_is_not_adopted(
    cpi: CpiCalls, cluster: FakeCluster, plural: str
) -> None:
    cpi.create_vm("agent-1", **WEB, **POLICY)
    (name,) = cluster.of(plural)
    cluster.patch((plural, "bosh", name), {"metadata": {"labels": {"cpi.bosh.io/director": "another"}}})
    before = cluster.of(plural)[name]["spec"]

    with pytest.raises(CpiFailedError, match="lacks the labels of a"):
        cpi.create_vm("agent-2", services=WEB["services"], network_policy={"egress": []})
    cpi("delete_vm", next(iter(cluster.of("pods"))))

    assert cluster.of(plural)[name]["spec"] == before


def test_service_without_a_port_is_rejected(cpi: CpiCalls) -> None:
    with pytest.raises(CpiFailedError, match="`ports` of the Service 'web' is empty"):
        cpi.create_vm(services=[{"name": "web", "ports": []}])
