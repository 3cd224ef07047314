"""Tests the stemcell tarball, as Directors and CPIs read it. A full stemcell with a real image is tested in
tests/image.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

from stemcell_overlay.stemcell import licences, modules, packages
from tests.support.source import ROOT

DIGEST = f"sha256:{'ab' * 32}"


def stemcell(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = ROOT / "stemcell_overlay/stemcell.py"
    return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True)


def test_light_stemcell_names_its_image_and_has_valid_digests(tmp_path: Path) -> None:
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
    """A tag alone could later refer to a different image."""
    result = stemcell("--light", "--image", "ghcr.io/x/shim:1", "--out", str(tmp_path))

    assert result.returncode == 1
    assert "without --image NAME:TAG@sha256:DIGEST" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_licences_are_read_from_the_copyright_files() -> None:
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


def test_stemcell_sbom_resolves_debian_alternatives_and_virtual_packages() -> None:
    lines = (
        "cron\t3.0\tamd64\tcron-daemon\tdpkg (>= 1.15), libc6 (>= 2.36), exim4 | mail-agent, cron\n"
        "libc6\t2.36\tamd64\t\t, \n"
        "python3\t3.11\tamd64\t\tlibc6:any, \n"
        "postfix\t3.7\tall\tdefault-mta, mail-agent (= 1)\t, cron-daemon\n"
    ).splitlines()

    needs = {part.name: part.needs for part in packages("debian", lines, {"cron": ("GPL-2+",)})}

    cron, libc6 = "pkg:deb/debian/cron@3.0?arch=amd64", "pkg:deb/debian/libc6@2.36?arch=amd64"
    assert needs == {
        "cron": (libc6, "pkg:deb/debian/postfix@3.7?arch=all"),
        "libc6": (),
        "python3": (libc6,),
        "postfix": (cron,),
    }


def test_stemcell_sbom_finds_python_dependencies_under_any_spelling() -> None:
    found = modules(["agent-shim 0.3 PyYAML prometheus_client tzdata", "prometheus-client 1", "pyyaml 6"])

    assert {part.name: part.needs for part in found} == {
        "agent-shim": ("pkg:pypi/prometheus-client@1", "pkg:pypi/pyyaml@6"),
        "prometheus-client": (),
        "pyyaml": (),
    }
