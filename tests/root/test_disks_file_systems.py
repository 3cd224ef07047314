"""Tests copies between disks whose file systems differ in what they can store: ACLs, extended attributes, holes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk import copytree
from agent_shim.core.errors import HostError
from agent_shim.services.disks.markers import OURS
from tests.support.volumes import ACL, alone, fill, fingerprint, mount_ext4, mount_tmpfs

pytestmark = pytest.mark.root


def mount_ramfs(point: Path) -> Path:
    point.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", point], check=True)
    return point


def mount_fuse(point: Path) -> Path:
    """Mount ext4 with fuse2fs, under which the kernel treats ACLs like any other extended attribute."""
    image = point.with_suffix(".fuse")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    point.mkdir()
    try:
        subprocess.run(["fuse2fs", image, point], check=True)
    except FileNotFoundError:
        pytest.skip("fuse2fs is not installed")
    return point


def without(lost: tuple[str, ...], tree: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without the extended attributes whose names begin with one of ``lost``.

    Times are rounded to seconds, because ``fuse2fs`` stores them that way.
    """

    def kept(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {name: value for name, value in part.items() if not name.startswith(lost)}

    found = {path: [kept(part) for part in entry] for path, entry in tree.items()}
    for entry in found.values():
        entry[3] //= 1_000_000_000
    return found


@pytest.mark.parametrize(
    ("make", "lost", "kinds"),
    [
        pytest.param(mount_tmpfs, (), [], id="tmpfs"),
        pytest.param(mount_fuse, (), [], id="FUSE"),
        pytest.param(
            mount_ramfs,
            ("system.", "user.", "trusted.", "security."),
            ["ACLs: 3", "file capabilities: 1", "trusted.* attributes: 1", "user.* attributes: 2"],
            id="ramfs",
        ),
    ],
)
@alone
def test_disk_copy_keeps_what_the_target_can_store_and_reports_the_rest(
    tmp_path: Path, make: Callable[[Path], Path], lost: tuple[str, ...], kinds: list[str]
) -> None:
    source = mount_ext4(tmp_path / "source", tmp_path / "source.image")
    fill(source, as_root=True)
    odd = Path(os.fsdecode(os.fsencode(source) + b"/new\nline \xff"))
    odd.write_text("x")
    os.setxattr(odd, "user.odd", b"x")
    before = fingerprint(source)
    target = make(tmp_path / "target")

    losses = copytree.mirror(source, target, spared=OURS)

    assert without((), fingerprint(target)) == without(lost, before)
    assert sorted(each.partition(",")[0] for each in losses) == kinds
    for each in losses:
        assert each.endswith("(Operation not supported)")

    back = mount_ext4(tmp_path / "back", tmp_path / "back.image")
    assert copytree.mirror(target, back, spared=OURS) == []
    assert without((), fingerprint(back)) == without(lost, before)


@alone
def test_disk_copy_reports_an_attribute_too_large_for_the_target(tmp_path: Path) -> None:
    """On ext4, all extended attributes of a file share one block. If the attributes do not fit, the error is the same
    as for a full disk, but it must not make the copy fail.
    """
    source = mount_tmpfs(tmp_path / "source")
    (source / "file").write_text("x")
    os.setxattr(source / "file", "user.large", bytes(20_000))
    target = mount_ext4(tmp_path / "target", tmp_path / "image")

    losses = copytree.mirror(source, target, spared=OURS)

    assert losses == ["user.* attributes: 1, first of ./file (No space left on device)"]
    assert (target / "file").read_text() == "x"


@alone
def test_disk_copy_fails_if_the_disk_is_too_full_for_an_attribute(tmp_path: Path) -> None:
    source = mount_tmpfs(tmp_path / "source")
    (source / "file").write_text("x")
    os.setxattr(source / "file", "user.large", bytes(20_000))
    target = mount_ext4(tmp_path / "target", tmp_path / "image")
    (target / "lost+found").rmdir()
    (target / "lost+found").write_bytes(bytes(shutil.disk_usage(target).free - (16 << 10)))

    with pytest.raises(HostError, match=r"No space left on device; 0 MiB are free"):
        copytree.mirror(source, target, spared=OURS)


@alone
def test_disk_copy_reports_files_whose_attributes_cannot_be_listed(tmp_path: Path) -> None:
    """The kernel returns at most 64 KiB of attribute names, but a file on tmpfs can have more."""
    source, target = mount_tmpfs(tmp_path / "source"), mount_tmpfs(tmp_path / "target")
    (source / "file").write_text("x")
    for number in range(400):
        os.setxattr(source / "file", f"user.{number:0240}", b"")

    losses = copytree.mirror(source, target, spared=OURS)

    assert losses == ["all attributes: 1, first of file (Argument list too long)"]
    assert (target / "file").read_text() == "x"


@alone
def test_disk_copy_does_not_inherit_the_targets_default_acls(tmp_path: Path) -> None:
    source, target = mount_tmpfs(tmp_path / "source"), mount_tmpfs(tmp_path / "target")
    fill(source, as_root=True)
    os.setxattr(target, "system.posix_acl_default", ACL)

    assert copytree.mirror(source, target, spared=OURS) == []

    assert fingerprint(target) == fingerprint(source)
    assert os.listxattr(target) == []
