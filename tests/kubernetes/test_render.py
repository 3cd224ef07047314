"""Manifests from ``render --kubernetes`` are accepted by a real API server and run as pods."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes import rendered
from tests.support.kubernetes.api_server import ApiServer, programs
from tests.support.kubernetes.objects import Namespace, pod_spec

pytestmark = pytest.mark.kubernetes

APPLY = "application/apply-patch+yaml"
PATHS = {
    "ConfigMap": "/api/v1/namespaces/default/configmaps",
    "Secret": "/api/v1/namespaces/default/secrets",
    "Service": "/api/v1/namespaces/default/services",
    "StatefulSet": "/apis/apps/v1/namespaces/default/statefulsets",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
}
MANIFEST = """
name: shop
instance_groups:
- name: web
  instances: 2
  azs: [z1, z2]
  persistent_disk: 1024
  vm_resources: {cpu: 2, ram: 1024, ephemeral_disk_size: 4096}
  jobs: [{name: web, release: r}]
"""
SPEC = """
name: web
templates: {web.erb: config/web, bpm.erb: config/bpm.yml}
properties: {web.port: {default: 8080}}
provides: [{name: web, type: http, properties: [web.port]}]
"""
BPM = "processes: [{name: web, executable: /bin/true, unsafe: {privileged: %s}}]"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(programs(), tmp_path_factory.mktemp("api"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("is_privileged", [False, True])
def test_rendered_manifests_are_accepted_by_the_api_server(api: ApiServer, tmp_path: Path, is_privileged: bool) -> None:
    job = tmp_path / "r/jobs/web"
    (job / "templates").mkdir(parents=True)
    (job / "spec").write_text(SPEC)
    (job / "templates/web.erb").write_text("<%= spec.id %>")
    (job / "templates/bpm.erb").write_text(BPM % str(is_privileged).lower())
    (tmp_path / "manifest.yml").write_text(MANIFEST)
    argv = ["-m", "agent_shim", "render", "manifest.yml", "r", "--kubernetes", "--out", "out", "--image", "i:1"]
    subprocess.run([sys.executable, *argv], cwd=tmp_path, check=True)
    names = yaml.safe_load((tmp_path / "out/kustomization.yaml").read_text())["resources"]
    documents = [one for name in names for one in yaml.safe_load_all((tmp_path / "out" / name).read_text())]

    if api.request("GET", "/apis/policy/v1")[0] == 404:
        pytest.skip("no policy/v1 in this Kubernetes")
    for document in documents:
        options = "fieldManager=test&fieldValidation=Strict&force=true"
        path = f"{PATHS[document['kind']]}/{document['metadata']['name']}?{options}"
        status, answer = api.request("PATCH", path, document, kind=APPLY)
        assert status in (200, 201), answer
    status, made = api.request("GET", f"{PATHS['StatefulSet']}/web")
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"].get("privileged", False) is is_privileged
    assert {"name": "web", "containerPort": 8080, "protocol": "TCP"} in container["ports"]


async def test_instances_of_a_rendered_group_find_each_other(namespace: Namespace) -> None:
    if not namespace.node.has("coredns"):
        pytest.skip("nothing among the programs resolves names of Services")
    where = namespace.node.where / "releases" / rendered.DIRECTORY
    names = yaml.safe_load((where / "kustomization.yaml").read_text())["resources"]
    documents = [one for name in names for one in yaml.safe_load_all((where / name).read_text())]
    spec = pod_spec(documents)
    for container in (*spec["initContainers"], *spec["containers"]):
        container["imagePullPolicy"] = "IfNotPresent"  # the cluster has no registry to pull from
    await namespace.apply(documents)
    pods = [namespace.pod(f"{rendered.GROUP}-{index}") for index in (0, 1)]
    for pod in pods:
        await pod.until_ready()

    for pod in pods:
        peers = (await pod.exec("cat", "/var/vcap/jobs/peers/config/peers")).split()
        assert peers == [f"{one.name}.{rendered.GROUP}:{rendered.PORT}" for one in pods]
        answers = [await pod.exec("curl", "--silent", "--fail", f"http://{peer}/id") for peer in peers]
        assert answers == ["web-0 in z1, bootstrap true\n", "web-1 in z2, bootstrap false\n"]
        await pod.exec("touch", "/var/vcap/store/peers/kept")
        assert (namespace.volume(f"store-{pod.name}") / "peers/kept").exists()
