"""Tests markers, the files on a volume that say which disk it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Marker


def test_disk_marker_is_read_back_unchanged(tmp_path: Path) -> None:
    marker = Marker("disk-a", "store", source="disk-0", instance="i-1")

    markers.write(tmp_path, marker)

    assert markers.read(tmp_path) == marker
    assert (tmp_path / ".agent_shim/disk.json").read_text() == (
        '{"cid":"disk-a","role":"store","source":"disk-0","generation":0,"instance":"i-1","version":1}'
    )


def test_disk_marker_is_readable_only_by_root(tmp_path: Path) -> None:
    markers.write(tmp_path, Marker("a"))

    assert stat.S_IMODE((tmp_path / ".agent_shim").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / ".agent_shim/disk.json").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / ".agent_shim").iterdir()] == ["disk.json"]


def test_disk_marker_from_a_later_version_is_understood(tmp_path: Path) -> None:
    (tmp_path / ".agent_shim").mkdir()
    (tmp_path / ".agent_shim/disk.json").write_text('{"cid":"a","role":"store","version":2,"colour":"blue"}')

    assert markers.read(tmp_path) == Marker("a", "store", version=2)


def test_invalid_disk_marker_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / ".agent_shim/disk.json"
    path.parent.mkdir()
    for content in ("", "{", "[]", '{"cid": 7}', '{"cid": "a", "role": "king"}', '{"role": "store"}'):
        path.write_text(content)

        assert markers.read(tmp_path) is None


@pytest.mark.attack("a job replaces the marker or the lease on its disk with a link or a FIFO")
def test_symlinks_and_fifos_in_place_of_a_disk_marker_are_not_followed(tmp_path: Path) -> None:
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    volume.mkdir()
    elsewhere.mkdir()
    markers.write(elsewhere, Marker("a", "store"))

    (volume / ".agent_shim").symlink_to(elsewhere / ".agent_shim")
    assert markers.read(volume) is None
    with pytest.raises(HostError, match="cannot mark the volume"):
        markers.write(volume, Marker("b"))

    (volume / ".agent_shim").unlink()
    (volume / ".agent_shim").mkdir()
    (volume / ".agent_shim/disk.json").symlink_to(elsewhere / ".agent_shim/disk.json")
    assert markers.read(volume) is None
    markers.write(volume, Marker("b"))
    assert markers.read(elsewhere) == Marker("a", "store")

    (volume / ".agent_shim/disk.json").unlink()
    os.mkfifo(volume / ".agent_shim/disk.json")
    assert markers.read(volume) is None


@pytest.mark.root
@pytest.mark.parametrize("forged", ["the directory", "the file"])
def test_disk_marker_owned_by_a_job_counts_as_missing_and_is_set_aside(tmp_path: Path, forged: str) -> None:
    """A job can forge a marker, because many releases change the owner of a disk's top directory to vcap."""
    os.chown(tmp_path, 1000, 1000)
    markers.write(tmp_path, Marker("another", "store"))
    path = tmp_path / ".agent_shim"
    os.chown(path if forged == "the directory" else path / "disk.json", 1000, 1000)

    assert markers.read(tmp_path) is None

    markers.write(tmp_path, Marker("a", "store"))
    assert markers.read(tmp_path) == Marker("a", "store")


def test_missing_volume_has_no_disk_marker(tmp_path: Path) -> None:
    assert markers.read(tmp_path / "gone") is None
