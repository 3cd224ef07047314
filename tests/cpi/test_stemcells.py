"""Tests light stemcells, both this project's own and unmodified ones that were made for the Docker CPI."""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_cpi import stemcells
from kubernetes_cpi.config import Config, Stemcells
from kubernetes_cpi.errors import CpiError
from tests.cpi.calls import DYNAMIC, ENV, CpiCalls
from tests.cpi.fake_api import FakeCluster

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    "properties",
    [
        {"image_reference": "registry.example/a:1", "digest": DIGEST, "image": f"registry.example/a:1@{DIGEST}"},
        {"image_reference": "registry.example/a:1", "digest": DIGEST},
        {"image": f"registry.example/a:1@{DIGEST}"},
        {"image_reference": f"registry.example/a:1@{DIGEST}", "name": "x", "version": "1", "infrastructure": "docker"},
    ],
)
def test_stemcell_cid_is_the_image_name_with_its_digest(properties: dict[str, Any]) -> None:
    assert stemcells.create(Config(), None, properties) == f"registry.example/a:1@{DIGEST}"


@pytest.mark.parametrize(
    "reference",
    ["localhost/a", "localhost:5000/a/b", "REG.example:443/a__b/c-d:V_1", "10.0.0.1:5000/a", "ubuntu", "a/b:1"],
)
def test_stemcell_image_may_come_from_any_registry(reference: str) -> None:
    lenient = Config(stemcells=Stemcells(allow_mutable_images=True))

    assert stemcells.create(Config(), None, {"image": f"{reference}@{DIGEST}"}) == f"{reference}@{DIGEST}"
    assert stemcells.create(lenient, None, {"image": reference}) == reference


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({}, "only light stemcells"),
        ({"image": "registry.example/a:1"}, "has no digest"),
        ({"image_reference": "registry.example/a:1", "digest": "md5:1"}, "not a reference to an image"),
        ({"image_reference": "a b", "digest": DIGEST}, "not a reference to an image"),
        ({"image_reference": ["a"], "digest": DIGEST}, "not a reference to an image"),
        ({"image_reference": "REG/X:1", "digest": DIGEST}, "not a reference to an image"),
        ({"image_reference": "registry.example/a/:1", "digest": DIGEST}, "not a reference to an image"),
        ({"image_reference": "registry.example/a:1:2", "digest": DIGEST}, "not a reference to an image"),
        ({"image": f"registry.example/a:1@{DIGEST}", "architecture": "mips"}, "'mips', not one of x86_64, amd64"),
    ],
)
def test_invalid_stemcell_image_is_rejected(properties: dict[str, Any], words: str) -> None:
    with pytest.raises(CpiError, match=words):
        stemcells.create(Config(), None, properties)


@pytest.mark.parametrize(
    ("named", "wished", "selector"),
    [
        ("x86_64", {}, {"kubernetes.io/arch": "amd64"}),
        ("arm64", {"pool": "bosh"}, {"kubernetes.io/arch": "arm64", "pool": "bosh"}),
        ("aarch64", {}, {"kubernetes.io/arch": "arm64"}),
        (None, {}, None),
    ],
)
def test_vm_is_scheduled_on_nodes_with_the_stemcell_architecture(
    cpi: CpiCalls, cluster: FakeCluster, named: str | None, wished: dict[str, str], selector: dict[str, str] | None
) -> None:
    pointers = {"image": f"registry.example/a:1@{DIGEST}"} | ({"architecture": named} if named else {})
    stemcell = cpi("create_stemcell", "/nothing", pointers, {})
    vm = cpi("create_vm", "agent-1", stemcell, {"node_selector": wished}, DYNAMIC, [], ENV)[0]
    spec = cluster.of("pods")[vm]["spec"]

    assert spec.get("nodeSelector") == selector
    assert spec["containers"][0]["image"] == pointers["image"]
