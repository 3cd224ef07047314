"""External tools confirm that manifests, Dockerfiles, the dashboard and workflows are valid."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes.manifests import DEPLOY, manifests
from tests.support.source import ROOT

pytestmark = pytest.mark.image

OLDEST = {
    **dict.fromkeys(("base", "privileged", "restricted", "cpi", "example"), "1.25"),
    "userns": "1.30",
    "unmodified": "1.31",
    "unmodified-copy": "1.25",
    **dict.fromkeys(("../cpi/privileged", "../cpi/baseline", "../cpi/restricted", "../cpi/cluster-reader"), "1.25"),
}
"""Maps each directory of manifests to the oldest Kubernetes version that both the manifests and the validator support.
"""
NEWEST = "1.37"


def tool(name: str) -> str:
    """Return the path of a program that requirements/tools.lock installs."""
    path = ROOT / ".tools/bin" / name
    if not path.exists():
        pytest.fail(f"{name} is missing: ./dev test-image installs it")
    return str(path)


@pytest.mark.parametrize(("name", "version"), [*OLDEST.items(), *dict.fromkeys(OLDEST, NEWEST).items()])
def test_kubernetes_manifests_are_valid(name: str, version: str, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(manifests(name))
    validate = [tool("kubernetes-validate"), "--strict", "--kubernetes-version", version, str(manifest)]
    done = subprocess.run(validate, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_monitoring_component_adds_monitoring_to_an_instance(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    overlay = {
        "namespace": "mine",
        "resources": ["../deploy/kubernetes/restricted"],
        "components": ["../deploy/monitoring"],
    }
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = [one for one in yaml.safe_load_all(manifests(str(tmp_path / "overlay"))) if one]

    assert {one["kind"] for one in documents} > {"StatefulSet", "PodMonitor", "PrometheusRule", "ConfigMap"}
    assert {one["metadata"]["namespace"] for one in documents} == {"mine"}
    (board,) = (one for one in documents if "grafana_dashboard" in one["metadata"].get("labels", {}))
    assert (board["kind"], board["metadata"]["name"]) == ("ConfigMap", "agent-shim-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["data"] == {"agent-shim.json": (ROOT / "deploy/grafana/agent-shim.json").read_text()}


def test_manifest_check_detects_an_unknown_field(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(manifests("base").replace("terminationGracePeriodSeconds", "terminationGrace"))
    done = subprocess.run([tool("kubernetes-validate"), "--strict", str(manifest)], capture_output=True, text=True)

    assert done.returncode != 0


def test_dockerfiles_pass_the_linter() -> None:
    """The linter's rule that package versions must be pinned is disabled, because each build must install the latest
    security fixes.
    """
    files = [str(ROOT / "Dockerfile"), str(DEPLOY / "example/Dockerfile")]
    done = subprocess.run([tool("hadolint"), "--ignore=DL3008", *files], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


def dashboard_losses(path: Path) -> list[str]:
    program = [tool("python"), "-I", str(ROOT / "tests/support/programs/grafana_losses.py"), str(path)]
    said: str = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    return said.split()


def test_grafana_preserves_every_dashboard_field(tmp_path: Path) -> None:
    """Grafana's own library reads the dashboard and writes it again. A misspelt field would be lost."""
    path = ROOT / "deploy/grafana/agent-shim.json"
    misspelt = tmp_path / "misspelt.json"
    misspelt.write_text(path.read_text().replace('"gridPos"', '"gridPosition"', 1))

    assert dashboard_losses(path) == []
    assert dashboard_losses(misspelt) == ["$.panels[0].gridPosition"]


def test_workflows_are_valid_and_safe() -> None:
    files = sorted(map(str, (ROOT / ".github/workflows").iterdir()))
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *files]
    for command in (schema, [tool("zizmor"), "--offline", "--no-progress", *files]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
