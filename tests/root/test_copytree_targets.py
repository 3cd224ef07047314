"""A disk is copied to file systems that lack ACLs or extended attributes, and back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.bulk import copytree
from tests.support.volumes import fill, fingerprint

pytestmark = pytest.mark.root


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """An ext4, and a ramfs, which has neither ACLs nor attributes."""
    image = tmp_path / "ext4.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    found = {}
    for name, options in (("ext4", ["-o", "loop", str(image)]), ("ramfs", ["-t", "ramfs", "ramfs"])):
        (tmp_path / name).mkdir()
        subprocess.run(["mount", *options, str(tmp_path / name)], check=True)
        found[name] = tmp_path / name
    yield found
    for path in found.values():
        subprocess.run(["umount", str(path)], check=True)


def without_attributes(tree: Path) -> dict[str, object]:
    """Return what the Go agent's migration keeps: everything but ACLs, whose mask is the group mode, and attributes."""
    return {
        name: [part for part in entry[1:] if not isinstance(part, dict)] for name, entry in fingerprint(tree).items()
    }


def test_disk_is_migrated_to_a_file_system_without_acls_and_back(mounted: dict[str, Path]) -> None:
    fill(mounted["ext4"] / "disk", as_root=True)
    source, target = mounted["ext4"] / "disk", mounted["ramfs"]

    lost = copytree.mirror(source, target)

    assert without_attributes(target) == without_attributes(source)
    assert "cannot hold" in lost
    assert "Operation not supported" in lost
    back = mounted["ext4"] / "back"
    back.mkdir()
    assert copytree.mirror(target, back) == ""
    assert without_attributes(back) == without_attributes(source)


def test_disk_without_attributes_loses_nothing_on_a_file_system_without_acls(mounted: dict[str, Path]) -> None:
    """Every file had an ACL message of tar, so that a single ordinary file ended a migration."""
    source = mounted["ext4"] / "plain"
    (source / "empty").mkdir(parents=True)
    (source / "file").write_text("x")

    assert copytree.mirror(source, mounted["ramfs"]) == ""
    assert (mounted["ramfs"] / "file").read_text() == "x"


def test_disk_keeps_acls_and_attributes_on_a_file_system_that_has_them(mounted: dict[str, Path]) -> None:
    fill(mounted["ext4"] / "disk", as_root=True)
    (mounted["ext4"] / "copy").mkdir()

    assert copytree.mirror(mounted["ext4"] / "disk", mounted["ext4"] / "copy") == ""
    assert fingerprint(mounted["ext4"] / "copy") == fingerprint(mounted["ext4"] / "disk")
