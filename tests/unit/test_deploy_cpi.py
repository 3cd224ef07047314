"""Tests that the Director and the CPI can use the operations files, configs and cloud properties in deploy/cpi."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kubernetes_cpi import attachments, names, reference, schema
from kubernetes_cpi.config import Config
from kubernetes_cpi.names import OWN_RULES
from kubernetes_cpi.properties import DiskProperties, NetworkProperties, VmProperties
from stemcell_overlay import stemcell
from tests.support.source import ROOT

BOSH = ROOT / "deploy/cpi/bosh"
OPERATIONS = ("cpi.yml", "cpi-secondary.yml", "cloud-config-cpi.yml")


def read(name: str) -> Any:
    """Return the parsed file, in which each variable is replaced by its name, with hyphens instead of underscores."""
    return yaml.safe_load(re.sub(r"\(\((\w+)\)\)", lambda found: found[1].replace("_", "-"), (BOSH / name).read_text()))


def values(name: str, ending: str) -> Iterator[Any]:
    """Yield the values of the operations whose path ends with ``ending``."""
    return (one["value"] for one in read(name) if one["path"].rstrip("?").endswith(ending))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_files_have_the_keys_that_the_cli_expects(name: str) -> None:
    for one in read(name):
        assert one.keys() == {"type", "path", "value"}
        assert one["type"] == "replace"
        assert one["path"].startswith("/")


@pytest.mark.parametrize("name", ["stemcell.yml", "director.yml"])
def test_operations_files_for_the_docker_cpi_have_valid_types_and_values(name: str) -> None:
    for one in yaml.safe_load((ROOT / "deploy/docker" / name).read_text()):
        assert one.keys() - {"value"} == {"type", "path"}
        assert one["type"] in ("replace", "remove")
        # The CLI treats a null value as missing, so every ``replace`` operation needs a non-null value.
        assert (one.get("value") is not None) == (one["type"] == "replace")


def test_docker_cpi_stemcell_has_the_same_name_as_our_tarballs() -> None:
    names = [
        one["value"]
        for one in yaml.safe_load((ROOT / "deploy/docker/stemcell.yml").read_text())
        if "name" in one["path"]
    ]

    assert names == [stemcell.name_of("ubuntu-noble", "amd64")]


def test_operations_files_set_only_known_cpi_properties() -> None:
    found = list(values("cpi.yml", "properties/kubernetes_cpi"))
    assert len(found) == 2
    for one in found:
        schema.read(one, Config, origin="cpi.yml")


def test_operations_files_set_only_known_cloud_properties_for_the_director() -> None:
    (found,) = values("cpi.yml", "cloud_properties")
    director = schema.read(found, VmProperties, origin="cpi.yml")
    assert director.service_account_token
    assert director.network_policy
    assert director.network_policy.ingress
    (admitted,) = director.network_policy.ingress
    assert [port["port"] for port in admitted["ports"]] == [port.port for port in director.services[0].ports]


def test_cpi_config_example_has_known_properties() -> None:
    (entry,) = read("cpi-config.yml")["cpis"]
    assert entry["type"] == "kubernetes", "the Director calls jobs/kubernetes_cpi/bin/cpi"
    schema.read(entry["properties"], Config, origin="cpi-config.yml")


def test_cloud_config_example_has_known_properties() -> None:
    config = read("cloud-config.yml")
    kinds: dict[str, type[msgspec.Struct]] = {
        "azs": VmProperties,
        "vm_types": VmProperties,
        "vm_extensions": VmProperties,
        "disk_types": DiskProperties,
    }
    for kind, struct in kinds.items():
        for one in config[kind]:
            schema.read(one.get("cloud_properties", {}), struct, origin=f"{kind} {one['name']}")
    for network in config["networks"]:
        for subnet in network["subnets"]:
            schema.read(subnet.get("cloud_properties", {}), NetworkProperties, origin=network["name"])
    assert config["compilation"]["vm_type"] in {one["name"] for one in config["vm_types"]}


def test_unknown_property_in_a_manifest_is_detected() -> None:
    with pytest.raises(Exception, match="memory"):
        schema.read({"memori": 1}, VmProperties, origin="a test")


@pytest.mark.parametrize("level", ["privileged", "baseline", "restricted"])
def test_namespace_manifest_enforces_its_pod_security_level(level: str) -> None:
    (namespace,) = yaml.safe_load_all((ROOT / "deploy/cpi" / level / "namespace.yaml").read_text())
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == level


def test_namespace_policies_exclude_vms_with_their_own_policy() -> None:
    policies = list(yaml.safe_load_all((ROOT / "deploy/cpi/base/networkpolicy.yaml").read_text()))
    assert sorted(kind for one in policies for kind in one["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    for one in policies:
        (direction,) = one["spec"]["policyTypes"]
        (condition,) = one["spec"]["podSelector"]["matchExpressions"]
        assert condition == {"key": OWN_RULES[direction.lower()], "operator": "DoesNotExist"}


def test_cpi_role_has_no_wildcards_and_cannot_list_secrets_or_execute_in_pods() -> None:
    role = next(yaml.safe_load_all(Path(ROOT / "deploy/cpi/base/role.yaml").read_text()))
    verbs = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for resource, verb in verbs if resource == "secrets"} == {"create", "delete", "get"}
    assert not any("*" in (resource, verb) or resource == "pods/exec" for resource, verb in verbs)


def test_admission_policy_accepts_exactly_the_objects_that_the_cpi_creates() -> None:
    """The policy rejects all other helper pods, so the values in it must match those in the CPI's code."""
    text = " ".join((ROOT / "deploy/cpi/admission/policy.yaml").read_text().split())
    kinds = list(attachments.KINDS)
    account = yaml.safe_load_all((ROOT / "deploy/cpi/base/account.yaml").read_text())

    assert f"variables.kind in {kinds}" in text
    assert f"s.metadata.labels['{names.MANAGED_BY}'] == '{names.OURS}'" in text
    assert f"params.data.host_path : '{Config().disks.host_path}'" in text
    assert f"params.data.python : '{Config().disks.helper_python}'" in text
    assert f"postStart.exec.command == {attachments.WAIT_UNTIL_DONE['exec']['command']}" in text
    assert f"':{next(account)['metadata']['name']}'" in text


def test_documented_property_tables_match_the_types() -> None:
    """To update the tables, run ``python -m kubernetes_cpi.reference`` and insert the output after the marker."""
    _, mark, found = (ROOT / "docs/cpi.md").read_text().partition("<!-- tables -->\n\n")

    assert mark
    assert found == reference.sections()


def test_each_az_refers_to_an_entry_in_the_cpi_config() -> None:
    entries = [f"/azs/name={az['name']}/cpi?" for az in read("cloud-config.yml")["azs"]]

    assert [one["path"] for one in read("cloud-config-cpi.yml")] == entries
    assert {one["value"] for one in read("cloud-config-cpi.yml")} == {
        one["name"] for one in read("cpi-config.yml")["cpis"]
    }


def test_manifests_have_no_liveness_probe_that_kills_a_slow_agent() -> None:
    """A liveness probe would restart the container, and thus all jobs, whenever the agent has to wait for CPU time."""
    texts = {path: path.read_text() for path in (ROOT / "deploy").rglob("*.yaml")}

    assert any("readinessProbe:" in text for text in texts.values())
    ending = re.compile(r"^ *(livenessProbe|startupProbe):", re.MULTILINE)
    assert [path for path, text in texts.items() if ending.search(text)] == []
