"""Tests a VM's networks: annotations for CNI plugins, interfaces, DNS, and the agent's settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kubernetes_cpi import networks
from kubernetes_cpi.config import Networks
from kubernetes_cpi.errors import InputError, NotSupportedError

MANUAL: dict[str, Any] = {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0", "gateway": "10.0.0.1"}


@pytest.mark.parametrize(
    ("properties", "network", "annotations"),
    [
        ({"cni": "calico"}, {}, {"cni.projectcalico.org/ipAddrs": '["10.0.0.5"]'}),
        ({"cni": "kube-ovn"}, {}, {"ovn.kubernetes.io/ip_address": "10.0.0.5"}),
        (
            {"cni": "antrea", "name": "pool"},
            {},
            {"ipam.antrea.io/pod-ips": "10.0.0.5", "ipam.antrea.io/ippools": "pool"},
        ),
        (
            {"cni": "template", "annotations": {"x/y": "((ip))/((prefix)) via ((gateway))"}},
            {},
            {"x/y": "10.0.0.5/24 via 10.0.0.1"},
        ),
        (
            {"cni": "template", "annotations": {"x": "((ip))/((prefix))"}},
            {"ip": "fd00::5", "netmask": "ffff:ffff:ffff:ffff::"},
            {"x": "fd00::5/64"},
        ),
        (
            {"cni": "template", "annotations": {"x": "((ip))/((delegated_prefix))"}},
            {"ip": "2001:db8:0:1::", "netmask": "ffff:ffff:ffff:ffff::", "prefix": "80"},
            {"x": "2001:db8:0:1::/80"},
        ),
        ({"cni": "calico"}, {"prefix": "32"}, {"cni.projectcalico.org/ipAddrs": '["10.0.0.5"]'}),
    ],
)
def test_manual_address_is_requested_through_cni_annotations(
    properties: dict[str, Any], network: dict[str, str], annotations: dict[str, str]
) -> None:
    given = {**MANUAL, **network}
    found = networks.plan({"a": {**given, "cloud_properties": properties}}, Networks())

    assert found.annotations == annotations
    assert found.address == given["ip"]
    if properties == {"cni": "calico"}:
        assert networks.plan({"a": MANUAL}, Networks(cni="calico")).annotations == annotations, "from the configuration"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": MANUAL}, "set `cni` in its cloud properties"),
        ({"a": {"type": "dynamic"}, "b": {"type": "dynamic"}}, "a pod has one interface"),
    ],
    ids=["manual without a cni", "two on one interface"],
)
def test_network_unsuitable_for_a_pod_is_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        networks.plan(given, Networks())


@pytest.mark.parametrize(
    "properties",
    [
        {"cni": "calico"},
        {"cni": "kube-ovn"},
        {"cni": "antrea"},
        {"cni": "multus", "name": "x"},
        {"cni": "template", "annotations": {"x": "((ip))/((prefix))"}},
    ],
    ids=lambda properties: str(properties["cni"]),
)
def test_network_prefix_is_rejected_if_a_pod_gets_a_single_address(properties: dict[str, Any]) -> None:
    delegated = {"type": "manual", "ip": "2001:db8:0:1::", "netmask": "ffff:ffff:ffff:ffff::", "prefix": "80"}

    with pytest.raises(NotSupportedError, match=r"cannot delegate the prefix 2001:db8:0:1::/80 of the network 'a'"):
        networks.plan({"a": {**delegated, "cloud_properties": properties}}, Networks())
    networks.plan({"a": {**delegated, "prefix": "128", "cloud_properties": properties}}, Networks())


def test_vip_network_with_a_prefix_is_rejected() -> None:
    vip = {"type": "vip", "ip": "10.0.0.8", "prefix": "29", "cloud_properties": {"ports": [{"port": 80}]}}

    with pytest.raises(NotSupportedError, match=r"cannot delegate the prefix 10\.0\.0\.8/29"):
        networks.plan({"a": vip}, Networks())
    assert networks.plan({"a": {**vip, "prefix": "32"}}, Networks()).vips[0].ip == "10.0.0.8"


def test_several_networks_in_one_nic_group_are_rejected() -> None:
    multus = {**MANUAL, "nic_group": "1", "cloud_properties": {"cni": "multus", "name": "x"}}
    other = {**multus, "ip": "fd00::5", "netmask": "ffff:ffff:ffff:ffff::"}

    with pytest.raises(NotSupportedError, match=r"networks 'a' and 'b' on one interface \(nic_group 1\)"):
        networks.plan({"a": multus, "b": other}, Networks())
    assert networks.MULTUS in networks.plan({"a": multus, "b": {**other, "nic_group": "2"}}, Networks()).annotations


def test_dynamic_network_does_not_request_the_previous_vms_address() -> None:
    """When the Director recreates a VM, its request contains the previous VM's address, which the new VM cannot get."""
    given = {**MANUAL, "type": "dynamic", "default": ["dns"], "dns": ["10.0.0.2"]}
    found = networks.plan({"a": given}, Networks(cni="calico"))

    assert (found.address, found.annotations) == ("", {})
    assert found.settings["a"] == {"type": "dynamic", "default": ["dns"], "dns": ["10.0.0.2"], "preconfigured": True}


def test_additional_networks_become_multus_interfaces() -> None:
    multus = {"cni": "multus", "name": "net/storage", "interface": "eth1"}
    given = {"a": {"type": "dynamic"}, "b": {**MANUAL, "cloud_properties": multus}}
    found = networks.plan(given, Networks())

    assert json.loads(found.annotations[networks.MULTUS]) == [
        {"name": "storage", "namespace": "net", "ips": ["10.0.0.5/24"], "interface": "eth1"}
    ]


def test_at_most_three_dns_servers_come_from_the_default_dns_network() -> None:
    multus = {"cni": "multus", "name": "x"}
    given = {
        "a": {"type": "dynamic", "dns": ["1.1.1.1"]},
        "b": {
            **MANUAL,
            "dns": ["2.2.2.2", "3.3.3.3", "4.4.4.4", "5.5.5.5"],
            "default": ["dns"],
            "cloud_properties": multus,
        },
    }

    assert networks.plan(given, Networks()).nameservers == ["2.2.2.2", "3.3.3.3", "4.4.4.4"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "vip", "ip": "10.0.0.9"}, "needs an address, and `ports`"),
        ({"type": "manual", "cloud_properties": {"cnii": "calico"}}, "nearest known one is `cni`"),
        ({"type": "dynamic", "dns": "1.1.1.1"}, "Expected `array`"),
        ({"type": "manual", "cloud_properties": {"cni": "multus"}}, "needs `name`"),
        (7, "Expected `object`"),
    ],
)
def test_invalid_network_is_rejected(given: Any, words: str) -> None:
    with pytest.raises(InputError, match="'a'") as failed:
        networks.plan({"a": given}, Networks())

    assert words in str(failed.value)
