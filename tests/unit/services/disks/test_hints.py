"""Tests disk hints in every form that CPIs send, and the file in which they are stored."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.settings import Env
from agent_shim.services.disks import hints
from agent_shim.services.disks.hints import DiskSettings

ENV = Env()


@pytest.mark.parametrize(
    ("hint", "place"),
    [
        ("/warden-cpi-dev/disk-a", "/warden-cpi-dev/disk-a"),
        ({"path": "/mnt/disk-a"}, "/mnt/disk-a"),
        ({"path": "/mnt/a", "volume_id": "/mnt/b", "id": "/mnt/c"}, "/mnt/a"),
        ({"volume_id": "/mnt/b"}, "/mnt/b"),
        ({"id": "/mnt/c", "volume_id": "vol-1"}, "/mnt/c"),
        ({"path": "/mnt//a/../with blanks/"}, "/mnt/with blanks"),
        ({"path": None, "volume_id": "/mnt/b"}, "/mnt/b"),
        ({"volume_id": "vol-1"}, None),
        ({"lun": 3}, None),
        ("vol-1", None),
        ("", None),
        (None, None),
        ({}, None),
        (7, None),
        (["/mnt/a"], None),
    ],
)
def test_disk_path_is_derived_from_its_hint(hint: Any, place: str | None) -> None:
    disk = hints.from_hint("disk-a", hint, ENV)

    assert disk.cid == "disk-a"
    assert disk.place == (Path(place) if place else None)


def test_disk_hint_file_has_the_same_format_as_under_the_go_agent(tmp_path: Path) -> None:
    path = tmp_path / "persistent_disk_hints.json"

    hints.save(path, {"disk-b": hints.from_hint("disk-b", "/dev/sdz", ENV)})

    assert path.read_text() == (
        '{"disk-b":{"ID":"disk-b","DeviceID":"","VolumeID":"/dev/sdz","Lun":"","HostDeviceID":"","Path":"/dev/sdz",'
        '"ISCSISettings":{"InitiatorName":"","Username":"","Target":"","Password":""},"FileSystemType":"",'
        '"MountOptions":null,"Partitioner":""}}'
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_disk_hint_file_keeps_every_member(tmp_path: Path) -> None:
    env = Env(persistent_disk_fs="xfs", persistent_disk_mount_options=["noatime"], persistent_disk_partitioner="parted")
    iscsi = {"username": "u", "password": "p", "initiator_name": "i", "target": "t"}
    hint = {"path": "/a", "volume_id": "v", "id": "d", "lun": 0, "host_device_id": "h", "iscsi_settings": iscsi}
    disk = hints.from_hint("disk-a", hint, env)

    hints.save(tmp_path / "hints", {"disk-a": disk})

    assert hints.load(tmp_path / "hints") == {"disk-a": disk}
    assert json.loads((tmp_path / "hints").read_text())["disk-a"] == {
        "ID": "disk-a",
        "DeviceID": "d",
        "VolumeID": "v",
        "Lun": "0",
        "HostDeviceID": "h",
        "Path": "/a",
        "ISCSISettings": {"InitiatorName": "i", "Username": "u", "Target": "t", "Password": "p"},
        "FileSystemType": "xfs",
        "MountOptions": ["noatime"],
        "Partitioner": "parted",
    }


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
def test_disk_hint_as_text_contains_no_secret() -> None:
    disk = hints.from_hint("a", {"path": "/p", "iscsi_settings": {"password": "canary"}}, ENV)

    assert str(disk) == "{ID:a DeviceID: VolumeID: Path:/p}"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"a": 7}', '{"a": {"Path": {}}}'])
def test_invalid_disk_hint_file_counts_as_missing_and_is_set_aside(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "hints.json"
    if content is not None:
        path.write_text(content)

    assert hints.load(path) == {}
    assert (tmp_path / "hints.json.unreadable").exists() is (content is not None)


def test_disk_hint_file_with_missing_and_unknown_members_is_read(tmp_path: Path) -> None:
    (tmp_path / "hints").write_text('{"a": {"ID": "a", "Path": "/p", "MountOptions": null, "New": 1}}')

    assert hints.load(tmp_path / "hints") == {"a": DiskSettings(cid="a", path="/p")}


@pytest.mark.parametrize(
    ("settings", "hint", "place"),
    [
        ({"a": "/s"}, "/h", "/h"),
        ({"a": "/s"}, None, "/s"),
        ({"a": None}, "/h", "/h"),
        ({"a": None}, None, None),
        ({}, None, None),
    ],
)
def test_disk_hint_with_a_path_overrides_the_settings(settings: dict[str, Any], hint: Any, place: str | None) -> None:
    found = hints.known(settings, ENV, {"a": hints.from_hint("a", hint, ENV)})

    assert found["a"].place == (Path(place) if place else None)


def test_disk_without_a_hint_gets_its_path_from_the_settings() -> None:
    assert hints.known({"a": {"path": "/s"}}, ENV, {})["a"].place == Path("/s")
