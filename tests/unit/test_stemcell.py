"""Tests stemcell manifests, and the architecture in their names and versions."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from stemcell_overlay import stemcell

IMAGE = "registry.example/agent-shim:1@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("options", "name", "version", "word"),
    [
        (["--os", "ubuntu-resolute"], "ubuntu-resolute", "1.2", "x86_64"),
        (["--arch", "amd64"], "ubuntu-noble", "1.2", "x86_64"),
        (["--arch", "arm64"], "ubuntu-noble-arm64", "1.2+arm64", "arm64"),
    ],
)
def test_light_stemcell_names_its_architecture(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    name: str,
    version: str,
    word: str,
) -> None:
    """The architecture is part of the name and of the version, because a Director compiles packages per operating
    system and version.
    """
    argv = ["stemcell", "--light", "--image", IMAGE, "--version", "1.2", "--out", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", argv)
    assert stemcell.main() == 0
    made = capsys.readouterr().out.strip()
    with tarfile.open(made) as packed:
        manifest = yaml.safe_load(packed.extractfile("stemcell.MF") or b"")

    assert manifest["name"] == manifest["cloud_properties"]["name"] == f"bosh-warden-boshlite-{name}-agent-shim"
    assert manifest["operating_system"] == name.removesuffix("-arm64")
    assert manifest["version"] == version
    assert manifest["architecture"] == manifest["cloud_properties"]["architecture"] == word


def test_stemcell_version_contains_an_architecture_other_than_amd64_once() -> None:
    assert stemcell.version_for("arm64", "1.2+shim.0.3.0") == "1.2+shim.0.3.0.arm64"
    assert stemcell.version_for("arm64", "1.2+arm64") == "1.2+arm64"
    assert stemcell.version_for("amd64", "1.2") == "1.2"
