"""Tests the Kubernetes objects for an instance group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent_shim.cli import kubernetes
from agent_shim.cli.deployment import Group
from agent_shim.cli.kubernetes import JobPort
from agent_shim.core.errors import ConfigError


def object_inputs(**group: Any) -> kubernetes.ObjectInputs:
    """Return the inputs for the Kubernetes objects of an instance group with the members ``group``."""
    return kubernetes.ObjectInputs(
        deployment="My shop!",
        group=msgspec.convert({"name": "web", **group}, Group),
        manifest="name: shop\ninstance_groups: []\n",
        releases=["releases/web.tgz"],
        image="registry.example/agent-shim:1",
        renderer="registry.example/web:1",
        ports=[JobPort("http", 8080), JobPort("udp-53", 53, "UDP")],
        is_privileged=False,
    )


def write_and_read(where: Path, made: kubernetes.ObjectInputs) -> dict[str, Any]:
    """Write the objects to ``where``. Read the files that the kustomization lists, and return the objects in them,
    keyed by ``KIND/NAME``.
    """
    kubernetes.write(made, where)
    names = yaml.safe_load((where / "kustomization.yaml").read_text())["resources"]
    documents = [document for name in names for document in yaml.safe_load_all((where / name).read_text())]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def test_instance_group_becomes_a_stateful_set_whose_init_container_renders_the_jobs(tmp_path: Path) -> None:
    resources = {"cpu": 0.5, "ram": 512, "ephemeral_disk_size": 2048}
    objects = write_and_read(
        tmp_path, object_inputs(instances=3, azs=["z1", "z2"], persistent_disk=1024, vm_resources=resources)
    )
    spec = objects["StatefulSet/web"]["spec"]
    pod = spec["template"]["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]

    assert list(objects) == [
        *("ConfigMap/web-agent", "Secret/web-manifest", "Service/web", "Service/web-ready", "StatefulSet/web"),
        "PodDisruptionBudget/web",
    ]
    assert (spec["replicas"], spec["serviceName"]) == (3, "web")
    assert init["image"] == "registry.example/web:1"
    assert init["args"][:4] == ["/manifest/manifest.yml", "/releases/web.tgz", "--group", "web"]
    assert [one["name"] for one in init["env"]] == ["AGENT_SHIM_INDEX", "AGENT_SHIM_ADDRESS"]
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "2048Mi"},
        "limits": {"memory": "512Mi"},
    }
    assert "livenessProbe" not in container
    assert spec["volumeClaimTemplates"][0]["spec"]["resources"] == {"requests": {"storage": "1024Mi"}}
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/zone"
    assert [one["port"] for one in objects["Service/web"]["spec"]["ports"]] == [8080, 53, 9190]
    assert (tmp_path / "Dockerfile").read_text().splitlines()[-1] == "COPY releases/web.tgz /releases/web.tgz"


def test_manifest_file_is_private_and_not_mounted_in_the_agent_container(tmp_path: Path) -> None:
    pod = write_and_read(tmp_path, object_inputs())["StatefulSet/web"]["spec"]["template"]["spec"]

    assert "manifest" not in [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
    assert (tmp_path / "secret.yaml").stat().st_mode & 0o777 == 0o600


def test_new_secret_file_is_private_even_if_the_old_file_was_not(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("")
    (tmp_path / "secret.yaml").chmod(0o644)
    write_and_read(tmp_path, object_inputs())

    assert (tmp_path / "secret.yaml").stat().st_mode & 0o777 == 0o600


def test_changed_manifest_replaces_the_pods(tmp_path: Path) -> None:
    def annotations(made: kubernetes.ObjectInputs) -> Any:
        return write_and_read(tmp_path, made)["StatefulSet/web"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations(object_inputs()) != annotations(object_inputs()._replace(manifest="other"))


@pytest.mark.parametrize(
    ("properties", "links", "found"),
    [
        (
            {"quarks": {"ports": [{"name": "api_port", "internal": "80-81", "protocol": "tcp"}]}},
            [],
            [JobPort("api-port", 80), JobPort("tcp-81", 81)],
        ),
        (
            {"bosh_containerization": {"ports": [{"name": "d", "internal": 53, "protocol": "UDP"}]}},
            [],
            [JobPort("d", 53, "UDP")],
        ),
        (
            {},
            [{"nats": {"port": 4222, "cluster_port": "4223", "monitor_port": 0, "user": "x", "report": 7}}],
            [JobPort("nats", 4222), JobPort("nats-cluster", 4223)],
        ),
        (
            {},
            [{"port": 1}, {"x": {"port": 1}}, {"a_very_long_name_of_a_port": 2}],
            [JobPort("port", 1), JobPort("tcp-2", 2)],
        ),
        ({}, [{"agent": {"port": 3}}], [JobPort("tcp-3", 3)]),
    ],
)
def test_service_ports_come_from_properties_and_links(properties: Any, links: Any, found: Any) -> None:
    assert kubernetes.ports([(properties, links)]) == found


@pytest.mark.parametrize("ports", [[8080], {"name": "web"}, "8080", 8080, [{"name": "web"}], [{"internal": "a"}]])
def test_invalid_port_properties_are_rejected(ports: Any) -> None:
    with pytest.raises(ConfigError, match="cannot read quarks.ports: "):
        kubernetes.ports([({"quarks": {"ports": ports}}, [])])


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"name": "my_web"}, "Services get its name"),
        ({"lifecycle": "errand"}, "it is an errand"),
        ({"persistent_disk_type": "large"}, "is in the cloud config"),
        ({"persistent_disks": [{"name": "a"}]}, "it has several persistent disks"),
    ],
)
def test_instance_group_without_a_kubernetes_equivalent_is_rejected(tmp_path: Path, group: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kubernetes.write(object_inputs(**group), tmp_path / "out")

    assert not (tmp_path / "out").exists()
