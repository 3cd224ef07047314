"""Tests the renderer image as an init container, with read-only inputs and the pod's environment variables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support import pods
from tests.support.pods import Podman

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def renderer(podman: Podman, base: str, image: str) -> str:
    """Build the renderer once the image exists, because the two share most layers."""
    return pods.build(podman, base, "renderer")


@pytest.mark.timeout(1800)  # includes the time to build the image on a busy machine
@pytest.mark.parametrize("index", [0, 1])
def test_renderer_image_uses_the_pod_index_and_address(
    podman: Podman, renderer: str, tmp_path: Path, index: int
) -> None:
    job = tmp_path / "release/jobs/web"
    (job / "templates").mkdir(parents=True)
    (job / "spec").write_text(yaml.safe_dump({"name": "web", "templates": {"a.erb": "config/a"}}))
    (job / "templates/a.erb").write_text("<%= [spec.id, spec.index, spec.az, spec.bootstrap, spec.address].to_json %>")
    group = {"name": "front", "instances": 2, "azs": ["z1", "z2"], "jobs": [{"name": "web"}]}
    (tmp_path / "manifest.yml").write_text(yaml.safe_dump({"instance_groups": [group]}))
    (tmp_path / "out").mkdir()
    options = [f"--volume={tmp_path}:/in:ro", f"--volume={tmp_path}/out:/out", "--read-only", "--network=none"]
    pod = [f"--env=AGENT_SHIM_INDEX=front-{index}", "--env=AGENT_SHIM_ADDRESS=10.0.0.7"]
    podman("run", "--rm", *options, *pod, renderer, "/in/manifest.yml", "/in/release", "--out", "/out")

    rendered = json.loads((tmp_path / "out/jobs/web/config/a").read_text())
    assert rendered == [f"front-{index}", index, f"z{index + 1}", index == 0, "10.0.0.7"]
