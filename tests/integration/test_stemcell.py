"""The stemcell tarball: what Directors and CPIs read of it. The heavy one is tried on a real image in tests/image."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

from stemcell_overlay.stemcell import licences
from tests.structure.source import ROOT

DIGEST = f"sha256:{'ab' * 32}"


def stemcell(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = ROOT / "stemcell_overlay/stemcell.py"
    return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True)


def test_light_stemcell(tmp_path: Path) -> None:
    """It names the image in the ways in which the CPIs look for it, and has an empty image whose digests fit."""
    result = stemcell("--light", "--image", f"ghcr.io/x/shim:1@{DIGEST}", "--version", "1.2", "--out", str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    path = Path(result.stdout.strip())
    with tarfile.open(path) as tarball:
        names = tarball.getnames()
        found = tarball.extractfile("stemcell.MF")
        assert found is not None
        manifest: dict[str, Any] = yaml.safe_load(found)
        assert tarball.getmember("image").size == 0

    assert path.name == "light-bosh-stemcell-1.2-warden-boshlite-ubuntu-noble-agent-shim.tgz"
    assert names[0] == "stemcell.MF"
    assert manifest["stemcell_formats"] == ["docker-light", "warden-light", "general-tar"]
    assert (manifest["api_version"], manifest["bosh_protocol"]) == (3, "1")
    assert (manifest["version"], manifest["operating_system"]) == ("1.2", "ubuntu-noble")
    assert manifest["sha1"] == f"{hashlib.sha1(b'').hexdigest()};sha256:{hashlib.sha256(b'').hexdigest()}"
    assert manifest["cloud_properties"]["image_reference"] == "ghcr.io/x/shim:1"
    assert manifest["cloud_properties"]["digest"] == DIGEST
    assert manifest["cloud_properties"]["image"] == f"ghcr.io/x/shim:1@{DIGEST}"
    assert manifest["cloud_properties"]["infrastructure"] == "warden"


def test_light_stemcell_needs_a_digest(tmp_path: Path) -> None:
    """A tag alone may be another image tomorrow."""
    result = stemcell("--light", "--image", "ghcr.io/x/shim:1", "--out", str(tmp_path))

    assert result.returncode == 1
    assert "without --image NAME:TAG@sha256:DIGEST" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_licences_are_those_of_the_copyright_files() -> None:
    """By the fields of machine-readable files, else by the common licences that a file refers to."""
    found = licences(
        [
            "tini/copyright:License: Expat",
            "bash/copyright:License: GPL-3+",
            "bash/copyright:License:   GPL-3+ with Bison exception",
            "bash/copyright:License: GPL-3+",
            "bash/copyright:/usr/share/common-licenses/GPL-3",
            "bash/copyright:License:",
            "isc/copyright:License: Permission to use, copy, modify, and distribute this software and its",
            "zip/copyright:/usr/share/common-licenses/BSD.",
        ]
    )

    assert found == {"tini": ("Expat",), "bash": ("GPL-3+", "GPL-3+ with Bison exception"), "zip": ("BSD",)}
