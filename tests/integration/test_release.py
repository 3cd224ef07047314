"""Tests the parts of ``./dev release`` that need no container."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from hatch_build import version
from stemcell_overlay.stemcell import OWN
from tests.support.source import ROOT
from tools.release.__main__ import manifest_digest, repack


def release(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.release", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})


def test_release_builds_are_reproducible_and_compare_finds_differences(tmp_path: Path) -> None:
    for place in ("first", "second"):
        parts = "--only=wheel", "--only=notes", f"--image={OWN[platform.machine()]}=base"
        done = release(*parts, f"--out={tmp_path / place}", SOURCE_DATE_EPOCH="1700000000")
        assert done.returncode == 0, done.stderr
    first = tmp_path / "first"
    (wheel,) = first.glob(f"agent_shim-{version()}-py3-none-manylinux_*.whl")
    source = first / f"agent_shim-{version()}.tar.gz"
    with zipfile.ZipFile(wheel) as packed:
        members = set(packed.namelist())
    with tarfile.open(source) as unpacked:
        sources = {name.partition("/")[2] for name in unpacked.getnames()}

    assert {"agent_shim/py.typed", "kubernetes_cpi/py.typed"} <= members & sources
    assert "agent_shim/host/keeper" in members - sources
    assert {"CHANGELOG.md", "agent_shim/host/keeper.c"} <= sources
    assert not any(name.startswith(("tests/", "tools/")) for name in members)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=first, check=True)
    assert wheel.name in done.stdout
    assert release("--compare", str(first), str(tmp_path / "second")).returncode == 0
    (first / "SHA256SUMS").write_text(f"0  {wheel.name}\n")
    compared = release("--compare", str(first), str(tmp_path / "second"))
    assert compared.returncode == 1
    assert {f"{source.name}: only after", f"{wheel.name}: content"} <= set(compared.stdout.splitlines())


def test_image_digest_is_the_manifest_digest_in_the_oci_archive(tmp_path: Path) -> None:
    """An OCI archive's digest is the digest of its manifest, so it does not change when the image is pushed."""
    index = {"manifests": [{"digest": "sha256:" + "a" * 64}]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "index.json", "index.json")
    assert manifest_digest(tmp_path / "image.tar") == "sha256:" + "a" * 64


def test_repacked_images_with_equal_content_are_byte_identical(tmp_path: Path) -> None:
    for number, names in enumerate((("a", "b"), ("b", "a"))):
        with tarfile.open(tmp_path / f"{number}.part", "w") as archive:
            for name in names:
                (tmp_path / name).write_text(name)
                os.utime(tmp_path / name, (number, number))
                archive.add(tmp_path / name, name)
        repack(tmp_path / f"{number}.part", tmp_path / f"{number}.tar", 1_700_000_000)

    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
    with tarfile.open(tmp_path / "0.tar") as packed:
        assert {member.mtime for member in packed.getmembers()} == {1_700_000_000}


def test_release_is_refused_if_its_tag_names_another_version(tmp_path: Path) -> None:
    """Between two releases, the tree's version matches no tag, so every tag is rejected."""
    done = release("--tag=v9.9.9", "--only=wheel", f"--out={tmp_path / 'out'}")

    assert (done.returncode, done.stderr.partition(":")[0]) == (1, "release")
    assert "cannot make v9.9.9: this tree is " in done.stderr
    assert not (tmp_path / "out").exists()
