"""Tests how the used space and inodes of file systems are measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_shim.host import mounts
from agent_shim.supervisor.filesystem_usage import usage

NUMBERS = (4096, 512, 100, 60, 50, 80, 20, 20, 0, 255)
"""Result of ``statvfs``: 40 of 100 blocks of 512 bytes and 60 of 80 inodes are in use."""


def test_filesystem_usage_has_absolute_and_percentage_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(NUMBERS))

    assert usage(tmp_path) == {"space": 40 * 512, "space %": 40.0, "inode": 60, "inode %": 75.0, "flags": 0}


def test_file_system_without_inodes_has_no_inode_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*NUMBERS[:5], 0, 0, 0, 0, 255)))

    assert set(usage(tmp_path)) == {"space", "space %", "flags"}


@pytest.mark.parametrize(
    ("name", "is_device", "place"),
    [("by-id", True, Path("/store")), ("unmounted", True, Path("unmounted")), ("by-id", False, "disk")],
)
def test_filesystem_usage_of_a_device_is_measured_at_its_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_device: bool, place: Path | str
) -> None:
    """A path that is not a device is opened first, and ``statvfs`` is called on the open descriptor. Otherwise, a job
    could swap in a symlink between the device check and the measurement.
    """
    for device in ("disk", "unmounted"):
        (tmp_path / device).touch()
    (tmp_path / "by-id").symlink_to(tmp_path / "disk")
    mount = mounts.Mount(1, 0, "8:1", "/", Path("/store"), frozenset(), "ext4", str(tmp_path / "disk"), frozenset())
    monkeypatch.setattr(mounts, "mounts", lambda: [mount])
    asked: list[Path | str] = []

    def statvfs(place: object) -> os.statvfs_result:
        asked.append(place if isinstance(place, Path) else str(Path(f"/proc/self/fd/{place}").readlink()))
        return os.statvfs_result(NUMBERS)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr("stat.S_ISBLK", lambda _: is_device)

    usage(tmp_path / name)

    assert asked == [tmp_path / place if is_device else str(tmp_path / place)]


def test_filesystem_usage_of_a_missing_path_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        usage(tmp_path / "absent")
